"""Graphs as SVG, which notebooks and browsers show without any tools.

The hard problem: a captured model has thousands of nodes with names of hundreds of letters, and a picture
of all that shows nothing. So names are shortened (the whole is in the tooltip), long graphs are cut with
a count of what is left out, and addresses, which differ from run to run, are left to `print(graph)`: the
same work gives the same picture.

SVG: https://www.w3.org/TR/SVG11/
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from html import escape

from .layout import LINE, PADDING, Box, BoxLayout, Wire
from .node import Look, Node
from .text import COLOURS, PLAIN

_MOST = 200  # nodes of one graph

_MARGIN = 10.0


# ---------------------------------------------------------------- what is drawn


def page(title: str, look: Look | None) -> str:
    """A picture of a graph; of a closed one (None), a box that says so."""
    return drawn(BoxLayout([Box([title], PLAIN)], []) if look is None else layout_of(look))


def layout_of(look: Look) -> BoxLayout:
    nodes = look.nodes
    number = {node.handle: place for place, node in enumerate(nodes[:_MOST])}
    boxes = [_box(node) for node in nodes[:_MOST]]
    wires = [
        Wire(
            number[edge.source.handle],
            number[edge.target.handle],
            "" if edge.kind == "full" else edge.kind,
        )
        for edge in look.edges
        if edge.source.handle in number and edge.target.handle in number
    ]
    if len(nodes) > _MOST:
        boxes.append(Box([f"... and {len(nodes) - _MOST} more nodes"], PLAIN, is_dashed=True))
        wires.append(Wire(_MOST - 1, _MOST))
    return BoxLayout(boxes, wires)


def _box(node: Node) -> Box:
    lines = [f"[{node.scope}]"] if node.scopes else []
    return Box(
        [*lines, *node._picture()],
        COLOURS.get(node.kind, PLAIN),
        [
            ("" if title == "graph" else title, layout_of(graph.snapshot()))
            for title, graph in node._inside()
        ],
        title=node.label,
        is_dashed=not node.enabled,
    )


# ---------------------------------------------------------------- SVG


def drawn(layout: BoxLayout) -> str:
    width, height = (f"{side + 2 * _MARGIN:.0f}" for side in (layout.width, layout.height))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="monospace" font-size="12">',
            '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *_parts(layout, _MARGIN, _MARGIN),
            "</svg>",
            "",
        ]
    )


def _parts(layout: BoxLayout, left: float, top: float) -> Iterator[str]:
    for wire in layout.wires:
        yield from _wire(wire, left, top)
    for box in layout.boxes:
        yield from _rectangle(box, left + box.x, top + box.y)


def _rectangle(box: Box, x: float, y: float) -> Iterator[str]:
    dashes = ' stroke-dasharray="4 3"' if box.is_dashed else ""
    yield "<g>"
    if box.title:
        yield f"<title>{escape(box.title)}</title>"
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="4" '
        f'fill="{box.colour}" stroke="#555"{dashes}/>'
    )
    line = y + PADDING
    for text in box.lines:
        line += LINE
        yield _text(text, x + PADDING, line - 4)
    across = x + PADDING
    below = line + PADDING + (LINE if any(title for title, _ in box.inside) else 0.0)
    for title, layout in box.inside:
        if title:
            yield _text(title, across, line + LINE - 4)
        yield from _parts(layout, across, below)
        across += layout.width + PADDING
    yield "</g>"


def _text(text: str, x: float, y: float) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" xml:space="preserve">{escape(text)}</text>'


def _wire(wire: Wire, left: float, top: float) -> Iterator[str]:
    points = [(left + x, top + y) for x, y in wire.points]
    path = [f"M{points[0][0]:.1f},{points[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (y0 + y1) / 2
        path.append(f"C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}")
    dashes = ' stroke-dasharray="5 3"' if wire.label else ""
    title = f"<title>{escape(wire.label)}</title>" if wire.label else ""
    yield (
        f'<path d="{" ".join(path)}" fill="none" stroke="#555" marker-end="url(#end)"{dashes}>'
        f"{title}</path>"
    )
