"""Drivers that note misuse, and things to work with; the rules of a device are in conformance/."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from breakable_cuda_graphs.simulator import SimulatedDriver
from raw_calls import INVALIDATED, code, ok


@pytest.fixture
def driver_module() -> Iterator[Any]:
    """An initialised module like `cuda.bindings.driver`, with a context current here.

    At the end nothing may have been misused; tests of misuse take `misused_driver`.
    """
    driver = _ready(SimulatedDriver(seed=1))
    yield driver
    assert driver.findings == []


@pytest.fixture
def misused_driver() -> Any:
    """The same for tests that misuse it."""
    return _ready(SimulatedDriver(seed=1))


def _ready(driver: Any) -> Any:
    """Initialise, and make the primary context current."""
    ok(driver.cuInit(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
    return driver


@pytest.fixture
def new_stream(driver_module: Any) -> Iterator[Callable[[int], Any]]:
    """Makes streams, non-blocking ones unless told otherwise; ends what they still capture."""
    made = []

    def make(flags: int = 1) -> Any:
        made.append(ok(driver_module.cuStreamCreate(flags)))
        return made[-1]

    yield make
    for stream in made:
        answer = driver_module.cuStreamEndCapture(stream)
        if code(answer) == 0:
            ok(driver_module.cuGraphDestroy(answer[1]))
    for stream in made:
        assert code(driver_module.cuStreamIsCapturing(stream)) == 0
        assert int(driver_module.cuStreamIsCapturing(stream)[1]) != INVALIDATED
        ok(driver_module.cuStreamDestroy(stream))


@pytest.fixture
def stream(new_stream: Callable[[], Any]) -> Any:
    """A non-blocking stream."""
    return new_stream()


@pytest.fixture
def buffer(driver_module: Any) -> Iterator[int]:
    """1 KiB of device memory, zeroed."""
    address = ok(driver_module.cuMemAlloc(1024))
    ok(driver_module.cuMemsetD32(address, 0, 256))
    ok(driver_module.cuCtxSynchronize())
    yield int(address)
    ok(driver_module.cuMemFree(address))
