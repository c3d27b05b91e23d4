"""Placing a graph that was built by hand into a sequence.

The hard problem: a sequence believes that its graphs do not change and that it alone runs them. So a
graph that is placed can no longer be built on, its nodes show what the sequence will run, and a
placement that fails leaves the sequence as it was, unlike a capture: nothing of the user's was lost.
"""

from __future__ import annotations

from .._driver import contexts, release
from ..errors import bad_type
from ..graph.graph import Graph
from . import errors
from .segments import GraphSegment
from .state import SequenceState


def append(sequence: SequenceState, graph: Graph) -> GraphSegment:
    """Add a graph behind what the sequence has; `replay()` runs it with the rest.

    Neighbours without a break between them are launched as one. The graph stays readable; edit it
    through `segment.exec`. Raises `TypeError` for anything but a `Graph`, and `RuntimeError` for one
    that is closed or has been placed already.
    """
    if not isinstance(graph, Graph):
        raise bad_type("graph", graph, "a Graph")
    if sequence._has_failed:
        raise errors.replay_after_failure()
    template = graph._template
    before = template.is_open, template.shown
    framework = sequence._ensure_framework()
    if template.root.context not in (0, framework.context):
        raise errors.graph_of_other_device()
    sequence._ensure_pool(framework)
    plan = sequence._plan
    try:
        sequence._begin_capture(graph)
        segment = GraphSegment._of_graph(len(sequence._segments), graph)
        segment.belong(sequence)
        driver = framework.driver
        with contexts.made_current(driver, framework.context), release.relaxed_thread():
            sequence._commit(framework, [segment])
    except BaseException:
        if sequence._finish_commit() or sequence._captured_by is not graph:
            raise  # it never began, or an interrupt came too late
        # The segments of before are whole, and so is the graph: both go on as they were.
        template.is_open, template.shown = before
        sequence._captured_by, sequence._plan = None, plan
        raise
    return segment
