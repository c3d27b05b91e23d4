"""examples/tensor_parallel.py on devices: in both ways it equals the layer of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks import torchrun

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tensor_parallel.py"
BREAK = "break: 3 graph segments, 2 breaks; 100 replays"
CAPTURED = "captured: 1 graph segments, 0 breaks; 100 replays"


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one CUDA device to share")
def test_two_ranks_that_share_a_gpu_are_right_over_gloo() -> None:
    said = torchrun(EXAMPLE, 2).splitlines()
    assert said[0] == "2 ranks over gloo, on one GPU that they share"
    assert said[1].startswith(BREAK)
    assert said[-1] == "right on all ranks"


@pytest.mark.parametrize("ranks", [0, 2], ids=["alone", "two ranks"])
def test_ranks_with_a_gpu_each_are_right_in_both_ways(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    said = torchrun(EXAMPLE, ranks).splitlines()
    assert said[0].endswith("over NCCL, a GPU for each")
    assert said[1].startswith(BREAK)
    assert said[2].startswith(CAPTURED)
    assert said[-1] == "right on all ranks"
