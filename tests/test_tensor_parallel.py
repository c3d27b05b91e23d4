"""examples/tensor_parallel.py under torchrun: the sharded layer equals the whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks import torchrun

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "tensor_parallel.py"


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch is built without gloo",
)
def test_two_ranks_without_a_gpu_say_so_and_are_right() -> None:
    said = torchrun(EXAMPLE, 2, CUDA_VISIBLE_DEVICES="").splitlines()
    assert said[0] == "2 ranks over no GPU: gloo, and a simulated device in each"
    assert said[1].startswith("break: 3 graph segments, 2 breaks; 100 replays")
    assert said[2].startswith("captured: left out")
    assert said[-1] == "right on all ranks"
