"""Conditional nodes on the device, built by hand and from torch, inside a block and eagerly."""

from __future__ import annotations

from typing import Any

import pytest

from breakable_cuda_graphs import (
    CaptureError,
    CUDAGraphSequence,
    Graph,
    breakable_graph,
    capture_if,
    capture_while,
    no_graph,
)
from breakable_cuda_graphs.graph.graph import ConditionalNode

from .helpers import N, bump, close, dev, same, sync, torch
from .kernels import add_scale, f32, kernel

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float32", "bfloat16"])
def test_if_takes_its_body_as_python_would(dtype: str) -> None:
    graph, y = Graph(), dev(0)
    flag = torch.zeros(1, device="cuda", dtype=getattr(torch, dtype))
    node = graph.if_(flag, orelse=True)
    node.body.memset(y, f32(1), 4 * N)
    node.orelse.memset(y, f32(2), 4 * N)
    with graph.instantiate() as execution:
        for value in (1, 0, 1, 0, 0):
            flag.fill_(value)
            y.zero_()
            execution.launch()
            same(y, 1.0 if value else 2.0)


def test_negative_zero_is_false() -> None:
    graph, y, flag = Graph(), dev(0), torch.full((1,), -0.0, device="cuda")
    graph.if_(flag).body.memset(y, f32(1), 4 * N)
    with graph.instantiate() as execution:
        execution.launch()
        same(y, 0.0)


def test_while_counts_down() -> None:
    graph = Graph()
    counter, total = torch.full((1,), 5, device="cuda", dtype=torch.int32), dev(0, 1)
    loop = graph.while_(counter)
    loop.body.kernel(kernel("known_decrement"), 1, 1, (counter, total))
    with graph.instantiate() as execution:
        for start, expected in ((5, 15.0), (0, 15.0), (3, 21.0)):
            counter.fill_(start)
            execution.launch()
            same(total, expected)


def test_switch_takes_one_body_or_none() -> None:
    graph, y = Graph(), dev(0)
    index = torch.zeros(1, device="cuda", dtype=torch.int64)
    node = graph.switch(index, 3)
    for number, body in enumerate(node.bodies):
        body.memset(y, f32(number + 1), 4 * N)
    with graph.instantiate() as execution:
        for value in (0, 1, 2, 3, -1):
            index.fill_(value)
            y.zero_()
            execution.launch()
            same(y, float(value + 1) if 0 <= value < 3 else 0.0)


def test_nodes_of_bodies_are_edited() -> None:
    graph, x, y, flag = Graph(), dev(1), dev(0), torch.ones(1, device="cuda")
    inside = add_scale(graph.if_(flag).body, y, x, 2.0)
    with graph.instantiate() as execution:
        execution.launch()
        same(y, 2.0)
        execution.update(inside, args={2: f32(9)})
        execution.launch()
        same(y, 9.0)


def test_bodies_are_captured_from_torch() -> None:
    graph, x, flag = Graph(), dev(1), torch.ones(1, device="cuda")
    node = graph.if_(flag)
    with node.body.capture() as part:
        y = x * 3
        x.copy_(y + 1)
    assert part.nodes
    with graph.instantiate() as execution:
        execution.launch()
        same(x, 4.0)
        flag.zero_()
        execution.launch()
        same(x, 4.0)


def add(t: Any, number: float) -> None:
    t.add_(number)


def dynamic_scale(t: Any, flag: Any) -> None:
    """The quick start's break, decided on the device."""
    torch.gt(t.abs().max(), 10, out=flag)
    capture_if(flag, lambda: halve(t))


def halve(t: Any) -> None:
    t.mul_(0.5)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_capture_if_decides_at_each_replay(mode: str) -> None:
    x, seq, flag = dev(1), CUDAGraphSequence(), torch.ones((), device="cuda", dtype=torch.bool)
    capture_if(flag, lambda: None)
    with breakable_graph(seq, capture_error_mode=mode):
        y = x * 2
        capture_if(flag, lambda: add(y, 10), lambda: add(y, 20))
        z = y * 3
    assert len(seq) == 1
    for value in (True, False, True, False):
        flag.fill_(value)
        seq.replay()
        same(z, 36.0 if value else 66.0)


def test_a_body_is_captured_on_a_stream_that_nobody_has_used() -> None:
    """In the global mode no other thread may allocate, and autograd's would for a new stream."""
    seqs = [CUDAGraphSequence() for _ in range(16)]
    streams = [each.stream for each in seqs]  # takes all that are idle
    x, flag, seq = dev(0), torch.ones((), device="cuda"), CUDAGraphSequence()
    with breakable_graph(seq):
        x.zero_()
        capture_if(flag, lambda: add(x, 5))
    seq.replay()
    same(x, 5.0)
    assert len(set(streams)) == 16


def test_bodies_that_allocate_and_multiply() -> None:
    a = torch.randn(128, 128, device="cuda")
    x, flag, seq = torch.randn(8, 128, device="cuda"), dev(1, 1), CUDAGraphSequence()
    out = torch.zeros(8, 128, device="cuda")

    def body() -> None:
        h = torch.relu(x @ a)
        out.copy_(h @ a)

    body()
    with breakable_graph(seq):
        out.zero_()
        capture_if(flag, body)
        bump(out)
    for value in (1.0, 0.0, 1.0):
        x.normal_()
        flag.fill_(value)
        expected = torch.relu(x @ a) @ a + 1 if value else torch.ones_like(out)
        seq.replay()
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-1)


def test_capture_while_equals_eager() -> None:
    def iterate(x: Any, going: Any) -> None:
        new = torch.cos(x)
        torch.any((new - x).abs() > 1e-4, out=going)
        x.copy_(new)

    x, going, seq = dev(0), torch.ones((), device="cuda", dtype=torch.bool), CUDAGraphSequence()
    iterate(x, going)
    with breakable_graph(seq):
        going.fill_(True)
        capture_while(going, lambda: iterate(x, going))
        x.mul_(2)
    for start in (0.0, 0.5, 3.0, 0.739085):
        expected, flag = dev(start), torch.ones((), device="cuda", dtype=torch.bool)
        capture_while(flag, lambda e=expected, f=flag: iterate(e, f))
        x.fill_(start)
        seq.replay()
        same(x, expected * 2)


def test_conditionals_lie_inside_each_other_and_beside_breaks() -> None:
    x, seq = dev(0), CUDAGraphSequence()
    outer, inner = (torch.ones((), device="cuda", dtype=torch.int32) for _ in "ab")

    def body() -> None:
        add(x, 1)
        capture_if(inner, lambda: add(x, 10), lambda: add(x, 100))

    with breakable_graph(seq):
        x.zero_()
        capture_if(outer, body)
        bump(x)
        capture_if(outer, lambda: add(x, 1000))
    for a, b, expected in ((1, 0, 1102), (1, 1, 1012), (0, 1, 1)):
        outer.fill_(a)
        inner.fill_(b)
        seq.replay()
        same(x, expected)


def test_the_quick_start_without_a_break() -> None:
    flag = torch.zeros((), device="cuda", dtype=torch.bool)
    x, seq = dev(1), CUDAGraphSequence()

    def step(t: Any) -> Any:
        y = t * 2
        dynamic_scale(y, flag)
        return y + 1

    step(x)
    with breakable_graph(seq):
        out = step(x)
    assert len(seq) == 1
    for value in (1.0, 4.0, 6.0, 100.0):
        x.fill_(value)
        seq.replay()
        same(out, (value * 2 if value * 2 <= 10 else value) + 1)


def test_random_numbers_around_a_conditional() -> None:
    x, flag, seq = dev(0), torch.ones((), device="cuda"), CUDAGraphSequence()
    with breakable_graph(seq):
        a = torch.rand(N, device="cuda")
        capture_if(flag, lambda: add(x, 1))
        b = torch.rand(N, device="cuda")
    torch.manual_seed(9)
    seq.replay()
    torch.manual_seed(9)
    same(a, torch.rand(N, device="cuda"))
    same(b, torch.rand(N, device="cuda"))
    same(x, 1.0)


def test_norms_around_and_in_a_body_are_not_taken_for_draws() -> None:
    """Their arguments may look like a generator's state, and the body is a second capture."""
    scale, seq = torch.ones(1024, device="cuda"), CUDAGraphSequence()
    x, flag = torch.rand(4, 1024, device="cuda"), torch.ones((), device="cuda")

    def norm(t: Any) -> Any:
        t = torch.nn.functional.layer_norm(t + 1, (1024,), scale, scale)
        return torch.nn.functional.rms_norm(t * t, (1024,), scale)

    def again() -> None:
        y.copy_(norm(y))

    norm(x)
    with breakable_graph(seq):
        y = norm(x)
        capture_if(flag, again)
        z = norm(y)
    for value in (1.0, 0.0):
        flag.fill_(value)
        x.uniform_()
        seq.replay()
        once = norm(x)
        close(z, norm(norm(once) if value else once))


def test_a_body_that_draws_from_a_generator_of_its_block_is_refused_and_takes_nothing() -> None:
    noise, flag, y = torch.Generator("cuda"), torch.ones((), device="cuda"), dev(0)
    seq = CUDAGraphSequence()

    def draw() -> None:
        y.copy_(torch.rand(N, device="cuda", generator=noise))

    with breakable_graph(seq, generators=[noise]):
        with pytest.raises(RuntimeError):
            capture_if(flag, draw)
        out = torch.rand(N, device="cuda", generator=noise)
    noise.manual_seed(4)
    ours = [(seq.replay(), out.clone())[1] for _ in range(2)]
    noise.manual_seed(4)
    for mine in ours:
        same(mine, torch.rand(N, device="cuda", generator=noise))
    same(y, 0.0)


def test_what_a_body_cannot_hold_is_refused_and_the_block_goes_on() -> None:
    x, flag, seq = dev(1), torch.ones((), device="cuda"), CUDAGraphSequence()

    @no_graph
    def eager(t: Any) -> None:
        t.add_(1)

    def reads() -> None:
        x.sum().item()

    def draws() -> None:
        x.copy_(torch.rand(N, device="cuda"))

    with breakable_graph(seq):
        add(x, 1)
        with pytest.raises(CaptureError, match="random"):
            capture_if(flag, draws)
        with pytest.raises(RuntimeError):
            capture_if(flag, reads)
        add(x, 1)
    x.zero_()
    seq.replay()
    same(x, 2.0)
    assert eager


def test_a_conditional_in_somebody_elses_graph() -> None:
    x, flag, graph = dev(0), torch.ones((), device="cuda"), torch.cuda.CUDAGraph()
    capture_if(flag, lambda: None)
    with torch.cuda.graph(graph):
        x.zero_()
        capture_if(flag, lambda: add(x, 5), lambda: add(x, 7))
    for value in (1.0, 0.0):
        flag.fill_(value)
        graph.replay()
        same(x, 5.0 if value else 7.0)


def test_the_bodies_of_a_segment_are_looked_into() -> None:
    x, flag, seq = dev(0), torch.ones((), device="cuda"), CUDAGraphSequence()
    with breakable_graph(seq):
        capture_if(flag, lambda: add(x, 5))
    graph = seq.segments[0].graph
    (node,) = (n for n in graph.nodes if isinstance(n, ConditionalNode))
    assert [n.kind for n in node.body.nodes] == ["kernel"]
    assert "if node" in str(graph)
    sync()
