"""Choices and loops on the device: the same code eagerly, in a block, and built by hand."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy
import pytest

from breakable_cuda_graphs import (
    CaptureError,
    CUDAGraphSequence,
    Graph,
    UpdateError,
    breakable_graph,
    capture_if,
    capture_while,
    no_graph,
)
from breakable_cuda_graphs._driver.bindings import types
from breakable_cuda_graphs.graph.graph import ConditionalNode
from breakable_cuda_graphs.graph.nodes import KernelNode
from breakable_cuda_graphs.sequence.rebinding.rebind import rebind
from breakable_cuda_graphs.simulator import SimulatedKernel, simulated_device
from graphs import array, f32, scale

torch: Any = pytest.importorskip("torch")


def flag_of(value: Any, dtype: str = "i4") -> Any:
    return numpy.full(1, value, dtype)


def run(graph: Graph) -> None:
    with graph.instantiate() as execution:
        execution.launch()


# ---------------------------------------------------------------- built by hand


FLAGS = [
    ("?", True, True), ("?", False, False), ("u1", 2, True), ("i4", -1, True), ("i4", 0, False),
    ("i8", 1 << 40, True), ("f4", 0.5, True), ("f4", -0.0, False), ("f8", float("nan"), True),
    ("f2", 0.0, False),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "value", "expected"), FLAGS)
def test_if_takes_its_body_as_python_would(
    device: Any, dtype: str, value: Any, expected: bool
) -> None:
    graph, y, flag = Graph(), array(0), flag_of(value, dtype)
    node = graph.if_(flag)
    node.body.memset(y, f32(1), y.nbytes)
    run(graph)
    assert (y == expected).all()
    assert bool(flag) == expected


def test_a_body_may_be_empty_and_nobody_is_warned(device: Any) -> None:
    seq, x, flag = CUDAGraphSequence(), torch.zeros(4), torch.zeros(1, dtype=torch.int32)

    def fill() -> None:
        x.fill_(3)

    with breakable_graph(seq):
        capture_if(flag, lambda: None, fill)
    seq.replay()
    assert x.tolist() == [3.0] * 4
    flag.fill_(1)
    x.zero_()
    seq.replay()
    assert x.tolist() == [0.0] * 4


@pytest.mark.parametrize("swallowed", [False, True])
def test_a_body_that_launches_into_the_capture_around_it_is_refused(
    device: Any, swallowed: bool
) -> None:
    """It would run whatever the flag says."""
    seq, y, flag = CUDAGraphSequence(), array(0), flag_of(0)
    outer = types.CUstream(seq.stream.handle)

    def body() -> None:
        assert not int(device.driver.cuMemsetD32Async(y.ctypes.data, 1, 1, outer)[0])

    with pytest.raises(CaptureError, match="body of capture_if has launched on the stream of the"):
        with breakable_graph(seq):
            with contextlib.suppress(CaptureError if swallowed else ()):
                capture_if(flag, body)
    assert len(seq) == 0


def test_a_node_without_a_second_body_says_how_to_make_one(device: Any) -> None:
    graph = Graph()
    for node in (graph.if_(flag_of(1)), graph.switch(flag_of(1), 3)):
        with pytest.raises(RuntimeError, match=r"no second body.*orelse=True"):
            _ = node.orelse


@pytest.mark.parametrize("shape", ["13", "12.9"])
@pytest.mark.parametrize("value", [0, 1])
def test_if_and_else(shape: str, value: int) -> None:
    """Drivers before 13.0 get two nodes with opposite values."""
    with simulated_device(seed=3, shape=shape) as device:
        graph, y, z, flag = Graph(), array(0), array(0), flag_of(value)
        node = graph.if_(flag, orelse=True)
        assert len(node.bodies) == 2
        node.body.memset(y, f32(1), y.nbytes)
        node.orelse.memset(z, f32(2), z.nbytes)
        last = graph.memset(array(), 0, 4, after=node)
        assert node in last.predecessors
        for now in (value, 1 - value, value):
            y[:] = z[:] = 0
            flag[0] = now
            run(graph)
            assert (y == (1 if now else 0)).all()
            assert (z == (0 if now else 2)).all()
        kinds = sum(isinstance(each, ConditionalNode) for each in graph.nodes)
        assert kinds == (1 if shape == "13" else 2)
        del graph, node, last
        assert device.findings == []


def count_down(counter: int) -> None:
    cell = ctypes.c_int.from_address(counter)
    cell.value -= 1


def test_while_reads_the_flag_after_each_round(device: Any) -> None:
    kernel = SimulatedKernel(count_down, (ctypes.c_void_p,), name="count_down")
    counter, y, x = flag_of(5), array(1), array(1)
    graph = Graph()
    loop = graph.while_(counter)
    first = scale(loop.body, x, y, 2.0)
    copied = loop.body.memcpy(y, x, y.nbytes, after=first)
    loop.body.kernel(kernel, 1, 1, (counter,), after=copied)
    with graph.instantiate() as execution:
        execution.launch()
        assert counter[0] == 0
        assert (y == 32).all()
        execution.launch()
        assert (y == 32).all(), "a false flag runs nothing"


def test_a_while_body_can_grow_between_executables(device: Any) -> None:
    kernel = SimulatedKernel(count_down, (ctypes.c_void_p,), name="count_down")
    counter, y, z = flag_of(2), array(), array()
    graph = Graph()
    loop = graph.while_(counter)
    loop.body.kernel(kernel, 1, 1, (counter,))
    run(graph)
    assert counter[0] == 0
    loop.body.memset(y, f32(3), y.nbytes)
    counter[0] = 2
    run(graph)
    assert counter[0] == 0
    assert (y == 3).all()
    assert len([n for n in loop.body.nodes if isinstance(n, KernelNode)]) == 2
    assert z is not None


@pytest.mark.parametrize("index", [-1, 0, 1, 2, 3, 1 << 33])
def test_switch_takes_the_body_of_its_number_or_none(device: Any, index: int) -> None:
    graph, y = Graph(), array(0)
    node = graph.switch(flag_of(index, "i8"), 3)
    assert node.type == "switch"
    for number, body in enumerate(node.bodies):
        body.memset(y.ctypes.data + 4 * number, f32(1), 4)
    run(graph)
    assert y[:3].tolist() == [float(index == number) for number in range(3)]


def test_bodies_are_filled_by_capture(device: Any) -> None:
    graph, x, flag = Graph(), torch.ones(4), flag_of(1)
    node = graph.if_(flag)
    with node.body.capture() as part:
        x.mul_(3)
    assert len(part.nodes) == 1
    run(graph)
    assert x.tolist() == [3.0] * 4


def test_conditionals_lie_inside_each_other(device: Any) -> None:
    outer_flag, inner_flag, y = flag_of(1), flag_of(0), array(0)
    graph = Graph()
    outer = graph.if_(outer_flag)
    inner = outer.body.if_(inner_flag, orelse=True)
    inner.orelse.memset(y, f32(4), y.nbytes)
    run(graph)
    assert (y == 4).all()
    assert set(graph.find("*", ConditionalNode)) >= {outer, inner}


def test_nodes_of_bodies_are_edited_in_the_executable(device: Any) -> None:
    graph, x, y, flag = Graph(), array(1), array(), flag_of(1)
    node = graph.if_(flag)
    inside = scale(node.body, y, x, 2.0)
    with graph.instantiate() as execution:
        execution.update(inside, args={2: f32(9)})
        execution.launch()
        assert (y == 9).all()
        with pytest.raises(UpdateError):
            execution.update(node, grid=1)


def test_a_conditional_is_read_back(device: Any) -> None:
    graph = Graph()
    node = graph.while_(flag_of(0))
    node.body.memset(array(), 0, 4)
    (found,) = (n for n in graph.nodes if isinstance(n, ConditionalNode))
    assert found == node
    assert (found.type, found.condition) == ("while", node.condition)
    assert [n.kind for n in found.body.nodes] == ["memset"]
    assert "while node" in str(graph)
    assert "subgraph" in graph.to_dot()
    assert graph.fingerprint() == graph.fingerprint()


@pytest.mark.parametrize(
    ("flag", "why"),
    [(5, "no array"), (numpy.zeros(2, "i4"), "one element"), (numpy.zeros(1, "c8"), "complex|c8")],
)
def test_what_is_no_flag_is_refused(device: Any, flag: Any, why: str) -> None:
    graph = Graph()
    with pytest.raises(TypeError, match=why):
        graph.if_(flag)
    assert len(graph) == 0
    with pytest.raises(TypeError, match="f4"):
        graph.switch(flag_of(1, "f4"), 2)


def test_a_body_takes_few_kinds_of_nodes(device: Any) -> None:
    graph = Graph()
    node = graph.if_(flag_of(1))
    with pytest.raises(CaptureError, match="cannot hold a host node"):
        node.body.host(lambda: None)
    stream = device.driver.cuStreamCreate(1)[1]
    with pytest.raises(CaptureError, match="body of a conditional"), node.body.capture(stream):
        address = device.driver.cuMemAllocAsync(64, stream)[1]
        device.driver.cuMemFreeAsync(address, stream)
    assert node.body.nodes == ()
    device.driver.cuStreamDestroy(stream)


# ---------------------------------------------------------------- in a block


def test_capture_if_decides_at_each_replay(device: Any) -> None:
    x, flag, seq = torch.ones(4), torch.tensor(1), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        capture_if(flag, lambda: add(y, 10), lambda: add(y, 20))
        y.mul_(3)
    assert len(seq) == 1, "no break"
    for value in (1, 0, 5, 0):
        flag.fill_(value)
        seq.replay()
        assert y.tolist() == [36.0 if value else 66.0] * 4
    seq.reset()


def add(t: Any, number: float) -> None:
    t.add_(number)


def test_capture_if_is_plain_python_outside(device: Any) -> None:
    x = torch.ones(4)
    capture_if(torch.tensor(0), lambda: add(x, 1))
    assert x.tolist() == [1.0] * 4
    capture_if(torch.tensor(0.5), lambda: add(x, 1))
    assert x.tolist() == [2.0] * 4
    capture_if(torch.tensor(False), lambda: add(x, 1), lambda: add(x, 5))
    assert x.tolist() == [7.0] * 4


def iterate(x: Any, going: Any) -> None:
    """One step towards the fixed point of cos, and whether it moved."""
    new = torch.cos(x)
    going.copy_(((new - x).abs() > 1e-3).any())
    x.copy_(new)


def test_capture_while_counts_as_eager_does(device: Any) -> None:
    x, going, seq = torch.zeros(3), torch.tensor(True), CUDAGraphSequence()
    with breakable_graph(seq):
        going.fill_(True)
        capture_while(going, lambda: iterate(x, going))
        x.mul_(2)
    for start in (0.0, 0.5, 3.0):
        expected, flag = torch.full((3,), start), torch.tensor(True)
        capture_while(flag, lambda e=expected, f=flag: iterate(e, f))
        x.fill_(start)
        seq.replay()
        assert torch.equal(x, expected * 2)
    seq.reset()


def test_conditionals_of_a_block_lie_inside_each_other(device: Any) -> None:
    x, seq = torch.zeros(2), CUDAGraphSequence()
    outer, inner = torch.tensor(1), torch.tensor(0)

    def body() -> None:
        add(x, 1)
        capture_if(inner, lambda: add(x, 10), lambda: add(x, 100))

    with breakable_graph(seq):
        x.zero_()
        capture_if(outer, body)
    for a, b, expected in ((1, 0, 101), (1, 1, 11), (0, 1, 0)):
        outer.fill_(a)
        inner.fill_(b)
        seq.replay()
        assert x.tolist() == [expected] * 2
    seq.reset()


def test_a_block_goes_on_behind_a_conditional_with_breaks(device: Any) -> None:
    @no_graph
    def double(t: Any) -> None:
        t.mul_(2)

    x, flag, seq = torch.zeros(2), torch.tensor(1), CUDAGraphSequence()
    with breakable_graph(seq):
        x.fill_(1)
        capture_if(flag, lambda: add(x, 1))
        double(x)
        capture_if(flag, lambda: add(x, 1))
    assert len(seq) == 3
    for value, expected in ((1, 5), (0, 2)):
        flag.fill_(value)
        seq.replay()
        assert x.tolist() == [expected] * 2
    seq.reset()


def test_the_bodies_of_a_segment_are_looked_into_and_rebound(device: Any) -> None:
    x, flag, seq = torch.ones(2), torch.tensor(1), CUDAGraphSequence()
    with breakable_graph(seq):
        capture_if(flag, lambda: add(x, 1))
    node = next(n for n in seq.segments[0].graph.nodes if isinstance(n, ConditionalNode))
    (inside,) = node.body.nodes
    assert isinstance(inside, KernelNode)
    new, other = torch.full((2,), 5.0), torch.tensor(0)
    report = rebind(seq, {x: new, flag: other})
    assert report.nodes == 2
    seq.replay()
    assert new.tolist() == [5.0, 5.0]
    other.fill_(1)
    seq.replay()
    assert new.tolist() == [6.0, 6.0]
    seq.reset()


def test_a_body_that_fails_leaves_the_capture_as_it_was(device: Any) -> None:
    x, flag, seq = torch.ones(2), torch.tensor(1), CUDAGraphSequence()

    def fail() -> None:
        add(x, 1)
        raise KeyError("mine")

    with breakable_graph(seq):
        add(x, 1)
        with pytest.raises(KeyError, match="mine"):
            capture_if(flag, fail)
        with pytest.raises(TypeError, match="return None"):
            capture_if(flag, lambda: x.add_(1))
        add(x, 1)
    x.zero_()
    seq.replay()
    assert x.tolist() == [2.0, 2.0]
    seq.reset()


def test_a_loop_in_a_part_of_a_graph(device: Any) -> None:
    graph, x, going = Graph(), torch.zeros(3), torch.tensor(True)
    with graph.capture():
        going.fill_(True)
        capture_while(going, lambda: iterate(x, going))
    expected, flag = torch.zeros(3), torch.tensor(True)
    capture_while(flag, lambda: iterate(expected, flag))
    run(graph)
    assert torch.equal(x, expected)
