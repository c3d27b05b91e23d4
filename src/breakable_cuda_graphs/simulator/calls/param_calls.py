"""The calls that read and set what a node of a template does.

The hard problem: a getter hands out memory of the node (the arguments of a kernel, the bodies of a
conditional) that has to stay valid until the node changes, so it is kept with the node and dropped
with its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..._driver.enums import (
    CLUSTER,
    INVALID_CLUSTER_SIZE,
    INVALID_VALUE,
    NOT_SUPPORTED,
    PRIORITY,
    PROGRAMMATIC,
)
from ..._driver.set_params import put_copy, put_fill, put_host
from ..graphs import ChildOp, ConditionalOp, Graphs, NodeData, Op
from ..kernels import expose_arguments
from ..nodes import BatchMemOp, EmptyOp, Host, KernelOp, MemAlloc, Memcpy, MemFree, Memset
from ..stream_state import RecordEvent, WaitEvent
from ..streams import GREATEST_PRIORITY, LEAST_PRIORITY
from ..structs import (
    Structs,
    attribute_bytes,
    attribute_struct,
    fill_kernel,
    publish_bodies,
    publish_operations,
)
from ..world import DriverCalls, Handle, Refusal, call, types

W = TypeVar("W", bound=Op)


def _sets(name: str, read: Callable[..., Op], since: int = 0) -> Callable[..., tuple[Any, ...]]:
    """The call of a name that gives a node the work which `read` takes from its arguments."""

    def answer(self: ParameterCalls, hNode: Handle, *given: Any, **named: Any) -> None:
        self._set(hNode, read(self.structs, *given, **named))

    return call(since=since, name=name)(answer)


class ParameterCalls(DriverCalls):
    """cuGraph*NodeGetParams, cuGraph*NodeSetParams, cuGraphKernelNode*Attribute*."""

    graphs: Graphs
    structs: Structs

    # ---- parameters

    def _work(self, handle: Handle, kind: type[W]) -> W:
        work = self.graphs.nodes.get(handle).work
        if not isinstance(work, kind):
            raise Refusal(INVALID_VALUE)
        return work

    def _set(self, handle: Handle, work: Op) -> None:
        node = self.graphs.nodes.get(handle)
        if node.work.kind != work.kind:
            raise Refusal(INVALID_VALUE)
        if isinstance(work, KernelOp) and isinstance(node.work, KernelOp):
            work = work.with_attributes(node.work.attributes)
            _check_cluster(work, attribute_struct(work.attribute(CLUSTER) or b""))
        node.replace(work)

    @call(1)
    def cuGraphKernelNodeGetParams(self, hNode: Handle) -> Any:
        work = self._work(hNode, KernelOp)
        shown = _shown(self.graphs.nodes.get(hNode), work)
        return fill_kernel(types.CUDA_KERNEL_NODE_PARAMS(), work, shown)

    cuGraphKernelNodeSetParams = _sets("cuGraphKernelNodeSetParams", Structs.kernel)

    @call(1)
    def cuGraphMemcpyNodeGetParams(self, hNode: Handle) -> Any:
        params = types.CUDA_MEMCPY3D()
        put_copy(params, self._work(hNode, Memcpy))
        return params

    @call()
    def cuGraphMemcpyNodeSetParams(self, hNode: Handle, nodeParams: Any) -> None:
        self._set(hNode, self.structs.node_memcpy(nodeParams, self._work(hNode, Memcpy).context))

    @call(1)
    def cuGraphMemsetNodeGetParams(self, hNode: Handle) -> Any:
        params = types.CUDA_MEMSET_NODE_PARAMS()
        put_fill(params, self._work(hNode, Memset))
        return params

    @call()
    def cuGraphMemsetNodeSetParams(self, hNode: Handle, nodeParams: Any) -> None:
        self._set(hNode, self.structs.memset(nodeParams, self._work(hNode, Memset).context))

    @call(1)
    def cuGraphHostNodeGetParams(self, hNode: Handle) -> Any:
        params = types.CUDA_HOST_NODE_PARAMS()
        put_host(params, self._work(hNode, Host))
        return params

    cuGraphHostNodeSetParams = _sets("cuGraphHostNodeSetParams", Structs.host)

    @call(1)
    def cuGraphEventRecordNodeGetEvent(self, hNode: Handle) -> Any:
        return self._work(hNode, RecordEvent).event.handle

    cuGraphEventRecordNodeSetEvent = _sets("cuGraphEventRecordNodeSetEvent", Structs.record)

    @call(1)
    def cuGraphEventWaitNodeGetEvent(self, hNode: Handle) -> Any:
        return self._work(hNode, WaitEvent).event.handle

    cuGraphEventWaitNodeSetEvent = _sets("cuGraphEventWaitNodeSetEvent", Structs.wait)

    @call(1)
    def cuGraphBatchMemOpNodeGetParams(self, hNode: Handle) -> Any:
        params = types.CUDA_BATCH_MEM_OP_NODE_PARAMS()
        work = self._work(hNode, BatchMemOp)
        self.graphs.nodes.get(hNode).shown = publish_operations(params, work)
        return params

    cuGraphBatchMemOpNodeSetParams = _sets("cuGraphBatchMemOpNodeSetParams", Structs.batch)

    cuGraphNodeSetParams = _sets("cuGraphNodeSetParams", Structs.generic)

    cuGraphNodeSetParams_v2 = _sets("cuGraphNodeSetParams_v2", Structs.generic, since=13020)

    @call(1, since=13020)
    def cuGraphNodeGetParams(self, hNode: Handle) -> Any:
        return _generic_struct(self.graphs.nodes.get(hNode))

    @call(1)
    def cuGraphChildGraphNodeGetGraph(self, hNode: Handle) -> Any:
        return self._work(hNode, ChildOp).graph.handle

    @call(1)
    def cuGraphMemAllocNodeGetParams(self, hNode: Handle) -> Any:
        work = self._work(hNode, MemAlloc)
        params = types.CUDA_MEM_ALLOC_NODE_PARAMS()
        params.bytesize, params.dptr = work.nbytes, types.CUdeviceptr(work.address)
        return params

    @call(1)
    def cuGraphMemFreeNodeGetParams(self, hNode: Handle) -> Any:
        return types.CUdeviceptr(self._work(hNode, MemFree).address)

    # ---- attributes of kernel nodes

    @call(1)
    def cuGraphKernelNodeGetAttribute(self, hNode: Handle, attr: int) -> Any:
        work = self._work(hNode, KernelOp)
        if int(attr) == PROGRAMMATIC:  # it has become edges
            raise Refusal(INVALID_VALUE)
        raw = work.attribute(int(attr))
        return attribute_struct(raw or b"")

    @call()
    def cuGraphKernelNodeSetAttribute(self, hNode: Handle, attr: int, value: Any) -> None:
        work = self._work(hNode, KernelOp)
        changed = dict(work.attributes) | {int(attr): self._attribute(work, int(attr), value)}
        self.graphs.nodes.get(hNode).replace(work.with_attributes(tuple(changed.items())))

    def _attribute(self, work: KernelOp, identity: int, value: Any) -> bytes:
        if identity == PRIORITY:
            value.priority = max(GREATEST_PRIORITY, min(LEAST_PRIORITY, value.priority))
        if identity == CLUSTER:
            _check_cluster(work, value)
        return attribute_bytes(value)

    @call()
    def cuGraphKernelNodeCopyAttributes(self, dst: Handle, src: Handle) -> None:
        attributes = self._work(src, KernelOp).attributes
        work = self._work(dst, KernelOp)
        self.graphs.nodes.get(dst).replace(work.with_attributes(attributes))


# ---------------------------------------------------------------- helpers


def _check_cluster(work: KernelOp, value: Any) -> None:
    cluster = (value.clusterDim.x, value.clusterDim.y, value.clusterDim.z)
    if any(blocks % size for blocks, size in zip(work.grid, cluster, strict=True) if size):
        raise Refusal(INVALID_CLUSTER_SIZE)


def _shown(node: NodeData, work: KernelOp) -> Any:
    if node.shown is None:
        node.shown = expose_arguments(work.kernel, work.arguments, packed=work.packed)
    return node.shown


def _generic_struct(node: NodeData) -> Any:
    params = types.CUgraphNodeParams()
    params.type = types.CUgraphNodeType(node.work.kind)
    work = node.work
    if isinstance(work, KernelOp):
        fill_kernel(params.kernel, work, _shown(node, work))
    elif isinstance(work, Memcpy):
        put_copy(params.memcpy.copyParams, work)
        params.memcpy.copyCtx = types.CUcontext(work.context)
    elif isinstance(work, Memset):
        put_fill(params.memset, work)
        params.memset.ctx = types.CUcontext(work.context)
    elif isinstance(work, Host):
        put_host(params.host, work)
    elif isinstance(work, RecordEvent):
        params.eventRecord.event = work.event.handle
    elif isinstance(work, WaitEvent):
        params.eventWait.event = work.event.handle
    elif isinstance(work, BatchMemOp):
        node.shown = publish_operations(params.memOp, work)
    elif isinstance(work, ChildOp):
        params.graph.graph = work.graph.handle
    elif isinstance(work, ConditionalOp):
        _fill_conditional(params.conditional, node, work)
    elif not isinstance(work, EmptyOp):
        raise Refusal(NOT_SUPPORTED)
    return params


def _fill_conditional(params: Any, node: NodeData, work: ConditionalOp) -> None:
    params.handle = types.CUgraphConditionalHandle(work.handle)
    params.type = types.CUgraphConditionalNodeType(work.choice)
    params.size = len(work.bodies)
    node.shown = publish_bodies(params, [body.address for body in work.bodies], work.context)
