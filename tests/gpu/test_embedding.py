"""Replays while another capture is open, and captures inside captures."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from breakable_cuda_graphs import (
    CUDAGraphSequence,
    breakable_graph,
    is_in_breakable_graph,
    no_graph,
)

from .helpers import bump, canaries, check_canaries, dev, kinds, same, torch

pytestmark = pytest.mark.gpu


class Inner:
    """y = 2 x + 1 through a temporary, and one more for each break."""

    def __init__(self, breaks: int) -> None:
        self.x, self.y, self.seq = dev(1), dev(0), CUDAGraphSequence()
        self.added = 1.0 + breaks
        self.runs = 0

        @no_graph
        def add(t: Any) -> None:
            self.runs += 1
            t.add_(1)

        with breakable_graph(self.seq):
            t = self.x * 2
            self.y.copy_(t + 1)
            for _ in range(breaks):
                add(self.y)

    def check(self) -> None:
        for k in range(2):
            self.x.fill_(10 * k)
            self.seq.replay()
            same(self.y, 20 * k + self.added, "the inner sequence by itself")


def test_inside_a_torch_graph_a_sequence_without_breaks_is_taken_in() -> None:
    inner, x, out, graph = Inner(0), dev(1), dev(0), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inner.x.copy_(x * 3)
        inner.seq.replay()
        out.copy_(inner.y * 10)
    for k in range(4):
        x.fill_(k)
        out.zero_()
        inner.y.zero_()
        graph.replay()
        same(out, (6.0 * k + 1) * 10, f"replay {k} of the outer graph")
    inner.check()


def test_what_is_taken_in_twice_runs_twice() -> None:
    total, x, seq, graph = dev(0), dev(1), CUDAGraphSequence(), torch.cuda.CUDAGraph()
    with breakable_graph(seq):
        total.add_(x)
    with torch.cuda.graph(graph):
        seq.replay()
        total.mul_(10)
        seq.replay()
    total.zero_()
    graph.replay()
    same(total, 11.0)


def test_on_a_forked_stream_of_the_outer_capture_it_is_taken_in_there() -> None:
    inner, x, out, graph = Inner(0), dev(1), dev(0), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        inner.x.copy_(x * 3)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            inner.seq.replay()
        z = x + 5
        main.wait_stream(side)
        out.copy_(inner.y + z)
    for k in range(3):
        x.fill_(k)
        graph.replay()
        same(out, 6.0 * k + 1 + k + 5)


@pytest.mark.parametrize("how", ["reset", "deleted"])
def test_the_outer_graph_keeps_the_memory_of_what_it_took_in(how: str) -> None:
    inner, x, out, graph = Inner(0), dev(1), dev(0), torch.cuda.CUDAGraph()
    source, target, seq = inner.x, inner.y, inner.seq
    with torch.cuda.graph(graph):
        source.copy_(x * 3)
        seq.replay()
        out.copy_(target * 10)
    seq.reset()
    if how == "deleted":
        del inner, seq
    gc.collect()
    torch.cuda.empty_cache()
    guards = canaries(64, 64)
    for k in range(3):
        x.fill_(k)
        graph.replay()
        same(out, (6.0 * k + 1) * 10)
    check_canaries(guards)


@pytest.mark.parametrize("what", ["breaks", "random numbers"])
def test_what_a_torch_graph_cannot_hold_is_refused_and_the_outer_capture_goes_on(
    what: str,
) -> None:
    x, out, graph, seq = dev(1), dev(0), torch.cuda.CUDAGraph(), CUDAGraphSequence()
    with breakable_graph(seq):
        y = torch.rand(64, device="cuda") if what == "random numbers" else x * 2
        if what == "breaks":
            bump(y)
    with torch.cuda.graph(graph):
        z = x * 2
        with pytest.raises(RuntimeError, match="break" if what == "breaks" else "random"):
            seq.replay()
        assert torch.cuda.is_current_stream_capturing()
        out.copy_(z + 1)
    for k in range(3):
        x.fill_(k)
        graph.replay()
        same(out, 2.0 * k + 1, "the outer graph")
    seq.replay()
    if what == "breaks":
        same(y, 5.0)


def test_an_empty_sequence_inside_a_torch_graph_adds_nothing() -> None:
    x, out, graph = dev(1), dev(0), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        CUDAGraphSequence().replay()
        out.copy_(x + 1)
    graph.replay()
    same(out, 2.0)


def test_inside_another_block_a_sequence_without_breaks_is_taken_in() -> None:
    inner, x, seq = Inner(0), dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        inner.x.copy_(x * 3)
        inner.seq.replay()
        z = inner.y * 10
        bump(z)
        out = z + 1
    assert kinds(seq) == "geg"
    for k in range(3):
        x.fill_(k)
        inner.y.zero_()
        seq.replay()
        same(out, (6.0 * k + 1) * 10 + 2)
    inner.check()


@pytest.mark.parametrize("breaks", [1, 3])
def test_inside_another_block_its_breaks_become_breaks_of_the_outer_one(breaks: int) -> None:
    inner, x, seq = Inner(breaks), dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        inner.x.copy_(x * 3)
        inner.seq.replay()
        assert is_in_breakable_graph()
        assert torch.cuda.is_current_stream_capturing()
        z = inner.y * 10
        bump(z)
        out = z + 1
    assert kinds(seq).count("e") == breaks + 1
    assert kinds(seq) == "ge" * (breaks + 1) + "g"
    inner.runs = 0
    for k in range(3):
        x.fill_(k)
        inner.y.zero_()
        seq.replay()
        same(out, (6.0 * k + inner.added) * 10 + 2)
    assert inner.runs == 3 * breaks
    inner.check()


def test_the_outer_sequence_keeps_what_it_took_in() -> None:
    inner, x, seq = Inner(1), dev(1), CUDAGraphSequence()
    source, target = inner.x, inner.y
    with breakable_graph(seq):
        source.copy_(x * 3)
        inner.seq.replay()
        out = target * 10
    added = inner.added
    del inner
    gc.collect()
    torch.cuda.empty_cache()
    guards = canaries(64, 64)
    for k in range(3):
        x.fill_(k)
        seq.replay()
        same(out, (6.0 * k + added) * 10)
    check_canaries(guards)


@pytest.mark.parametrize("breaks", [0, 2])
def test_inside_a_break_of_another_block_a_replay_is_a_replay(breaks: int) -> None:
    inner, x, seq = Inner(breaks), dev(1), CUDAGraphSequence()
    run = no_graph(inner.seq.replay)
    with breakable_graph(seq):
        inner.x.copy_(x * 3)
        run()
        out = inner.y * 10
    assert kinds(seq) == "geg"
    for k in range(3):
        x.fill_(k)
        seq.replay()
        same(out, (6.0 * k + inner.added) * 10)
    inner.check()


@pytest.mark.parametrize("other", [False, True], ids=["the same sequence", "another sequence"])
def test_a_block_inside_a_block_is_refused_and_the_outer_one_goes_on(other: bool) -> None:
    x, seq = dev(1), CUDAGraphSequence()
    second = CUDAGraphSequence() if other else seq
    with breakable_graph(seq):
        z = x * 2
        with pytest.raises(RuntimeError, match=r"(?i)nested|inside|already"):
            with breakable_graph(second):
                pytest.fail("the block was entered")
        assert torch.cuda.is_current_stream_capturing()
        assert is_in_breakable_graph()
        bump(z)
        out = z + 1
    assert kinds(seq) == "geg"
    for k in range(3):
        x.fill_(k)
        seq.replay()
        same(out, 2.0 * k + 2, "the outer sequence")
    if other:
        with breakable_graph(second):
            y = x * 3
        second.replay()
        same(y, 6.0, "the inner sequence, captured later")


def test_a_block_inside_a_torch_graph_is_refused_and_the_outer_capture_goes_on() -> None:
    x, out, graph, seq = dev(1), dev(0), torch.cuda.CUDAGraph(), CUDAGraphSequence()
    with torch.cuda.graph(graph):
        z = x * 2
        with pytest.raises(RuntimeError, match=r"(?i)captur"), breakable_graph(seq):
            pytest.fail("the block was entered")
        out.copy_(z + 1)
    x.fill_(4)
    graph.replay()
    same(out, 9.0)


def test_a_torch_graph_may_be_replayed_in_a_break() -> None:
    x, y, graph, seq = dev(1), dev(0), torch.cuda.CUDAGraph(), CUDAGraphSequence()
    with torch.cuda.graph(graph):
        y.add_(x)
    run = no_graph(graph.replay)
    with breakable_graph(seq):
        x.mul_(2)
        run()
        out = y * 10
    x.fill_(3)
    y.zero_()
    seq.replay()
    same(out, 60.0)


def test_refused_many_times_it_is_as_good_as_before() -> None:
    inner, x = Inner(1), dev(1)
    for _ in range(5):
        graph, out = torch.cuda.CUDAGraph(), dev(0)
        with torch.cuda.graph(graph):
            with pytest.raises(RuntimeError, match="break"):
                inner.seq.replay()
            out.copy_(x * 2)
        x.fill_(4)
        graph.replay()
        same(out, 8.0)
        del graph
    inner.check()
