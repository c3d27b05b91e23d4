"""Memory: real addresses of this process that count as device memory.

The hard problem: addresses travel as plain numbers and are written through by kernels, so a use
after free must be noticed without handing the bytes back to the process, where a late write would
hit something else. Freed memory is therefore poisoned and kept for as long as the driver lives.

Addresses that this driver did not make (ctypes buffers, CPU tensors) are host memory of the
process and are used as they are.
"""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass
from typing import Any

from .._driver.enums import DEVICE_MEMORY, INVALID_VALUE, OUT_OF_MEMORY
from .contexts import TOTAL_MEMORY, Context
from .world import Refusal, World

_POISON = 0xA5
_ALIGNMENT = 256


@dataclass(eq=False)
class MemoryBlock:
    """One block. `graph_state` is for blocks that graph nodes allocate and free."""

    address: int
    size: int
    memory_type: int
    context: Context
    buffer: Any
    released_by: str = ""
    graph_state: str = ""  # "", "allocated", "free"

    @property
    def name(self) -> str:
        kind = "device" if self.memory_type == DEVICE_MEMORY else "pinned host"
        return f"{kind} memory {self.address:#x} ({self.size} bytes)"


class SimulatedMemory:
    """All blocks that one driver has given out, live and released."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._starts: list[int] = []
        self._blocks: dict[int, MemoryBlock] = {}
        self.in_use = 0

    def allocate(self, size: int, memory_type: int, context: Context) -> MemoryBlock:
        """A new block, its content undefined (poisoned)."""
        if size < 1:
            raise Refusal(INVALID_VALUE)
        if self.in_use + size > TOTAL_MEMORY:
            raise Refusal(OUT_OF_MEMORY)
        buffer = ctypes.create_string_buffer(size + _ALIGNMENT)
        start = -(-ctypes.addressof(buffer) // _ALIGNMENT) * _ALIGNMENT
        ctypes.memset(start, _POISON, size)
        block = MemoryBlock(start, size, memory_type, context, buffer)
        self._blocks[start] = block
        bisect.insort(self._starts, start)
        self.in_use += size
        return block

    def block_at(self, address: int) -> MemoryBlock | None:
        """The block, live or released, that an address is in."""
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        block = self._blocks[self._starts[place]]
        return block if address < block.address + block.size else None

    def release(self, address: int, memory_type: int) -> None:
        """Give a block back; it is poisoned and kept."""
        block = self._blocks.get(address)
        if block is None or block.memory_type != memory_type:
            raise Refusal(INVALID_VALUE)
        if block.released_by:
            self.world.find(
                f"{self.world.thread.call} released {block.name} a second time "
                f"(first: {block.released_by})"
            )
            raise Refusal(INVALID_VALUE)
        block.released_by = self.world.thread.call
        self.in_use -= block.size
        ctypes.memset(block.address, _POISON, block.size)

    def free(self, address: int) -> None:
        """`cuMemFree`, for memory of graphs too; nothing happens for the null address."""
        if self.is_allocated_by_graph(address):
            self.graph_frees(address)
        elif address:
            self.release(address, DEVICE_MEMORY)

    # ---- uses

    def refuse_released(self, address: int, who: str) -> bool:
        """Whether an address points into released memory; a finding if so."""
        block = self.block_at(address)
        if block is None:
            return False
        if block.released_by:
            self.world.find(f"{who} uses {block.name} after {block.released_by} released it")
            return True
        if block.graph_state == "free":
            self.world.find(f"{who} uses {block.name} while no graph has it allocated")
            return True
        return False

    def refuse_range(self, address: int, size: int, who: str) -> bool:
        """Whether a range touches released memory or leaves its block; a finding if so."""
        if size <= 0:
            return False
        if self.refuse_released(address, who):
            return True
        block = self.block_at(address)
        if block is not None and address + size > block.address + block.size:
            self.world.find(f"{who} runs past the end of {block.name}")
            return True
        return False

    # ---- memory of graphs

    def reserve_for_graph(self, size: int, context: Context) -> MemoryBlock:
        """An address for an allocation node; nothing may use it before the node has run."""
        block = self.allocate(size, DEVICE_MEMORY, context)
        block.graph_state = "free"
        return block

    def graph_allocates(self, address: int) -> None:
        """An allocation node runs."""
        block = self._blocks[address]
        block.graph_state = "allocated"
        ctypes.memset(block.address, _POISON, block.size)

    def graph_frees(self, address: int) -> bool:
        """A free node, or a free outside the graph; whether that was right."""
        block = self._blocks.get(address)
        if block is None or block.graph_state != "allocated":
            self.world.find(f"memory {address:#x} was freed while no graph had it allocated")
            return False
        block.graph_state = "free"
        return True

    def is_allocated_by_graph(self, address: int) -> bool:
        """Whether the block of an allocation node is out at the moment."""
        block = self._blocks.get(address)
        return block is not None and block.graph_state == "allocated"

    def is_of_graph(self, address: int) -> bool:
        """Whether an allocation node has this address."""
        block = self._blocks.get(address)
        return block is not None and bool(block.graph_state)

    def leaks(self) -> list[str]:
        """One line for each block that was not given back."""
        return [
            f"{block.name} was not released"
            for block in self._blocks.values()
            if not block.released_by and not block.graph_state
        ]
