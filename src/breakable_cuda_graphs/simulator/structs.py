"""Between the bindings' structs and descriptions of work.

The hard problem: the structs are C unions and hold borrowed pointers. Each is read once, field by
field and only where its kind says that the field is there (a look at another union member can crash
the process, and so does `repr`), and everything behind a pointer is copied before the call returns.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from .._driver.enums import (
    ARRAY_MEMORY,
    BATCH_MEM_OP,
    EMPTY,
    EVENT_RECORD,
    EVENT_WAIT,
    HOST,
    INVALID_CONTEXT,
    INVALID_VALUE,
    KERNEL,
    MEMCPY,
    MEMSET,
    NOT_SUPPORTED,
)
from .._driver.node_params import (
    COUNT_AT,
    OPERATION_BYTES,
    OPERATIONS_AT,
    Dim,
    End,
    batch_operations,
)
from .contexts import Contexts
from .graphs import Op
from .kernels import ArgumentBuffers, copy_arguments, has_buffer, has_table, kernel_of
from .nodes import BatchMemOp, EmptyOp, Host, KernelOp, Memcpy, Memset
from .stream_state import Event, RecordEvent, WaitEvent
from .streams import StreamTable
from .world import Handle, Refusal, as_int, types

_MOST_BLOCKS = (2**31 - 1, 65535, 65535)
_MOST_THREADS = (1024, 1024, 64)
_MOST_SHARED = 48 << 10  # without cuFuncSetAttribute
_ATTRIBUTE_BYTES = 64  # CUlaunchAttributeValue
_PH_GRAPH_OUT, _CTX_OUT = 16, 24  # offsets in CUDA_CONDITIONAL_NODE_PARAMS


class OutsideLimits(Refusal):
    """A launch that the device is too small for: the one refusal that a capture does not survive."""


@dataclass(frozen=True)
class Structs:
    """Reads structs, called as the driver's functions call them; needs to know contexts and events."""

    contexts: Contexts
    streams: StreamTable

    # ---- kernels

    def kernel(self, nodeParams: Any) -> KernelOp:
        """From CUDA_KERNEL_NODE_PARAMS, any version."""
        if nodeParams is None:
            raise Refusal(INVALID_VALUE)
        named = as_int(getattr(nodeParams, "ctx", 0))
        return self.launch(
            (nodeParams.func, getattr(nodeParams, "kern", 0)),
            (nodeParams.gridDimX, nodeParams.gridDimY, nodeParams.gridDimZ),
            (nodeParams.blockDimX, nodeParams.blockDimY, nodeParams.blockDimZ),
            nodeParams.sharedMemBytes,
            nodeParams.kernelParams,
            nodeParams.extra,
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

    def memcpy(self, copyParams: Any, ctx: Handle = 0) -> Memcpy:
        """From CUDA_MEMCPY3D."""
        if copyParams is None:
            raise Refusal(INVALID_VALUE)
        _check_end(End.read(copyParams, "src"))
        _check_end(End.read(copyParams, "dst"))
        work = Memcpy.read(copyParams, self.contexts.of(ctx).address)
        if work.height > 1 and any(end.pitch < work.width for end in (work.src, work.dst)):
            raise Refusal(INVALID_VALUE)
        if not self.copy_fits(work):
            raise Refusal(INVALID_VALUE)
        return work

    def copy_fits(self, work: Memcpy) -> bool:
        """Whether both ends of a copy stay inside of the blocks that they begin in."""
        return all(self._fits(end.start, work.extent(end)) for end in (work.src, work.dst))

    def node_memcpy(self, copyParams: Any, ctx: Handle = 0) -> Memcpy:
        """The same for a node, which has to copy something."""
        work = self.memcpy(copyParams, ctx)
        if not (work.width and work.height and work.depth):
            raise Refusal(INVALID_VALUE)
        return work

    def _fits(self, address: int, size: int) -> bool:
        """Whether a range ends in the block that it begins in, if this driver has made that."""
        block = self.streams.memory.block_at(address)
        return block is None or address + size <= block.address + block.size

    def memset(self, memsetParams: Any, ctx: Handle = 0) -> Memset:
        """From CUDA_MEMSET_NODE_PARAMS, any version."""
        if memsetParams is None or memsetParams.elementSize not in (1, 2, 4):
            raise Refusal(INVALID_VALUE)
        if not as_int(memsetParams.dst) or memsetParams.width < 1 or memsetParams.height < 1:
            raise Refusal(INVALID_VALUE)
        work = Memset.read(memsetParams, self.contexts.of(ctx).address)
        row, size = work.width * work.element_size, work.element_size
        if work.dst % size or (work.height > 1 and (work.pitch < row or work.pitch % size)):
            raise Refusal(INVALID_VALUE)
        if not self._fits(work.dst, work.span):
            raise Refusal(INVALID_VALUE)
        return work

    # ---- the rest

    def host(self, nodeParams: Any) -> Host:
        """From CUDA_HOST_NODE_PARAMS, any version."""
        if nodeParams is None or not as_int(nodeParams.fn):
            raise Refusal(INVALID_VALUE)
        return Host(as_int(nodeParams.fn), as_int(nodeParams.userData))

    def record(self, event: Handle) -> RecordEvent:
        return RecordEvent(self._event(event))

    def wait(self, event: Handle) -> WaitEvent:
        return WaitEvent(self._event(event))

    def _event(self, handle: Handle) -> Event:
        if not as_int(handle):  # another error than for a call that uses an event
            raise Refusal(INVALID_VALUE)
        return self.streams.events.get(handle)

    def batch(self, nodeParams: Any) -> BatchMemOp:
        """From CUDA_BATCH_MEM_OP_NODE_PARAMS, any version."""
        if nodeParams is None:
            raise Refusal(INVALID_VALUE)
        found = tuple(batch_operations(nodeParams))
        if any(not each.nbytes for each in found):
            raise Refusal(NOT_SUPPORTED)
        if not found or any(not each.address or each.address % each.nbytes for each in found):
            raise Refusal(INVALID_VALUE)
        return BatchMemOp(found, self.contexts.of(nodeParams.ctx).address)

    def generic(self, nodeParams: Any) -> Op:
        """From CUgraphNodeParams, for the kinds that need nothing but their parameters."""
        kind = int(nodeParams.type)
        if kind == KERNEL:
            return self.kernel(nodeParams.kernel)
        if kind == MEMCPY:
            return self.node_memcpy(nodeParams.memcpy.copyParams, nodeParams.memcpy.copyCtx)
        if kind == MEMSET:
            return self.memset(nodeParams.memset, nodeParams.memset.ctx)
        if kind == HOST:
            return self.host(nodeParams.host)
        if kind == EMPTY:
            return EmptyOp()
        if kind == EVENT_WAIT:
            return self.wait(nodeParams.eventWait.event)
        if kind == EVENT_RECORD:
            return self.record(nodeParams.eventRecord.event)
        if kind == BATCH_MEM_OP:
            return self.batch(nodeParams.memOp)
        raise Refusal(NOT_SUPPORTED)


def _launchable(grid: Dim, block: Dim, shared_bytes: int) -> bool:
    """Whether a launch is within the limits of the device (those of compute capability 9.0)."""
    threads = block[0] * block[1] * block[2]
    most = (*_MOST_BLOCKS, *_MOST_THREADS)
    fits = all(1 <= number <= limit for number, limit in zip((*grid, *block), most, strict=True))
    return fits and threads <= _MOST_THREADS[0] and 0 <= shared_bytes <= _MOST_SHARED


def _check_end(end: End) -> None:
    if end.memory_type == ARRAY_MEMORY:
        raise Refusal(NOT_SUPPORTED)
    if not (end.memory_type and end.address):
        raise Refusal(INVALID_VALUE)


# ---------------------------------------------------------------- towards the caller


def fill_kernel(params: Any, work: KernelOp, shown: ArgumentBuffers) -> Any:
    """Write a kernel's description into a struct of any version, its pointers to the node's memory."""
    params.func = work.kernel.handle
    params.kern = work.kernel.kernel_handle
    params.ctx = types.CUcontext(work.context)
    params.gridDimX, params.gridDimY, params.gridDimZ = work.grid
    params.blockDimX, params.blockDimY, params.blockDimZ = work.block
    params.sharedMemBytes = work.shared_bytes
    params.kernelParams = shown.kernel_params
    params.extra = shown.extra
    return params


def publish_operations(params: Any, work: BatchMemOp) -> Any:
    """Write a batch's description into a struct; returns the array that it points at."""
    array = ctypes.create_string_buffer(OPERATION_BYTES * len(work.operations))
    for place, each in enumerate(work.operations):
        at = ctypes.addressof(array) + place * OPERATION_BYTES
        ctypes.c_uint.from_address(at).value = each.operation
        ctypes.c_uint64.from_address(at + 8).value = each.address
        ctypes.c_uint64.from_address(at + 16).value = each.value
        ctypes.c_uint.from_address(at + 24).value = each.flags
    start = params.getPtr()
    ctypes.c_void_p.from_address(start).value = work.context
    ctypes.c_uint.from_address(start + COUNT_AT).value = len(work.operations)
    ctypes.c_void_p.from_address(start + OPERATIONS_AT).value = ctypes.addressof(array)
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
