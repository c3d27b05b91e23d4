"""The calls of the simulated driver: allocations, copies and questions about addresses.

The hard problem: eager copies run at once, but not while they would harm a capture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..contexts import TOTAL_MEMORY, Contexts
from ..memory import DEVICE, HOST, MemoryBlock, SimulatedMemory
from ..world import (
    INVALID_VALUE,
    NOT_FOUND,
    DriverCalls,
    Handle,
    Refusal,
    address_of,
    as_int,
    call,
    types,
)

if TYPE_CHECKING:
    from ..captures import Captures
    from ..streams import StreamTable


class MemoryCalls(DriverCalls):
    """cuMemAlloc and its kin, cuPointerGetAttribute."""

    memory: SimulatedMemory
    contexts: Contexts
    captures: Captures
    streams: StreamTable

    @call(1)
    def cuMemAlloc(self, bytesize: int) -> Any:
        self.captures.guard_unsafe()
        block = self.memory.allocate(bytesize, DEVICE, self.contexts.current())
        return types.CUdeviceptr(block.address)

    @call()
    def cuMemFree(self, dptr: Handle) -> None:
        self.captures.guard_unsafe()
        if self.memory.is_allocated_by_graph(as_int(dptr)):
            self.memory.graph_frees(as_int(dptr))
        elif as_int(dptr):
            self.memory.release(as_int(dptr), DEVICE)

    @call(1)
    def cuMemAllocHost(self, bytesize: int) -> int:
        self.captures.guard_unsafe()
        return self._pinned(bytesize)

    @call(1)
    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> int:
        self.captures.guard_unsafe()
        return self._pinned(bytesize)

    def _pinned(self, size: int) -> int:
        """Nothing for nothing: the null address, which can be freed."""
        context = self.contexts.current()
        return self.memory.allocate(size, HOST, context).address if size else 0

    @call()
    def cuMemFreeHost(self, p: Any) -> None:
        self.captures.guard_unsafe()
        if address_of(p):
            self.memory.release(address_of(p), HOST)

    @call(1)
    def cuMemAllocAsync(self, bytesize: int, hStream: Handle) -> Any:
        return types.CUdeviceptr(self.streams.allocate(self.streams.usable(hStream), bytesize))

    @call()
    def cuMemFreeAsync(self, dptr: Handle, hStream: Handle) -> None:
        self.streams.free(self.streams.usable(hStream), as_int(dptr))

    @call(2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        self.contexts.current()
        return TOTAL_MEMORY - self.memory.in_use, TOTAL_MEMORY

    @call(2)
    def cuMemGetAddressRange(self, dptr: Handle) -> tuple[Any, int]:
        block = self._live_block(as_int(dptr), NOT_FOUND)
        return types.CUdeviceptr(block.address), block.size

    @call(1)
    def cuPointerGetAttribute(self, attribute: int, ptr: Handle) -> Any:
        block = self._live_block(as_int(ptr), INVALID_VALUE)
        return _pointer_attribute(block, int(attribute), as_int(ptr))

    def _live_block(self, address: int, otherwise: int) -> MemoryBlock:
        block = self.memory.block_at(address)
        if block is None or block.released_by:
            raise Refusal(otherwise)
        return block


def _pointer_attribute(block: MemoryBlock, attribute: int, address: int) -> Any:
    if attribute == 1:
        return block.context.handle
    if attribute == 2:
        return types.CUmemorytype(block.memory_type)
    if attribute == 3:
        return types.CUdeviceptr(address)
    if attribute == 4 and block.memory_type == HOST:
        return address
    if attribute == 8:
        return False
    if attribute == 9:
        return block.context.device.ordinal
    if attribute == 11:
        return types.CUdeviceptr(block.address)
    if attribute == 12:
        return block.size
    raise Refusal(INVALID_VALUE)
