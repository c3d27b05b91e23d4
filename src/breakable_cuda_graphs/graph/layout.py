"""Where the boxes of a picture go: layer below layer, so that every edge points down.

The hard problem: edges must not run through boxes, and the same graph must give the same picture to the
byte. So an edge over several layers gets a narrow place in each layer between (Sugiyama, Tagawa, Toda,
1981), layers are ordered by the mean place of their neighbours, a fixed number of times, and ties go by
the order in which the boxes were given.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Pixels: one letter of the font, a line of text, inside a box, between boxes.
LETTER, LINE, PADDING, GAP, DROP = 7.25, 16.0, 8.0, 24.0, 30.0

_LANE = 10.0  # the width of an edge that passes a layer
_SWEEPS = 6

Point = tuple[float, float]


@dataclass(eq=False)
class Box:
    """A rectangle with lines of text, and perhaps whole layouts in it. `x`, `y`: its corner."""

    lines: Sequence[str]
    colour: str
    inside: Sequence[tuple[str, BoxLayout]] = ()
    title: str = ""
    is_dashed: bool = False
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0

    def measure(self) -> None:
        """Its size, by its text and what is inside."""
        titles = [title for title, _ in self.inside]
        texts = max((len(line) for line in (*self.lines, *titles)), default=0)
        inner = sum(layout.width for _, layout in self.inside) + PADDING * len(self.inside)
        self.width = max(texts * LETTER, inner - PADDING) + 2 * PADDING
        self.height = len(self.lines) * LINE + 2 * PADDING
        if self.inside:
            self.height += max(layout.height for _, layout in self.inside) + PADDING
            self.height += LINE if any(titles) else 0.0


@dataclass(eq=False)
class Wire:
    """An edge between two boxes, by number, and the points that it goes through."""

    source: int
    target: int
    label: str = ""
    points: list[Point] = field(default_factory=list)


class _Slot:
    """A box, or the lane of an edge, in a layer."""

    def __init__(self, width: float) -> None:
        self.width, self.x = width, 0.0
        self.above: list[_Slot] = []
        self.below: list[_Slot] = []

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


class BoxLayout:
    """Boxes and edges with their places; edges have to be without cycles."""

    def __init__(self, boxes: Sequence[Box], wires: Sequence[Wire]) -> None:
        self.boxes, self.wires = list(boxes), list(wires)
        for box in self.boxes:
            box.measure()
        self._places = [_Slot(box.width) for box in self.boxes]
        self._depths = self._layers()
        self._lanes: dict[int, list[_Slot]] = {}
        layers = self._fill()
        _order(layers)
        _spread(layers)
        self.width, self.height = self._put(layers)

    def _layers(self) -> list[int]:
        """The layer of each box: one below the lowest that it waits for."""
        depths = [0] * len(self.boxes)
        for _ in self.boxes:
            changed = False
            for wire in self.wires:
                if depths[wire.target] <= depths[wire.source]:
                    depths[wire.target] = depths[wire.source] + 1
                    changed = True
            if not changed:
                break
        return depths

    def _fill(self) -> list[list[_Slot]]:
        layers: list[list[_Slot]] = [[] for _ in range(max(self._depths, default=-1) + 1)]
        for place, depth in zip(self._places, self._depths, strict=True):
            layers[depth].append(place)
        for number, wire in enumerate(self.wires):
            lanes = [
                _Slot(_LANE)
                for _ in range(self._depths[wire.source] + 1, self._depths[wire.target])
            ]
            for depth, lane in enumerate(lanes, self._depths[wire.source] + 1):
                layers[depth].append(lane)
            self._lanes[number] = lanes
            chain = [self._places[wire.source], *lanes, self._places[wire.target]]
            for upper, lower in itertools.pairwise(chain):
                upper.below.append(lower)
                lower.above.append(upper)
        return layers

    def _put(self, layers: list[list[_Slot]]) -> tuple[float, float]:
        """Give boxes and edges their points; the size of it all."""
        left = min((place.x for layer in layers for place in layer), default=0.0)
        right = max((place.x + place.width for layer in layers for place in layer), default=0.0)
        tops, y = [], 0.0
        for depth in range(len(layers)):
            heights = [
                box.height for box, at in zip(self.boxes, self._depths, strict=True) if at == depth
            ]
            tops.append((y, max(heights, default=0.0)))
            y += tops[-1][1] + DROP
        for box, place, depth in zip(self.boxes, self._places, self._depths, strict=True):
            box.x, box.y = place.x - left, tops[depth][0]
        for number, wire in enumerate(self.wires):
            source, target = self.boxes[wire.source], self.boxes[wire.target]
            across, (top, height) = source.x + source.width / 2, tops[self._depths[wire.source]]
            wire.points = [(across, source.y + source.height), (across, top + height)]
            for depth, lane in enumerate(self._lanes[number], self._depths[wire.source] + 1):
                top, height = tops[depth]
                wire.points += [(lane.middle - left, top), (lane.middle - left, top + height)]
            wire.points.append((target.x + target.width / 2, target.y))
        return right - left, max(y - DROP, 0.0)


def _order(layers: list[list[_Slot]]) -> None:
    """Bring places near to their neighbours: down, up, down, ..."""
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            _place_side_by_side(layer)
            keys = [_mean(place.above if down else place.below, place) for place in layer]
            layer[:] = [layer[n] for n in sorted(range(len(layer)), key=keys.__getitem__)]
            _place_side_by_side(layer)


def _place_side_by_side(layer: list[_Slot]) -> None:
    x = -sum(place.width + GAP for place in layer) / 2
    for place in layer:
        place.x = x
        x += place.width + GAP


def _mean(neighbours: list[_Slot], place: _Slot) -> float:
    if not neighbours:
        return place.middle
    return sum(each.middle for each in neighbours) / len(neighbours)


def _spread(layers: list[list[_Slot]]) -> None:
    """Move places below (then above) their neighbours, as far as those beside them let them."""
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            wanted = [_mean(p.above if down else p.below, p) - p.width / 2 for p in layer]
            _settle(layer, wanted)


def _settle(layer: list[_Slot], wanted: list[float]) -> None:
    """As near to what is wanted as order and gaps allow: groups that touch take their mean."""
    groups: list[list[int]] = []
    offsets: list[float] = [0.0] * len(layer)
    starts: list[float] = []
    for number in range(len(layer)):
        groups.append([number])
        offsets[number] = 0.0
        starts.append(wanted[number])
        while len(groups) > 1:
            upper = groups[-2]
            last = upper[-1]
            end = starts[-2] + offsets[last] + layer[last].width + GAP
            if end <= starts[-1]:
                break
            shift = offsets[last] + layer[last].width + GAP
            for each in groups[-1]:
                offsets[each] += shift
            merged = upper + groups.pop()
            groups[-1] = merged
            starts.pop()
            starts[-1] = sum(wanted[each] - offsets[each] for each in merged) / len(merged)
    for group, start in zip(groups, starts, strict=True):
        for each in group:
            layer[each].x = start + offsets[each]
