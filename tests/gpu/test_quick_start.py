"""The first things that a reader of the README tries."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

import pytest

import breakable_cuda_graphs
from breakable_cuda_graphs import BreakableCUDAGraph, CUDAGraphSequence, breakable_graph, no_graph

from .helpers import bump, check, check_replays, dev, kinds, same, torch

pytestmark = pytest.mark.gpu


@no_graph
def dynamic_scale(t: Any) -> None:
    """Take one of two ways, depending on a value that only the device knows."""
    if t.sum().item() > 0:
        t.mul_(2)
    else:
        t.mul_(-3)


@pytest.mark.parametrize("captured_with", [4.0, -4.0])
def test_each_replay_takes_the_branch_of_its_own_input(captured_with: float) -> None:
    static_input, seq = dev(captured_with), CUDAGraphSequence()
    with breakable_graph(seq):
        hidden = static_input * 2
        dynamic_scale(hidden)
        result = hidden + 1
    for value, expected in [(4.0, 17.0), (-4.0, 25.0), (0.5, 3.0), (0.0, 1.0), (-1.0, 7.0)]:
        static_input.fill_(value)
        seq.replay()
        same(result, expected, f"the replay for {value}")


def test_without_a_break_it_is_one_graph() -> None:
    assert kinds(check(lambda x: (x * 2 + 1).relu())) == "g"


def test_capture_does_not_run_the_segments() -> None:
    x, y, seq = dev(1), dev(0), CUDAGraphSequence()
    with breakable_graph(seq):
        y.copy_(x)
    same(y, 0.0, "before the first replay")
    seq.replay()
    same(y, 1.0, "after the first replay")


def test_both_names_are_one_class() -> None:
    assert BreakableCUDAGraph is CUDAGraphSequence


def test_the_sequence_may_be_given_by_keyword() -> None:
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(cuda_graph=seq):
        y = x + 1
        bump(y)
    check_replays(seq, x, y, lambda t: t + 2)


def test_code_written_for_piecewise_cuda_graphs_needs_only_an_import_alias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "piecewise_cuda_graphs", breakable_cuda_graphs)
    piecewise_cuda_graphs = importlib.import_module("piecewise_cuda_graphs")
    x, seq = dev(1), piecewise_cuda_graphs.CUDAGraphSequence()

    @piecewise_cuda_graphs.no_graph
    def step(t: Any) -> None:
        t.add_(1)

    with piecewise_cuda_graphs.breakable_graph(seq):
        y = x * 2
        step(y)
        z = y * 3
    check_replays(seq, x, z, lambda t: (t * 2 + 1) * 3)


def test_a_capture_in_place_of_torch_cuda_graph_gives_the_same_numbers() -> None:
    weight = torch.randn(32, 32, device="cuda")
    x = torch.randn(8, 32, device="cuda")

    def body() -> Any:
        return torch.softmax((x @ weight).relu(), dim=-1).sum(dim=0)

    body()
    graph, seq = torch.cuda.CUDAGraph(), CUDAGraphSequence()
    with torch.cuda.graph(graph):
        theirs = body()
    with breakable_graph(seq):
        ours = body()
    for _ in range(3):
        x.normal_()
        graph.replay()
        seq.replay()
        torch.testing.assert_close(ours, theirs)


FIRST_MATMUL = """
import torch
from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph

@no_graph
def bump(t):
    t.add_(1)

x, seq = torch.ones(64, 64, device="cuda"), CUDAGraphSequence()
with breakable_graph(seq):
    h = x @ x
    bump(h)
    out = h @ x
x.fill_(2)
seq.replay()
torch.cuda.synchronize()
assert bool((out == (64 * 4 + 1) * 2 * 64).all()), out[0, 0].item()
print("right")
"""


def test_the_first_matmul_of_a_process_may_be_in_a_segment() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_MATMUL],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["right"]
