"""Graphs built by hand: what is built runs, in the order of its edges, and can be looked into."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from breakable_cuda_graphs import CaptureError, CUDAError, Graph, UnjoinedStreamError
from breakable_cuda_graphs._driver import bindings
from breakable_cuda_graphs.graph.graph import ChildNode
from breakable_cuda_graphs.graph.nodes import KernelNode
from breakable_cuda_graphs.simulator import SimulatedKernel
from graphs import UNTOUCHED, N, array, f32, i32, launch_scale, scale, scale_kernel


@pytest.fixture
def stream(device: Any) -> Iterator[Any]:
    """A stream of the user's."""
    made = device.driver.cuStreamCreate(1)[1]
    yield made
    device.driver.cuStreamDestroy(made)


def run(graph: Graph, times: int = 1) -> None:
    """Instantiate and launch; the simulated device picks a new order each time."""
    with graph.instantiate() as execution:
        for _ in range(times):
            execution.launch()


# ---------------------------------------------------------------- building


def test_edges_order_what_runs(device: Any) -> None:
    x, y, z = array(1), array(), array()
    graph = Graph()
    fill = graph.memset(y, 0, y.nbytes)
    first = scale(graph, y, x, 2.0, after=fill)
    graph.memcpy(z, y, z.nbytes, after=first)
    for _ in range(20):
        z[:] = UNTOUCHED
        run(graph)
        assert (z == 2).all()


def test_after_takes_one_node_or_many(device: Any) -> None:
    graph, a, b, c = Graph(), array(), array(), array()
    one, two = graph.memset(a, f32(1), a.nbytes), graph.memset(b, f32(2), b.nbytes)
    both = graph.memcpy(c, a, c.nbytes, after=[one, two])
    joined = graph.join(one, two, both)
    assert set(both.predecessors) == {one, two}
    assert set(joined.predecessors) == {one, two, both}
    assert one.successors == (both, joined) or set(one.successors) == {both, joined}


def test_nodes_come_in_topological_order_ties_by_insertion(device: Any) -> None:
    graph = Graph()
    a, b, c, d = (graph.join() for _ in range(4))
    graph.link(d, a)
    graph.link(c, b)
    assert graph.nodes == (c, b, d, a)
    assert [(edge.source, edge.target, edge.kind) for edge in graph.edges] == [
        (d, a, "full"), (c, b, "full"),
    ]  # fmt: skip


def test_links_can_be_taken_out_again(device: Any) -> None:
    graph = Graph()
    a, b = graph.join(), graph.join()
    graph.link(a, b)
    assert b.predecessors == (a,)
    graph.unlink(a, b)
    assert graph.edges == ()
    with pytest.raises(ValueError, match="no such edge"):
        graph.unlink(a, b)


def test_a_programmatic_edge_is_kept(device: Any) -> None:
    graph, x, y = Graph(), array(1), array()
    a, b = scale(graph, y, x, 1), scale(graph, x, y, 1)
    graph.link(a, b, kind="programmatic")
    (edge,) = graph.edges
    assert (edge.kind, edge.from_port) == ("programmatic", 1)
    outer = Graph()
    child = outer.child(graph)
    assert child.graph.edges[0].kind == "programmatic"
    graph.unlink(a, b)
    assert graph.edges == ()


def test_a_removed_node_does_not_run(device: Any) -> None:
    graph, y = Graph(), array()
    node = graph.memset(y, 0, y.nbytes)
    graph.remove(node)
    assert len(graph) == 0
    run(graph)
    assert (y == UNTOUCHED).all()


def test_copies_in_two_and_three_dimensions(device: Any) -> None:
    source = numpy.arange(4 * 6 * 8, dtype="u1").reshape(4, 6, 8)
    target = numpy.zeros((4, 6, 8), "u1")
    graph = Graph()
    graph.memcpy(target, source, (3, 2, 2), src_pitch=8, dst_pitch=8, src_rows=6, dst_rows=6)
    run(graph)
    expected = numpy.zeros_like(target)
    expected[:2, :2, :3] = source[:2, :2, :3]
    assert (target == expected).all()
    (node,) = graph.nodes
    assert node.shape == (3, 2, 2)
    assert node.nbytes == 12


def test_a_fill_in_two_dimensions(device: Any) -> None:
    target = numpy.zeros((4, 8), "u1")
    graph = Graph()
    graph.memset(target, 5, (3, 2), pitch=8)
    run(graph)
    assert target.sum() == 5 * 6
    assert (target[:2, :3] == 5).all()


@pytest.mark.parametrize("value", [f32(1.5), ctypes.c_float(1.5)])
def test_a_typed_value_fills_elements_of_its_size(device: Any, value: Any) -> None:
    y, graph = array(), Graph()
    graph.memset(y, value, y.nbytes)
    run(graph)
    assert (y == 1.5).all()


def test_what_does_not_fit_is_refused_when_it_is_built(device: Any) -> None:
    graph, x, y, kernel = Graph(), array(1), array(), scale_kernel()
    with pytest.raises(ValueError, match="4 arguments"):
        graph.kernel(kernel, 1, 1, (y, x))
    with pytest.raises(ValueError, match=r"4 bytes.*8 bytes"):
        graph.kernel(kernel, 1, 1, (y, x, numpy.float64(2), i32(N)))
    with pytest.raises(TypeError, match="bare Python float"):
        graph.kernel(kernel, 1, 1, (y, x, 2.0, i32(N)))
    with pytest.raises(TypeError, match="str"):
        graph.kernel(kernel, 1, 1, (y, x, "two", i32(N)))
    with pytest.raises(ValueError, match="grid"):
        graph.kernel(kernel, (0, 1, 1), 1, (y, x, f32(2), i32(N)))
    with pytest.raises(ValueError, match="threads"):
        graph.kernel(kernel, 1, (1024, 2, 1), (y, x, f32(2), i32(N)))
    with pytest.raises(ValueError, match="needed"):
        graph.memcpy(y, x, y.nbytes + 1)
    with pytest.raises(ValueError, match="overlap"):
        graph.memcpy(y, x, (8, 2), dst_pitch=4)
    with pytest.raises(ValueError, match="overlap"):
        graph.memset(y, 0, (8, 2), pitch=4)
    with pytest.raises(TypeError, match="one to three"):
        graph.memcpy(y, x, (1, 1, 1, 1))
    with pytest.raises(TypeError, match="what, ptr, value"):
        graph.batch_mem_op([("write", y)])
    with pytest.raises(ValueError, match="empty"):
        graph.batch_mem_op([])
    with pytest.raises(ValueError, match="fit an element"):
        graph.memset(y, 256, y.nbytes)
    with pytest.raises(ValueError, match="must not be zero"):
        graph.memset(y, 0, 0)
    with pytest.raises(TypeError, match="not a kernel"):
        graph.kernel("scale", 1, 1)
    assert len(graph) == 0


def test_nodes_of_other_graphs_are_refused_before_the_driver_hears(device: Any) -> None:
    graph, other, y = Graph(), Graph(), array()
    stranger = other.join()
    for add in (
        lambda: graph.memset(y, 0, 4, after=stranger),
        lambda: graph.join(stranger),
        lambda: graph.remove(stranger),
        lambda: graph.link(stranger, stranger),
        lambda: graph.capture(after=stranger),
    ):
        with pytest.raises(RuntimeError, match="another graph"):
            add()
    assert len(graph) == 0


def test_a_cycle_is_the_drivers_error_and_can_be_looked_at(device: Any) -> None:
    graph = Graph()
    a, b = graph.join(), graph.join()
    graph.link(a, b)
    graph.link(b, a)
    assert set(graph.nodes) == {a, b}
    with pytest.raises(CUDAError):
        graph.instantiate()


# ---------------------------------------------------------------- children


def test_a_child_is_a_copy_of_what_the_graph_was(device: Any) -> None:
    inner, outer, x, y = Graph(), Graph(), array(1), array()
    node = scale(inner, y, x, 2.0)
    child = outer.child(inner)
    inner.update(node, args={2: f32(9)})
    run(outer)
    assert (y == 2).all()
    assert isinstance(child, ChildNode)
    (twin,) = child.graph.nodes
    assert twin != node
    assert twin.args[2].as_float32() == 2.0


def test_nodes_inside_a_child_are_edited_in_the_outer_executable(device: Any) -> None:
    inner, outer, x, y = Graph(), Graph(), array(1), array()
    scale(inner, y, x, 2.0)
    child = outer.child(inner)
    (node,) = child.graph.nodes
    with outer.instantiate() as execution:
        execution.update(node, args={2: f32(6)})
        execution.launch()
        assert (y == 6).all()


def test_a_child_graph_cannot_be_built_on(device: Any) -> None:
    inner, outer, y = Graph(), Graph(), array()
    inner.memset(y, 0, 4)
    child = outer.child(inner)
    with pytest.raises(RuntimeError, match="Graph\\(\\) of your own"):
        child.graph.memset(y, 0, 4)
    with pytest.raises(RuntimeError, match="inside a node"):
        child.graph.instantiate()
    with pytest.raises(ValueError, match="child of itself"):
        outer.child(outer)


def test_a_graph_with_allocations_is_refused_as_a_child(device: Any) -> None:
    inner = Graph()
    inner.mem_alloc(64)
    with pytest.raises(ValueError, match="mem alloc"):
        Graph().child(inner)


# ---------------------------------------------------------------- who keeps what


def test_arrays_live_as_long_as_what_names_them(device: Any) -> None:
    class Array:
        def __init__(self, value: float) -> None:
            self.data = array(value)
            self.__array_interface__ = self.data.__array_interface__

        def __len__(self) -> int:
            return len(self.data)

    graph, x, y = Graph(), Array(3), array()
    node = scale(graph, y, x, 2.0)
    alive = weakref.ref(x)
    del x
    execution = graph.instantiate()
    graph.update(node, args={1: y})
    graph.close()
    del graph, node
    gc.collect()
    assert alive() is not None, "the executable still names it"
    execution.launch()
    assert (y == 6).all()
    execution.close()
    gc.collect()
    assert alive() is None, "nothing names it any more"


def test_things_can_be_kept_for_the_graph(device: Any) -> None:
    class Thing:
        pass

    thing = Thing()
    alive = weakref.ref(thing)
    graph = Graph()
    graph.keep_alive(thing)
    del thing
    assert alive() is not None
    del graph
    gc.collect()
    assert alive() is None


def test_a_closed_graph_refuses_and_its_executables_run_on(device: Any) -> None:
    graph, y = Graph(), array()
    node = graph.memset(y, 0, y.nbytes)
    execution = graph.instantiate()
    graph.close()
    graph.close()
    for use in (
        lambda: graph.nodes, lambda: graph.join(), graph.instantiate, lambda: len(graph),
        lambda: execution.update(node, value=1), lambda: execution.disable(node),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert repr(graph) == "<Graph closed>"
    execution.launch()
    assert (y == 0).all()
    execution.close()


def test_graphs_and_executables_cannot_be_copied(device: Any) -> None:
    graph = Graph()
    execution = graph.instantiate()
    for thing in (graph, execution):
        with pytest.raises(TypeError, match="copied"):
            copy.copy(thing)
        with pytest.raises(TypeError, match="copied"):
            pickle.dumps(thing)


def test_what_is_dropped_is_given_back(device: Any) -> None:
    graph, x, y = Graph(), array(1), array()
    scale(graph, y, x, 2.0)
    for node in graph.nodes:
        assert node.predecessors == ()
    graph.instantiate().launch()
    print(graph)
    del graph, node
    from breakable_cuda_graphs._driver import release

    release.drain()
    assert [line for line in device.leaks() if "graph" in line or "exec" in line] == []


# ---------------------------------------------------------------- capturing into a graph


def test_a_part_has_its_nodes_and_its_frontier(device: Any, stream: Any) -> None:
    graph, kernel, x, y, z = Graph(), scale_kernel(), array(1), array(), array()
    with graph.capture(stream) as first:
        launch_scale(device.driver, kernel, stream, y, x, 2.0)
    with graph.capture(stream, after=first.frontier) as second:
        launch_scale(device.driver, kernel, stream, z, y, 3.0)
    (one,), (two,) = first.nodes, second.nodes
    assert isinstance(one, KernelNode)
    assert first.frontier == (one,)
    assert two.predecessors == (one,)
    assert graph.nodes == (one, two)
    with graph.instantiate() as execution:
        for _ in range(5):
            z[:] = UNTOUCHED
            execution.launch()
            assert (z == 6).all()
        execution.update(one, args={2: f32(5)})
        execution.update(two, args={2: f32(7)})
        execution.launch()
        assert (z == 35).all()


def test_parts_compose_without_events(device: Any, stream: Any) -> None:
    graph, kernel = Graph(), scale_kernel()
    x, a, b, c = array(1), array(), array(), array()
    with graph.capture(stream) as left:
        launch_scale(device.driver, kernel, stream, a, x, 2.0)
    with graph.capture(stream) as right:
        launch_scale(device.driver, kernel, stream, b, x, 3.0)
    with graph.capture(stream, after=[*left.frontier, *right.frontier]) as last:
        launch_scale(device.driver, kernel, stream, c, b, 5.0)
        launch_scale(device.driver, kernel, stream, x, a, 1.0)
    assert right.nodes[0].predecessors == ()
    assert set(last.nodes[0].predecessors) == {*left.nodes, *right.nodes}
    run(graph)
    assert (c == 15).all()
    assert (x == 2).all()


def test_an_empty_part_passes_its_own_dependencies_on(device: Any, stream: Any) -> None:
    graph = Graph()
    node = graph.join()
    with graph.capture(stream, after=node) as part:
        pass
    assert part.nodes == ()
    assert part.frontier == (node,)


def test_a_failed_part_leaves_the_graph_as_it_was(device: Any, stream: Any) -> None:
    graph, kernel, x, y = Graph(), scale_kernel(), array(1), array()
    node = scale(graph, y, x, 2.0)

    def fail() -> None:
        with graph.capture(stream, after=node):
            launch_scale(device.driver, kernel, stream, y, x, 3.0)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert graph.nodes == (node,)
    with pytest.raises(CaptureError, match="as it was"), graph.capture(stream):
        launch_scale(device.driver, kernel, stream, y, x, 3.0)
        device.driver.cuStreamSynchronize(stream)
    assert graph.nodes == (node,)
    run(graph)
    assert (y == 2).all()


def test_a_part_that_lost_work_on_a_side_stream_is_refused(device: Any, stream: Any) -> None:
    driver, kernel, x, y = device.driver, scale_kernel(), array(1), array()
    side, event = driver.cuStreamCreate(1)[1], driver.cuEventCreate(2)[1]
    graph = Graph()
    with pytest.raises(UnjoinedStreamError, match="scale"), graph.capture(stream):
        driver.cuEventRecord(event, stream)
        driver.cuStreamWaitEvent(side, event, 0)
        launch_scale(driver, kernel, side, y, x, 3.0)
    assert len(graph) == 0
    driver.cuEventDestroy(event)
    driver.cuStreamDestroy(side)


def test_a_part_with_a_forked_stream_keeps_its_shape(device: Any, stream: Any) -> None:
    driver, kernel, x, y, z = device.driver, scale_kernel(), array(1), array(), array()
    side, fork, join = driver.cuStreamCreate(1)[1], *(driver.cuEventCreate(2)[1] for _ in "ab")
    graph = Graph()
    with graph.capture(stream) as part:
        launch_scale(driver, kernel, stream, y, x, 2.0)
        driver.cuEventRecord(fork, stream)
        driver.cuStreamWaitEvent(side, fork, 0)
        launch_scale(driver, kernel, side, z, x, 3.0)
        launch_scale(driver, kernel, stream, x, y, 1.0)
        driver.cuEventRecord(join, side)
        driver.cuStreamWaitEvent(stream, join, 0)
    first, on_side, last = part.nodes
    assert set(part.frontier) == {on_side, last}
    assert first.successors == (on_side, last)
    for thing in (fork, join):
        driver.cuEventDestroy(thing)
    driver.cuStreamDestroy(side)


def test_a_stream_that_is_captured_already_is_refused_unharmed(device: Any, stream: Any) -> None:
    graph, kernel, x, y = Graph(), scale_kernel(), array(1), array()
    with graph.capture(stream) as part:
        with pytest.raises(CaptureError, match="unharmed"), graph.capture(stream):
            pass
        launch_scale(device.driver, kernel, stream, y, x, 2.0)
    assert len(part.nodes) == 1


def test_a_part_that_allocates_becomes_a_child(device: Any, stream: Any) -> None:
    driver, graph = device.driver, Graph()
    with graph.capture(stream) as part:
        address = driver.cuMemAllocAsync(256, stream)[1]
        driver.cuMemsetD32Async(address, 5, 64, stream)
        driver.cuMemFreeAsync(address, stream)
    (node,) = part.nodes
    assert isinstance(node, ChildNode)
    assert part.frontier == (node,)
    assert [n.kind for n in node.graph.nodes] == ["mem alloc", "memset", "mem free"]
    run(graph)


def test_programmatic_edges_survive_a_capture_into_a_graph(device: Any, stream: Any) -> None:
    driver, kernel, x, y = bindings.current(), scale_kernel(), array(1), array()
    graph = Graph()
    with graph.capture(stream):
        launch_scale(device.driver, kernel, stream, y, x, 2.0)
        info = driver.capture_info(stream)
        # What a launch with the attribute of programmatic serialization leaves in a capture.
        edge = bindings.types.CUgraphEdgeData()
        edge.type, edge.from_port = 1, 1
        second = driver.cuGraphAddKernelNode(
            info.graph, None, 0, driver.cuGraphKernelNodeGetParams(info.dependencies[0])
        )
        driver.add_dependencies(info.graph, info.dependencies, [second], [edge])
        driver.update_capture_dependencies(stream, [second])
    assert [(edge.kind, edge.from_port) for edge in graph.edges] == [("programmatic", 1)]


def test_a_capture_into_a_graph_cannot_keep_what_is_gone_at_its_end(device: Any) -> None:
    torch = pytest.importorskip("torch")
    held, graph = [torch.ones(2)], Graph()
    with pytest.raises(CaptureError, match="gone already"), graph.capture():
        held.pop() * 2
    assert graph.nodes == ()


def test_torch_work_is_captured_into_a_graph(device: Any) -> None:
    torch = pytest.importorskip("torch")
    graph, x = Graph(), torch.ones(4)
    with graph.capture() as part:
        y = x * 2
        y.add_(1)
    assert len(part.nodes) == 2
    with graph.instantiate() as execution:
        x.fill_(5)
        execution.launch()
        assert y.tolist() == [11.0] * 4


# ---------------------------------------------------------------- pages and pictures


def test_a_graph_prints_as_a_page(device: Any) -> None:
    graph, x, y = Graph(), array(1), array()
    scale(graph, y, x, 2.0)
    graph.memset(y, 0, 16)
    assert repr(graph) == "<Graph 2 nodes: 1 kernel, 1 memset>"
    page = str(graph)
    assert "scale  1 block of 8, 4 args" in page
    assert "fill 16 B" in page
    assert "<- nothing" in page


def test_a_page_stays_a_page(device: Any) -> None:
    graph = Graph()
    for _ in range(500):
        graph.join()
    assert len(str(graph).splitlines()) < 80
    assert "more nodes" in str(graph)


def test_dot_names_kernels_and_edges(device: Any) -> None:
    graph, x, y = Graph(), array(1), array()
    first = scale(graph, y, x, 2.0)
    scale(graph, x, y, 2.0, after=first)
    text = graph.to_dot()
    assert text.startswith("digraph")
    assert text.count("scale") == 2
    assert "n0 -> n1;" in text
    assert "digraph" in graph.to_dot(verbose=True)


def test_networkx_has_the_nodes_and_edges(device: Any) -> None:
    pytest.importorskip("networkx")
    graph, x, y = Graph(), array(1), array()
    first = scale(graph, y, x, 2.0)
    second = scale(graph, x, y, 2.0, after=first)
    drawn = graph.to_networkx()
    assert set(drawn.nodes) == {first, second}
    assert list(drawn.edges) == [(first, second)]
    assert drawn.nodes[first]["grid"] == (1, 1, 1)


# ---------------------------------------------------------------- comparing


def twins() -> tuple[Graph, Graph]:
    """Two graphs of the same work on different memory."""
    made = []
    for _ in range(2):
        graph, x, y = Graph(), array(1), array()
        fill = graph.memset(y, 0, y.nbytes)
        scale(graph, y, x, 2.0, after=fill, kernel=_KERNEL)
        made.append(graph)
    return made[0], made[1]


_KERNEL: Any = None


@pytest.fixture(autouse=True)
def one_kernel() -> Any:
    global _KERNEL
    _KERNEL = scale_kernel()
    yield
    _KERNEL = None


def test_equal_work_has_one_fingerprint(device: Any) -> None:
    one, other = twins()
    assert one.fingerprint() == other.fingerprint()
    assert one.fingerprint(addresses=True) != other.fingerprint(addresses=True)
    assert one.fingerprint(addresses=True) == one.fingerprint(addresses=True)


@pytest.mark.parametrize("change", ["grid", "edge", "node", "kernel", "nbytes"])
def test_other_work_has_another_fingerprint(device: Any, change: str) -> None:
    one, other = twins()
    fill, kernel = other.nodes
    if change == "grid":
        other.update(kernel, grid=2)
    elif change == "edge":
        other.unlink(fill, kernel)
    elif change == "node":
        other.join()
    elif change == "kernel":
        args = [a.data for a in kernel.args]
        other.update(kernel, fn=scale_kernel(name="other"), args=args)
    else:
        other.update(fill, nbytes=16)
    assert one.fingerprint() != other.fingerprint()


def test_a_fingerprint_has_no_addresses_unless_they_are_wanted(device: Any) -> None:
    """Of every kind: ranks and restarts have other addresses, contexts and handles."""

    def built() -> tuple[Graph, Any]:
        graph, x, y, event = Graph(), array(1), array(), device.driver.cuEventCreate(0)[1]
        last = graph.memcpy(y, x, 16)
        last = graph.event_record(event, after=last)
        last = graph.event_wait(event, after=last)
        last = graph.host(lambda: None, after=last)
        last = graph.batch_mem_op([("write", y, numpy.uint32(1))], after=last)
        last = graph.child(twins()[0], after=last)
        memory = graph.mem_alloc(64, after=last)
        graph.mem_free(memory, after=memory)
        graph.if_(array(1, 1)).body.memset(y, 0, 4)
        return graph, event

    (one, event), (other, another) = built(), built()
    assert not any("context" in dict(node._fields()) for node in one.nodes)
    assert one.fingerprint() == other.fingerprint()
    assert one.fingerprint(addresses=True) != other.fingerprint(addresses=True)
    for each in (event, another):
        device.driver.cuEventDestroy(each)


def test_a_difference_names_node_and_field(device: Any) -> None:
    one, other = twins()
    fill, kernel = other.nodes
    other.update(kernel, grid=(3, 1, 1))
    other.update(fill, nbytes=16)
    other.join()
    found = {(change.node.label, change.field) for change in one.diff(other)}
    assert {("scale", "grid"), ("memset", "nbytes"), ("empty", "topology")} <= found
    assert all(str(change) for change in one.diff(other))
    same, _ = twins()
    assert {change.field for change in same.diff(same)} == set()


# ---------------------------------------------------------------- kernels of other libraries


def test_a_kernel_is_found_behind_a_handle(device: Any) -> None:
    y, x, kernel = array(), array(1), scale_kernel()

    class CudaCoreKernel:
        handle = kernel.kernel_handle

    args = (y, x, f32(2), i32(N))
    for fn in (kernel, kernel.handle, int(kernel.handle), kernel.kernel_handle, CudaCoreKernel()):
        graph = Graph()
        graph.kernel(fn, 1, N, args)
        y[:] = UNTOUCHED
        run(graph)
        assert (y == 2).all()


def test_a_compiled_triton_kernel_brings_its_block_and_scratch(device: Any) -> None:
    calls: list[Any] = []
    kernel = SimulatedKernel(
        lambda *args: calls.append(args), [ctypes.c_void_p] * 3, name="triton_kernel"
    )

    class Metadata:
        num_warps, shared, global_scratch_size = 4, 0, 0

    class Compiled:
        metadata, function = Metadata(), int(kernel.handle)

    graph, x = Graph(), array(1)
    node = graph.kernel(Compiled(), 7, None, (x,))
    assert (node.grid, node.block) == ((7, 1, 1), (128, 1, 1))
    run(graph)
    assert calls == [(x.ctypes.data, 0, 0)]


def test_what_a_part_reads_is_kept_alive(device: Any) -> None:
    torch = pytest.importorskip("torch")
    graph, x = Graph(), torch.full((4,), 3.0)
    with graph.capture():
        y = x * 2
    alive = weakref.ref(x.untyped_storage())
    del x
    gc.collect()
    assert alive() is not None
    run(graph)
    assert y.tolist() == [6.0] * 4
