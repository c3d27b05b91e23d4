"""TODO sequence.show.

The hard problem: TODO
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..graph.layout import Box, Layout, Wire
from ..graph.svg import NAME_LENGTH, drawn, layout_of
from ..graph.text import PLAIN, node_lines, shortened

if TYPE_CHECKING:
    from ..replay.sequence import CUDAGraphSequence


def sequence_page(sequence: Any) -> str:
    """One readable page for a sequence: its segments, and the nodes of each."""
    from .segments import GraphSegment

    lines = [repr(sequence)]
    for place, segment in enumerate(sequence.segments):
        if not isinstance(segment, GraphSegment):
            scope = f"  [{'/'.join(segment.scopes)}]" if segment.scopes else ""
            where = f"  {segment.line}" if segment.line else ""
            lines.append(f"{place}: break {segment.name}{scope}{where}")
            continue
        lines.append(f"{place}: {'nothing' if segment.is_empty else repr(segment.graph)}")
        if not segment.is_empty:
            lines += node_lines(segment.graph, "  ")
    return "\n".join(lines)


_BREAK, _SEGMENT = "#ffd9b3", "#ffffff"


def of_sequence(sequence: CUDAGraphSequence) -> str:
    """A picture of a sequence: its segments with their nodes, and the breaks between."""
    from .segments import GraphSegment

    boxes = []
    for number, segment in enumerate(sequence.segments):
        if not isinstance(segment, GraphSegment):
            scope = [f"[{'/'.join(segment.scopes)}]"] if segment.scopes else []
            name = f"{number}: break {shortened(segment.name, NAME_LENGTH)}"
            boxes.append(Box([*scope, name], _BREAK))
        elif not segment.is_empty:
            name = f"{number}: graph"
            boxes.append(Box([name], _SEGMENT, [("", layout_of(segment.graph))]))
    if not boxes:
        boxes.append(Box([repr(sequence)], PLAIN))
    return drawn(Layout(boxes, [Wire(n, n + 1) for n in range(len(boxes) - 1)]))
