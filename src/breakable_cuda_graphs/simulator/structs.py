"""Between the bindings' structs and descriptions of work.

The hard problem: the structs are C unions and hold borrowed pointers. Each is read once, field by
field and only where its kind says that the field is there (a look at another union member can crash
the process, and so does `repr`), and everything behind a pointer is copied before the call returns.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

from .._driver.enums import (
    ARRAY_MEMORY,
    BATCH_MEM_OP,
    HOST_MEMORY,
    WAIT_32,
    WAIT_64,
    WRITE_32,
    WRITE_64,
)
from .contexts import Contexts
from .graphs import Op
from .kernels import (
    ArgumentBuffers,
    Dim,
    copy_arguments,
    expose_arguments,
    has_buffer,
    has_table,
    kernel_of,
)
from .nodes import BatchMemOp, CopyEnd, EmptyOp, Host, KernelOp, Memcpy, Memset, WordOperation
from .stream_state import Event, RecordEvent, WaitEvent
from .streams import StreamTable
from .world import INVALID_CONTEXT, INVALID_VALUE, NOT_SUPPORTED, Handle, Refusal, as_int, types

_MOST_BLOCKS = (2**31 - 1, 65535, 65535)
_MOST_THREADS = (1024, 1024, 64)
_MOST_SHARED = 48 << 10  # without cuFuncSetAttribute
_ATTRIBUTE_BYTES = 64  # CUlaunchAttributeValue
_COUNT, _OPERATIONS = 8, 16  # offsets in CUDA_BATCH_MEM_OP_NODE_PARAMS
_OPERATION_BYTES = 48  # CUstreamBatchMemOpParams
_PH_GRAPH_OUT, _CTX_OUT = 16, 24  # offsets in CUDA_CONDITIONAL_NODE_PARAMS


class OutsideLimits(Refusal):
    """A launch that the device is too small for: the one refusal that a capture does not survive."""


class Structs:
    """Reads structs; needs to know contexts and events."""

    def __init__(self, contexts: Contexts, streams: StreamTable) -> None:
        self.contexts = contexts
        self.streams = streams

    # ---- kernels

    def kernel(self, params: Any) -> KernelOp:
        """From CUDA_KERNEL_NODE_PARAMS, any version."""
        if params is None:
            raise Refusal(INVALID_VALUE)
        named = as_int(getattr(params, "ctx", 0))
        return self.launch(
            (params.func, getattr(params, "kern", 0)),
            (params.gridDimX, params.gridDimY, params.gridDimZ),
            (params.blockDimX, params.blockDimY, params.blockDimZ),
            params.sharedMemBytes,
            params.kernelParams,
            params.extra,
            named,
        )

    def launch(
        self,
        handles: tuple[Handle, ...],
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        arguments: Any,
        extra: Any,
        context: int = 0,
        attributes: tuple[tuple[int, bytes], ...] = (),
    ) -> KernelOp:
        """A kernel launch, checked as the driver checks it."""
        kernel = kernel_of(*handles)
        in_table, in_buffer = has_table(arguments), has_buffer(extra)
        if kernel.layout and in_table and in_buffer:
            raise Refusal(INVALID_VALUE)
        if not _launchable(grid, block, shared_bytes):
            raise OutsideLimits(INVALID_VALUE)
        home = kernel.context or context or self.contexts.current().address
        if context and context != home:
            raise Refusal(INVALID_CONTEXT)
        return KernelOp(
            kernel,
            grid,
            block,
            shared_bytes,
            copy_arguments(kernel, arguments, extra),
            home,
            kernel.packed or in_buffer,
            attributes,
        )

    # ---- copies and fills

    def memcpy(self, params: Any, ctx: Handle = 0) -> Memcpy:
        """From CUDA_MEMCPY3D."""
        if params is None:
            raise Refusal(INVALID_VALUE)
        work = Memcpy(
            _place(params, "dst"),
            _place(params, "src"),
            params.WidthInBytes,
            params.Height,
            params.Depth,
            self.contexts.of(ctx).address,
        )
        ends = (work.destination, work.source)
        if work.height > 1 and any(place.pitch < work.width for place in ends):
            raise Refusal(INVALID_VALUE)
        if not self.copy_fits(work):
            raise Refusal(INVALID_VALUE)
        return work

    def copy_fits(self, work: Memcpy) -> bool:
        """Whether both ends of a copy stay inside of the blocks that they begin in."""
        ends = (work.destination, work.source)
        return all(self._fits(place.row(0, 0), work.extent(place)) for place in ends)

    def node_memcpy(self, params: Any, ctx: Handle = 0) -> Memcpy:
        """The same for a node, which has to copy something."""
        work = self.memcpy(params, ctx)
        if not (work.width and work.height and work.depth):
            raise Refusal(INVALID_VALUE)
        return work

    def _fits(self, address: int, size: int) -> bool:
        """Whether a range ends in the block that it begins in, if this driver has made that."""
        block = self.streams.memory.block_at(address)
        return block is None or address + size <= block.address + block.size

    def memset(self, params: Any, ctx: Handle = 0) -> Memset:
        """From CUDA_MEMSET_NODE_PARAMS, any version."""
        if params is None or params.elementSize not in (1, 2, 4):
            raise Refusal(INVALID_VALUE)
        if not as_int(params.dst) or params.width < 1 or params.height < 1:
            raise Refusal(INVALID_VALUE)
        work = Memset(
            as_int(params.dst),
            params.value,
            params.elementSize,
            params.width,
            params.height,
            params.pitch,
            self.contexts.of(ctx).address,
        )
        row, size = work.width * work.element_size, work.element_size
        if work.destination % size or (work.height > 1 and (work.pitch < row or work.pitch % size)):
            raise Refusal(INVALID_VALUE)
        if not self._fits(work.destination, work.extent):
            raise Refusal(INVALID_VALUE)
        return work

    # ---- the rest

    def host(self, params: Any) -> Host:
        """From CUDA_HOST_NODE_PARAMS, any version."""
        if params is None or not as_int(params.fn):
            raise Refusal(INVALID_VALUE)
        return Host(as_int(params.fn), as_int(params.userData))

    def record(self, event: Handle) -> RecordEvent:
        return RecordEvent(self._event(event))

    def wait(self, event: Handle) -> WaitEvent:
        return WaitEvent(self._event(event))

    def _event(self, handle: Handle) -> Event:
        if not as_int(handle):  # another error than for a call that uses an event
            raise Refusal(INVALID_VALUE)
        return self.streams.events.get(handle)

    def batch(self, params: Any) -> BatchMemOp:
        """From CUDA_BATCH_MEM_OP_NODE_PARAMS, any version."""
        if params is None:
            raise Refusal(INVALID_VALUE)
        start = params.getPtr()
        count = ctypes.c_uint.from_address(start + _COUNT).value
        at = ctypes.c_void_p.from_address(start + _OPERATIONS).value or 0
        if not at or not count:
            raise Refusal(INVALID_VALUE)
        found = tuple(_operation(at + place * _OPERATION_BYTES) for place in range(count))
        return BatchMemOp(found, self.contexts.of(params.ctx).address)

    def generic(self, params: Any) -> Op:
        """From CUgraphNodeParams, for the kinds that need nothing but their parameters."""
        kind = int(params.type)
        if kind == 0:
            return self.kernel(params.kernel)
        if kind == 1:
            return self.node_memcpy(params.memcpy.copyParams, params.memcpy.copyCtx)
        if kind == 2:
            return self.memset(params.memset, params.memset.ctx)
        if kind == 3:
            return self.host(params.host)
        if kind == 5:
            return EmptyOp()
        if kind == 6:
            return self.wait(params.eventWait.event)
        if kind == 7:
            return self.record(params.eventRecord.event)
        if kind == BATCH_MEM_OP:
            return self.batch(params.memOp)
        raise Refusal(NOT_SUPPORTED)


def _operation(at: int) -> WordOperation:
    """One CUstreamBatchMemOpParams, a union of structs that begin alike."""
    operation = ctypes.c_uint.from_address(at).value
    if operation not in (WAIT_32, WRITE_32, WAIT_64, WRITE_64):
        raise Refusal(NOT_SUPPORTED)
    address, value = (ctypes.c_uint64.from_address(at + place).value for place in (8, 16))
    made = WordOperation(operation, address, value, ctypes.c_uint.from_address(at + 24).value)
    if not address or address % made.size:
        raise Refusal(INVALID_VALUE)
    return replace(made, value=value & ((1 << 8 * made.size) - 1))


def _launchable(grid: Dim, block: Dim, shared_bytes: int) -> bool:
    """Whether a launch is within the limits of the device (those of compute capability 9.0)."""
    threads = block[0] * block[1] * block[2]
    most = (*_MOST_BLOCKS, *_MOST_THREADS)
    fits = all(1 <= number <= limit for number, limit in zip((*grid, *block), most, strict=True))
    return fits and threads <= _MOST_THREADS[0] and 0 <= shared_bytes <= _MOST_SHARED


def _place(params: Any, side: str) -> CopyEnd:
    try:
        memory_type = int(getattr(params, f"{side}MemoryType"))
    except ValueError:  # never set
        raise Refusal(INVALID_VALUE) from None
    if memory_type == ARRAY_MEMORY:
        raise Refusal(NOT_SUPPORTED)
    where = f"{side}Host" if memory_type == HOST_MEMORY else f"{side}Device"
    address = as_int(getattr(params, where))
    if not address:
        raise Refusal(INVALID_VALUE)
    return CopyEnd(
        memory_type,
        address,
        *(int(getattr(params, side + name)) for name in ("XInBytes", "Y", "Z", "Pitch", "Height")),
    )


# ---------------------------------------------------------------- towards the caller


def kernel_struct(work: KernelOp, shown: ArgumentBuffers, kind: Any = None) -> Any:
    """As CUDA_KERNEL_NODE_PARAMS whose pointers lead to the node's own memory."""
    params = (kind or types.CUDA_KERNEL_NODE_PARAMS)()
    fill_kernel(params, work, shown)
    return params


def fill_kernel(params: Any, work: KernelOp, shown: ArgumentBuffers) -> None:
    """Write a kernel's description into a struct of any version."""
    params.func = work.kernel.handle
    params.kern = work.kernel.kernel_handle
    params.ctx = types.CUcontext(work.context)
    params.gridDimX, params.gridDimY, params.gridDimZ = work.grid
    params.blockDimX, params.blockDimY, params.blockDimZ = work.block
    params.sharedMemBytes = work.shared_bytes
    params.kernelParams = shown.kernel_params
    params.extra = shown.extra


def show(work: KernelOp) -> ArgumentBuffers:
    """Memory that shows a kernel's arguments."""
    return expose_arguments(work.kernel, work.arguments, packed=work.packed)


def fill_memcpy(params: Any, work: Memcpy) -> None:
    """Write a copy's description into CUDA_MEMCPY3D."""
    for side, place in (("dst", work.destination), ("src", work.source)):
        setattr(params, f"{side}MemoryType", types.CUmemorytype(place.memory_type))
        if place.memory_type == HOST_MEMORY:
            setattr(params, f"{side}Host", place.address)
        else:
            setattr(params, f"{side}Device", types.CUdeviceptr(place.address))
        for name, value in zip(
            ("XInBytes", "Y", "Z", "Pitch", "Height"),
            (place.x, place.y, place.z, place.pitch, place.height),
            strict=True,
        ):
            setattr(params, side + name, value)
    params.WidthInBytes, params.Height, params.Depth = work.width, work.height, work.depth


def fill_memset(params: Any, work: Memset) -> None:
    """Write a fill's description into a struct of any version."""
    params.dst = types.CUdeviceptr(work.destination)
    params.value, params.elementSize = work.value, work.element_size
    params.width, params.height, params.pitch = work.width, work.height, work.pitch


def fill_host(params: Any, work: Host) -> None:
    """Write a host call's description into a struct of any version."""
    params.fn = types.CUhostFn(work.function)
    params.userData = work.user_data


def publish_operations(params: Any, work: BatchMemOp) -> Any:
    """Write a batch's description into a struct; returns the array that it points at."""
    array = ctypes.create_string_buffer(_OPERATION_BYTES * len(work.operations))
    for place, each in enumerate(work.operations):
        at = ctypes.addressof(array) + place * _OPERATION_BYTES
        ctypes.c_uint.from_address(at).value = each.operation
        ctypes.c_uint64.from_address(at + 8).value = each.address
        ctypes.c_uint64.from_address(at + 16).value = each.value
        ctypes.c_uint.from_address(at + 24).value = each.flags
    start = params.getPtr()
    ctypes.c_void_p.from_address(start).value = work.context
    ctypes.c_uint.from_address(start + _COUNT).value = len(work.operations)
    ctypes.c_void_p.from_address(start + _OPERATIONS).value = ctypes.addressof(array)
    return array


def publish_bodies(conditional: Any, bodies: list[int], context: int) -> Any:
    """Point `phGraph_out` of a caller's struct at an array of body graphs; returns the array."""
    array = (ctypes.c_void_p * len(bodies))(*bodies)
    start = conditional.getPtr()
    ctypes.c_void_p.from_address(start + _PH_GRAPH_OUT).value = ctypes.addressof(array)
    ctypes.c_void_p.from_address(start + _CTX_OUT).value = context
    return array


def attribute_bytes(value: Any) -> bytes:
    """The raw union of a launch attribute."""
    return ctypes.string_at(value.getPtr(), _ATTRIBUTE_BYTES)


def attribute_struct(raw: bytes) -> Any:
    """The bindings' union for raw bytes."""
    value = types.CUkernelNodeAttrValue()
    ctypes.memmove(value.getPtr(), raw, len(raw))
    return value
