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
        self.memory.free(as_int(dptr))

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
        answers = _pointer_attributes(block, as_int(ptr))
        if int(attribute) not in answers:
            raise Refusal(INVALID_VALUE)
        return answers[int(attribute)]

    def _live_block(self, address: int, otherwise: int) -> MemoryBlock:
        block = self.memory.block_at(address)
        if block is None or block.released_by:
            raise Refusal(otherwise)
        return block


def _pointer_attributes(block: MemoryBlock, address: int) -> dict[int, Any]:
    """What is told of an address in a block, by CUpointer_attribute."""
    return {
        1: block.context.handle,
        2: types.CUmemorytype(block.memory_type),
        3: types.CUdeviceptr(address),
        **({4: address} if block.memory_type == HOST_MEMORY else {}),
        8: False,
        9: block.context.device.ordinal,
        11: types.CUdeviceptr(block.address),
        12: block.size,
    }
