"""A sequence as a page of text and as a picture: its segments, and the breaks between them.

The hard problem: a sequence is a line of parts that are graphs themselves, so text and picture of a graph are
put into those of the whole, and each part keeps its number in `sequence.segments`.
"""

from __future__ import annotations

from ..graph.abbreviate import IN_A_BOX, shortened
from ..graph.layout import Box, BoxLayout, Wire
from ..graph.svg import drawn, layout_of
from ..graph.text import PLAIN, node_lines
from ..graph.view import look_at
from .segments import GraphSegment
from .state import SequenceState


def sequence_page(sequence: SequenceState) -> str:
    """One readable page for a sequence: its segments, and the nodes of each."""
    lines = [repr(sequence)]
    for place, segment in enumerate(sequence.segments):
        if not isinstance(segment, GraphSegment):
            scope = f"  [{'/'.join(segment.scopes)}]" if segment.scopes else ""
            where = f"  {segment.line}" if segment.line else ""
            lines.append(f"{place}: break {segment.name}{scope}{where}")
            continue
        lines.append(f"{place}: {'nothing' if segment.is_empty else repr(segment.graph)}")
        if not segment.is_empty:
            lines += node_lines(look_at(segment.graph), "  ")
    return "\n".join(lines)


_BREAK, _SEGMENT = "#ffd9b3", "#ffffff"


def of_sequence(sequence: SequenceState) -> str:
    """A picture of a sequence: its segments with their nodes, and the breaks between."""
    boxes = []
    for number, segment in enumerate(sequence.segments):
        if not isinstance(segment, GraphSegment):
            scope = [f"[{'/'.join(segment.scopes)}]"] if segment.scopes else []
            name = f"{number}: break {shortened(segment.name, IN_A_BOX)}"
            boxes.append(Box([*scope, name], _BREAK))
        elif not segment.is_empty:
            name = f"{number}: graph"
            boxes.append(Box([name], _SEGMENT, [("", layout_of(look_at(segment.graph)))]))
    if not boxes:
        boxes.append(Box([repr(sequence)], PLAIN))
    return drawn(BoxLayout(boxes, [Wire(n, n + 1) for n in range(len(boxes) - 1)]))
