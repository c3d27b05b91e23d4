"""The calls that read and set what a node of a template does.

The hard problem: a getter hands out memory of the node (the arguments of a kernel, the bodies of a
conditional) that has to stay valid until the node changes, so it is kept with the node and dropped
with its parameters.
"""

from __future__ import annotations

from typing import Any, TypeVar

from ..._driver.enums import CLUSTER, PRIORITY, PROGRAMMATIC
from ..graphs import ChildOp, ConditionalOp, Graphs, NodeData, Op
from ..nodes import BatchMemOp, EmptyOp, Host, KernelOp, MemAlloc, Memcpy, MemFree, Memset
from ..stream_state import RecordEvent, WaitEvent
from ..streams import GREATEST_PRIORITY, LEAST_PRIORITY
from ..structs import (
    Structs,
    attribute_bytes,
    attribute_struct,
    fill_host,
    fill_kernel,
    fill_memcpy,
    fill_memset,
    kernel_struct,
    publish_bodies,
    publish_operations,
    show,
)
from ..world import (
    INVALID_CLUSTER_SIZE,
    INVALID_VALUE,
    NOT_SUPPORTED,
    DriverCalls,
    Handle,
    Refusal,
    call,
    types,
)

W = TypeVar("W", bound=Op)


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
        return kernel_struct(work, _shown(self.graphs.nodes.get(hNode), work))

    @call()
    def cuGraphKernelNodeSetParams(self, hNode: Handle, nodeParams: Any) -> None:
        self._set(hNode, self.structs.kernel(nodeParams))

    @call(1)
    def cuGraphMemcpyNodeGetParams(self, hNode: Handle) -> Any:
        params = types.CUDA_MEMCPY3D()
        fill_memcpy(params, self._work(hNode, Memcpy))
        return params

    @call()
    def cuGraphMemcpyNodeSetParams(self, hNode: Handle, nodeParams: Any) -> None:
        self._set(hNode, self.structs.node_memcpy(nodeParams, self._work(hNode, Memcpy).context))

    @call(1)
    def cuGraphMemsetNodeGetParams(self, hNode: Handle) -> Any:
        params = types.CUDA_MEMSET_NODE_PARAMS()
        fill_memset(params, self._work(hNode, Memset))
        return params

    @call()
    def cuGraphMemsetNodeSetParams(self, hNode: Handle, nodeParams: Any) -> None:
        self._set(hNode, self.structs.memset(nodeParams, self._work(hNode, Memset).context))

    @call(1)
    def cuGraphHostNodeGetParams(self, hNode: Handle) -> Any:
        params = types.CUDA_HOST_NODE_PARAMS()
        fill_host(params, self._work(hNode, Host))
        return params

    @call()
    def cuGraphHostNodeSetParams(self, hNode: Handle, nodeParams: Any) -> None:
        self._set(hNode, self.structs.host(nodeParams))

    @call(1)
    def cuGraphEventRecordNodeGetEvent(self, hNode: Handle) -> Any:
        return self._work(hNode, RecordEvent).event.handle

    @call()
    def cuGraphEventRecordNodeSetEvent(self, hNode: Handle, event: Handle) -> None:
        self._set(hNode, self.structs.record(event))

    @call(1)
    def cuGraphEventWaitNodeGetEvent(self, hNode: Handle) -> Any:
        return self._work(hNode, WaitEvent).event.handle

    @call()
    def cuGraphEventWaitNodeSetEvent(self, hNode: Handle, event: Handle) -> None:
        self._set(hNode, self.structs.wait(event))

    @call(1)
    def cuGraphBatchMemOpNodeGetParams(self, hNode: Handle) -> Any:
        params = types.CUDA_BATCH_MEM_OP_NODE_PARAMS()
        work = self._work(hNode, BatchMemOp)
        self.graphs.nodes.get(hNode).shown = publish_operations(params, work)
        return params

    @call()
    def cuGraphBatchMemOpNodeSetParams(self, hNode: Handle, nodeParams: Any) -> None:
        self._set(hNode, self.structs.batch(nodeParams))

    @call()
    def cuGraphNodeSetParams(self, hNode: Handle, nodeParams: Any) -> None:
        self._set(hNode, self.structs.generic(nodeParams))

    @call(since=13020)
    def cuGraphNodeSetParams_v2(self, hNode: Handle, nodeParams: Any) -> None:
        self._set(hNode, self.structs.generic(nodeParams))

    @call(1, since=13020)
    def cuGraphNodeGetParams(self, hNode: Handle) -> Any:
        return _generic_struct(self.graphs.nodes.get(hNode))

    @call(1)
    def cuGraphMemAllocNodeGetParams(self, hNode: Handle) -> Any:
        work = self._work(hNode, MemAlloc)
        params = types.CUDA_MEM_ALLOC_NODE_PARAMS()
        params.bytesize, params.dptr = work.size, types.CUdeviceptr(work.address)
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
        node.shown = show(work)
    return node.shown


def _generic_struct(node: NodeData) -> Any:
    params = types.CUgraphNodeParams()
    params.type = types.CUgraphNodeType(node.work.kind)
    work = node.work
    if isinstance(work, KernelOp):
        fill_kernel(params.kernel, work, _shown(node, work))
    elif isinstance(work, Memcpy):
        fill_memcpy(params.memcpy.copyParams, work)
        params.memcpy.copyCtx = types.CUcontext(work.context)
    elif isinstance(work, Memset):
        fill_memset(params.memset, work)
        params.memset.ctx = types.CUcontext(work.context)
    elif isinstance(work, Host):
        fill_host(params.host, work)
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
