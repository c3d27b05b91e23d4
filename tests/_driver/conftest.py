"""The driver that most tests of this folder use."""

from __future__ import annotations

from typing import Any

import pytest

from breakable_cuda_graphs._driver import bindings
from breakable_cuda_graphs.simulator import SimulatedDevice


@pytest.fixture
def driver(bare_device: SimulatedDevice) -> Any:
    """The simulated driver, with the first device's primary context current."""
    made = bindings.current()
    made.cuCtxSetCurrent(made.cuDevicePrimaryCtxRetain(0))
    return made
