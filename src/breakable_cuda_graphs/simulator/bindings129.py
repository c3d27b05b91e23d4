"""The 12.9 shape: bare names without edge data, and the forms with it under a suffix.

The hard problem: the same bare name means two tuples. In 12.9 it drops edge data and fails with
CUDA_ERROR_LOSSY_QUERY where there is some to drop; `_v2` and `_v3` are what 13.x calls by the bare
name, and what came with 13.x does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._driver.enums import LOSSY_QUERY
from .calls.capture_calls import CaptureCalls
from .calls.context_calls import ContextCalls
from .calls.graph_calls import TemplateCalls
from .world import DriverCalls, result

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
Call = Callable[..., Answer]


def _lossy(edges: Any) -> bool:
    return any(int(e.type) or int(e.from_port) or int(e.to_port) for e in edges or ())


def _answers_without(call: Call, place: int) -> Call:
    """The call without the list of edge data at a place of its answer; a loss is an error."""

    def bare(self: DriverCalls, *given: Any, **named: Any) -> Answer:
        answer = call(self, *given, **named)
        if not int(answer[0]) and _lossy(answer[place]):
            return (result(LOSSY_QUERY), *(None,) * (len(answer) - 2))
        return answer[:place] + answer[place + 1 :]

    return bare


def _takes_none(call: Call, place: int, parameter: str) -> Call:
    """The call without the parameter at a place."""

    def bare(self: DriverCalls, *given: Any, **named: Any) -> Answer:
        if len(given) < place:
            return call(self, *given, **named, **{parameter: None})
        return call(self, *given[:place], None, *given[place:], **named)

    return bare


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

    cuStreamGetCaptureInfo = _answers_without(CaptureCalls.cuStreamGetCaptureInfo, 5)
    cuGraphGetEdges = _answers_without(TemplateCalls.cuGraphGetEdges, 3)
    cuGraphNodeGetDependencies = _answers_without(TemplateCalls.cuGraphNodeGetDependencies, 2)
    cuGraphNodeGetDependentNodes = _answers_without(TemplateCalls.cuGraphNodeGetDependentNodes, 2)

    cuStreamUpdateCaptureDependencies = _takes_none(
        CaptureCalls.cuStreamUpdateCaptureDependencies, 2, "dependencyData"
    )
    cuGraphAddDependencies = _takes_none(TemplateCalls.cuGraphAddDependencies, 3, "edgeData")
    cuGraphRemoveDependencies = _takes_none(TemplateCalls.cuGraphRemoveDependencies, 3, "edgeData")
    cuGraphAddNode = _takes_none(TemplateCalls.cuGraphAddNode, 2, "dependencyData")
    cuCtxCreate = _takes_none(ContextCalls.cuCtxCreate, 0, "ctxCreateParams")
