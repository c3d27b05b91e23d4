"""The calls that make, launch, edit and update executables.

The hard problem: an update that fails has to say why, and the bindings lose it: they return no
result info with an error. Callers read it through the driver's C entry, so there is one here too.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from ..._driver.enums import (
    AUTO_FREE,
    CHILD,
    DEVICE_LAUNCH,
    INVALID_VALUE,
    KERNEL,
    MEMCPY,
    MEMSET,
    NOT_FOUND,
    UPDATE_FAILURE,
    UPLOAD,
)
from ..._driver.set_params import UPDATE_ENTRY
from ..captures import Captures
from ..execs import Exec, Execs, NotInstantiable
from ..graphs import Graphs, NodeData, Op
from ..streams import StreamTable
from ..structs import Structs
from ..updates import UpdateRefused
from ..world import DriverCalls, Handle, Refusal, as_int, call, types

_FINE = 0  # CUDA_GRAPH_INSTANTIATE_SUCCESS
_TOLD = AUTO_FREE | DEVICE_LAUNCH  # the flags that an executable tells afterwards
_INFO_BYTES = 24  # CUgraphExecUpdateResultInfo: an enum and two handles


def _changes(name: str, read: Callable[..., Op]) -> Callable[..., tuple[Any, ...]]:
    """The call of a name that gives an executable's node the work which `read` takes from the rest."""

    def answer(
        self: ExecCalls, hGraphExec: Handle, hNode: Handle, *given: Any, **named: Any
    ) -> None:
        self._change(hGraphExec, hNode, read(self.structs, *given, **named))

    return call(name=name)(answer)


class ExecCalls(DriverCalls):
    """cuGraphInstantiate*, cuGraphLaunch, cuGraphExec*, cuGraphNodeSetEnabled."""

    execs: Execs
    graphs: Graphs
    streams: StreamTable
    captures: Captures
    structs: Structs

    @call(1)
    def cuGraphInstantiate(self, hGraph: Handle, flags: int) -> Any:
        self.captures.guard_unsafe()
        if int(flags) & UPLOAD:  # which needs a stream: that is for the other call
            raise Refusal(INVALID_VALUE)
        return self.execs.instantiate(self.graphs.live.get(hGraph), int(flags)).handle

    @call(1)
    def cuGraphInstantiateWithParams(self, hGraph: Handle, instantiateParams: Any) -> Any:
        params = instantiateParams
        if params is None:
            raise Refusal(INVALID_VALUE)
        self.captures.guard_unsafe()
        try:
            made = self.execs.instantiate(self.graphs.live.get(hGraph), as_int(params.flags))
        except NotInstantiable as refusal:
            params.result_out = types.CUgraphInstantiateResult(refusal.why)
            params.hErrNode_out = refusal.node.handle if refusal.node else types.CUgraphNode(0)
            raise
        params.result_out = types.CUgraphInstantiateResult(_FINE)
        params.hErrNode_out = types.CUgraphNode(0)
        return made.handle

    @call()
    def cuGraphLaunch(self, hGraphExec: Handle, hStream: Handle) -> None:
        self.execs.launch(self._launchable(hGraphExec, hStream))

    @call()
    def cuGraphUpload(self, hGraphExec: Handle, hStream: Handle) -> None:
        self._launchable(hGraphExec, hStream)

    def _launchable(self, executable: Handle, stream: Handle) -> Exec:
        self.captures.conflict(self.streams.get(stream))
        self.streams.usable(stream)
        return self.execs.live.get(executable)

    @call()
    def cuGraphExecDestroy(self, hGraphExec: Handle) -> None:
        executable = self.execs.live.find(hGraphExec)
        if executable is not None:
            self.captures.guard_release(f"executable {executable.address:#x}", refuse=True)
        self.execs.destroy(hGraphExec)

    @call(1)
    def cuGraphExecGetFlags(self, hGraphExec: Handle) -> Any:
        return types.cuuint64_t(self.execs.live.get(hGraphExec).flags & _TOLD)

    @call(1, since=13010)
    def cuGraphExecGetId(self, hGraphExec: Handle) -> int:
        return self.execs.live.get(hGraphExec).identity

    # ---- one node

    def _change(self, executable: Handle, node: Handle, work: Op) -> None:
        self.execs.change(self.execs.live.get(executable), self.graphs.nodes.get(node), work)

    cuGraphExecKernelNodeSetParams = _changes("cuGraphExecKernelNodeSetParams", Structs.kernel)
    cuGraphExecMemcpyNodeSetParams = _changes("cuGraphExecMemcpyNodeSetParams", Structs.node_memcpy)
    cuGraphExecMemsetNodeSetParams = _changes("cuGraphExecMemsetNodeSetParams", Structs.memset)
    cuGraphExecHostNodeSetParams = _changes("cuGraphExecHostNodeSetParams", Structs.host)
    cuGraphExecEventRecordNodeSetEvent = _changes(
        "cuGraphExecEventRecordNodeSetEvent", Structs.record
    )
    cuGraphExecEventWaitNodeSetEvent = _changes("cuGraphExecEventWaitNodeSetEvent", Structs.wait)
    cuGraphExecBatchMemOpNodeSetParams = _changes(
        "cuGraphExecBatchMemOpNodeSetParams", Structs.batch
    )

    def _change_child(self, hGraphExec: Handle, hNode: Handle, childGraph: Handle) -> None:
        self.execs.change_child(
            self.execs.live.get(hGraphExec),
            self.graphs.nodes.get(hNode),
            self.graphs.live.get(childGraph),
        )

    cuGraphExecChildGraphNodeSetParams = call(name="cuGraphExecChildGraphNodeSetParams")(
        _change_child
    )

    @call()
    def cuGraphExecNodeSetParams(self, hGraphExec: Handle, hNode: Handle, nodeParams: Any) -> None:
        if nodeParams is None:
            raise Refusal(INVALID_VALUE)
        if int(nodeParams.type) == CHILD:
            self._change_child(hGraphExec, hNode, nodeParams.graph.graph)
        else:
            self._change(hGraphExec, hNode, self.structs.generic(nodeParams))

    @call()
    def cuGraphNodeSetEnabled(self, hGraphExec: Handle, hNode: Handle, isEnabled: int) -> None:
        executable, twin = self._switchable(hGraphExec, hNode)
        if isEnabled:
            executable.disabled.discard(twin)
        else:
            executable.disabled.add(twin)

    @call(1)
    def cuGraphNodeGetEnabled(self, hGraphExec: Handle, hNode: Handle) -> int:
        executable, twin = self._switchable(hGraphExec, hNode)
        return int(twin not in executable.disabled)

    def _switchable(self, handle: Handle, node: Handle) -> tuple[Exec, NodeData]:
        executable = self.execs.live.get(handle)
        twin = self.execs.twin(executable, self.graphs.nodes.get(node))
        if twin.work.kind not in (KERNEL, MEMCPY, MEMSET):
            raise Refusal(INVALID_VALUE)
        return executable, twin

    # ---- the whole graph

    @call(1)
    def cuGraphExecUpdate(self, hGraphExec: Handle, hGraph: Handle) -> Any:
        info = types.CUgraphExecUpdateResultInfo()  # the bindings drop it on failure; so do we
        self._update(hGraphExec, hGraph, info)
        return info

    def _update(self, executable: Handle, graph: Handle, info: Any) -> None:
        try:
            self.execs.update(self.execs.live.get(executable), self.graphs.live.get(graph))
        except UpdateRefused as refused:
            info.result = types.CUgraphExecUpdateResult(refused.why)
            info.errorNode = refused.node.handle if refused.node else types.CUgraphNode(0)
            source = refused.from_node
            info.errorFromNode = source.handle if source else types.CUgraphNode(0)
            raise Refusal(UPDATE_FAILURE) from None

    @call(2)
    def cuGetProcAddress(self, symbol: bytes, cudaVersion: int, flags: int) -> tuple[int, Any]:
        """Only `cuGraphExecUpdate` has a C entry: callers need it to read why an update failed."""
        if symbol not in (b"cuGraphExecUpdate", b"cuGraphExecUpdate_v2") or cudaVersion < 12000:
            raise Refusal(NOT_FOUND)
        address = ctypes.cast(self._update_entry, ctypes.c_void_p).value or 0
        return address, types.CUdriverProcAddressQueryResult(0)

    @functools.cached_property
    def _update_entry(self) -> Any:
        return UPDATE_ENTRY(self._update_from_c)

    def _update_from_c(self, executable: int, graph: int, target: int) -> int:
        info = types.CUgraphExecUpdateResultInfo()
        code, *_ = self.world.enter(
            "cuGraphExecUpdate", lambda: self._update(executable, graph, info), 0
        )
        ctypes.memmove(target, info.getPtr(), _INFO_BYTES)
        return int(code)
