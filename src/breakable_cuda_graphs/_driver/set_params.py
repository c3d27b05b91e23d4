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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from . import bindings
from .enums import (
    ARRAY_MEMORY,
    CLUSTER,
    COOPERATIVE,
    HOST_MEMORY,
    MOVE,
    PARAM_BUFFER,
    PARAM_END,
    PARAM_SIZE,
    UpdateResult,
)
from .node_params import (
    PLACE,
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

_PINNED, _DEVICE_LOCATION = 1, 1  # CUmemAllocationType, CUmemLocationType


# ---------------------------------------------------------------- adding and changing


def add(driver: bindings.Driver, graph: Any, after: Sequence[Any], work: Work) -> Any:
    """Add a node behind others; full dependencies."""
    place = (graph, list(after) or None, len(after))
    if isinstance(work, Empty):
        return driver.cuGraphAddEmptyNode(*place)
    if isinstance(work, Child):
        return driver.cuGraphAddChildGraphNode(*place, types.CUgraph(work.graph))
    if isinstance(work, Batch) or work.kind not in _TYPED:
        return driver.add_node(graph, list(after), _generic(work))
    calls = _TYPED[work.kind]
    given, _keep = calls.arguments(driver, work)
    return getattr(driver, f"cuGraphAdd{calls.name}Node")(*place, *given)


def set_in_graph(driver: bindings.Driver, node: Any, work: Work) -> None:
    """Change a node of a template; executables that exist are not affected."""
    calls = _calls(work)
    value, _keep = calls.given(work)
    getattr(driver, f"cuGraph{calls.name}NodeSet{calls.what}")(node, value)


def set_in_exec(driver: bindings.Driver, executable: Any, node: Any, work: Work) -> None:
    """Change a node of an executable: one driver call, for launches from now on."""
    calls = _calls(work)
    given, _keep = calls.arguments(driver, work)
    getattr(driver, f"cuGraphExec{calls.name}NodeSet{calls.what}")(executable, node, *given)


class _Calls(NamedTuple):
    """The driver's own calls for one kind of node: a piece of their names, and what they are given."""

    name: str
    given: Callable[[Any], tuple[Any, object]]  # and what has to live until the call returns
    what: str = "Params"
    has_context: bool = False  # is told to all but those that change a template

    def arguments(self, driver: bindings.Driver, work: Any) -> tuple[tuple[Any, ...], object]:
        """What a call is given that may have to be told a context too."""
        value, keep = self.given(work)
        if not self.has_context:
            return (value,), keep
        # Copies and fills need the context that they belong to (before 13.2 nothing else tells it).
        known = work.context
        return (value, types.CUcontext(known) if known else driver.cuCtxGetCurrent()), keep


def _calls(work: Work) -> _Calls:
    if work.kind not in _TYPED:
        raise TypeError(f"a node of kind {work.kind} has nothing to set")
    return _TYPED[work.kind]


def _struct(kind: Any, put: Callable[[Any, Any], object], work: Work) -> tuple[Any, object]:
    """A struct with the values of a node's work, and what `put` says has to live as long."""
    params = kind()
    return params, put(params, work)


def _event(work: EventRecord | EventWait) -> tuple[Any, object]:
    return types.CUevent(work.event), None


# ---------------------------------------------------------------- structs


def put_kernel(params: Any, work: Kernel) -> object:
    """Fill CUDA_KERNEL_NODE_PARAMS; returns what has to live until the call with it returns."""
    _put_launch(params, work)
    if work.parameters:
        return _put_arguments(params, work)[0]
    # No sizes are known (or there are none): the node's own memory serves as it is.
    setattr(params, "extra" if work.packed else "kernelParams", work.table)
    return None


def _put_launch(params: Any, work: Kernel) -> None:
    """All but the arguments."""
    if work.func:
        params.func = types.CUfunction(work.func)
    if work.kern:
        params.kern = types.CUkernel(work.kern)
    if work.context:
        params.ctx = types.CUcontext(work.context)
    params.gridDimX, params.gridDimY, params.gridDimZ = work.grid
    params.blockDimX, params.blockDimY, params.blockDimZ = work.block
    params.sharedMemBytes = work.shared_bytes


def _put_arguments(params: Any, work: Kernel) -> tuple[object, list[int]]:
    """The arguments; returns what has to live as long as the struct, and where each of them is."""
    if work.packed:
        params.extra, keep, places = packed_arguments(work.parameters, work.args)
    else:
        params.kernelParams, keep, places = argument_table(work.args)
    return keep, places


#: The address for a struct, what has to live as long as that is used, and where each argument is.
_Arguments = tuple[int, object, list[int]]


def argument_table(args: Sequence[bytes]) -> _Arguments:
    """The usual form of a kernel's arguments: an array of addresses, one an argument."""
    blobs = [ctypes.create_string_buffer(data, len(data)) for data in args]
    places = [ctypes.addressof(blob) for blob in blobs]
    table = (ctypes.c_void_p * len(blobs))(*places)
    return ctypes.addressof(table), (table, blobs), places


def packed_arguments(parameters: Sequence[tuple[int, int]], args: Sequence[bytes]) -> _Arguments:
    """The form of cuBLAS's Hopper kernels: one buffer, each argument at its offset."""
    end = max(offset + size for offset, size in parameters)
    buffer = ctypes.create_string_buffer(end)
    start = ctypes.addressof(buffer)
    places = [start + offset for offset, _ in parameters]
    for place, (_, size), data in zip(places, parameters, args, strict=True):
        ctypes.memmove(place, data, size)
    length = ctypes.c_size_t(end)
    extra = (ctypes.c_size_t * 5)(
        PARAM_BUFFER, start, PARAM_SIZE, ctypes.addressof(length), PARAM_END
    )
    return ctypes.addressof(extra), (buffer, length, extra), places


class KernelWriter:
    """A kernel node's struct and the memory of its arguments, kept for changes of single words.

    To make them costs several times what the driver's call does.
    """

    __slots__ = ("_keep", "_places", "params")

    def __init__(self, work: Kernel) -> None:
        self.params = types.CUDA_KERNEL_NODE_PARAMS()
        _put_launch(self.params, work)
        self._keep, self._places = _put_arguments(self.params, work)

    def put(self, argument: int, offset: int, value: int) -> None:
        """Write one word of an argument."""
        ctypes.c_uint64.from_address(self._places[argument] + offset).value = value


def put_copy(params: Any, work: Copy) -> None:
    """Fill CUDA_MEMCPY3D."""
    for side, end in (("dst", work.dst), ("src", work.src)):
        _put_end(params, side, end)
    params.WidthInBytes, params.Height, params.Depth = work.width, work.height, work.depth


def _put_end(params: Any, side: str, end: End) -> None:
    setattr(params, f"{side}MemoryType", types.CUmemorytype(end.memory_type))
    if end.memory_type == HOST_MEMORY:
        setattr(params, f"{side}Host", end.address)
    elif end.memory_type == ARRAY_MEMORY:
        setattr(params, f"{side}Array", types.CUarray(end.address))
    else:
        setattr(params, f"{side}Device", types.CUdeviceptr(end.address))
    values = (end.x, end.y, end.z, end.pitch, end.height)
    for name, value in zip(PLACE, values, strict=True):
        setattr(params, side + name, value)


def put_fill(params: Any, work: Fill) -> None:
    """Fill CUDA_MEMSET_NODE_PARAMS, any version."""
    params.dst = types.CUdeviceptr(work.dst)
    params.value, params.elementSize = work.value, work.element_size
    params.width, params.height, params.pitch = work.width, work.height, work.pitch


def put_host(params: Any, work: HostCall) -> None:
    """Fill CUDA_HOST_NODE_PARAMS, any version."""
    params.fn = types.CUhostFn(work.function)
    params.userData = work.user_data


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


#: The kinds that have calls of their own.
_TYPED: dict[int, _Calls] = {
    Kernel.kind: _Calls("Kernel", partial(_struct, types.CUDA_KERNEL_NODE_PARAMS, put_kernel)),
    Copy.kind: _Calls("Memcpy", partial(_struct, types.CUDA_MEMCPY3D, put_copy), has_context=True),
    Fill.kind: _Calls(
        "Memset", partial(_struct, types.CUDA_MEMSET_NODE_PARAMS, put_fill), has_context=True
    ),
    HostCall.kind: _Calls("Host", partial(_struct, types.CUDA_HOST_NODE_PARAMS, put_host)),
    EventRecord.kind: _Calls("EventRecord", _event, "Event"),
    EventWait.kind: _Calls("EventWait", _event, "Event"),
    Batch.kind: _Calls(
        "BatchMemOp", partial(_struct, types.CUDA_BATCH_MEM_OP_NODE_PARAMS, _put_batch)
    ),
}


# ---------------------------------------------------------------- kinds without typed calls


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
    params.graph.ownership = types.CUgraphChildGraphNodeOwnership(MOVE)
    return driver.add_node(graph, list(after), params)


# ---------------------------------------------------------------- single properties of nodes


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
UPDATE_RESULTS = {result.value: result.name for result in UpdateResult}

#: The C entry of `cuGraphExecUpdate`.
UPDATE_ENTRY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_UPDATE_VERSION = 12000


def update_exec(driver: bindings.Driver, executable: Any, graph: Any) -> UpdateRefusal | None:
    """`cuGraphExecUpdate`: None when it worked, else why not.

    The bindings drop the result struct of a failed call, so this one goes to the driver's entry.
    """
    address, _ = driver.cuGetProcAddress(b"cuGraphExecUpdate", _UPDATE_VERSION, 0)
    info = types.CUgraphExecUpdateResultInfo()
    code = UPDATE_ENTRY(int(address))(int(executable), int(graph), info.getPtr())
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
