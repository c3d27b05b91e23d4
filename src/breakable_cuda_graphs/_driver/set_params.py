"""Write what nodes do: add them to graphs, change them in graphs and in executables.

The hard problem: an edit has to be one driver call that happens or does not, and everything that the
driver reads has to live until that call returns. So each call builds its struct and the buffers
behind it, holds both, and drops them afterwards; the driver keeps its own copy.

What an executable lets change is the driver's business (CUDA Driver API, cuGraphExec*SetParams);
the reason why a whole-graph update failed is dropped by the bindings, so that one call goes through
its C entry.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import bindings
from .enums import ARRAY_MEMORY, CLUSTER, COOPERATIVE, HOST_MEMORY
from .node_params import (
    Allocation,
    Batch,
    Child,
    Copy,
    Empty,
    End,
    EventRecord,
    EventWait,
    Fill,
    HostCall,
    Kernel,
    MemoryOperation,
    Release,
    Work,
)

types = bindings.types

_BUFFER, _SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END

_PINNED, _DEVICE_LOCATION = 1, 1  # CUmemAllocationType, CUmemLocationType


# ---------------------------------------------------------------- structs


def kernel_struct(work: Kernel) -> tuple[Any, object]:
    """CUDA_KERNEL_NODE_PARAMS, and what has to live until the call with it returns."""
    params = _launch_struct(work)
    if not work.parameters:
        # No sizes are known (or there are none): the node's own memory serves as it is.
        setattr(params, "extra" if work.packed else "kernelParams", work.table)
        return params, None
    address, keep, _ = _packed(work) if work.packed else _table(work)
    setattr(params, "extra" if work.packed else "kernelParams", address)
    return params, keep


def _launch_struct(work: Kernel) -> Any:
    """The struct without the arguments."""
    params = types.CUDA_KERNEL_NODE_PARAMS()
    if work.func:
        params.func = types.CUfunction(work.func)
    if work.kern:
        params.kern = types.CUkernel(work.kern)
    if work.context:
        params.ctx = types.CUcontext(work.context)
    params.gridDimX, params.gridDimY, params.gridDimZ = work.grid
    params.blockDimX, params.blockDimY, params.blockDimZ = work.block
    params.sharedMemBytes = work.shared_bytes
    return params


#: The address for the struct, what has to live as long as that is used, and where each argument is.
_Arguments = tuple[int, object, list[int]]


def _table(work: Kernel) -> _Arguments:
    """The usual form: an array of addresses, one an argument."""
    blobs = [ctypes.create_string_buffer(data, len(data)) for data in work.args]
    places = [ctypes.addressof(blob) for blob in blobs]
    table = (ctypes.c_void_p * len(blobs))(*places)
    return ctypes.addressof(table), (table, blobs), places


def _packed(work: Kernel) -> _Arguments:
    """The form of cuBLAS's Hopper kernels: one buffer, each argument at its offset."""
    end = max(offset + size for offset, size in work.parameters)
    buffer = ctypes.create_string_buffer(end)
    for (offset, size), data in zip(work.parameters, work.args, strict=True):
        ctypes.memmove(ctypes.addressof(buffer) + offset, data, size)
    length = ctypes.c_size_t(end)
    extra = (ctypes.c_size_t * 5)(
        _BUFFER, ctypes.addressof(buffer), _SIZE, ctypes.addressof(length), _END
    )
    start = ctypes.addressof(buffer)
    places = [start + offset for offset, _ in work.parameters]
    return ctypes.addressof(extra), (buffer, length, extra), places


class KernelWriter:
    """A kernel node's struct and the memory of its arguments, kept for changes of single words.

    To make them costs several times what the driver's call does.
    """

    __slots__ = ("_keep", "_places", "params")

    def __init__(self, work: Kernel) -> None:
        self.params = _launch_struct(work)
        address, self._keep, self._places = _packed(work) if work.packed else _table(work)
        setattr(self.params, "extra" if work.packed else "kernelParams", address)

    def put(self, argument: int, offset: int, value: int) -> None:
        """Write one word of an argument."""
        ctypes.c_uint64.from_address(self._places[argument] + offset).value = value


def copy_struct(work: Copy) -> Any:
    """CUDA_MEMCPY3D."""
    params = types.CUDA_MEMCPY3D()
    _put_end(params, "src", work.src)
    _put_end(params, "dst", work.dst)
    params.WidthInBytes, params.Height, params.Depth = work.width, work.height, work.depth
    return params


def _put_end(params: Any, side: str, end: End) -> None:
    setattr(params, f"{side}MemoryType", types.CUmemorytype(end.memory_type))
    if end.memory_type == HOST_MEMORY:
        setattr(params, f"{side}Host", end.address)
    elif end.memory_type == ARRAY_MEMORY:
        setattr(params, f"{side}Array", types.CUarray(end.address))
    else:
        setattr(params, f"{side}Device", types.CUdeviceptr(end.address))
    values = (end.x, end.y, end.z, end.pitch, end.height)
    for name, value in zip(("XInBytes", "Y", "Z", "Pitch", "Height"), values, strict=True):
        setattr(params, side + name, value)


def fill_struct(work: Fill) -> Any:
    """CUDA_MEMSET_NODE_PARAMS."""
    params = types.CUDA_MEMSET_NODE_PARAMS()
    params.dst = types.CUdeviceptr(work.dst)
    params.value, params.elementSize = work.value, work.element_size
    params.width, params.height, params.pitch = work.width, work.height, work.pitch
    return params


def host_struct(work: HostCall) -> Any:
    """CUDA_HOST_NODE_PARAMS."""
    params = types.CUDA_HOST_NODE_PARAMS()
    params.fn = types.CUhostFn(work.function)
    params.userData = work.user_data
    return params


def _context(driver: bindings.Driver, known: int) -> Any:
    """Copies and fills need the context that they belong to (before 13.2 nothing else tells it)."""
    return types.CUcontext(known) if known else driver.cuCtxGetCurrent()


# ---------------------------------------------------------------- adding


def add(driver: bindings.Driver, graph: Any, after: Sequence[Any], work: Work) -> Any:
    """Add a node behind others; full dependencies."""
    nodes = list(after) or None
    place = (graph, nodes, len(after))
    if isinstance(work, Kernel):
        params, _keep = kernel_struct(work)
        return driver.cuGraphAddKernelNode(*place, params)
    if isinstance(work, Copy):
        return driver.cuGraphAddMemcpyNode(
            *place, copy_struct(work), _context(driver, work.context)
        )
    if isinstance(work, Fill):
        return driver.cuGraphAddMemsetNode(
            *place, fill_struct(work), _context(driver, work.context)
        )
    if isinstance(work, HostCall):
        return driver.cuGraphAddHostNode(*place, host_struct(work))
    if isinstance(work, Child):
        return driver.cuGraphAddChildGraphNode(*place, types.CUgraph(work.graph))
    if isinstance(work, Empty):
        return driver.cuGraphAddEmptyNode(*place)
    if isinstance(work, EventRecord):
        return driver.cuGraphAddEventRecordNode(*place, types.CUevent(work.event))
    if isinstance(work, EventWait):
        return driver.cuGraphAddEventWaitNode(*place, types.CUevent(work.event))
    return driver.add_node(graph, list(after), _generic(work))


def _generic(work: Work) -> Any:
    """CUgraphNodeParams for the kinds without a typed call here. Never print it."""
    params = types.CUgraphNodeParams()
    params.type = types.CUgraphNodeType(work.kind)
    if isinstance(work, Release):
        params.free.dptr = types.CUdeviceptr(work.address)
    elif isinstance(work, Batch):
        _put_batch(params.memOp, work)
    else:
        raise TypeError(f"a node of kind {work.kind} cannot be added")
    return params


def _batch_struct(work: Batch) -> Any:
    """CUDA_BATCH_MEM_OP_NODE_PARAMS."""
    params = types.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    _put_batch(params, work)
    return params


def _put_batch(params: Any, work: Batch) -> None:
    params.ctx = types.CUcontext(work.context)
    params.count = len(work.operations)
    params.paramArray = [_operation_struct(each) for each in work.operations]
    params.flags = 0


def _operation_struct(operation: MemoryOperation) -> Any:
    params = types.CUstreamBatchMemOpParams()
    half = params.waitValue if operation.is_wait else params.writeValue
    half.operation = types.CUstreamBatchMemOpType(operation.operation)
    half.address = types.CUdeviceptr(operation.address)
    half.value64 = types.cuuint64_t(operation.value)
    half.flags = operation.flags
    return params


def add_allocation(
    driver: bindings.Driver, graph: Any, after: Sequence[Any], nbytes: int, device: int
) -> tuple[Any, int]:
    """Add an allocation on a device: the node, and the address that each launch allocates."""
    params = types.CUgraphNodeParams()
    params.type = types.CUgraphNodeType(Allocation.kind)
    pool = types.CUmemPoolProps()
    pool.allocType = types.CUmemAllocationType(_PINNED)
    pool.location.type = types.CUmemLocationType(_DEVICE_LOCATION)
    pool.location.id = device
    params.alloc.poolProps = pool
    params.alloc.bytesize = nbytes
    node = driver.add_node(graph, list(after), params)
    return node, int(params.alloc.dptr)


def add_moved_child(driver: bindings.Driver, graph: Any, after: Sequence[Any], child: Any) -> Any:
    """Add a graph as a child that takes it over: the way for graphs with allocations (12.9)."""
    params = types.CUgraphNodeParams()
    params.type = types.CUgraphNodeType(Child.kind)
    params.graph.graph = child
    params.graph.ownership = types.CUgraphChildGraphNodeOwnership(1)  # MOVE
    return driver.add_node(graph, list(after), params)


# ---------------------------------------------------------------- changing


def set_in_graph(driver: bindings.Driver, node: Any, work: Work) -> None:
    """Change a node of a template; executables that exist are not affected."""
    if isinstance(work, Kernel):
        params, _keep = kernel_struct(work)
        driver.cuGraphKernelNodeSetParams(node, params)
    elif isinstance(work, Copy):
        driver.cuGraphMemcpyNodeSetParams(node, copy_struct(work))
    elif isinstance(work, Fill):
        driver.cuGraphMemsetNodeSetParams(node, fill_struct(work))
    elif isinstance(work, HostCall):
        driver.cuGraphHostNodeSetParams(node, host_struct(work))
    elif isinstance(work, EventRecord):
        driver.cuGraphEventRecordNodeSetEvent(node, types.CUevent(work.event))
    elif isinstance(work, EventWait):
        driver.cuGraphEventWaitNodeSetEvent(node, types.CUevent(work.event))
    elif isinstance(work, Batch):
        driver.cuGraphBatchMemOpNodeSetParams(node, _batch_struct(work))
    else:
        raise TypeError(f"a node of kind {work.kind} has nothing to set")


def set_in_exec(driver: bindings.Driver, executable: Any, node: Any, work: Work) -> None:
    """Change a node of an executable: one driver call, for launches from now on."""
    place = (executable, node)
    if isinstance(work, Kernel):
        params, _keep = kernel_struct(work)
        driver.cuGraphExecKernelNodeSetParams(*place, params)
    elif isinstance(work, Copy):
        context = _context(driver, work.context)
        driver.cuGraphExecMemcpyNodeSetParams(*place, copy_struct(work), context)
    elif isinstance(work, Fill):
        context = _context(driver, work.context)
        driver.cuGraphExecMemsetNodeSetParams(*place, fill_struct(work), context)
    elif isinstance(work, HostCall):
        driver.cuGraphExecHostNodeSetParams(*place, host_struct(work))
    elif isinstance(work, EventRecord):
        driver.cuGraphExecEventRecordNodeSetEvent(*place, types.CUevent(work.event))
    elif isinstance(work, EventWait):
        driver.cuGraphExecEventWaitNodeSetEvent(*place, types.CUevent(work.event))
    elif isinstance(work, Batch):
        driver.cuGraphExecBatchMemOpNodeSetParams(*place, _batch_struct(work))
    else:
        raise TypeError(f"a node of kind {work.kind} has nothing to set")


def set_attribute(driver: bindings.Driver, node: Any, identity: int, value: Any) -> None:
    """Give a kernel node of a template a launch attribute (CUkernelNodeAttrID)."""
    made = types.CUkernelNodeAttrValue()
    if identity == CLUSTER:
        made.clusterDim.x, made.clusterDim.y, made.clusterDim.z = value
    elif identity == COOPERATIVE:
        made.cooperative = int(value)
    else:
        made.priority = int(value)
    driver.cuGraphKernelNodeSetAttribute(node, types.CUkernelNodeAttrID(identity), made)


def set_enabled(driver: bindings.Driver, executable: Any, node: Any, enabled: bool) -> None:
    """Let a node of an executable run, or be skipped; its parameters stay."""
    driver.cuGraphNodeSetEnabled(executable, node, 1 if enabled else 0)


# ---------------------------------------------------------------- whole graphs


class UpdateRefusal(NamedTuple):
    """Why a whole-graph update failed: the code, CUgraphExecUpdateResult, and two nodes (0: none).

    `node` is one of the new graph; `source` is the other end of a bad edge.
    """

    code: int
    result: int
    node: int
    source: int


#: CUgraphExecUpdateResult in words.
UPDATE_RESULTS = {
    0: "SUCCESS",
    1: "ERROR",
    2: "TOPOLOGY_CHANGED",
    3: "NODE_TYPE_CHANGED",
    4: "FUNCTION_CHANGED",
    5: "PARAMETERS_CHANGED",
    6: "NOT_SUPPORTED",
    7: "UNSUPPORTED_FUNCTION_CHANGE",
    8: "ATTRIBUTES_CHANGED",
}

_UPDATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_UPDATE_VERSION = 12000


def update_exec(driver: bindings.Driver, executable: Any, graph: Any) -> UpdateRefusal | None:
    """`cuGraphExecUpdate`: None when it worked, else why not.

    The bindings drop the result struct of a failed call, so this one goes to the driver's entry.
    """
    address, _ = driver.cuGetProcAddress(b"cuGraphExecUpdate", _UPDATE_VERSION, 0)
    info = types.CUgraphExecUpdateResultInfo()
    code = _UPDATE(int(address))(int(executable), int(graph), info.getPtr())
    if code == 0:
        return None
    try:
        result = int(info.result)
    except ValueError:  # newer than the bindings
        result = 1
    return UpdateRefusal(int(code), result, int(info.errorNode), int(info.errorFromNode))


def set_child(driver: bindings.Driver, executable: Any, node: Any, graph: Any) -> int:
    """Give a child graph's nodes the parameters of another graph's; the code is the answer."""
    (code,) = driver.module.cuGraphExecChildGraphNodeSetParams(executable, node, graph)
    return int(code)
