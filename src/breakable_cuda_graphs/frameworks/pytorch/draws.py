"""Random numbers: replays draw what the eager code would draw, over segments and breaks.

The hard problem: torch counts a capture's draws from zero in each graph, while an activation
checkpoint may save the generator in one segment and restore it in another or in a break. So each
segment is told the generator's true offset when it begins, and the generator itself moves on with
the captured draws until the block ends; all segments and breaks then speak of one scale, and a
replay only has to shift it: base = (offset now) - (offset at capture).

A captured kernel reads the seed and the offset from two tensors of the generator's. `CUDAGraph.replay()`
fills them by two kernels, which takes longer than to launch a graph. Here the driver writes them, so that a
segment that draws is a graph like any other; where they lie, a draw in the capture shows, whose node is taken
out of the graph again.

Up to torch 2.11 a generator has one flag and one such pair of tensors for all of its captures:
two captures at once cannot both draw, and what writes into the tensors has to be ordered.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch

from ..._driver import kernel_params, write_value
from ..._driver.bindings import Driver, types
from ..._driver.stream_order import CompletionMark
from ..._driver.threads import Home
from ...errors import CUDAError
from ..errors import (
    draw_during_capture,
    generator_not_found,
    generator_of_other_device,
    two_captures_draw,
)
from .modes import unseen

_WRAP = 1 << 64

#: torch before 2.12 shares one flag and one pair of tensors between all captures of a generator.
SHARED_TENSORS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)

#: How long a replay waits for another thread's open segment, in seconds, before it is refused.
_PATIENCE = 10.0


class Draws:
    """All generators of one block: the device's default one, and those registered with it."""

    def __init__(
        self, driver: Driver, device: int, stream: Any, generators: tuple[Any, ...]
    ) -> None:
        default = torch.cuda.default_generators[device]
        for generator in generators:
            _refuse_other_device(generator, device)
        self.generators = tuple(dict.fromkeys((default, *generators)))  # each is counted once
        self.registered = self.generators[1:]
        self._driver, self.stream, self.handle = driver, stream, int(stream)
        self._device = device
        self._traffic = driver.once(Traffic, device)
        self._home = Home()
        #: held around the end of a capture and of torch's books: none may open in between
        self.lock = self._traffic.lock
        with self._traffic.lock:
            self._counters = [_Counter(g) for g in self.generators]
        self._found: list[tuple[Any, Any]] = []  # as a guest: generators, and their states inside
        self.scratch: Any = None  # a tensor for the draws that look
        self._tensors: list[PhiloxTensors] | None = None  # of the generators, once looked at
        self._looked_in: Any = None  # the shell of the segment in which that was
        self._probes: list[Any] = []  # nodes of the segment that showed where they are
        self.is_guest = False  # another capture had these generators when this segment began
        self.hosts_wait = True  # if so, it goes on when this has ended: it is this thread's
        self.lent: tuple[Any, ...] = ()  # its generators, beside ours: they can be drawn from too
        self.had_guest = False  # another thread's capture began while this segment was open
        self.is_spoilt = False  # another capture drew from them while this one was open

    def open(self, begin_capture: Callable[[], None]) -> None:
        """Let a segment's capture be begun on the stream, and count from the true offsets on."""
        for counter in self._counters:
            counter.begin()
        if self.registered or not SHARED_TENSORS or self.is_guest:
            self._tensors = self._looked_in = None
        self._probes = []
        self._traffic.open(self, begin_capture)
        if self.is_guest:
            self._tensors = None
            self._found = [(each, each.get_state()) for each in (*self.generators, *self.lent)]
        else:
            for counter in self._counters:
                counter.opened()

    def ended(self) -> None:
        """The capture is over, well or not; still under the lock."""
        self._traffic.ended(self)

    def states_in(self, kernels: list[list[int]]) -> list[PhiloxState]:
        """The generators' states that the segment's kernels are handed.

        What has the shape of one is common: a norm gets two pointers, a count and a flag. So it is
        compared with where the tensors are. Beside another thread's capture that is no proof: the tensors
        of a copy, which a guest leaves in place, may be gone by now; and to look is to draw, which the
        other may be doing. Called inside the capture.
        """
        found = generator_states(kernels)
        if not found or self.had_guest or (self.is_guest and not self.hosts_wait):
            return found
        return generator_states(kernels, {word for pair in self._find_tensors() for word in pair})

    def _find_tensors(self) -> list[PhiloxTensors]:
        """Where each generator has its seed and its offset on the device: ours, then those lent."""
        if self._tensors is None:
            if self.scratch is None:  # of the pool: nobody watches for its end
                with unseen():
                    self.scratch = torch.empty(1, device=torch.device("cuda", self._device))
            self._tensors = [self._probe(each) for each in (*self.generators, *self.lent)]
        return self._tensors

    def _probe(self, generator: Any) -> PhiloxTensors:
        """Draw a number inside the capture, and see what its kernel was handed."""
        state, before = generator.get_state(), self._frontier()
        with unseen():
            self.scratch.uniform_(generator=generator)
        generator.set_state(state)
        nodes = [node for number, node in self._frontier().items() if number not in before]
        self._probes += nodes
        words = [kernel_params.KernelReader(self._driver).words_of(node) for node in nodes]
        for seed, offset, _ in generator_states(each for each in words if each):
            return seed, offset
        raise generator_not_found(torch.__version__)

    def _frontier(self) -> dict[int, Any]:
        """The nodes that the stream's next work waits for, by number."""
        return {int(node): node for node in self._driver.capture_info(self.stream).dependencies}

    def take_probes_out(self) -> bool:
        """The capture has ended well: what looked into it is no part of the graph.

        Returns whether that is so: the driver takes nothing out of a graph with allocations. What
        stays draws its number at each launch, and needs the tensors and `scratch`.
        """
        if not self._probes:
            return True
        probes, self._probes = self._probes, []
        taken = [self._driver.ask("cuGraphDestroyNode", node) is not None for node in probes]
        return all(taken)

    def ending(self, states: list[PhiloxState] | None) -> tuple[bool, Exception | None]:
        """Inside the capture, just before its end; `states` are those that its kernels are handed.

        Returns whether replays have to move the generators on, and what makes that impossible
        where it is needed. The offset alone does not tell: a checkpoint draws and puts it back.
        """
        if states is None:  # a capture that is lost cannot be asked for its offsets any more
            return False, None
        if self.is_guest:
            return False, self._end_of_guest() if states else None
        for counter in self._counters:
            counter.ending()
            if self.is_spoilt and not states:
                counter.used = 0  # it was the guest that drew
        used = [counter.used for counter in self._counters]
        if not states and not any(used):
            return False, None
        tensors = self._find_tensors()
        if self.had_guest and states and _is_doubtful(states, tensors, used):
            self.is_spoilt = True
        if self.is_spoilt and states:
            return False, two_captures_draw()
        return True, None

    def _end_of_guest(self) -> Exception:
        """A guest has drawn: it is refused, and its hosts are as if it had not, where that can be."""
        if not self._traffic.spoil_hosts(self):
            for generator, state in self._found:
                generator.set_state(state)
        return two_captures_draw()

    def closed(self, shell: Any) -> None:
        """The segment's capture is over and torch's books are closed; still under the lock.

        A generator's tensors go with the last shell that knows it. So the one in which they were
        looked for is kept, reset or not, for as long as this relies on where they are.
        """
        if self._probes:
            self._looked_in = shell
        self._traffic.ended(self)
        for counter in self._counters:
            counter.closed()

    def runner(self, give_up: Callable[[], None]) -> DrawingRunner:
        """What launches a segment that draws: the last one. `give_up` keeps its shell until it is called."""
        assert self._tensors is not None
        # Of all generators: what moves one need not show in a kernel's arguments, and they are its own.
        draws = list(map(_Draw, self._counters, self._tensors))
        return DrawingRunner(self._driver, self._traffic, give_up, draws)

    def progress(self) -> Progress:
        """Which capture is open, and what its stream did last; tells whether it has gone on since."""
        info = self._driver.capture_info(self.stream)
        return (info.id, *(int(node) for node in info.dependencies))

    def finish(self, failed: bool) -> None:
        """At the end of the block, outside any capture."""
        is_late = not self._home.is_here()  # another thread ends it, at whatever time
        with self.lock:  # a replay of another thread may be drawing
            for counter in self._counters:
                counter.finish(failed, is_late)
        self.scratch = self._looked_in = None  # whoever keeps the exception of a block keeps this


class _Counter:
    """One generator over one block."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        # A second handle of the same state: setting its offset leaves cuDNN's dropout state alone.
        self.view = generator.graphsafe_get_state()
        self._before: Any = generator.get_state()
        self._seed = generator.initial_seed()
        self._state = self._before.clone()  # what is handed over to set one: made once
        self._words = (ctypes.c_uint64 * 2).from_address(self._state.data_ptr())
        self._expected = 0
        self._captured = 0  # draws of segments since the block began or the generator was seeded
        self.start = self.used = 0  # the offset at which a segment begins, and what it has drawn

    def begin(self) -> None:
        """Before a segment's capture opens."""
        seed, self.start, self.used = self.generator.initial_seed(), self.view.get_offset(), 0
        if seed != self._seed or self.start < self._expected:
            self._seed, self._captured = seed, 0  # a break has seeded it

    def opened(self) -> None:
        """Inside the capture: count from the true offset on."""
        if self.start:
            self._words[0], self._words[1] = self._seed % _WRAP, self.start
            self.generator.set_state(self._state)

    def ending(self) -> None:
        """Still inside: see how much was drawn."""
        self.used = _offset_inside(self.generator) - self.start

    def closed(self) -> None:
        """After the books are closed: the generator moves on as if the segment had run."""
        used = self.used
        self._expected = self.start + used
        if used:
            self._captured += used
            self.view.set_offset(self._expected)

    def finish(self, failed: bool, is_late: bool = False) -> None:
        """The block is over: take the captured draws back, or everything; once.

        Everything of one that ends late, only if nobody has drawn since: the same numbers would come again.
        """
        if failed:
            here = (self.generator.initial_seed(), self.view.get_offset())
            is_left = here == (self._seed, max(self.start, self._expected))
            if self._before is not None and (is_left or not is_late):
                self.generator.set_state(self._before)
        elif self._captured and self.generator.initial_seed() == self._seed:
            self.view.set_offset(max(0, self.view.get_offset() - self._captured))
            self._captured = 0  # an end may be gone through again
        self._before = None


def _offset_inside(generator: Any) -> int:
    """The offset within the open capture (`get_offset` refuses to be called there)."""
    state = generator.get_state()  # the seed and the offset, eight bytes each
    return ctypes.c_uint64.from_address(state.data_ptr() + 8).value


def _refuse_other_device(generator: Any, device: int) -> None:
    """Raise `ValueError` for what is no generator of the device."""
    if not isinstance(generator, torch.Generator):
        raise generator_of_other_device(type(generator).__name__, device)
    place = generator.device
    if place.type != "cuda" or place.index not in (None, device):
        raise generator_of_other_device(place, device)


class _Draw:
    """What one generator gives to one segment."""

    __slots__ = ("offset_word", "seed_word", "start", "used", "view")

    def __init__(self, counter: _Counter, tensors: PhiloxTensors) -> None:
        self.view, self.start, self.used = counter.view, counter.start, counter.used
        self.seed_word, self.offset_word = map(types.CUdeviceptr, tensors)


class DrawingRunner:
    """Launches one segment that draws: writes what its kernels read, and moves the generators on."""

    def __init__(
        self, driver: Driver, traffic: Traffic, give_up: Callable[[], None], draws: list[_Draw]
    ) -> None:
        self._driver, self._traffic, self._draws = driver, traffic, draws
        self._give_up: Callable[[], None] | None = give_up  # keeps the shell, which has the tensors
        self._raw_launch = driver.raw("cuGraphLaunch")

    def launch(self, executable: Any) -> None:
        traffic = self._traffic
        with traffic.lock:
            stream = traffic.before_replay()
            try:
                self._launch(executable, stream)
            except BaseException:
                with contextlib.suppress(CUDAError):  # the first error is the one to see
                    traffic.after_replay()
                raise
            traffic.after_replay()

    def _launch(self, executable: Any, stream: Any) -> None:
        """The generators move before the launch: an interrupt leaves numbers out, none come twice."""
        write, draws = self._traffic.write, self._draws
        offsets = [draw.view.get_offset() for draw in draws]
        for draw, offset in zip(draws, offsets, strict=True):
            write(stream, draw.seed_word, draw.view.initial_seed())
            write(stream, draw.offset_word, (offset - draw.start) % _WRAP)
        for draw, offset in zip(draws, offsets, strict=True):
            if draw.used:  # else another thread may draw from it meanwhile
                draw.view.set_offset((offset + draw.used) % _WRAP)
        (code,) = self._raw_launch(executable, stream)
        if code:
            for draw, offset in zip(draws, offsets, strict=True):
                draw.view.set_offset(offset)
            raise self._driver.error("cuGraphLaunch", code)

    def close(self) -> None:
        give_up, self._give_up = self._give_up, None
        if give_up is not None:
            give_up()


# ---------------------------------------------------------------- what the kernels read

#: Which capture is open on a stream, and the nodes that the stream's next work waits for.
Progress = tuple[int, ...]

#: Where a generator's seed and its offset lie on the device.
PhiloxTensors = tuple[int, int]

#: The same, and the offset inside the graph.
PhiloxState = tuple[int, int, int]


def generator_states(
    kernels: Iterable[list[int]], blocks: Container[int] | None = None
) -> list[PhiloxState]:
    """What kernels are handed that has the shape of a generator's state, one a kernel at most.

    That is a `PhiloxCudaState` by value: two pointers, the offset inside the graph, and a flag that
    is 1 (ATen/cuda/detail/PhiloxCudaStateRaw.cuh). With `blocks`, the pointers have to be of these.
    """
    found = []
    for words in kernels:
        for at in range(3, len(words)):
            if words[at] & 0xFF != 1:  # the flag is rare, so it is looked at first
                continue
            seed, offset, inside = words[at - 3 : at]
            if inside % 4 or seed == offset or not (_is_block(seed) and _is_block(offset)):
                continue
            if blocks is None or (seed in blocks and offset in blocks):
                found.append((seed, offset, inside))
                break
    return found


def _is_doubtful(states: list[PhiloxState], tensors: list[PhiloxTensors], used: list[int]) -> bool:
    """Whether draws of a segment that had a guest may have gone wrong.

    Into the guest's copy, when it was in place; or twice from one offset, when it was put back.
    """
    has_strangers = any(state[:2] not in tensors for state in states)
    return has_strangers or not any(used) or len(set(states)) < len(states)


def _is_block(word: int) -> bool:
    """The allocator's blocks begin at multiples of 512; device addresses are far above 4 GiB."""
    return word % 512 == 0 and 1 << 32 < word < 1 << 57


# ---------------------------------------------------------------- captures at the same time


class Traffic:
    """Keeps apart what uses a device's generators up to torch 2.11: captures and replays.

    An opening fills the generators' tensors on its stream just before the capture begins, where no
    event can be recorded behind it until the segment has ended. So while a segment is open in another
    thread, a replay that draws waits for its end; both then follow each other through one mark.

    A generator serves one capture. The first that is open has it; a later one, the guest, is begun
    and ended with a copy of the state in its place, so that it takes nothing from the first, and is
    refused if it draws.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self._device = device
        self.write = write_value.writer(driver)
        self._mark = CompletionMark(driver)
        self._open: dict[Draws, int] = {}  # -> the thread that opened it
        self._progress_of_hosts: dict[Draws, dict[Draws, Progress]] = {}  # when the guest opened
        self._handle, self._stream = -1, None  # of the last replay
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._is_awaited = False  # by a replay, now or once before

    def open(self, draws: Draws, begin_capture: Callable[[], None]) -> None:
        """Begin a segment's capture."""
        if not SHARED_TENSORS:
            begin_capture()
            return
        with self.lock:
            self._mark.order_after(draws.handle, draws.stream)
            hosts = {}
            if self._open:
                hosts = {other: other.progress() for other in self._open if not other.is_guest}
            draws.is_guest, draws.had_guest, draws.is_spoilt = bool(hosts), False, False
            here = threading.get_ident()
            others = [host for host in hosts if self._open[host] != here]
            draws.hosts_wait = not others
            self._open[draws] = here
            if not hosts:
                draws.lent = ()
                begin_capture()
                return
            lent = dict.fromkeys(each for host in hosts for each in host.generators)
            draws.lent = tuple(each for each in lent if each not in draws.generators)
            for host in others:  # those of this thread draw nothing while the copies are in place
                host.had_guest = True
            self._progress_of_hosts[draws] = hosts
            with _copies_in_place(draws.generators):
                begin_capture()

    def ended(self, draws: Draws) -> None:
        """A segment is over: what follows on other streams follows what filled its tensors.

        The mark is recorded now, not when somebody comes: by then the next segment may be open, and
        a mark in a capture would bring whoever waits for it into that capture.
        """
        if draws.is_guest:
            self._progress_of_hosts.pop(draws, None)
        if self._open.pop(draws, None) is not None:
            if self._is_awaited:
                self._changed.notify_all()
            self._mark.record(draws.handle, draws.stream)

    def spoil_hosts(self, guest: Draws) -> bool:
        """A guest has drawn from generators that another open capture has: whether that is lost.

        One whose capture has not gone on since the guest began cannot have drawn in between; the
        guest puts its offset back. Any other cannot be right any more.
        """
        before = self._progress_of_hosts.get(guest, {})
        spoilt = False
        for host in self._open:
            if not host.is_guest and before.get(host) != host.progress():
                host.is_spoilt = spoilt = True
        return spoilt

    def before_replay(self) -> Any:
        """Before the writes and the launch of a replay, under the lock; returns the current stream."""
        if self._open:
            own = threading.get_ident() in self._open.values()
            self._is_awaited = True
            if own or not self._changed.wait_for(lambda: not self._open, _PATIENCE):
                raise draw_during_capture()
        handle = torch._C._cuda_getCurrentRawStream(self._device)
        if handle != self._handle:
            self._handle, self._stream = handle, types.CUstream(handle)
        if SHARED_TENSORS:
            self._mark.order_after(handle, self._stream)
        return self._stream

    def after_replay(self) -> None:
        """Behind the launch."""
        if SHARED_TENSORS:
            self._mark.record(self._handle, self._stream)


@contextlib.contextmanager
def _copies_in_place(generators: tuple[Any, ...]) -> Iterator[None]:
    """Inside, the generators have copies of their states; afterwards their own again."""
    own = [(generator, generator.graphsafe_get_state()) for generator in generators]
    for generator, _ in own:
        generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        for generator, state in own:
            generator.graphsafe_set_state(state)
