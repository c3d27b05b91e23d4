"""Named ranges: each launch and break has one, by name, always closed, and nothing where they are off."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")


from breakable_cuda_graphs import (  # noqa: E402
    CUDAGraphSequence,
    annotate,
    breakable_graph,
    force_no_graph,
    no_graph,
)
from helping import Boom, capture  # noqa: E402

LABELS = ["layer 0/segment 0", "layer 0/attend", "layer 0 …/segments 2, 4"]


@pytest.fixture
def nvtx(monkeypatch: Any) -> list[str]:
    """A stand-in for the `nvtx` package that notes what is opened and closed."""
    seen: list[str] = []
    module = types.ModuleType("nvtx")
    module.push_range = seen.append  # type: ignore[attr-defined]
    module.pop_range = lambda: seen.append("")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvtx", module)
    return seen


@no_graph
def attend(t: Any) -> None:
    t.add_(1)


def decoder(x: Any) -> None:
    with annotate("layer 0"):
        x.mul_(2)
        attend(x)
        x.add_(3)
    force_no_graph()
    x.sub_(1)


def opened(seen: list[str]) -> list[str]:
    """The names, once it is sure that each is closed before the next opens."""
    assert seen[1::2] == [""] * (len(seen) // 2)
    return seen[0::2]


def test_each_launch_and_break_is_a_range_by_name(device: Any, nvtx: list[str]) -> None:
    x = torch.ones(4)
    seq, _ = capture(lambda: decoder(x))
    seq.ranges = "nvtx"
    nvtx.clear()
    seq.replay()
    assert opened(nvtx) == LABELS


def test_the_ranges_of_a_later_capture_are_there_too(device: Any, nvtx: list[str]) -> None:
    x, seq = torch.ones(4), CUDAGraphSequence()
    seq.ranges = "nvtx"
    capture(lambda: decoder(x), seq)
    nvtx.clear()
    seq.replay()
    assert opened(nvtx) == LABELS
    seq.reset()
    capture(lambda: x.add_(1), seq)
    nvtx.clear()
    seq.replay()
    assert opened(nvtx) == ["segment 0"]


def test_off_again_a_replay_is_what_it_was(device: Any, nvtx: list[str]) -> None:
    x = torch.ones(4)
    seq, _ = capture(lambda: decoder(x))
    before = seq._plan
    assert seq.ranges == ()
    seq.ranges = ("nvtx", "record_function")
    assert seq.ranges == ("nvtx", "record_function")
    assert seq._plan is not before
    seq.ranges = None
    nvtx.clear()
    seq.replay()
    assert nvtx == []
    assert seq._plan is before


def test_a_range_is_closed_when_its_break_raises(device: Any, nvtx: list[str]) -> None:
    armed: list[int] = []

    @no_graph
    def fail() -> None:
        if armed:
            raise Boom

    x, seq = torch.ones(4), CUDAGraphSequence()
    with breakable_graph(seq):
        x.add_(1)
        fail()
    seq.ranges = "nvtx"
    nvtx.clear()
    armed.append(1)
    with pytest.raises(Boom):
        seq.replay()
    assert opened(nvtx) == ["segment 0", "fail"]


def test_the_torch_profiler_shows_the_ranges(device: Any) -> None:
    x = torch.ones(4)
    seq, _ = capture(lambda: decoder(x))
    seq.ranges = "record_function"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        seq.replay()
    names = [event.name for event in profiler.events()]
    assert [name for name in names if name in LABELS] == LABELS


def test_static_results_and_rebound_breaks_keep_their_ranges(device: Any, nvtx: list[str]) -> None:
    @no_graph(outputs="static")
    def twice(t: Any) -> Any:
        return t * 2

    x, other = torch.ones(4), torch.full((4,), 5.0)
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        y = twice(x)
        z = y + 1
    seq.ranges = "nvtx"
    seq.rebind({x: other})
    nvtx.clear()
    seq.replay()
    assert opened(nvtx) == ["twice", "segment 2"]
    torch.testing.assert_close(z, torch.full((4,), 11.0))


def test_an_unknown_kind_of_range_is_refused(device: Any) -> None:
    seq = CUDAGraphSequence()
    with pytest.raises(ValueError, match="ranges"):
        seq.ranges = "vtune"
    assert seq.ranges == ()


def test_where_no_library_speaks_nvtx_it_says_what_to_install(
    device: Any, monkeypatch: Any
) -> None:
    for module in ("nvtx", "torch.cuda.nvtx", "cupy.cuda.nvtx"):
        monkeypatch.setitem(sys.modules, module, None)
    x = torch.ones(4)
    seq, _ = capture(lambda: decoder(x))
    with pytest.raises(RuntimeError, match="pip install nvtx"):
        seq.ranges = "nvtx"
    assert seq.ranges == ()
    seq.replay()
