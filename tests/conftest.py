"""Fixtures of the tests that run on the simulated driver, and what must hold after each of them.

The hard problem: a test that leaves a capture open, a handle unreleased or a mode switched on makes
another one fail, far away. So `device` looks at all of it at the end of the test that did it.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def warm_recorder() -> Iterator[None]:
    """The first recorded operator of a process imports much of torch."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from breakable_cuda_graphs.simulator import simulated_device
    from helping import capture

    with simulated_device():
        capture(lambda: torch.ones(2) + 1)
    gc.collect()
    yield
    gc.unfreeze()


@pytest.fixture
def quick_collector(warm_recorder: None) -> None:
    """What is older than the test is out of the collector's way, so that it can run after each."""
    gc.freeze()


@pytest.fixture
def asked_collector(quick_collector: None) -> Iterator[None]:
    """Each run of a program makes the same calls of the driver."""
    import helping

    with helping.asked_collector():
        yield


@pytest.fixture
def device(request: pytest.FixtureRequest, quick_collector: None) -> Iterator[Any]:
    """A simulated device, on which nothing may be misused, left open or kept."""
    from breakable_cuda_graphs.simulator import simulated_device
    from helping import assert_nothing_left, assert_nothing_open

    with simulated_device(seed=zlib.crc32(request.node.nodeid.encode())) as made:
        yield made
        assert_nothing_open(made)
        assert_nothing_left(made)


@pytest.fixture
def bare_device() -> Iterator[Any]:
    """A simulated device for tests of the driver's floor, which know no torch: no findings, no more."""
    from breakable_cuda_graphs.simulator import simulated_device

    with simulated_device(seed=1) as made:
        yield made
        assert made.findings == []
        assert made.open_captures() == 0


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the suites have counted."""
    import tallies

    for line in tallies.lines():
        terminalreporter.write_line(line)
