"""Every test here needs a CUDA device and must leave the process as usable as it found it.

The hard problem: torch is optional. Tests that use it import `helpers`, which skips them without it;
the others run in an environment that has none, and what is checked after them is the driver's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import pytest


@functools.cache
def has_device() -> bool:
    """Whether the driver answers and has a device."""
    from cuda.bindings import driver

    try:
        return not driver.cuInit(0)[0] and driver.cuDeviceGetCount()[1] > 0
    except RuntimeError:  # no driver is installed
        return False


@pytest.fixture(autouse=True)
def process_stays_usable() -> Iterator[None]:
    """Skip without a device; afterwards: nothing captured, nothing switched, all works."""
    if not has_device():
        pytest.skip("needs a CUDA device")
    from breakable_cuda_graphs import is_in_breakable_graph
    from breakable_cuda_graphs._driver import release

    if "torch" in sys.modules:
        yield from _torch_stays_usable()
    else:
        yield
    assert not is_in_breakable_graph()
    assert release.open_captures() == 0, "a capture was left open"


def _torch_stays_usable() -> Iterator[None]:
    import torch

    from .helpers import still_usable

    stream, device = torch.cuda.current_stream(), torch.cuda.current_device()
    yield
    assert torch.cuda.current_stream() == stream, "another stream was left current"
    assert torch.cuda.current_device() == device, "another device was left current"
    assert not torch.cuda.is_current_stream_capturing(), "the stream was left in capture mode"
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not torch.is_autocast_enabled("cuda")
    still_usable()
