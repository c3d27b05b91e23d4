"""`simulated_device`: the library uses it inside, and what it used before afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from breakable_cuda_graphs._driver import bindings
from breakable_cuda_graphs._driver.handles import EventHandle, GraphHandle, StreamHandle
from breakable_cuda_graphs.simulator import simulated_device


def test_the_library_uses_it_inside_only():
    before = bindings.use(None)
    bindings.use(before)
    with simulated_device() as device:
        assert bindings.current().module is device.driver
        assert bindings.current().simulated
        with simulated_device() as inner:
            assert bindings.current().module is inner.driver
        assert bindings.current().module is device.driver
    assert bindings.use(before) is before


def test_it_is_taken_away_after_an_exception_too():
    before = bindings.use(None)
    bindings.use(before)
    with pytest.raises(KeyError), simulated_device():
        raise KeyError
    assert bindings.use(before) is before


def test_it_tells_findings_leaks_and_its_seed():
    with simulated_device(seed=5, devices=2, check=False) as device:
        driver = bindings.current()
        assert (device.seed, driver.cuDeviceGetCount()) == (5, 2)
        stream = driver.cuStreamCreate(1)
        assert device.leaks() == [f"stream {int(stream):#x} was not released"]
        driver.cuStreamDestroy(stream)
        assert (device.leaks(), device.findings) == ([], [])
        driver.module.cuStreamDestroy(stream)
        assert len(device.findings) == 1


def test_the_shape_can_be_chosen():
    with simulated_device(shape="12.9"):
        assert bindings.current().version == 12090


def test_open_captures_are_counted():
    with simulated_device() as device:
        driver = bindings.current()
        stream = driver.cuStreamCreate(1)
        assert device.open_captures() == 0
        driver.cuStreamBeginCapture(stream, bindings.types.CUstreamCaptureMode(2))
        assert device.open_captures() == 1
        driver.cuGraphDestroy(driver.cuStreamEndCapture(stream))
        assert device.open_captures() == 0
        driver.cuStreamDestroy(stream)


# ---------------------------------------------------------------- the end


def use_after_release() -> None:
    stream = bindings.current().cuStreamCreate(1)
    bindings.current().cuStreamDestroy(stream)
    bindings.current().module.cuStreamSynchronize(stream)


def second_release() -> None:
    event = bindings.current().cuEventCreate(2)
    bindings.current().cuEventDestroy(event)
    bindings.current().module.cuEventDestroy(event)


def lost_handle() -> None:
    bindings.current().cuGraphCreate(0)


def lost_memory() -> None:
    bindings.current().cuMemAlloc(64)


def release_in_a_capture() -> None:
    driver = bindings.current()
    stream, graph = StreamHandle.create(driver), GraphHandle.create(driver)
    driver.cuStreamBeginCapture(stream.value, bindings.types.CUstreamCaptureMode(0))
    graph.close()
    driver.module.cuStreamEndCapture(stream.value)


def open_capture() -> None:
    stream = StreamHandle.create(bindings.current())
    bindings.current().cuStreamBeginCapture(stream.value, bindings.types.CUstreamCaptureMode(0))
    kept.append(stream)


def call_in_a_fork() -> None:
    child = os.fork()
    if not child:
        bindings.current().module.cuStreamCreate(1)
        os._exit(0)
    os.waitpid(child, 0)


kept: list[object] = []

MISUSES: dict[Callable[[], None], str] = {
    use_after_release: "after cuStreamDestroy had released it",
    second_release: "a second time",
    lost_handle: "graph 0x[0-9a-f]+ was not released",
    lost_memory: "device memory .* was not released",
    release_in_a_capture: "inside an open capture",
    open_capture: "1 captures are open",
    call_in_a_fork: "in a forked child",
}


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.__name__)
def test_misuse_is_an_error_at_the_end(misuse):
    with pytest.raises(AssertionError, match=MISUSES[misuse]), simulated_device(seed=3):
        misuse()
    with simulated_device(check=False):
        misuse()
    kept.clear()


def test_the_error_tells_the_seed():
    with pytest.raises(AssertionError, match=r"seed 3\)"), simulated_device(seed=3):
        second_release()


def test_a_handle_that_an_object_owns_is_not_lost():
    with simulated_device() as device:
        event = EventHandle.create(bindings.current())
        assert (len(device.leaks()), device.lost()) == (1, [])
    del event


def test_an_exception_of_the_body_goes_on_with_a_note():
    with pytest.raises(KeyError) as caught, simulated_device():
        second_release()
        raise KeyError("mine")
    assert "a second time" in caught.value.__notes__[0]
    with pytest.raises(KeyError) as caught, simulated_device():
        raise KeyError("mine")
    assert not hasattr(caught.value, "__notes__")
