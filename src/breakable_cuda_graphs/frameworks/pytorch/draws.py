"""Random numbers: replays draw what the eager code would draw, over segments and breaks.

The hard problem: torch counts a capture's draws from zero in each graph, while an activation
checkpoint may save the generator in one segment and restore it in another or in a break. So each
segment is told the generator's true offset when it begins, and the generator itself moves on with
the captured draws until the block ends; all segments and breaks then speak of one scale, and a
replay only has to shift it: base = (offset now) - (offset at capture).

Up to torch 2.11 a generator has one flag and one pair of device tensors for all of its captures:
two captures at once cannot both draw, and what refills the tensors has to be ordered.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy
import torch

from ... import errors
from ..._driver.bindings import Driver, types
from ..._driver.ordering import CompletionMark
from ..._driver.reading import Survey

_WRAP = 1 << 64

#: torch before 2.12 shares one flag and one pair of tensors between all captures of a generator.
SHARED_TENSORS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)


def _offset_inside(generator: Any) -> int:
    """The offset within the open capture (`get_offset` refuses to be called there)."""
    return int(generator.get_state().numpy().view(numpy.uint64)[1])


def _set_inside(generator: Any, seed: int, offset: int) -> None:
    words = numpy.array([seed % _WRAP, offset], dtype=numpy.uint64)
    generator.set_state(torch.from_numpy(words.view(numpy.uint8)))


class _Counter:
    """One generator over one block."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        # A second handle of the same state: setting its offset leaves cuDNN's dropout state alone.
        self.view = generator.graphsafe_get_state()
        self._before = generator.get_state()
        self._seed = generator.initial_seed()
        self._expected = 0
        self._captured = 0  # draws of segments since the block began or the generator was seeded
        self.start = 0

    def begin(self) -> None:
        """Before a segment's capture opens."""
        seed, self.start = self.generator.initial_seed(), self.view.get_offset()
        if seed != self._seed or self.start < self._expected:
            self._seed, self._captured = seed, 0  # a break has seeded it

    def opened(self) -> None:
        """Inside the capture: count from the true offset on."""
        if self.start:
            _set_inside(self.generator, self._seed, self.start)

    def ending(self) -> int:
        """Still inside: how much was drawn. A total of zero would make torch refill nothing."""
        used = _offset_inside(self.generator) - self.start
        if self.start + used == 0:
            _set_inside(self.generator, self._seed, 4)
        return used

    def closed(self, used: int) -> None:
        """After the books are closed: the generator moves on as if the segment had run."""
        if used:
            self._captured += used
            self.view.set_offset(self.start + used)
        self._expected = self.start + used

    def finish(self, failed: bool) -> None:
        """The block is over: take the captured draws back, or everything."""
        if failed:
            self.generator.set_state(self._before)
        elif self._captured and self.generator.initial_seed() == self._seed:
            self.view.set_offset(max(0, self.view.get_offset() - self._captured))


class Draws:
    """All generators of one block."""

    def __init__(self, driver: Driver, device: int, generators: tuple[Any, ...]) -> None:
        self.driver = driver
        default = torch.cuda.default_generators[device]
        extra = tuple(g for g in generators if g is not default)
        self.registered = extra
        self._counters = [_Counter(g) for g in (default, *extra)]
        self._device = device
        self._overlap = _Overlap(device)

    def begin(self, stream: Any) -> None:
        """Before a capture opens on a stream: its opening refills tensors that replays read."""
        for counter in self._counters:
            counter.begin()
        if SHARED_TENSORS:
            _refills(self.driver, self._device).order_after(int(stream), stream)
        self._overlap.enter()

    def opened(self) -> None:
        for counter in self._counters:
            counter.opened()

    def ending(self) -> list[int]:
        return [counter.ending() for counter in self._counters]

    def judge(self, survey: Survey | None, used: list[int]) -> tuple[bool, Exception | None]:
        """Whether the segment needs torch's refill at replay, and whether that can be right.

        The offset alone does not tell: a checkpoint draws and puts the offset back.
        """
        overlapped = self._overlap.leave()
        if survey is None:
            return False, None
        reads = any(_has_state(words) for words in survey.kernel_words())
        if SHARED_TENSORS and overlapped:
            return reads, errors.two_captures_draw() if reads else None
        return reads or any(used), None

    def closed(self, used: list[int]) -> None:
        for counter, drawn in zip(self._counters, used, strict=True):
            counter.closed(drawn)

    def runner(self, shell: Any, used: list[int]) -> DrawingRunner:
        shifts = [
            (counter.view, counter.start, drawn)
            for counter, drawn in zip(self._counters, used, strict=True)
        ]
        return DrawingRunner(self.driver, self._device, shell, shifts)

    def abandoned(self) -> None:
        self._overlap.leave()

    def finish(self, stream: Any, failed: bool) -> None:
        """At the end of the block, outside any capture."""
        for counter in self._counters:
            counter.finish(failed)
        if SHARED_TENSORS:
            _refills(self.driver, self._device).record(int(stream), stream)


class DrawingRunner:
    """Replays one segment that draws: shift the generator's base, torch's refill, one launch."""

    def __init__(
        self,
        driver: Driver,
        device: int,
        shell: Any,
        shifts: list[tuple[Any, int, int]],
    ) -> None:
        self._driver, self._device = driver, device
        self._shell: Any = shell
        self._shifts = shifts
        shell.instantiate()

    @property
    def raw_exec(self) -> Any:
        return self._shell.raw_cuda_graph_exec()

    def replay(self) -> None:
        if SHARED_TENSORS:
            if _open_on(self._device):
                raise errors.draw_during_capture()
            mark = _refills(self._driver, self._device)
            handle = torch._C._cuda_getCurrentRawStream(self._device)
            stream = types.CUstream(handle)
            mark.order_after(handle, stream)
        ends = []
        for view, start, used in self._shifts:
            offset = view.get_offset()
            view.set_offset((offset - start) % _WRAP)
            ends.append((view, (offset + used) % _WRAP))
        self._shell.replay()
        for view, end in ends:
            if view.get_offset() != end:
                view.set_offset(end)
        if SHARED_TENSORS:
            mark.record(handle, stream)

    def close(self) -> None:
        shell, self._shell = self._shell, None
        if shell is not None:
            shell.reset()


# ---------------------------------------------------------------- what the kernels read


def _has_state(words: list[int]) -> bool:
    """Whether a kernel is handed a generator's device state.

    It gets a `PhiloxCudaState` by value: two pointers, the offset inside the graph, and a flag that
    is 1 (ATen/cuda/detail/PhiloxCudaStateRaw.cuh). Something else of that shape only costs speed.
    """
    for at in range(len(words) - 3):
        seed, offset, inside, flag = words[at : at + 4]
        if (
            flag & 0xFF == 1
            and inside % 4 == 0
            and seed != offset
            and _is_block(seed)
            and _is_block(offset)
        ):
            return True
    return False


def _is_block(word: int) -> bool:
    """The allocator's blocks begin at multiples of 512; device addresses are far above 4 GiB."""
    return word % 512 == 0 and 1 << 32 < word < 1 << 57


# ---------------------------------------------------------------- captures at the same time

_lock = threading.Lock()
_open: dict[int, set[_Overlap]] = {}
_marks: dict[tuple[int, int], CompletionMark] = {}


class _Overlap:
    """Knows whether another capture of the device was open at the same time as this one."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._seen = False

    def enter(self) -> None:
        with _lock:
            others = _open.setdefault(self._device, set())
            self._seen = bool(others)
            for other in others:
                other._seen = True
            others.add(self)

    def leave(self) -> bool:
        with _lock:
            _open.get(self._device, set()).discard(self)
        return self._seen


def _open_on(device: int) -> bool:
    return bool(_open.get(device))


def _refills(driver: Driver, device: int) -> CompletionMark:
    """The last work that refilled or read the generators' shared tensors of a device."""
    key = (id(driver), device)
    mark = _marks.get(key)
    if mark is None:
        mark = _marks.setdefault(key, CompletionMark(driver))
    return mark
