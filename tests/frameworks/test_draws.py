"""Random numbers, as far as they go without a device: what kernels read, and the traffic of captures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import ReplayError  # noqa: E402
from breakable_cuda_graphs._driver import bindings, capturing, ordering, release  # noqa: E402
from breakable_cuda_graphs.frameworks.pytorch import draws as module  # noqa: E402
from breakable_cuda_graphs.frameworks.pytorch.draws import (  # noqa: E402
    Traffic,
    generator_states,
)
from helping import in_thread  # noqa: E402

SEED, OFFSET = 0x7F00_0000_0200, 0x7F00_0000_0400
STATE = [SEED, OFFSET, 8, 1]


# ---------------------------------------------------------------- what the kernels read


@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_generators_state_is_found_wherever_it_lies(before):
    words = [3] * before + STATE + [9, 9]
    assert generator_states([words]) == [(SEED, OFFSET, 8)]


def test_the_flag_is_one_byte():
    assert generator_states([[SEED, OFFSET, 0, 0xABCD_EF01]]) == [(SEED, OFFSET, 0)]
    assert generator_states([[SEED, OFFSET, 0, 0x0100]]) == []


@pytest.mark.parametrize(
    "words",
    [
        [],
        STATE[:3],
        [SEED, OFFSET, 8, 0],  # no capture
        [SEED, OFFSET, 6, 1],  # offsets are multiples of four
        [SEED, SEED, 8, 1],  # one pointer twice
        [SEED + 8, OFFSET, 8, 1],  # no beginning of a block
        [512, 1024, 8, 1],  # small numbers
        [1 << 60, OFFSET, 8, 1],  # no address
    ],
)
def test_what_only_looks_like_one_is_none(words):
    assert generator_states([words]) == []


def test_several_kernels_are_searched():
    other = [SEED + 0x1000, OFFSET + 0x1000, 0, 1]
    assert generator_states([[1], STATE, [7, *other]]) == [
        (SEED, OFFSET, 8),
        (SEED + 0x1000, OFFSET + 0x1000, 0),
    ]


LIKENESS = [SEED + 0x8000, OFFSET + 0x8000, 1024, 1]  # a norm: two pointers, a count, a flag


def test_pointers_to_other_blocks_are_no_state():
    assert generator_states([LIKENESS, STATE], {SEED, OFFSET}) == [(SEED, OFFSET, 8)]


def test_a_likeness_does_not_hide_the_state_behind_it():
    assert generator_states([[*LIKENESS, *STATE]], {SEED, OFFSET}) == [(SEED, OFFSET, 8)]


@pytest.mark.parametrize(
    ("shared", "registered", "looks"), [(True, (), 1), (True, ("given",), 3), (False, (), 3)]
)
def test_the_allocator_is_asked_when_there_is_a_likeness(monkeypatch, shared, registered, looks):
    asked = []
    monkeypatch.setattr(module, "SHARED_TENSORS", shared)
    monkeypatch.setattr(module.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        module, "words_in_use", lambda device: asked.append(device) or {SEED, OFFSET}
    )
    draws = object.__new__(module.Draws)
    draws.is_guest = draws.had_guest = False
    draws._words, draws.registered = None, registered
    assert draws.states_in([[1, 2, 3]]) == []
    assert asked == []
    for _ in range(3):
        assert draws.states_in([LIKENESS]) == []
    assert draws.states_in([]) == []
    assert asked == [0] * looks
    draws.had_guest = True  # the copy's tensors may be gone
    assert draws.states_in([LIKENESS]) == [tuple(LIKENESS[:3])]
    assert asked == [0] * looks


# ---------------------------------------------------------------- the end of a block


class SeededGenerator:
    """A generator whose state is a seed and an offset."""

    def __init__(self, seed: int, offset: int) -> None:
        self.state = (seed, offset)

    def graphsafe_get_state(self) -> SeededGenerator:
        return self

    def get_state(self) -> Any:
        return torch.tensor(self.state)

    def set_state(self, state: Any) -> None:
        self.state = tuple(state.tolist())

    def initial_seed(self) -> int:
        return self.state[0]

    def get_offset(self) -> int:
        return self.state[1]

    def set_offset(self, offset: int) -> None:
        self.state = (self.state[0], offset)


def counted(generator: Any, *segments: int) -> Any:
    """A counter that has seen segments with so many draws."""
    counter = module._Counter(generator)
    for drawn in segments:
        segment(counter, drawn)
    return counter


def segment(counter: Any, drawn: int) -> None:
    counter.begin()
    counter.used = drawn
    counter.closed()


def test_a_block_that_failed_leaves_the_generator_as_it_was():
    generator = SeededGenerator(7, 40)
    counter = counted(generator, 8, 4)
    generator.state = (9, 1000)  # a break has seeded it and drawn
    counter.finish(failed=True)
    assert generator.state == (7, 40)
    generator.set_offset(48)
    counter.finish(failed=True)  # an end that could not be finished is gone through again
    assert generator.state == (7, 48)


@pytest.mark.parametrize("is_open", [False, True])
def test_numbers_that_were_drawn_since_a_thread_ended_in_its_block_do_not_come_again(is_open):
    for since, after in ((0, 40), (4, 56)):
        generator = SeededGenerator(7, 40)
        counter = counted(generator, 8, 4)
        if is_open:
            counter.begin()
        generator.set_offset(generator.get_offset() + since)
        counter.finish(failed=True, is_late=True)
        assert generator.state == (7, after)


def test_captured_draws_are_taken_back_and_those_of_breaks_stay():
    generator = SeededGenerator(7, 40)
    counter = counted(generator, 8)
    generator.set_offset(generator.get_offset() + 100)  # a break has drawn
    segment(counter, 4)
    assert generator.state == (7, 152)
    counter.finish(failed=False)
    assert generator.state == (7, 140)
    counter.finish(failed=True)  # an interrupt came behind
    assert generator.state == (7, 140)


# ---------------------------------------------------------------- captures at the same time


class FakeDraws:
    """A block's generators, for the traffic: how many nodes its capture has, and whose guest it is."""

    def __init__(self) -> None:
        self.is_guest = self.had_guest = self.is_spoilt = False
        self.generators: tuple[Any, ...] = ()
        self.stream: Any = None
        self.handle = 0
        self.nodes = 1

    def progress(self) -> tuple[int, ...]:
        return (1, self.nodes)


@pytest.fixture
def road(bare_device, monkeypatch):
    """Traffic as on torch 2.11, with two streams."""
    driver = bindings.current()
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0))
    monkeypatch.setattr(module, "SHARED_TENSORS", True)
    made = Traffic(driver, 0)
    streams = [driver.cuStreamCreate(1) for _ in range(2)]
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: int(streams[0]), raising=False
    )
    yield made, streams
    assert not made._open
    assert not made._progress_of_hosts
    made._mark.close()
    for stream in streams:
        driver.cuStreamDestroy(stream)
    release.drain()
    assert made._mark._event not in ordering._events
    assert bare_device.leaks() == []


def replay(traffic: Traffic, launch: Callable[[], object] = lambda: None) -> None:
    with traffic.lock:
        traffic.before_replay()
        launch()
        traffic.after_replay()


def put(draws: Any, stream: Any) -> None:
    draws.stream, draws.handle = stream, int(stream)


def open_(traffic: Traffic, draws: Any, stream: Any) -> None:
    begun: list[int] = []
    put(draws, stream)
    traffic.open(draws, lambda: begun.append(1))
    assert begun == [1]


def close(traffic: Traffic, draws: Any, stream: Any) -> None:
    put(draws, stream)
    with traffic.lock:
        traffic.ended(draws)


def test_the_first_capture_has_the_generators_and_a_second_is_its_guest(road):
    traffic, (one, two) = road
    host, guest = FakeDraws(), FakeDraws()
    open_(traffic, host, one)
    open_(traffic, guest, two)
    assert (host.is_guest, guest.is_guest) == (False, True)
    close(traffic, host, one)
    close(traffic, guest, two)
    later = FakeDraws()
    later.is_guest = True
    open_(traffic, later, two)
    assert not later.is_guest
    close(traffic, later, two)


def test_a_guest_of_a_guest_is_a_guest_of_the_host_only(road):
    traffic, (one, two) = road
    host, guest, third = FakeDraws(), FakeDraws(), FakeDraws()
    for draws, stream in ((host, one), (guest, two), (third, two)):
        open_(traffic, draws, stream)
    assert third.is_guest
    assert set(traffic._progress_of_hosts[third]) == {host}
    for draws in (third, guest, host):
        close(traffic, draws, one)


@pytest.mark.parametrize("gone_on", [False, True])
def test_a_guest_that_draws_spoils_a_host_that_has_gone_on(road, gone_on):
    traffic, (one, two) = road
    host, guest = FakeDraws(), FakeDraws()
    open_(traffic, host, one)
    open_(traffic, guest, two)
    host.nodes += gone_on
    assert traffic.spoil_hosts(guest) is gone_on
    assert host.is_spoilt is gone_on
    close(traffic, guest, two)
    close(traffic, host, one)


def test_a_host_that_has_ended_cannot_be_spoilt(road):
    traffic, (one, two) = road
    host, guest = FakeDraws(), FakeDraws()
    open_(traffic, host, one)
    open_(traffic, guest, two)
    close(traffic, host, one)
    host.nodes += 5
    assert traffic.spoil_hosts(guest) is False
    assert not host.is_spoilt
    close(traffic, guest, two)


def test_a_failed_opening_can_be_closed(road):
    traffic, (one, _) = road
    draws = FakeDraws()

    def fail() -> None:
        raise ValueError("mine")

    put(draws, one)
    with pytest.raises(ValueError, match="mine"):
        traffic.open(draws, fail)
    close(traffic, draws, one)
    close(traffic, draws, one)
    replay(traffic)


class FakeGenerator:
    """A generator's handle: what it holds is a state that can be swapped."""

    def __init__(self) -> None:
        self.state: Any = "own"

    def graphsafe_get_state(self) -> Any:
        return self.state

    def graphsafe_set_state(self, state: Any) -> None:
        self.state = state

    def clone_state(self) -> Any:
        return f"copy of {self.state}"


@pytest.mark.parametrize("fails", [False, True])
def test_a_guest_begins_with_copies_and_the_generators_get_their_own_back(road, fails):
    traffic, (one, two) = road
    host, guest = FakeDraws(), FakeDraws()
    host.generators = guest.generators = (FakeGenerator(), FakeGenerator())
    seen: list[Any] = []

    def begin() -> None:
        seen.append([generator.state for generator in guest.generators])
        if fails:
            raise ValueError("mine")

    open_(traffic, host, one)
    put(guest, two)
    if fails:
        with pytest.raises(ValueError, match="mine"):
            traffic.open(guest, begin)
    else:
        traffic.open(guest, begin)
    assert seen[-1] == ["copy of own"] * 2
    assert [generator.state for generator in guest.generators] == ["own"] * 2
    close(traffic, guest, two)
    close(traffic, host, one)


def test_a_replay_in_the_capturing_thread_is_refused(road):
    traffic, (one, _) = road
    draws = FakeDraws()
    open_(traffic, draws, one)
    with pytest.raises(ReplayError, match="random"):
        replay(traffic, lambda: pytest.fail("it was let through"))
    close(traffic, draws, one)
    replay(traffic)


def test_a_replay_waits_for_the_segment_of_another_thread(road):
    traffic, (one, _) = road
    draws, log = FakeDraws(), []
    entered = threading.Event()
    driver = bindings.current()
    context = driver.cuCtxGetCurrent()

    def other() -> None:
        driver.cuCtxSetCurrent(context)
        entered.set()
        replay(traffic, lambda: log.append("replayed"))

    open_(traffic, draws, one)
    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(10)
    thread.join(0.05)
    assert log == []
    close(traffic, draws, one)
    thread.join(10)
    assert log == ["replayed"]


def test_a_replay_does_not_wait_for_ever(road, monkeypatch):
    traffic, (one, _) = road
    monkeypatch.setattr(module, "_PATIENCE", 0.02)
    draws = FakeDraws()
    open_(traffic, draws, one)

    with pytest.raises(ReplayError, match="Replay when"):
        in_thread(lambda: replay(traffic, lambda: pytest.fail("it was let through")))
    close(traffic, draws, one)


def test_refills_on_different_streams_follow_each_other(road, monkeypatch):
    traffic, (one, two) = road
    waited = []
    monkeypatch.setattr(
        type(traffic._mark), "order_after", lambda mark, handle, stream: waited.append(handle)
    )
    draws, other = FakeDraws(), FakeDraws()
    open_(traffic, draws, two)
    close(traffic, draws, two)
    replay(traffic)
    assert traffic._mark._stream == int(one)
    open_(traffic, other, two)
    close(traffic, other, two)
    assert waited == [int(two), int(one), int(two)]


def test_no_mark_is_recorded_while_a_segment_is_open(road, monkeypatch):
    """It would be captured, and whoever waits for it would be drawn into that capture."""
    traffic, (one, two) = road
    recorded: list[int] = []
    monkeypatch.setattr(
        type(traffic._mark), "record", lambda mark, handle, stream: recorded.append(handle)
    )
    host, guest = FakeDraws(), FakeDraws()
    for _ in range(2):
        open_(traffic, host, two)
        close(traffic, host, two)
    open_(traffic, host, two)
    assert recorded == [int(two)] * 2
    open_(traffic, guest, one)
    assert guest.is_guest
    assert recorded == [int(two)] * 2
    close(traffic, guest, one)
    close(traffic, host, two)
    assert recorded == [int(two)] * 2 + [int(one), int(two)]


def test_nothing_is_kept_apart_where_tensors_are_not_shared(road, monkeypatch):
    traffic, (one, two) = road
    monkeypatch.setattr(module, "SHARED_TENSORS", False)
    host, other = FakeDraws(), FakeDraws()
    open_(traffic, host, one)
    open_(traffic, other, two)
    assert not other.is_guest
    replay(traffic)
    close(traffic, host, one)
    close(traffic, other, two)


def test_a_guest_is_not_drawn_into_the_capture_of_its_host(road):
    traffic, (one, two) = road
    driver = bindings.current()
    host, guest = FakeDraws(), FakeDraws()
    open_(traffic, host, one)
    close(traffic, host, one)  # the host's second segment is open when the guest comes
    mode = bindings.types.CUstreamCaptureMode(2)
    traffic.open(host, lambda: driver.cuStreamBeginCapture(one, mode))
    open_(traffic, guest, two)
    assert guest.is_guest
    assert capturing.status(driver, two) is capturing.Status.NONE
    close(traffic, guest, two)
    assert capturing.status(driver, one) is capturing.Status.ACTIVE
    driver.cuGraphDestroy(driver.cuStreamEndCapture(one))
    close(traffic, host, one)


class Offset:
    """A generator, as far as its offset goes."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert 0 <= offset < 1 << 64
        self.offset = offset


class Shell:
    """Torch's graph at replay: kernels see the offset, which then moves on by all that was counted."""

    def __init__(self, generator: Offset, counted: int, *, fails: bool = False) -> None:
        self.generator, self.counted, self.fails = generator, counted, fails
        self.seen = -1

    def instantiate(self) -> None: ...

    def replay(self) -> None:
        if self.fails:
            raise RuntimeError("refused")
        self.seen = self.generator.offset
        self.generator.offset = (self.generator.offset + self.counted) % (1 << 64)


@pytest.mark.parametrize(
    ("start", "used", "counted"),
    [
        (0, 8, 8),
        (16, 8, 24),
        (16, 0, 16),  # a checkpoint drew and put the offset back
        (16, -12, 4),  # one of an earlier segment was restored
        (0, 0, 4),  # reads without a count: torch was told four, to make it refill
        (16, -16, 4),
    ],
)
@pytest.mark.parametrize("now", [0, 400])
def test_a_replay_draws_from_where_the_generator_is_and_moves_it_on(
    road, start, used, counted, now
):
    traffic, _ = road
    generator = Offset(now)
    shell = Shell(generator, counted)
    runner = module.DrawingRunner(traffic, shell, [(generator, start, used)])
    runner.replay()
    assert (shell.seen + start) % (1 << 64) == now  # kernels add what they counted from
    assert generator.offset == (now + used) % (1 << 64)


def test_a_replay_that_fails_leaves_the_generator_where_it_was(road):
    traffic, _ = road
    generator = Offset(40)
    runner = module.DrawingRunner(traffic, Shell(generator, 24, fails=True), [(generator, 16, 8)])
    with pytest.raises(RuntimeError, match="refused"):
        runner.replay()
    assert generator.offset == 40


def test_a_device_has_one_traffic(bare_device):
    driver = bindings.current()
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0))
    made = module.traffic(driver, 0)
    assert module.traffic(driver, 0) is made
    other = module.traffic(driver, 1)
    assert other is not made
    made._mark.close()
    other._mark.close()
