"""Several devices in one process: a sequence belongs to the device of its first capture.

The hard problem: a wrong device does not fail, it only works somewhere else. So each test asks the
driver which context was current while the library worked, and afterwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import (  # noqa: E402
    CaptureError,
    CUDAGraphSequence,
    Graph,
    ReplayError,
    breakable_graph,
    is_in_breakable_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import (  # noqa: E402
    bindings,
    contexts,
    unfinished,
)
from breakable_cuda_graphs.simulator import simulated_device  # noqa: E402
from helping import (  # noqa: E402
    Boom,
    assert_nothing_left,
    assert_nothing_open,
    in_thread,
    new_stream,
)


class Devices:
    """Two simulated devices; the first is current."""

    def __init__(self) -> None:
        self.driver = bindings.current()
        self.contexts = [contexts.primary(self.driver, number) for number in (0, 1)]
        self.use(0)

    def use(self, number: int) -> None:
        """Make a device current, as `cudaSetDevice` does."""
        self.driver.cuCtxSetCurrent(bindings.types.CUcontext(self.contexts[number]))

    @property
    def current(self) -> int:
        return self.contexts.index(contexts.current(self.driver))

    def of(self, stream: Any) -> int:
        return self.contexts.index(contexts.of_stream(self.driver, int(stream)))


@pytest.fixture
def devices(quick_collector: None) -> Iterator[Devices]:
    with simulated_device(seed=1, devices=2) as device:
        made = Devices()
        yield made
        made.use(0)
        assert_nothing_open(device)
        assert_nothing_left(device)


def seen_in(devices: Devices) -> tuple[Any, list[int]]:
    """A break that notes which device is current when it runs."""
    seen: list[int] = []

    @no_graph
    def look(t: Any) -> None:
        seen.append(devices.current)
        t += 1

    return look, seen


def captured(devices: Devices, seq: Any, **options: Any) -> tuple[Any, Any, list[int]]:
    """y = (x * 2 + 1) * 2, with a break in the middle."""
    x, (look, seen) = torch.ones(2), seen_in(devices)
    with breakable_graph(seq, **options):
        y = x * 2
        look(y)
        y = y * 2
    return x, y, seen


def check(seq: Any, x: Any, y: Any) -> None:
    for value in (3.0, 5.0):
        x.fill_(value)
        y.fill_(-1)
        seq.replay()
        assert y.tolist() == [4 * value + 2] * 2


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize("away", [0, 1])
def test_a_sequence_is_replayed_on_its_own_device_whichever_is_current(devices, home, away):
    devices.use(home)
    seq = CUDAGraphSequence()
    x, y, seen = captured(devices, seq)
    assert devices.of(seq.stream.handle) == home
    devices.use(away)
    check(seq, x, y)
    assert devices.current == away
    assert seen == [home] * 3


@pytest.mark.parametrize("home", [0, 1])
def test_a_second_capture_goes_to_the_device_of_the_first(devices, home):
    devices.use(home)
    seq = CUDAGraphSequence()
    x, y, seen = captured(devices, seq)
    devices.use(1 - home)
    u, v, more = captured(devices, seq)
    assert devices.current == 1 - home
    assert more == [home]
    check(seq, x, y)
    check(seq, u, v)
    assert devices.current == 1 - home
    assert set(seen + more) == {home}


def test_a_stream_says_which_device_a_capture_is_for(devices):
    devices.use(1)
    stream = new_stream()
    devices.use(0)
    seq = CUDAGraphSequence()
    x, y, seen = captured(devices, seq, stream=stream)
    assert devices.current == 0
    check(seq, x, y)
    assert seen == [1] * 3
    assert devices.of(seq.stream.handle) == 1
    seq.reset()
    devices.driver.cuStreamDestroy(stream)


def test_the_stream_of_another_device_is_refused_for_a_sequence_that_has_one(devices):
    seq = CUDAGraphSequence()
    x, y, _ = captured(devices, seq)
    devices.use(1)
    stream = new_stream()
    for current in (0, 1):
        devices.use(current)
        with pytest.raises(CaptureError, match="another device"):
            captured(devices, seq, stream=stream)
        with pytest.raises(ReplayError, match="another device"):
            seq.replay(stream)
        assert devices.current == current
    check(seq, x, y)
    devices.driver.cuStreamDestroy(stream)


def test_after_a_reset_a_sequence_may_go_to_another_device(devices):
    seq = CUDAGraphSequence()
    captured(devices, seq)
    seq.reset()
    devices.use(1)
    x, y, seen = captured(devices, seq)
    check(seq, x, y)
    assert seen == [1] * 3


def test_a_pool_of_another_device_is_refused(devices):
    first = CUDAGraphSequence()
    captured(devices, first)
    devices.use(1)
    with pytest.raises(ValueError, match="another device"):
        captured(devices, CUDAGraphSequence(pool=first.pool()))
    assert devices.current == 1
    devices.use(0)
    second = CUDAGraphSequence(pool=first.pool())
    x, y, _ = captured(devices, second)
    check(second, x, y)


def test_a_break_where_another_device_is_current_is_refused(devices):
    x, (look, seen) = torch.ones(2), seen_in(devices)
    seq = CUDAGraphSequence()
    with pytest.raises(CaptureError, match="inside of the break") as info:
        with breakable_graph(seq):
            y = x * 2
            devices.use(1)
            look(y)
    assert "look" in info.value.function
    assert seen == []
    devices.use(0)
    x, y, _ = captured(devices, seq)
    check(seq, x, y)


@pytest.mark.parametrize("fails", [False, True])
def test_a_body_may_leave_another_device_current(devices, fails):
    """The end of the block finds the sequence's device by itself."""
    devices.use(1)
    x, seq = torch.ones(2), CUDAGraphSequence()
    try:
        with breakable_graph(seq):
            y = x * 2
            devices.use(0)
            if fails:
                raise Boom
    except Boom:
        x, y, _ = captured(devices, seq)
        assert fails
    else:
        x.fill_(4)
        seq.replay()
        assert y.tolist() == [8, 8]


@pytest.mark.parametrize("where", ["segment", "break", "begin"])
def test_a_failure_gives_the_current_device_back(devices, where, monkeypatch):
    devices.use(1)
    seq = CUDAGraphSequence()
    x, y, _ = captured(devices, seq)
    devices.use(0)

    @no_graph
    def fail() -> None:
        raise Boom

    def body() -> None:
        x.mul(3)
        if where == "break":
            fail()
        raise Boom

    if where == "begin":
        monkeypatch.setattr(type(seq), "_begin_capture", lambda *_: fail())
    with pytest.raises(Boom), breakable_graph(seq):
        body()
    assert devices.current == 0
    monkeypatch.undo()
    seq.reset()
    x, y, seen = captured(devices, seq, stream=None)
    check(seq, x, y)
    assert set(seen) == {0}


def test_a_context_of_the_users_own_is_not_taken_away(devices):
    driver = devices.driver
    seq = CUDAGraphSequence()
    x, y, _ = captured(devices, seq)
    own = driver.cuCtxCreate(None, 0, 1)
    with pytest.raises(CaptureError, match="another CUDA context"):
        captured(devices, seq)
    check(seq, x, y)
    assert contexts.current(driver) == int(own)
    driver.cuCtxDestroy(own)


def test_threads_capture_on_different_devices(devices):
    def work(number: int) -> Any:
        devices.use(number)
        seq = CUDAGraphSequence()
        x, y, seen = captured(devices, seq, capture_error_mode="thread_local")
        check(seq, x, y)
        assert seen == [number] * 3

    for number in (0, 1, 1, 0):
        in_thread(lambda number=number: work(number))


def test_a_graph_built_for_another_device_is_not_appended(devices):
    seq = CUDAGraphSequence()
    captured(devices, seq)
    devices.use(1)
    graph = Graph()
    graph.join()
    with pytest.raises(ValueError, match="on another device"):
        seq.append(graph)
    other = CUDAGraphSequence()
    other.append(graph)
    devices.use(0)
    other.replay()
    assert devices.current == 0


def test_an_executable_is_launched_on_its_own_device_whichever_is_current(devices):
    seq, memory = CUDAGraphSequence(), torch.zeros(4, dtype=torch.int32)
    x, y, _ = captured(devices, seq)
    graph = Graph()
    graph.memset(memory, ctypes.c_uint32(7), memory.nbytes)
    devices.use(1)
    elsewhere = new_stream()
    executable = graph.instantiate()
    for launch in (executable.launch, executable.upload, seq.segments[0].exec.launch):
        launch()
        with pytest.raises(ReplayError, match="another device"):
            launch(elsewhere)
        assert devices.current == 1
    assert memory.tolist() == [7] * 4
    check(seq, x, y)
    executable.close()
    devices.driver.cuStreamDestroy(elsewhere)


def test_a_part_of_a_graph_is_not_captured_where_another_device_is_current(devices):
    devices.use(1)
    stream = new_stream()
    devices.use(0)
    graph = Graph()
    with pytest.raises(CaptureError, match="make that one current"), graph.capture(stream):
        pytest.fail("the capture began")
    assert devices.current == 0
    devices.driver.cuStreamDestroy(stream)


def test_a_sequence_is_dropped_and_reset_wherever_one_is(devices):
    devices.use(1)
    dropped, reset = CUDAGraphSequence(), CUDAGraphSequence()
    kept = [captured(devices, seq) for seq in (dropped, reset)]
    dropped.replay()
    reset.replay()
    devices.use(0)
    reset.reset()
    del dropped, kept


@pytest.mark.parametrize("before", [0, 1, None])
@pytest.mark.parametrize("use", [is_in_breakable_graph, lambda: CUDAGraphSequence().reset()])
def test_who_ends_the_block_of_another_thread_stays_on_its_device(devices, before, use):
    """Be it on none: it would find itself on another than device 0."""

    def lose() -> None:
        devices.use(1)
        breakable_graph(CUDAGraphSequence()).__enter__()
        torch.ones(2) * 2

    def end() -> None:
        if before is not None:
            devices.use(before)
        now = contexts.current(devices.driver)
        use()
        assert contexts.current(devices.driver) == now
        assert unfinished.pending == {}

    in_thread(lose)
    in_thread(end)
