"""What nodes do: one frozen description of work a kind of node.

The hard problem: the same description is shown (getters), copied (clones, executables), compared
(updates) and run (launches), and a change in one place must reach none of the others. So a
description is immutable: setting parameters swaps it for another one.

`Run` is one execution of one graph or of one eager call; descriptions run inside it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

from .._driver.enums import (
    BATCH_MEM_OP,
    EMPTY,
    HOST,
    KERNEL,
    MEM_ALLOC,
    MEM_FREE,
    MEMCPY,
    MEMSET,
    WAIT_32,
    WAIT_64,
    WRITE_32,
)
from .graphs import Op, Run
from .kernels import Dim, Launch, SimulatedKernel, run_kernel
from .world import ILLEGAL_ADDRESS, LAUNCH_FAILED


@dataclass(frozen=True)
class EmptyOp(Op):
    kind = EMPTY


@dataclass(frozen=True)
class KernelOp(Op):
    kind = KERNEL
    kernel: SimulatedKernel
    grid: Dim
    block: Dim
    shared_bytes: int
    arguments: tuple[bytes, ...]
    context: int = 0
    packed: bool = False  # whether getters show the arguments as one buffer (`extra`)
    attributes: tuple[tuple[int, bytes], ...] = ()

    def run(self, run: Run) -> None:
        name = f"kernel {self.kernel.name}"
        if self._touches_released_memory(run, name):
            run.fail(ILLEGAL_ADDRESS)
            return
        launch = Launch(self.grid, self.block, self.shared_bytes, run.conditionals)
        run.fail(
            run.world.run_foreign(name, lambda: run_kernel(self.kernel, self.arguments, launch))
        )

    def _touches_released_memory(self, run: Run, name: str) -> bool:
        for parameter, data in zip(self.kernel.parameters, self.arguments, strict=True):
            if parameter is ctypes.c_void_p:
                address = int.from_bytes(data, "little")
                if run.memory.refuse_released(address, name):
                    return True
        return False

    def attribute(self, identity: int) -> bytes | None:
        """The raw value of a launch attribute that was set."""
        return dict(self.attributes).get(identity)

    def with_attributes(self, attributes: tuple[tuple[int, bytes], ...]) -> KernelOp:
        """The same launch with other attributes."""
        return replace(self, attributes=attributes)

    def title(self) -> str:
        return self.kernel.name


@dataclass(frozen=True)
class CopyEnd:
    """One end of a copy: the fields of CUDA_MEMCPY3D for it."""

    memory_type: int
    address: int
    x: int = 0
    y: int = 0
    z: int = 0
    pitch: int = 0
    height: int = 0

    def row(self, y: int, z: int) -> int:
        """Address of one row."""
        return self.address + self.x + (self.y + y + (self.z + z) * self.height) * self.pitch


@dataclass(frozen=True)
class Memcpy(Op):
    kind = MEMCPY
    destination: CopyEnd
    source: CopyEnd
    width: int
    height: int = 1
    depth: int = 1
    context: int = 0

    @property
    def one_dimensional(self) -> bool:
        return self.height <= 1 and self.depth <= 1

    def run(self, run: Run) -> None:
        for place in (self.destination, self.source):
            if run.memory.refuse_range(place.row(0, 0), self.extent(place), "a copy"):
                run.fail(ILLEGAL_ADDRESS)
                return
        for z in range(self.depth):
            for y in range(self.height):
                ctypes.memmove(self.destination.row(y, z), self.source.row(y, z), self.width)

    def extent(self, place: CopyEnd) -> int:
        """Bytes from the first to the last one of an end."""
        if not (self.width and self.height and self.depth):
            return 0
        return place.row(self.height - 1, self.depth - 1) - place.row(0, 0) + self.width


@dataclass(frozen=True)
class Memset(Op):
    kind = MEMSET
    destination: int
    value: int
    element_size: int
    width: int
    height: int = 1
    pitch: int = 0
    context: int = 0

    @property
    def extent(self) -> int:
        """Bytes from the first to the last one."""
        row = self.width * self.element_size
        return (self.height - 1) * self.pitch + row if self.height else 0

    def run(self, run: Run) -> None:
        row_bytes = self.width * self.element_size
        if run.memory.refuse_range(self.destination, self.extent, "a fill"):
            run.fail(ILLEGAL_ADDRESS)
            return
        element = (self.value % (1 << 8 * self.element_size)).to_bytes(self.element_size, "little")
        row = element * self.width
        for y in range(self.height):
            ctypes.memmove(self.destination + y * self.pitch, row, row_bytes)


@dataclass(frozen=True)
class Host(Op):
    kind = HOST
    function: int
    user_data: int
    #: `cuLaunchHostFunc` of the bindings wraps the function in something that frees itself after
    #: its first call: a second replay crashed the process on the device.
    calls: list[int] | None = None

    def run(self, run: Run) -> None:
        if self.calls is not None:
            self.calls.append(1)
            if len(self.calls) > 1:
                run.world.find(
                    "a captured cuLaunchHostFunc ran a second time: the bindings' wrapper has "
                    "freed itself after the first call, which crashes on a device"
                )
                run.fail(LAUNCH_FAILED)
                return
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.function)
        run.fail(run.world.run_foreign("a host callback", lambda: callback(self.user_data)))


@dataclass(frozen=True)
class MemAlloc(Op):
    kind = MEM_ALLOC
    address: int
    size: int
    device: int = 0

    def run(self, run: Run) -> None:
        run.memory.graph_allocates(self.address)


@dataclass(frozen=True)
class MemFree(Op):
    kind = MEM_FREE
    address: int

    def run(self, run: Run) -> None:
        if not run.memory.graph_frees(self.address):
            run.fail(ILLEGAL_ADDRESS)


@dataclass(frozen=True)
class WordOperation:
    """A wait for, or a write of, one word."""

    operation: int
    address: int
    value: int
    flags: int

    @property
    def size(self) -> int:
        return 4 if self.operation in (WAIT_32, WRITE_32) else 8

    @property
    def is_wait(self) -> bool:
        return self.operation in (WAIT_32, WAIT_64)

    def holds(self, word: int) -> bool:
        """Whether a wait is over, by the lowest bits of its flags: >=, ==, &, nor."""
        bits = 8 * self.size
        mask = (1 << bits) - 1
        distance = (word - self.value) & mask
        at_least = distance < 1 << (bits - 1)  # cyclic
        answers = (
            at_least,
            word == self.value,
            bool(word & self.value),
            bool(~(word | self.value) & mask),
        )
        return answers[self.flags & 3]


@dataclass(frozen=True)
class BatchMemOp(Op):
    kind = BATCH_MEM_OP
    operations: tuple[WordOperation, ...]
    context: int = 0

    def run(self, run: Run) -> None:
        for each in self.operations:
            if run.memory.refuse_range(each.address, each.size, "a batch memory operation"):
                run.fail(ILLEGAL_ADDRESS)
                return
            if not each.is_wait:
                ctypes.memmove(each.address, each.value.to_bytes(each.size, "little"), each.size)
                continue
            word = int.from_bytes(ctypes.string_at(each.address, each.size), "little")
            if not each.holds(word):  # nothing else runs meanwhile here
                run.world.find(f"a wait for the word at {each.address:#x} would never end")
                run.fail(LAUNCH_FAILED)
                return
