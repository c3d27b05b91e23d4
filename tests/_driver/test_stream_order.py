"""The completion mark: one event that stands for the end of the last replay."""

from __future__ import annotations

import pytest

from breakable_cuda_graphs import CUDAError
from breakable_cuda_graphs._driver import bindings, stream_order
from breakable_cuda_graphs._driver.stream_order import CompletionMark, join
from helping import WatchedDriver


@pytest.fixture
def driver(bare_device):
    watched = WatchedDriver(bare_device.driver)
    made = bindings.Driver(watched, simulated=True)
    previous = bindings.use(made)
    made.cuCtxSetCurrent(made.cuDevicePrimaryCtxRetain(0))
    yield made
    bindings.use(previous)


@pytest.fixture
def streams(driver):
    made = [driver.cuStreamCreate(1) for _ in range(2)]
    driver.module.calls.clear()
    yield made
    for stream in made:
        driver.cuStreamDestroy(stream)


def waits(driver) -> int:
    return driver.module.calls.count("cuStreamWaitEvent")


def test_only_another_stream_waits_and_only_after_a_first_replay(driver, streams, monkeypatch):
    one, two = streams
    monkeypatch.setattr(stream_order, "lasting", {int(one), int(two)})
    mark = CompletionMark(driver)
    mark.order_after(int(one), one)
    assert waits(driver) == 0
    mark.record(int(one), one)
    mark.order_after(int(one), one)
    assert waits(driver) == 0
    mark.order_after(int(two), two)
    assert waits(driver) == 1
    mark.close()


@pytest.mark.parametrize(("handle", "expected"), [(0, 0), (1, 0), (2, 1), (None, 1)])
def test_the_handle_of_a_stream_that_may_be_gone_does_not_mean_that_stream(
    driver, streams, handle, expected
):
    """Destroyed with its work still running, its handle may have been given to a new one."""
    stream = streams[0] if handle is None else bindings.types.CUstream(handle)
    mark = CompletionMark(driver)
    mark.record(int(stream), stream)
    mark.order_after(int(stream), stream)
    assert waits(driver) == expected
    mark.close()


def test_waiting_for_nothing_asks_nothing(driver):
    mark = CompletionMark(driver)
    driver.module.calls.clear()
    mark.wait()
    assert driver.module.calls == []
    mark.close()


def test_a_mark_waits_and_is_closed_once(driver, streams, bare_device):
    before = bare_device.leaks()
    mark = CompletionMark(driver)
    mark.record(int(streams[0]), streams[0])
    mark.wait()
    assert "cuEventSynchronize" in driver.module.calls
    mark.close()
    mark.close()
    mark.wait()
    assert bare_device.leaks() == before
    assert mark._event not in stream_order._events


def test_a_stream_that_is_gone_does_not_matter(driver, streams, bare_device):
    gone = driver.cuStreamCreate(1)
    mark = CompletionMark(driver)
    mark.record(int(gone), gone)
    driver.cuStreamDestroy(gone)
    mark.order_after(int(streams[0]), streams[0])
    mark.close()


def test_a_closed_mark_cannot_be_recorded(driver, streams):
    mark = CompletionMark(driver)
    mark.close()
    with pytest.raises(CUDAError, match="cuEventRecord"):
        mark.record(int(streams[0]), streams[0])


def test_a_failing_record_is_told(driver, streams, monkeypatch):
    mark = CompletionMark(driver)
    mark._record = lambda event, stream: (bindings.types.CUresult(700),)
    with pytest.raises(CUDAError, match="cuEventRecord") as info:
        mark.record(int(streams[0]), streams[0])
    assert info.value.code == 700
    mark.order_after(int(streams[1]), streams[1])
    assert waits(driver) == 0
    mark.close()


@pytest.mark.parametrize(("code", "lost"), [(0, False), (600, False), (700, False), (709, True)])
def test_a_context_that_was_destroyed_takes_the_mark_along(driver, code, lost):
    mark = CompletionMark(driver)
    driver.module.answer = lambda place, name, go: (
        (bindings.types.CUresult(code),) if name == "cuEventQuery" else go()
    )
    assert mark.is_lost() == lost
    mark.close()
    driver.module.answer = None
    assert mark.is_lost() == lost


def test_joining_is_one_wait_and_leaves_no_event(driver, streams, bare_device):
    before = bare_device.leaks()
    join(driver, streams[0], streams[1])
    assert waits(driver) == 1
    join(driver, streams[0], streams[0])
    assert waits(driver) == 1
    assert bare_device.leaks() == before


def test_a_join_that_fails_leaves_no_event(driver, streams, bare_device):
    before = bare_device.leaks()
    driver.module.answer = lambda place, name, go: (
        (bindings.types.CUresult(2),) if name == "cuStreamWaitEvent" else go()
    )
    with pytest.raises(CUDAError, match="cuStreamWaitEvent"):
        join(driver, streams[0], streams[1])
    driver.module.answer = None
    assert bare_device.leaks() == before
