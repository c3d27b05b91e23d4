"""Named ranges on a device: torch's profiler shows them, and replays stay right."""

from __future__ import annotations

from typing import Any

import pytest

from breakable_cuda_graphs import CUDAGraphSequence, annotate, breakable_graph

from .helpers import bump, check_replays, dev, sync, torch

pytestmark = pytest.mark.gpu

LABELS = ["layer/segment 0", "layer/add_one", "layer/segment 2"]


def captured() -> tuple[Any, Any, Any]:
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq), annotate("layer"):
        y = x * 2
        bump(y)
        out = y + 1
    return seq, x, out


def test_the_torch_profiler_shows_each_segment_and_break() -> None:
    seq, _x, _out = captured()
    seq.ranges = "record_function"
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(3):
            seq.replay()
        sync()
    on_host = [
        event.name
        for event in profiler.events()
        if event.name in LABELS and event.device_type == torch.autograd.DeviceType.CPU
    ]
    assert on_host == LABELS * 3


@pytest.mark.parametrize("kind", ["nvtx", "record_function"])
def test_replays_in_ranges_are_right(kind: str) -> None:
    seq, x, out = captured()
    seq.ranges = kind
    check_replays(seq, x, out, lambda t: t * 2 + 2)
    seq.ranges = None
    check_replays(seq, x, out, lambda t: t * 2 + 2)
