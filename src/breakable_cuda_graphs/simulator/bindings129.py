"""The 12.9 shape: bare names without edge data, and the forms with it under a suffix.

The hard problem: the same bare name means two tuples. In 12.9 it drops edge data and fails with
CUDA_ERROR_LOSSY_QUERY where there is some to drop; `_v2` and `_v3` are what 13.x calls by the bare
name, and what came with 13.x does not exist.
"""

from __future__ import annotations

from typing import Any

from .._driver.enums import LOSSY_QUERY
from .calls.capture_calls import CaptureCalls
from .calls.context_calls import ContextCalls
from .calls.graph_calls import TemplateCalls
from .world import result

_NOT_IN_129 = {
    "cuGraphGetId",
    "cuGraphExecGetId",
    "cuGraphNodeGetLocalId",
    "cuGraphNodeGetToolsId",
    "cuGraphNodeGetContainingGraph",
    "cuGraphNodeGetParams",
    "cuGraphNodeSetParams_v2",
    "cuGraphAddNode_v3",
    "cuFuncGetParamCount",
    "cuKernelGetParamCount",
}

Answer = tuple[Any, ...]


def _lossy(edges: Any) -> bool:
    return any(int(e.type) or int(e.from_port) or int(e.to_port) for e in edges or ())


def _without_edges(answer: Answer, place: int) -> Answer:
    """The answer without its list of edge data, or the error for a loss."""
    if int(answer[0]):
        return answer[:place] + answer[place + 1 :]
    if _lossy(answer[place]):
        return (result(LOSSY_QUERY), *(None,) * (len(answer) - 2))
    return answer[:place] + answer[place + 1 :]


class Shape129(ContextCalls, CaptureCalls, TemplateCalls):
    """Goes in front of the driver's own class."""

    def __getattribute__(self, name: str) -> Any:
        if name in _NOT_IN_129:
            raise AttributeError(f"{name} came with the 13.x bindings")
        return super().__getattribute__(name)

    # ---- with edge data, under a suffix

    cuStreamGetCaptureInfo_v3 = CaptureCalls.cuStreamGetCaptureInfo
    cuStreamUpdateCaptureDependencies_v2 = CaptureCalls.cuStreamUpdateCaptureDependencies
    cuGraphGetEdges_v2 = TemplateCalls.cuGraphGetEdges
    cuGraphNodeGetDependencies_v2 = TemplateCalls.cuGraphNodeGetDependencies
    cuGraphNodeGetDependentNodes_v2 = TemplateCalls.cuGraphNodeGetDependentNodes
    cuGraphAddDependencies_v2 = TemplateCalls.cuGraphAddDependencies
    cuGraphRemoveDependencies_v2 = TemplateCalls.cuGraphRemoveDependencies
    cuGraphAddNode_v2 = TemplateCalls.cuGraphAddNode

    # ---- without it, under the bare name

    def cuStreamGetCaptureInfo(self, hStream: Any) -> Answer:
        return _without_edges(CaptureCalls.cuStreamGetCaptureInfo(self, hStream), 5)

    def cuStreamUpdateCaptureDependencies(  # type: ignore[override]
        self, hStream: Any, dependencies: Any, numDependencies: int, flags: int
    ) -> Answer:
        return CaptureCalls.cuStreamUpdateCaptureDependencies(
            self, hStream, dependencies, None, numDependencies, flags
        )

    def cuGraphGetEdges(self, hGraph: Any, numEdges: int = 0) -> Answer:
        return _without_edges(TemplateCalls.cuGraphGetEdges(self, hGraph, numEdges), 3)

    def cuGraphNodeGetDependencies(self, hNode: Any, numDependencies: int = 0) -> Answer:
        answer = TemplateCalls.cuGraphNodeGetDependencies(self, hNode, numDependencies)
        return _without_edges(answer, 2)

    def cuGraphNodeGetDependentNodes(self, hNode: Any, numDependentNodes: int = 0) -> Answer:
        answer = TemplateCalls.cuGraphNodeGetDependentNodes(self, hNode, numDependentNodes)
        return _without_edges(answer, 2)

    def cuGraphAddDependencies(  # type: ignore[override]
        self, hGraph: Any, from_: Any, to: Any, numDependencies: int
    ) -> Answer:
        return TemplateCalls.cuGraphAddDependencies(self, hGraph, from_, to, None, numDependencies)

    def cuGraphRemoveDependencies(  # type: ignore[override]
        self, hGraph: Any, from_: Any, to: Any, numDependencies: int
    ) -> Answer:
        return TemplateCalls.cuGraphRemoveDependencies(
            self, hGraph, from_, to, None, numDependencies
        )

    def cuGraphAddNode(  # type: ignore[override]
        self, hGraph: Any, dependencies: Any, numDependencies: int, nodeParams: Any
    ) -> Answer:
        return TemplateCalls.cuGraphAddNode(
            self, hGraph, dependencies, None, numDependencies, nodeParams
        )

    def cuCtxCreate(self, flags: int, dev: Any) -> Answer:  # type: ignore[override]
        return ContextCalls.cuCtxCreate(self, None, flags, dev)
