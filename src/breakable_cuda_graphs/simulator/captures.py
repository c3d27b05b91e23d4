"""Stream capture: a state machine that other people's calls can break.

The hard problem: a capture spans streams (forks and joins by events) and is harmed from anywhere:
by a synchronise on one of its streams, by a 'potentially unsafe' call on the same thread or, in
global mode, on any thread, by work on the legacy stream. Harm invalidates the capture, which stays
on its streams until it is ended where it began; only then does the error come out as 901.

The rules are those of the driver's documentation (`cuThreadExchangeStreamCaptureMode`,
`cuStreamBeginCapture`, the programming guide's "Prohibited and Unhandled Operations") and of what
was seen on a device.
"""

from __future__ import annotations

from typing import Any

from .._driver.enums import (
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_MERGE,
    CAPTURE_UNJOINED,
    CAPTURE_UNMATCHED,
    CAPTURE_UNSUPPORTED,
    CAPTURE_WRONG_THREAD,
    CAPTURED_EVENT,
    GLOBAL,
    ILLEGAL_STATE,
    INVALID_VALUE,
    RELAXED,
)
from .contexts import Context
from .graphs import EdgeData, GraphData, Graphs, NodeData, Op, ancestors
from .stream_state import ACTIVE, ENDED, INVALIDATED, Capture, Event, Stream
from .world import Refusal, World

ADD, SET = 0, 1


class Captures:
    """All open captures of one driver."""

    def __init__(self, world: World, graphs: Graphs) -> None:
        self.world = world
        self.graphs = graphs
        self.open: list[Capture] = []

    # ---- who may call what

    def _thread(self) -> object:
        state = self.world.thread.__dict__
        return state.setdefault("capture_token", object())

    def _prohibiting(self) -> list[Capture]:
        """Open captures that forbid this thread potentially unsafe calls."""
        mode = self.world.thread.capture_mode
        if mode == RELAXED:
            return []
        me = self._thread()
        return [
            capture
            for capture in self.open
            if (capture.thread is me and capture.mode != RELAXED)
            or (mode == GLOBAL and capture.thread is not me and capture.mode == GLOBAL)
        ]

    def guard_unsafe(self) -> None:
        """At the start of a potentially unsafe call: refuse it, and the capture is done for."""
        self._refuse_harm(self._prohibiting(), CAPTURE_UNSUPPORTED)

    def _refuse_harm(self, harmed: list[Capture], code: int) -> None:
        """Refuse a call if it harms captures, which are done for then."""
        for capture in harmed:
            self.invalidate(capture)
        if harmed:
            raise Refusal(code)

    def guard_release(self, what: str, *, refuse: bool) -> None:
        """At a release: inside a capture that forbids it, it is a finding (and an unsafe call)."""
        if self._prohibiting():
            self.world.find(
                f"{self.world.thread.call} released {what} inside an open capture that is not "
                f"relaxed"
            )
            if refuse:
                self.guard_unsafe()

    def guard_legacy(self, context: Context) -> None:
        """At a use of the legacy stream: it would wait for capturing blocking streams."""
        self._refuse_harm(self.blocking_in(context), CAPTURE_IMPLICIT)

    def blocking_in(self, context: Context) -> list[Capture]:
        """Open captures that the legacy stream of a context would have to wait for."""
        return [
            capture
            for capture in self.open
            if any(s.blocking and s.context is context for s in capture.streams)
        ]

    def is_sound(self, stream: Stream) -> bool:
        """Whether the stream's capture has not been invalidated."""
        return stream.capture is None or stream.capture.status != INVALIDATED

    def guard_valid(self, stream: Stream) -> None:
        """At new work: a stream of an invalidated capture takes none."""
        if not self.is_sound(stream):
            raise Refusal(CAPTURE_INVALIDATED)

    def conflict(self, stream: Stream) -> None:
        """At a call that a capturing stream can never answer: query, synchronise, launch a graph."""
        if stream.capture is not None:
            self.invalidate(stream.capture)
            raise Refusal(CAPTURE_UNSUPPORTED)

    def conflict_in(self, context: Context) -> None:
        """At a synchronise of a whole context."""
        harmed = [c for c in self.open if any(s.context is context for s in c.streams)]
        self._refuse_harm(harmed, CAPTURE_UNSUPPORTED)

    def ask(self, capture: Capture) -> int:
        """The code for a question about an event that was recorded in a capture."""
        if capture.status != ACTIVE:
            return INVALID_VALUE
        self.invalidate(capture)
        return CAPTURED_EVENT

    def invalidate(self, capture: Capture) -> None:
        """The capture has failed; it stays on its streams until it is ended."""
        if capture.status == ACTIVE:
            capture.status = INVALIDATED

    # ---- begin and end

    def begin(
        self,
        stream: Stream,
        mode: int,
        graph: GraphData | None,
        dependencies: dict[NodeData, EdgeData],
    ) -> None:
        """Open a capture on a stream, into a new graph or a given one."""
        if stream.legacy:
            raise Refusal(CAPTURE_UNSUPPORTED)
        if stream.capture is not None or (graph is not None and graph.captures):
            raise Refusal(ILLEGAL_STATE)
        target = graph or self.graphs.create(lent=True)
        capture = Capture(mode, self._thread(), stream, target)
        target.captures += 1
        self.open.append(capture)
        self._join(stream, capture, dependencies)

    def _join(
        self, stream: Stream, capture: Capture, dependencies: dict[NodeData, EdgeData]
    ) -> None:
        stream.capture = capture
        stream.dependencies = dict(dependencies)
        capture.streams.append(stream)

    def end(self, stream: Stream) -> GraphData:
        """End the capture that began on this stream; its graph is the caller's now."""
        capture = stream.capture
        if capture is None:
            raise Refusal(ILLEGAL_STATE)
        if capture.origin is not stream:
            self.invalidate(capture)
            raise Refusal(CAPTURE_UNMATCHED)
        refusal = self._failure(capture)
        self._close(capture)
        if refusal:
            self._drop(capture.graph)
            raise Refusal(refusal)
        capture.graph.lent = False
        return capture.graph

    def lose(self, stream: Stream) -> None:
        """A capturing stream is destroyed: the capture ends if it began there, and else goes on."""
        capture = stream.capture
        if capture is not None and capture.origin is stream:
            self._close(capture)
            self._drop(capture.graph)

    def _failure(self, capture: Capture) -> int:
        """Why a capture that ends now has no graph, or 0. It has ended in any case."""
        if capture.status == INVALIDATED:
            return CAPTURE_INVALIDATED
        if capture.mode != RELAXED and capture.thread is not self._thread():
            return CAPTURE_WRONG_THREAD
        return CAPTURE_UNJOINED if self._unjoined(capture) else 0

    def _drop(self, graph: GraphData) -> None:
        """The driver frees the graph of a failed capture, the body of a conditional node too.

        The node still owns that body, and the process crashes when its graph is destroyed
        (NVIDIA/cuda-python#2918); here it is a finding, and the body stays.
        """
        if graph.owner is None:
            self.graphs.destroy(graph)
        else:
            self.world.find(
                f"{self.world.thread.call}: a failed capture into graph {graph.address:#x}, which "
                f"a node owns, frees it under that node: the driver crashes later"
            )

    def _unjoined(self, capture: Capture) -> bool:
        """Whether a forked stream did work that the stream of the capture does not wait for."""
        joined = ancestors(capture.origin.dependencies) | capture.let_go
        last = (node for s in capture.streams for node in s.dependencies)
        return any(node in capture.captured and node not in joined for node in last)

    def _close(self, capture: Capture) -> None:
        for stream in capture.streams:
            stream.capture = None
            stream.dependencies = {}
        capture.status = ENDED
        capture.graph.captures -= 1
        self.open.remove(capture)

    # ---- between

    def add(self, stream: Stream, work: Op) -> NodeData:
        """One more node, behind what the stream has to wait for."""
        capture = stream.capture
        if capture is None:
            raise Refusal(INVALID_VALUE)
        try:
            node = self.graphs.add(capture.graph, work, stream.dependencies)
        except Refusal:
            self.invalidate(capture)
            raise
        stream.dependencies = {node: EdgeData()}
        capture.captured.add(node)
        return node

    def wait(self, stream: Stream, event: Event) -> None:
        """`cuStreamWaitEvent`: nothing, a fork, a join, or a forbidden crossing."""
        state = event.captured
        if state is None:
            self._wait_for_uncaptured(stream, event)
        elif state.capture.status != ACTIVE:
            self._refuse(stream, INVALID_VALUE)
        elif stream.capture is None:
            self._fork(stream, state.capture, state.dependencies)
        elif stream.capture is not state.capture:
            self.invalidate(state.capture)
            self._refuse(stream, CAPTURE_MERGE)
        else:
            stream.dependencies |= state.dependencies

    def _wait_for_uncaptured(self, stream: Stream, event: Event) -> None:
        if stream.capture is not None and event.recorded is not None:
            self._refuse(stream, CAPTURE_ISOLATION)

    def _fork(
        self, stream: Stream, capture: Capture, dependencies: dict[NodeData, EdgeData]
    ) -> None:
        if stream.legacy:
            self.invalidate(capture)
            raise Refusal(CAPTURE_IMPLICIT)
        self._join(stream, capture, dependencies)

    def _refuse(self, stream: Stream, code: int) -> None:
        if stream.capture is not None:
            self.invalidate(stream.capture)
        raise Refusal(code)

    def set_dependencies(
        self, stream: Stream, nodes: Any, data: Any, count: int, flags: int
    ) -> None:
        """`cuStreamUpdateCaptureDependencies`."""
        capture = stream.capture
        if capture is None:
            raise Refusal(ILLEGAL_STATE)
        self.guard_valid(stream)
        if flags not in (ADD, SET):
            raise Refusal(INVALID_VALUE)
        found = self.graphs.dependencies(capture.graph, nodes, data, count, once=False)
        if flags == SET:
            capture.let_go |= ancestors(n for n in stream.dependencies if n not in found)
            stream.dependencies = found
        else:
            stream.dependencies |= found
