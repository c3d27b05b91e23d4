"""What one replay does, unit by unit, with the names that people know the units by.

The hard problem: what can be timed or named is a launch or a call, not a segment: neighbours are
joined into one launch, empty segments are none. So a unit is one launch or one call of the plan, and
it says which segments of the sequence it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .plan import Plan, Step
from .segments import EagerSegment, GraphSegment

if TYPE_CHECKING:
    from .sequence import CUDAGraphSequence

__all__ = ["Unit", "scope_of", "short_name", "units_of"]

GRAPH, BREAK = "graph", "break"


@dataclass(frozen=True)
class Unit:
    """One launch ("graph") or one call of Python ("break") of a replay.

    segments: the places in `sequence.segments` of what it runs; several where they are joined.
    name: "segment 2", or the break's function. scope: the `annotate` blocks around it.
    line: where the user's code was at capture ("file.py:12").
    """

    kind: str
    name: str
    scope: str
    line: str
    segments: tuple[int, ...]
    nodes: int
    step: Step

    @property
    def label(self) -> str:
        """Scope and name in one: "layer 3/attend"."""
        return f"{self.scope}/{self.name}" if self.scope else self.name


def units_of(sequence: CUDAGraphSequence, plan: Plan, *, with_nodes: bool = True) -> list[Unit]:
    """The units of a sequence's plan, in order; counting nodes reads every graph."""
    place = {id(segment): number for number, segment in enumerate(sequence.segments)}
    made = []
    for segments, step in plan.units():
        numbers = tuple(place[id(segment)] for segment in segments)
        first = segments[0]
        if isinstance(first, EagerSegment):
            name, scope = short_name(first.name), "/".join(first.scopes)
            made.append(Unit(BREAK, name, scope, first.line, numbers, 0, step))
            continue
        graphs = [segment for segment in segments if isinstance(segment, GraphSegment)]
        nodes = sum(1 for graph in graphs for _ in graph._template.walk()) if with_nodes else 0
        made.append(
            Unit(GRAPH, _numbers(numbers), scope_of(graphs), first.line, numbers, nodes, step)
        )
    return made


def short_name(name: str) -> str:
    """A qualified name without the functions that it was defined in."""
    return name.rpartition("<locals>.")[2]


def _numbers(numbers: Sequence[int]) -> str:
    return f"segment{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def scope_of(segments: Sequence[GraphSegment]) -> str:
    """The scopes that all nodes of the segments share, and, where they part, from which to which."""
    paths = [scopes for segment in segments for scopes in _scopes_of(segment)]
    if not any(paths):
        return ""
    shared = 0
    while all(len(path) > shared and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    rest = [path[shared] if len(path) > shared else "" for path in paths]
    ends = dict.fromkeys((rest[0], rest[-1]))
    parts = [" … ".join(ends).strip()] if any(rest) else []
    return "/".join([*paths[0][:shared], *parts])


def _scopes_of(segment: GraphSegment) -> list[tuple[str, ...]]:
    """The scopes of a segment's nodes in the order of capture; read from the notes alone."""
    template: Any = segment._seen  # made at capture where there was something to note
    if template is None:
        return [()]
    notes = template.notes
    nodes = template.driver.graph_nodes(template.value)
    return [notes[int(node)].scopes if int(node) in notes else () for node in nodes]
