"""Pages of what a device runs: real kernels, real addresses, in a time that one waits for."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph

from .helpers import bump, dev, torch

pytestmark = pytest.mark.gpu


def data_of(path: Path) -> Any:
    """What a page shows."""
    pattern = r'<script type="application/json" id="data">(.*?)</script>'
    return json.loads(re.findall(pattern, path.read_text(), re.DOTALL)[0])


def test_a_page_names_kernels_and_whose_memory_their_addresses_are(tmp_path: Path) -> None:
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        bump(y)
        out = y.sum() + x
    seq.to_html(tmp_path / "page.html")
    (side,) = data_of(tmp_path / "page.html")["sides"]
    assert [part["kind"] for part in side["parts"]] == ["graph", "break", "graph"]
    kernel = side["parts"][0]["nodes"][0]
    assert kernel["kind"] == "kernel"
    assert "elementwise" in kernel["name"]
    owners = {
        what
        for part in side["parts"]
        for node in part.get("nodes", ())
        for _, _, what in node.get("args", ())
    }
    words = " ".join(owners)
    assert "input, float32 [64]" in words
    assert "break argument 0 of add_one" in words
    assert "pool block" in words
    del out


def test_a_page_of_many_segments_is_made_in_seconds(tmp_path: Path) -> None:
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        for _ in range(200):
            for _ in range(10):
                x.mul_(1.5)
            bump(x)
    start = time.perf_counter()
    seq.to_html(tmp_path / "page.html")
    seconds = time.perf_counter() - start
    print(f"200 segments of 10 nodes: {seconds:.2f} s")
    assert seconds < 10
    parts = data_of(tmp_path / "page.html")["sides"][0]["parts"]
    assert sum(len(part.get("nodes", ())) for part in parts) == 2000


def test_the_page_of_a_profile_is_of_the_device(tmp_path: Path) -> None:
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        x.add_(1)
        bump(x)
    seq.profile(iterations=5).to_html(tmp_path / "page.html")
    data = data_of(tmp_path / "page.html")
    assert data["device"] == torch.cuda.get_device_name()
    assert not data["simulated"]
