"""`simulated_device`: the library uses it inside, and what it used before afterwards."""

from __future__ import annotations

import pytest

from breakable_cuda_graphs._driver import bindings
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
    with simulated_device(seed=5, devices=2) as device:
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
