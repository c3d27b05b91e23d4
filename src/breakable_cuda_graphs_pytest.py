"""The pytest fixture `simulated_device`.

The hard problem: pytest imports the plugins of all installed packages in every run, also in those
that have nothing to do with CUDA. So this is a module of its own outside of the package, which
imports pytest only; the library, and with it cuda.bindings, comes in when a test asks for the fixture.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from breakable_cuda_graphs.simulator import SimulatedDevice

__all__ = ["simulated_device"]

_MARKER = (
    "simulated_device(seed=None, shape=None, devices=1, check=True): options of the fixture of that "
    "name, as of breakable_cuda_graphs.simulator.simulated_device"
)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known to runs with --strict-markers."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def simulated_device(request: pytest.FixtureRequest) -> Iterator[SimulatedDevice]:
    """A CUDA driver on the CPU that breakable_cuda_graphs uses during the test.

    Options come from a marker: `@pytest.mark.simulated_device(devices=2)`. The seed of the launch
    orders is made from the test's name if none is given, so a test sees the same orders each time;
    a test that fails shows it. Misuse of the driver is an error at the end of the test.
    """
    from breakable_cuda_graphs import simulator

    marker = request.node.get_closest_marker("simulated_device")
    options: dict[str, Any] = {"seed": zlib.crc32(request.node.nodeid.encode())}
    options |= marker.kwargs if marker is not None else {}
    with simulator.simulated_device(**options) as device:
        request.node.add_report_section("setup", "simulated device", f"seed={device.seed}")
        yield device
