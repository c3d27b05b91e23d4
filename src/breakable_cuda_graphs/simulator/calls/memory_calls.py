"""The calls of the simulated driver: allocations, and questions about addresses.

The hard problem: a block may belong to an allocation node, and may still be taken and given back by calls
outside of its graph. So each call asks first whose the block is.
"""

from __future__ import annotations

from typing import Any

from ..._driver.enums import DEVICE_MEMORY, HOST_MEMORY, INVALID_VALUE, NOT_FOUND
from ..captures import Captures
from ..contexts import TOTAL_MEMORY, Contexts
from ..memory import MemoryBlock, SimulatedMemory
from ..streams import StreamTable
from ..world import DriverCalls, Handle, Refusal, address_of, as_int, call, types


class MemoryCalls(DriverCalls):
    """cuMemAlloc and its kin, cuPointerGetAttribute."""

    memory: SimulatedMemory
    contexts: Contexts
    captures: Captures
    streams: StreamTable

    @call(1)
    def cuMemAlloc(self, bytesize: int) -> Any:
        self.captures.guard_unsafe()
        block = self.memory.allocate(bytesize, DEVICE_MEMORY, self.contexts.current())
        return types.CUdeviceptr(block.address)

    @call()
    def cuMemFree(self, dptr: Handle) -> None:
        self.captures.guard_unsafe()
        if self.memory.is_allocated_by_graph(as_int(dptr)):
            self.memory.graph_frees(as_int(dptr))
        elif as_int(dptr):
            self.memory.release(as_int(dptr), DEVICE_MEMORY)

    @call(1)
    def cuMemAllocHost(self, bytesize: int) -> int:
        return self._pinned(bytesize)

    @call(1)
    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> int:
        return self._pinned(bytesize)

    def _pinned(self, size: int) -> int:
        """Nothing for nothing: the null address, which can be freed."""
        self.captures.guard_unsafe()
        context = self.contexts.current()
        return self.memory.allocate(size, HOST_MEMORY, context).address if size else 0

    @call()
    def cuMemFreeHost(self, p: Any) -> None:
        self.captures.guard_unsafe()
        if address_of(p):
            self.memory.release(address_of(p), HOST_MEMORY)

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
    if attribute == 4 and block.memory_type == HOST_MEMORY:
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
