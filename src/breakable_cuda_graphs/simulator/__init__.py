"""A CUDA driver on the CPU: for machines without a GPU, and for tests that must see every misuse.

The hard problem: a test double is only worth having if what passes on it passes on a device. So it
stands in at the lowest border, the module `cuda.bindings.driver`, keeps that module's names, tuples
and result codes, runs graphs in a different order each time, and writes down whatever a real driver
would have answered with a crash.

    with simulated_device() as device:
        ...                      # the library uses this driver now
    assert not device.findings   # nothing was misused
    assert not device.leaks()    # everything was given back

    driver.py      the stand-in itself         kernels.py   kernels with Python bodies
    captures.py    the capture state machine   execs.py     executables and their random orders
    tensors.py     CPU torch tensors captured operator by operator (the one part that needs torch)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .._driver import bindings, release
from .driver import SimulatedDriver
from .kernels import SimulatedKernel, conditional_setter, current_launch, set_conditional

__all__ = [
    "SimulatedDevice",
    "SimulatedDriver",
    "SimulatedKernel",
    "conditional_setter",
    "current_launch",
    "set_conditional",
    "simulated_device",
]


class SimulatedDevice:
    """What `simulated_device` yields: the driver, and what it has seen."""

    def __init__(self, driver: SimulatedDriver) -> None:
        self.driver = driver

    @property
    def findings(self) -> list[str]:
        """Every misuse seen so far, one sentence each; empty is good."""
        return self.driver.findings

    def leaks(self) -> list[str]:
        """What is live now and should have been released; empty is good at the end.

        Releases that finalizers have queued are done first, if no capture is open.
        """
        if bindings.current().module is self.driver:
            release.drain()
        return self.driver.leaks()

    def open_captures(self) -> int:
        """How many captures are open now."""
        return self.driver.open_captures()

    @property
    def seed(self) -> int:
        """The seed of the launch orders: give it to `simulated_device` to see a failure again."""
        return self.driver.seed


@contextmanager
def simulated_device(
    seed: int | None = None, shape: str | None = None, devices: int = 1
) -> Iterator[SimulatedDevice]:
    """Inside, this library uses a simulated driver (for all threads); afterwards the one before."""
    driver = SimulatedDriver(seed, shape or "13", devices)
    previous = bindings.use(bindings.Driver(driver, simulated=True))
    try:
        yield SimulatedDevice(driver)
    finally:
        bindings.use(previous)
