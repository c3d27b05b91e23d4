"""Placing a graph that was built by hand into a sequence.

The hard problem: a sequence believes that its graphs do not change and that it alone runs them. So a
graph that is placed can no longer be built on, its nodes show what the sequence will run, and a
placement that fails leaves the sequence as it was, unlike a capture: nothing of the user's was lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import errors
from ._driver import contexts, release
from .graph import Graph
from .segments import GraphSegment

if TYPE_CHECKING:
    from .sequence import CUDAGraphSequence

__all__ = ["append"]


def append(sequence: CUDAGraphSequence, graph: Graph) -> GraphSegment:
    """Add a graph behind what the sequence has; `replay()` runs it with the rest.

    Neighbours without a break between them are launched as one. The graph stays readable; edit it
    through `segment.exec`. Raises `TypeError` for anything but a `Graph`, and `RuntimeError` for one
    that is closed or has been placed already.
    """
    if not isinstance(graph, Graph):
        raise errors.bad_type("graph", graph, "a Graph")
    framework = sequence._ensure_framework()
    pool = sequence._ensure_pool(framework)
    has_failed = sequence._has_failed
    contexts.ensure(framework.driver, framework.context)
    sequence._begin_capture()
    plan_lost = True
    try:
        segment = GraphSegment._of_graph(len(sequence._segments), graph)
        segment._belong(sequence)
        with release.relaxed_thread():
            sequence._commit(framework, [segment])
        plan_lost = False
    finally:
        if plan_lost:
            sequence._roll_back()
            sequence._has_failed = has_failed
            if not has_failed:
                _restore(sequence, framework, pool)
    sequence._has_failed = has_failed
    return segment


def _restore(sequence: CUDAGraphSequence, framework: object, pool: object) -> None:
    """The plan of before: the segments that were there are still whole."""
    if sequence._segments:
        sequence._commit(framework, [])  # type: ignore[arg-type]
