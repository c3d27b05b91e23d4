"""Edits of executables reach the next launch, and only it; what is refused changes nothing."""

from __future__ import annotations

import struct
from typing import Any

import numpy
import pytest

from breakable_cuda_graphs import (
    CUDAGraphSequence,
    Graph,
    UpdateError,
    breakable_graph,
    force_no_graph,
)
from breakable_cuda_graphs.graph.nodes import MemcpyNode, MemsetNode

from .helpers import N, bump, busy, dev, same, sync, torch
from .kernels import add_scale, f32, found, i32, kernel, launch_scale

pytestmark = pytest.mark.gpu


class Scene:
    """y = x * 2; between; z = y * 3."""

    def __init__(self, between: Any = bump) -> None:
        kernel()
        self.x, self.y, self.z, self.seq = dev(1), dev(0), dev(0), CUDAGraphSequence()
        with breakable_graph(self.seq):
            launch_scale(self.y, self.x, 2.0)
            between(self.y)
            launch_scale(self.z, self.y, 3.0)
        sync()
        self.first, self.second = found(self.seq, "known_scale")

    def check(self, right: float, what: str = "the result") -> None:
        self.z.fill_(-1)
        self.seq.replay()
        same(self.z, right, what)


def edit(pair: Any, **changes: Any) -> None:
    segment, node = pair
    segment.exec.update(node, **changes)


def told(pair: Any) -> float:
    segment, node = pair
    return next(n for n in segment.graph.nodes if n == node).args[2].as_float32()


def no_break(_: Any) -> None:
    force_no_graph()


@pytest.mark.parametrize(
    ("between", "offset"), [(bump, 1), (no_break, 0)], ids=["with a break", "fused"]
)
def test_edits_reach_the_executable_that_runs(between: Any, offset: int) -> None:
    scene, other = Scene(between), dev(10)
    scene.check((2 + offset) * 3)
    edit(scene.first, args={2: f32(10)})
    scene.check((10 + offset) * 3)
    edit(scene.first, args={1: other})
    scene.check((100 + offset) * 3)
    edit(scene.second, args={2: f32(1)})
    scene.check(100 + offset)
    assert (told(scene.first), told(scene.second)) == (10.0, 1.0)
    segment, node = scene.second
    segment.exec.disable(node)
    scene.check(-1)
    edit(scene.second, args={2: f32(2)})
    segment.exec.enable(node)
    scene.check((100 + offset) * 2)


def test_edits_survive_another_joining() -> None:
    scene, out = Scene(no_break), dev(0)
    edit(scene.first, args={2: f32(10)})
    with breakable_graph(scene.seq):
        launch_scale(out, scene.z, 2.0)
    scene.check(30)
    same(out, 60)
    edit(scene.first, args={2: f32(1)})
    scene.check(3)


def test_edits_of_a_segment_with_random_numbers() -> None:
    kernel()
    x, y, seq = dev(1), dev(0), CUDAGraphSequence()
    with breakable_graph(seq):
        noise = torch.rand(N, device="cuda")
        launch_scale(y, x, 2.0)
    ((segment, node),) = found(seq, "known_scale")
    torch.manual_seed(5)
    seq.replay()
    same(y, 2.0)
    first = noise.clone()
    segment.exec.update(node, args={2: f32(7)})
    torch.manual_seed(5)
    seq.replay()
    same(y, 7.0)
    same(noise, first, "the random numbers")
    segment.exec.disable(node)
    y.fill_(-1)
    seq.replay()
    same(y, -1.0)


def test_replays_in_flight_keep_the_old_values() -> None:
    scene, results = Scene(), []
    busy(50)
    for factor in (2, 10, 20, 30):
        edit(scene.first, args={2: f32(factor)})
        scene.seq.replay()
        results.append(scene.z.clone())
    for got, factor in zip(results, (2, 10, 20, 30), strict=True):
        same(got, (factor + 1.0) * 3, f"the replay with factor {factor}")


BAD: dict[str, dict[str, Any]] = {
    "a double for a float": {"args": {2: numpy.float64(5)}},
    "a good value beside a bad one": {"args": {2: f32(5), 3: numpy.float64(5)}},
    "an argument that is not there": {"args": {4: f32(5)}},
    "an empty grid": {"grid": (0, 1, 1)},
    "a block that is too large": {"block": (4096, 1, 1)},
    "more shared memory than there is": {"shared_bytes": 1 << 30},
    "what only copies have": {"src": 0},
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_edit_changes_nothing(kind: str) -> None:
    scene = Scene()
    with pytest.raises(UpdateError, match="known_scale"):
        edit(scene.first, **BAD[kind])
    scene.check(9)
    assert told(scene.first) == 2.0
    edit(scene.first, args={2: f32(3)})
    scene.check(12)


def test_grid_block_and_count() -> None:
    scene = Scene()
    edit(scene.first, block=N // 2, grid=2)
    scene.check(9)
    edit(scene.first, args={3: i32(N // 2)})
    scene.y.fill_(5)
    scene.seq.replay()
    same(scene.z[: N // 2], 9.0)
    same(scene.z[N // 2 :], 18.0)


def test_copies_and_fills_captured_from_a_stream() -> None:
    from breakable_cuda_graphs._driver import bindings

    x, other, y, z, seq = dev(1), dev(8), dev(0), dev(0), CUDAGraphSequence()
    driver = bindings.current()
    one = struct.unpack("<I", struct.pack("<f", 1.0))[0]
    with breakable_graph(seq):
        stream = torch.cuda.current_stream().cuda_stream
        driver.cuMemcpyDtoDAsync(y.data_ptr(), x.data_ptr(), 4 * N, stream)
        driver.cuMemsetD32Async(z.data_ptr(), one, N, stream)
    segment = seq.segments[0]
    copy, fill = segment.graph.nodes
    assert isinstance(copy, MemcpyNode)
    assert isinstance(fill, MemsetNode)
    segment.exec.update(copy, src=other)
    segment.exec.update(fill, value=f32(3))
    seq.replay()
    same(y, 8.0)
    same(z, 3.0)
    segment.exec.update(copy, dst=z, src=x, nbytes=2 * N)
    y.zero_()
    seq.replay()
    same(y, 0.0)
    pinned = torch.full((N,), 5.0).pin_memory()
    with pytest.raises(UpdateError, match="kind of memory"):
        segment.exec.update(copy, src=pinned.data_ptr())
    with pytest.raises(UpdateError, match="kind of memory"):
        segment.exec.update(copy, src=torch.full((N,), 5.0).data_ptr())


def test_a_node_takes_the_parameters_of_a_captured_operation() -> None:
    graph, x, y = Graph(), dev(1), dev(0)
    node = add_scale(graph, y, x, 2.0)
    with graph.instantiate() as execution:
        stream = torch.cuda.Stream()
        with execution.capture_update(node, stream):
            launch_scale(y, x, 13.0)
        execution.launch()
        same(y, 13.0)
        with pytest.raises(UpdateError, match="just one"), execution.capture_update(node, stream):
            launch_scale(y, x, 13.0)
            launch_scale(y, x, 14.0)
        execution.launch()
        same(y, 13.0)


def test_a_whole_update_and_its_refusals() -> None:
    x, y, z = dev(1), dev(0), dev(0)

    def like(first: float, second: float, extra: bool = False, linked: bool = True) -> Graph:
        graph = Graph()
        one = add_scale(graph, y, x, first)
        add_scale(graph, z, y, second, after=one if linked else None)
        if extra:
            graph.join()
        return graph

    execution = like(2.0, 3.0).instantiate()
    execution.launch()
    same(z, 6.0)
    execution.update_from(like(5.0, 7.0))
    execution.launch()
    same(z, 35.0)
    for graph, field in ((like(1, 1, extra=True), "topology"), (like(1, 1, linked=False), "edges")):
        for _ in range(3):
            with pytest.raises(UpdateError, match="TOPOLOGY") as caught:
                execution.update_from(graph)
            assert caught.value.field == field
            assert caught.value.node is not None
            z.zero_()
            execution.launch()
            same(z, 35.0)
    other = Graph()
    one = add_scale(other, y, x, 1)
    other.memset(z, 0, 4 * N, after=one)
    with pytest.raises(UpdateError, match="type") as caught:
        execution.update_from(other)
    assert caught.value.field == "kind"
    execution.close()


def refusals() -> dict[str, tuple[Any, Any, str]]:
    """Two graphs of one topology of which the second cannot be taken over, and the field."""
    x, y = dev(1), dev(0)
    rows = torch.zeros(8, 8, device="cuda", dtype=torch.uint8)

    def launched(**attributes: Any) -> Graph:
        graph = Graph()
        graph.kernel(kernel(), 2, N, (y, x, f32(2), i32(N)), **attributes)
        return graph

    def filled(height: int) -> Graph:
        graph = Graph()
        graph.memset(rows, 1, (3, height), pitch=8)
        return graph

    def choosing(bodies: int) -> Graph:
        graph = Graph()
        for body in graph.switch(torch.zeros(1, device="cuda", dtype=torch.int32), bodies).bodies:
            body.memset(y, 0, 16)
        return graph

    return {
        "a cooperative launch": (launched(), launched(cooperative=True), "attrs.cooperative"),
        "a priority": (launched(priority=0), launched(priority=-2), "attrs.priority"),
        "cluster dimensions": (launched(cluster=1), launched(cluster=2), "attrs.cluster"),
        "rows of a fill": (filled(2), filled(3), "nbytes"),
        "bodies of a switch": (choosing(2), choosing(3), "bodies"),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "a cooperative launch", "a priority", "cluster dimensions", "rows of a fill",
        "bodies of a switch",
    ],
)  # fmt: skip
def test_what_an_executable_keeps_for_good_is_named(kind: str) -> None:
    before, after, field = refusals()[kind]
    with before.instantiate() as execution:
        with pytest.raises(UpdateError) as caught:
            execution.update_from(after)
        assert caught.value.field == field
        assert caught.value.node is not None
        assert field in {change.field for change in caught.value.changes}
        execution.launch()
        sync()


def test_a_kernel_of_another_context_is_named() -> None:
    from cuda.bindings import driver as raw

    from breakable_cuda_graphs._driver import bindings, nvrtc

    from .kernels import SOURCE

    driver = bindings.current()
    before = driver.cuCtxGetCurrent()
    code, context = raw.cuCtxCreate(None, 0, 0)
    assert not int(code)
    try:
        module = driver.cuModuleLoadData(nvrtc._compile(SOURCE, nvrtc._architecture(driver)))
        stranger = driver.cuModuleGetFunction(module, b"known_scale")
    finally:
        driver.cuCtxSetCurrent(before)
    x, y, graph = dev(1), dev(0), Graph()
    args = (y, x, f32(2), i32(N))
    node = graph.kernel(kernel(), 1, N, args)
    with graph.instantiate() as execution:
        with pytest.raises(UpdateError) as caught:
            execution.update(node, fn=stranger, args=args)
        assert (caught.value.node, caught.value.field) == (node, "fn")
        execution.launch()
        same(y, 2.0)
    driver.cuCtxDestroy(context)


def test_disabled_nodes_stay_disabled_after_a_whole_update() -> None:
    x, y = dev(1), dev(0)
    graph, other = Graph(), Graph()
    node = add_scale(graph, y, x, 2.0)
    add_scale(other, y, x, 3.0)
    with graph.instantiate() as execution:
        execution.disable(node)
        execution.update_from(other)
        y.fill_(-1)
        execution.launch()
        same(y, -1.0)
        execution.enable(node)
        execution.launch()
        same(y, 3.0)


def test_a_fused_segment_takes_over_a_whole_graph() -> None:
    scene = Scene(no_break)
    graph = Graph()
    add_scale(graph, scene.y, scene.x, 8.0)
    scene.first[0].exec.update_from(graph)
    scene.check(24)


def test_a_hopper_product_is_edited_in_its_packed_form() -> None:
    """Its one large argument is written back as it was: only the launch shape's bytes are the same."""
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    out, seq = torch.empty_like(a), CUDAGraphSequence()
    with breakable_graph(seq):
        torch.mm(a, b, out=out)
    segment = seq.segments[0]
    expected = a @ b
    for node in [n for n in segment.graph.nodes if n.kind == "kernel"]:
        segment.exec.update(node, args=[arg.data for arg in node.args])
        segment.exec.update(node, grid=node.grid)
    out.zero_()
    seq.replay()
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-1)


def test_an_edited_sequence_is_embedded_as_it_is() -> None:
    scene, outer = Scene(no_break), torch.cuda.CUDAGraph()
    edit(scene.first, args={2: f32(10)})
    scene.check(30)
    with torch.cuda.graph(outer):
        scene.seq.replay()
    scene.z.fill_(-1)
    outer.replay()
    same(scene.z, 30.0)
