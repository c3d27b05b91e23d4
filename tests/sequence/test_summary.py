"""`sequence.explain()`: one page that says which path replays take, and what falls back and why."""

from __future__ import annotations

import time
from typing import Any

import pytest

from breakable_cuda_graphs import (
    CUDAGraphSequence,
    annotate,
    breakable_graph,
    force_no_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import bindings
from helping import capture

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs.simulator import tensors  # noqa: E402  (needs torch)


@no_graph
def bump(t: Any) -> None:
    t.add_(1)


@no_graph(outputs="static")
def largest(t: Any) -> Any:
    return t.max().reshape(1)


def allocate() -> None:
    stream = bindings.types.CUstream(tensors.current_stream())
    driver = bindings.current()
    driver.cuMemFreeAsync(driver.cuMemAllocAsync(64, stream), stream)


def test_an_empty_sequence_says_so(device: Any) -> None:
    assert CUDAGraphSequence().explain() == "Not captured: empty; a replay does nothing."


def test_it_says_when_and_where_it_was_captured_and_of_what_it_consists(device: Any) -> None:
    x = torch.ones(4)

    def body() -> None:
        y = x * 2
        bump(y)
        force_no_graph()

    before = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    page = capture(body)[0].explain()
    after = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    assert f"Captured {before}" in page or f"Captured {after}" in page
    assert "by simulated torch" in page
    assert "test_summary.py" in page
    assert "3 graph segments, 2 empty and not launched; 2 breaks, 1 of them force_no_graph." in page


def test_it_lists_the_launches_and_calls_of_a_replay(device: Any) -> None:
    x = torch.ones(4)

    def body() -> None:
        with annotate("layer 1"):
            y = x * 2
            bump(y)
        z = y + 1
        force_no_graph()
        z.mul_(3)
        largest(z)
        z.add_(1)

    page = capture(body)[0].explain()
    assert "A replay: 3 launches, 2 calls of Python" in page
    assert "1. layer 1/segment 0: 1 node" in page
    assert "2. break layer 1/bump" in page
    assert "3. segments 2, 4: 2 nodes, 2 segments in one launch" in page
    assert "4. break largest, static result of 1 tensor, 1 copied at each replay" in page


def test_it_tells_what_is_watched_and_owned(device: Any) -> None:
    x = torch.ones(4)
    watching = capture(lambda: bump(x))[0].explain()
    assert "raises once some is gone: 1 piece\n  float32 [4] on cpu, argument 0" in watching
    assert "owned until reset(): 0 pieces, 0 bytes" in watching
    owning = capture(lambda: bump(x), keep_inputs=True)[0].explain()
    assert "owned until reset(): 1 piece, 16 bytes" in owning


def test_neighbours_that_are_no_one_launch_say_why(device: Any) -> None:
    x = torch.ones(4)

    def body() -> None:
        x.add_(1)
        force_no_graph()
        allocate()
        force_no_graph()
        x.add_(1)

    page = capture(body)[0].explain()
    assert "segment 0 and segment 2 are launched one by one: segment 2 allocates memory" in page
    assert "segment 2 and segment 4 are launched one by one: segment 2 allocates memory" in page
    assert "inside another capture it is refused: a graph in it has no clones" in page


def test_neighbours_of_two_blocks_say_why_they_are_two_launches(device: Any) -> None:
    x = torch.ones(4)
    seq = capture(lambda: x.add_(1))[0]
    capture(lambda: x.mul_(2), seq)
    assert "has an executable of its own, which an earlier block" in seq.explain()


def test_a_break_under_modes_of_its_own_is_told(device: Any) -> None:
    x = torch.ones(4)

    def body() -> None:
        bump(x)
        with torch.no_grad():
            bump(x)

    assert "break" in capture(body)[0].explain()
    assert "bump switches modes at each replay" in capture(body)[0].explain()


def test_a_plain_sequence_falls_back_nowhere(device: Any) -> None:
    x = torch.ones(4)
    assert capture(lambda: x.add_(1))[0].explain().endswith("Falls back: nothing")


def test_breaks_say_where_the_sequence_cannot_be_replayed(device: Any) -> None:
    x = torch.ones(4)
    page = capture(lambda: bump(x))[0].explain()
    assert "inside a capture that is no breakable_graph block it is refused: it has breaks" in page


def test_edits_are_told(device: Any) -> None:
    x = torch.ones(4)
    seq = capture(lambda: x.add_(1))[0]
    (node,) = seq.segments[0].graph.nodes
    seq.segments[0].exec.disable(node)
    assert "segment 0: 1 node, edited" in seq.explain()


def test_what_cannot_be_replayed_says_so_first(device: Any) -> None:
    x, seq = torch.ones(4), CUDAGraphSequence()
    with pytest.raises(KeyError), breakable_graph(seq):
        raise KeyError
    assert seq.explain().startswith("Not captured: the last capture failed")
    seq.reset()
    with breakable_graph(seq):
        bump(x)
        assert "Being captured now" in seq.explain()
    del x
    assert "STALE, so that a replay raises: float32 [4] on cpu" in seq.explain()


def test_two_hundred_breaks_are_still_one_page(device: Any) -> None:
    x = torch.ones(4)

    def body() -> None:
        for _ in range(200):
            bump(x)

    lines = capture(body)[0].explain().splitlines()
    assert len(lines) < 70
    assert any("and 160 more" in line for line in lines)
