"""Every test here needs a CUDA device and must leave the process as usable as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def process_stays_usable() -> Iterator[None]:
    """Skip without torch or a device; afterwards: nothing captured, nothing switched, all works."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from breakable_cuda_graphs import is_in_breakable_graph

    from .helpers import still_usable

    stream, device = torch.cuda.current_stream(), torch.cuda.current_device()
    yield
    assert torch.cuda.current_stream() == stream, "another stream was left current"
    assert torch.cuda.current_device() == device, "another device was left current"
    assert not torch.cuda.is_current_stream_capturing(), "the stream was left in capture mode"
    assert not is_in_breakable_graph()
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not torch.is_autocast_enabled("cuda")
    still_usable()
