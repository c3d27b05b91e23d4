"""A replay inside another capture: the sequence becomes part of what is captured.

The hard problem: the driver refuses to launch a graph into a capture, and its refusal kills the
capture. So everything is decided before any driver call: captured segments go in as child nodes;
breaks can only go into a capture that is a block of ours, as breaks of that block; and what cannot
go in is refused while the outer capture is still whole.
"""

from __future__ import annotations

from typing import Any

from .._driver import bindings, user_objects
from .._driver.enums import NO_CHILDREN
from ..capture import open_blocks
from ..sequence.plan import Plan
from ..sequence.segments import EagerSegment, GraphSegment
from ..sequence.state import SequenceState
from . import errors


def embed(sequence: SequenceState, plan: Plan, stream: Any) -> None:
    """Put a sequence into the capture that `stream` is in."""
    driver = bindings.current()
    outer = open_blocks.capturing(int(stream))
    if plan.draws:
        raise errors.cannot_embed(
            "its segments draw random numbers, whose start is written before each launch"
        )
    if outer is None and plan.has_breaks:
        raise errors.cannot_embed("it has breaks, and the capture is not a breakable_graph block")
    for part in plan.parts:
        if isinstance(part, GraphSegment) and not part._kinds.isdisjoint(NO_CHILDREN):
            raise errors.cannot_embed("a graph with allocations or conditional nodes has no clones")
    lease = (sequence._pool, list(sequence._segments), sequence._memory.kept())
    for part in plan.parts:
        if isinstance(part, EagerSegment):
            assert outer is not None
            outer.embed_break(part)
        else:
            graph = part._edited()  # held until the driver has made its copy
            _add_child(driver, stream, graph.value, None if outer else lease)
    if outer is not None:
        outer.keep(lease, sequence._memory)


def _add_child(driver: bindings.Driver, stream: Any, graph: Any, lease: object) -> None:
    """Add a graph as a node that the next work of the capturing stream waits for."""
    info = driver.capture_info(stream)
    if lease is not None:
        user_objects.hold(driver, info.graph, lease)
    node = driver.cuGraphAddChildGraphNode(
        info.graph, info.dependencies or None, len(info.dependencies), graph
    )
    driver.update_capture_dependencies(stream, [node])
