"""What nodes do: one frozen description of work a kind of node.

The hard problem: the same description is shown (getters), copied (clones, executables), compared
(updates) and run (launches), and a change in one place must reach none of the others. So a
description is immutable: setting parameters swaps it for another one.

`Run` is one execution of one graph or of one eager call; descriptions run inside it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

from .._driver.enums import ILLEGAL_ADDRESS, KERNEL, LAUNCH_FAILED
from .._driver.node_params import (
    Allocation,
    Batch,
    Copy,
    Dim,
    Empty,
    End,
    Fill,
    HostCall,
    MemoryOperation,
    Release,
)
from .graphs import Op, Run
from .kernels import Launch, SimulatedKernel, run_kernel


class EmptyOp(Empty, Op):
    """Nothing."""


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


class Memcpy(Copy, Op):
    """A copy that can be done."""

    def run(self, run: Run) -> None:
        for end in (self.dst, self.src):
            if run.memory.refuse_range(end.start, self.extent(end), "a copy"):
                run.fail(ILLEGAL_ADDRESS)
                return
        for z in range(self.depth):
            for y in range(self.height):
                ctypes.memmove(self.dst.row(y, z), self.src.row(y, z), self.width)

    def extent(self, end: End) -> int:
        """Bytes from the first to the last one of an end, of a copy that may be empty."""
        return self.span(end) if self.width and self.height and self.depth else 0


class Memset(Fill, Op):
    """A fill that can be done."""

    def run(self, run: Run) -> None:
        if run.memory.refuse_range(self.dst, self.span, "a fill"):
            run.fail(ILLEGAL_ADDRESS)
            return
        element = (self.value % (1 << 8 * self.element_size)).to_bytes(self.element_size, "little")
        row = element * self.width
        for y in range(self.height):
            ctypes.memmove(self.dst + y * self.pitch, row, len(row))


@dataclass(frozen=True)
class Host(HostCall, Op):
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


class MemAlloc(Allocation, Op):
    """An allocation that can be done."""

    def run(self, run: Run) -> None:
        run.memory.graph_allocates(self.address)


class MemFree(Release, Op):
    """Its end."""

    def run(self, run: Run) -> None:
        if not run.memory.graph_frees(self.address):
            run.fail(ILLEGAL_ADDRESS)


def _is_over(wait: MemoryOperation, word: int) -> bool:
    """Whether a wait is over, by the lowest bits of its flags: >=, ==, &, nor."""
    bits = 8 * wait.nbytes
    mask = (1 << bits) - 1
    distance = (word - wait.value) & mask
    at_least = distance < 1 << (bits - 1)  # cyclic
    answers = (
        at_least,
        word == wait.value,
        bool(word & wait.value),
        bool(~(word | wait.value) & mask),
    )
    return answers[wait.flags & 3]


class BatchMemOp(Batch, Op):
    """A batch that can be done."""

    def run(self, run: Run) -> None:
        for each in self.operations:
            if run.memory.refuse_range(each.address, each.nbytes, "a batch memory operation"):
                run.fail(ILLEGAL_ADDRESS)
                return
            if not each.is_wait:
                ctypes.memmove(
                    each.address, each.value.to_bytes(each.nbytes, "little"), each.nbytes
                )
                continue
            word = int.from_bytes(ctypes.string_at(each.address, each.nbytes), "little")
            if not _is_over(each, word):  # nothing else runs meanwhile here
                run.world.find(f"a wait for the word at {each.address:#x} would never end")
                run.fail(LAUNCH_FAILED)
                return
