"""The calls of the simulated driver: the calls that begin, end and look at captures.

The hard problem: an invalidated capture still has an end, on the thread that began it, and only that end
tells.
"""

from __future__ import annotations

from typing import Any

from ..._driver.enums import CAPTURE_IMPLICIT, GLOBAL, INVALID_VALUE, RELAXED, THREAD_LOCAL
from ..captures import Captures
from ..graphs import EdgeData, Graphs, NodeData
from ..stream_state import ACTIVE, NONE, Stream
from ..streams import StreamTable
from ..world import DriverCalls, Handle, Refusal, call, types


class CaptureCalls(DriverCalls):
    """The calls that begin, end and look at captures."""

    captures: Captures
    graphs: Graphs
    streams: StreamTable

    @call()
    def cuStreamBeginCapture(self, hStream: Handle, mode: int) -> None:
        self.captures.begin(self.streams.get(hStream), _mode(mode), None, {})

    @call()
    def cuStreamBeginCaptureToGraph(
        self,
        hStream: Handle,
        hGraph: Handle,
        dependencies: Any,
        dependencyData: Any,
        numDependencies: int,
        mode: int,
    ) -> None:
        graph = self.graphs.live.get(hGraph)
        found = self.graphs.dependencies(
            graph, dependencies, dependencyData, numDependencies, once=False
        )
        self.captures.begin(self.streams.get(hStream), _mode(mode), graph, found)

    @call(1)
    def cuStreamEndCapture(self, hStream: Handle) -> Any:
        return self.captures.end(self.streams.get(hStream)).handle

    @call(1)
    def cuStreamIsCapturing(self, hStream: Handle) -> Any:
        return types.CUstreamCaptureStatus(self._status(self.streams.get(hStream)))

    def _status(self, stream: Stream) -> int:
        if stream.legacy and self.captures.blocking_in(stream.context):
            raise Refusal(CAPTURE_IMPLICIT)
        return stream.capture.status if stream.capture is not None else NONE

    @call(6)
    def cuStreamGetCaptureInfo(self, hStream: Handle) -> tuple[Any, ...]:
        stream = self.streams.get(hStream)
        status = self._status(stream)
        capture = stream.capture
        if status != ACTIVE or capture is None:
            return _info(status, 0, types.CUgraph(0), {})
        return _info(status, capture.identity, capture.graph.handle, stream.dependencies)

    @call()
    def cuStreamUpdateCaptureDependencies(
        self,
        hStream: Handle,
        dependencies: Any,
        dependencyData: Any,
        numDependencies: int,
        flags: int,
    ) -> None:
        self.captures.set_dependencies(
            self.streams.get(hStream), dependencies, dependencyData, numDependencies, int(flags)
        )

    @call(1)
    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> Any:
        previous, self.world.thread.capture_mode = self.world.thread.capture_mode, _mode(mode)
        return types.CUstreamCaptureMode(previous)


def _mode(mode: int) -> int:
    if int(mode) not in (GLOBAL, THREAD_LOCAL, RELAXED):
        raise Refusal(INVALID_VALUE)
    return int(mode)


def _info(
    status: int, identity: int, graph: Any, dependencies: dict[NodeData, EdgeData]
) -> tuple[Any, ...]:
    return (
        types.CUstreamCaptureStatus(status),
        types.cuuint64_t(identity),
        graph,
        [node.handle for node in dependencies],
        [edge.struct() for edge in dependencies.values()],
        len(dependencies),
    )
