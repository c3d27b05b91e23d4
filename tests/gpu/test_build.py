"""Graphs built by hand: every kind this driver makes, read back, edited and run."""

from __future__ import annotations

import ctypes

import numpy
import pytest

from breakable_cuda_graphs import CaptureError, Graph, UnjoinedStreamError
from breakable_cuda_graphs._driver import bindings, nvrtc
from breakable_cuda_graphs.graph.graph import ChildNode
from breakable_cuda_graphs.graph.nodes import (
    BatchMemOpNode,
    EventRecordNode,
    HostNode,
    MemAllocNode,
)

from . import libraries
from .helpers import N, dev, same, sync, torch
from .kernels import (
    SOURCE,
    add_scale,
    cupy_scale,
    f32,
    i32,
    kernel,
    launch_scale,
    numba_scale,
    triton_double,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*Grid size.*"),  # Numba on small launches
]


def run(graph: Graph) -> None:
    with graph.instantiate() as execution:
        execution.launch()
        sync()


def test_every_kind_round_trips() -> None:
    x, y, z, pinned = dev(1), dev(0), dev(0), torch.zeros(N).pin_memory()
    event, called = torch.cuda.Event(), []
    event.record()
    graph, inner = Graph(), Graph()
    add_scale(inner, z, y, 3.0)
    fill = graph.memset(y, f32(5), 4 * N)
    first = add_scale(graph, y, x, 2.0, after=fill)
    child = graph.child(inner, after=first)
    copy = graph.memcpy(pinned, z, 4 * N, after=child)
    record = graph.event_record(event, after=copy)
    join = graph.join(record)
    host = graph.host(lambda: called.append(1), after=join)
    kinds = [node.kind for node in graph.nodes]
    assert kinds == [
        "memset", "kernel", "child", "memcpy", "event record", "empty", "host",
    ]  # fmt: skip
    assert isinstance(record, EventRecordNode)
    assert record.event == event.cuda_event
    assert isinstance(host, HostNode)
    assert isinstance(child, ChildNode)
    with graph.instantiate() as execution:
        execution.launch()
        sync()
        assert pinned.tolist() == [6.0] * N
        assert called == [1]
        execution.update(first, args={2: f32(4)})
        execution.update(child.graph.nodes[0], args={2: f32(10)})
        execution.launch()
        sync()
        assert pinned.tolist() == [40.0] * N
        execution.disable(copy)
        pinned.zero_()
        execution.launch()
        sync()
        assert pinned.tolist() == [0.0] * N
        assert called == [1, 1, 1]


def test_words_of_memory_are_written_and_edited() -> None:
    words, graph = torch.zeros(4, device="cuda", dtype=torch.int32), Graph()
    node = graph.batch_mem_op([("write", words, i32(7)), ("wait_geq", words, i32(5))])
    assert [(each.name, each.nbytes, each.value) for each in node.operations] == [
        ("write", 4, 7), ("wait_geq", 4, 5),
    ]  # fmt: skip
    assert {each.address for each in node.operations} == {words.data_ptr()}
    with graph.instantiate() as execution:
        execution.launch()
        sync()
        assert words.tolist() == [7, 0, 0, 0]
        execution.update(
            node, operations=[("write", words[2:], i32(9)), ("wait_eq", words[2:], i32(9))]
        )
        words.zero_()
        execution.launch()
        sync()
        assert words.tolist() == [0, 0, 9, 0]
    changed = graph.update(
        node, operations=[("write", words[1:], i32(3)), ("wait_geq", words[1:], i32(1))]
    )
    assert changed.operations[0].address == words[1:].data_ptr()


def test_words_that_a_stream_writes_are_captured() -> None:
    words, graph, driver = (
        torch.zeros(4, device="cuda", dtype=torch.int32),
        Graph(),
        bindings.current(),
    )
    with graph.capture() as part:
        stream = bindings.types.CUstream(torch.cuda.current_stream().cuda_stream)
        driver.cuStreamWriteValue32(stream, words.data_ptr(), 5, 0)
    (node,) = part.nodes
    assert isinstance(node, BatchMemOpNode)
    assert [(each.name, each.value) for each in node.operations] == [("write", 5)]
    run(graph)
    assert words.tolist() == [5, 0, 0, 0]


def test_a_host_node_is_edited() -> None:
    called: list[int] = []
    graph = Graph()
    node = graph.host(lambda: called.append(1))
    with graph.instantiate() as execution:
        execution.launch()
        sync()
        execution.update(node, fn=lambda: called.append(2))
        for _ in range(2):
            execution.launch()
            sync()
    assert called == [1, 2, 2]


def test_a_priority_is_given_and_read_back() -> None:
    x, y, graph = dev(1), dev(0), Graph()
    args = (y, x, f32(2), i32(N))
    node = graph.kernel(kernel(), 1, N, args, priority=-2)
    assert node.attrs.priority == -2
    with graph.capture(torch.cuda.Stream(priority=-1)) as part:
        y.add_(1)
    assert part.nodes[0].attrs.priority == -1  # type: ignore[attr-defined]
    run(graph)


def test_memory_of_a_graph() -> None:
    graph, out = Graph(), dev(0)
    memory = graph.mem_alloc(4 * N)
    assert isinstance(memory, MemAllocNode)
    fill = graph.memset(memory.address, f32(3), 4 * N, after=memory)
    copy = graph.memcpy(out, memory.address, 4 * N, after=fill)
    graph.mem_free(memory, after=copy)
    assert [n.kind for n in graph.nodes] == ["mem alloc", "memset", "memcpy", "mem free"]
    with graph.instantiate() as execution:
        for _ in range(3):
            out.zero_()
            execution.launch()
            same(out, 3.0)


def test_event_waits_and_records_order_streams() -> None:
    x, y, event = dev(1), dev(0), torch.cuda.Event()
    event.record()  # torch makes the event itself only now
    graph = Graph()
    wait = graph.event_wait(event)
    add_scale(graph, y, x, 2.0, after=wait)
    side = torch.cuda.Stream()
    with graph.instantiate() as execution:
        torch.cuda._sleep(20_000_000)
        x.fill_(7)
        event.record()
        execution.launch(side)
        side.synchronize()
        same(y, 14.0)


def test_copies_in_more_dimensions() -> None:
    source = torch.arange(4 * 6 * 8, device="cuda", dtype=torch.uint8).view(4, 6, 8)
    target = torch.zeros_like(source)
    graph = Graph()
    node = graph.memcpy(target, source, (3, 2, 2), src_pitch=8, dst_pitch=8, src_rows=6, dst_rows=6)
    run(graph)
    expected = torch.zeros_like(source)
    expected[:2, :2, :3] = source[:2, :2, :3]
    assert torch.equal(target, expected)
    assert node.shape == (3, 2, 2)
    flat = Graph()
    flat.memset(target, 9, (4, 6), pitch=8)
    run(flat)
    assert int((target.view(24, 8)[:6, :4] == 9).sum()) == 24


def test_pageable_host_memory_is_copied() -> None:
    source, target = numpy.full(N, 3, "f4"), dev(0)
    graph = Graph()
    graph.memcpy(target, source, 4 * N)
    run(graph)
    same(target, 3.0)


def test_cooperative_and_cluster_launches_are_kept() -> None:
    graph, out = Graph(), dev(0, 32)
    function = kernel("known_shared")
    node = graph.kernel(function, 4, 32, (out,), shared_bytes=128, cluster=(2, 1, 1))
    plain = graph.kernel(function, 4, 32, (out,), shared_bytes=128, cooperative=True, after=node)
    assert node.attrs.cluster == (2, 1, 1)
    assert plain.attrs.cooperative
    run(graph)
    assert out.tolist() == [float(i) for i in reversed(range(32))]


def test_parts_are_captured_into_a_graph_and_edited() -> None:
    graph, stream = Graph(), torch.cuda.Stream()
    x, y, z = dev(1), dev(0), dev(0)
    kernel()
    with graph.capture(stream) as first:
        launch_scale(y, x, 2.0, stream=stream.cuda_stream)
    with graph.capture(stream, after=first.frontier) as second:
        launch_scale(z, y, 3.0, stream=stream.cuda_stream)
    (node,), (last,) = first.nodes, second.nodes
    assert last.predecessors == (node,)
    with graph.instantiate() as execution:
        execution.launch()
        same(z, 6.0)
        execution.update(node, args={2: f32(5)})
        execution.update(last, args={2: f32(7)})
        execution.launch()
        same(z, 35.0)


def test_torch_and_cublas_are_captured_into_a_graph() -> None:
    graph = Graph()
    layer = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), graph.capture() as part:
        y = torch.relu(layer(x))
        total = y.float().sum(0)
    assert part.nodes
    with graph.instantiate() as execution:
        for _ in range(3):
            x.normal_()
            with torch.no_grad():
                expected = torch.relu(layer(x)).float().sum(0)
            execution.launch()
            torch.testing.assert_close(total, expected, rtol=2e-2, atol=2e-1)


def test_parts_that_are_not_linked_do_not_share_memory() -> None:
    graph, x = Graph(), dev(1, 1 << 20)
    results = []
    for number in range(2):
        with graph.capture():
            y = x
            for _ in range(8):
                y = y * 2 + number
            results.append(y)
    with graph.instantiate() as execution:
        for value in (1.0, 3.0, 5.0):
            x.fill_(value)
            execution.launch()
            for number, got in enumerate(results):
                want = value
                for _ in range(8):
                    want = want * 2 + number
                same(got, want)


def test_a_failed_part_leaves_all_as_it_was() -> None:
    graph, x, y = Graph(), dev(1), dev(0)
    node = add_scale(graph, y, x, 2.0)

    def fail() -> None:
        with graph.capture(after=node):
            (x * 2).sum().item()

    with pytest.raises(RuntimeError):
        fail()
    with pytest.raises(CaptureError), graph.capture():
        torch.rand(4, device="cuda")
    side = torch.cuda.Stream()
    with pytest.raises(UnjoinedStreamError), graph.capture():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.mul_(2)
    assert graph.nodes == (node,)
    run(graph)
    same(y, 2.0)
    assert 0 <= float(torch.rand(4, device="cuda").sum()) <= 4


def test_random_numbers_go_on_after_a_part() -> None:
    torch.manual_seed(3)
    expected = [torch.rand(8, device="cuda") for _ in range(2)]
    torch.manual_seed(3)
    first = torch.rand(8, device="cuda")
    graph, x = Graph(), dev(1)
    with graph.capture():
        x.mul_(2)
    same(first, expected[0])
    same(torch.rand(8, device="cuda"), expected[1])


def test_a_kernel_of_cupy_is_a_node() -> None:
    raw, x, y = cupy_scale(), dev(1), dev(0)
    graph = Graph()
    graph.kernel(raw, 1, N, (libraries.cupy().asarray(y), x, f32(4), i32(N)))
    run(graph)
    same(y, 4.0)


def test_a_kernel_of_triton_is_a_node() -> None:
    known_triton, x, y = triton_double(), dev(1), dev(0)
    compiled = known_triton[(1,)](y, x, N, BLOCK=64)
    graph = Graph()
    graph.kernel(compiled, 1, None, (y, x, i32(N)))
    y.zero_()
    run(graph)
    same(y, 2.0)


def test_a_kernel_of_numba_is_a_node() -> None:
    cuda, known_numba = libraries.numba_cuda(), numba_scale()
    x, y = dev(1), dev(0)
    known_numba[1, N](cuda.as_cuda_array(y), cuda.as_cuda_array(x), f32(2))
    sync()
    graph = Graph()
    graph.kernel(known_numba, 1, N, (y, x, f32(8)))
    run(graph)
    same(y, 8.0)


def test_a_kernel_of_cuda_core_is_a_node() -> None:
    core = pytest.importorskip("cuda.core")
    if not hasattr(core, "ObjectCode"):
        pytest.skip("this cuda.core is older than 1.0")
    driver = bindings.current()
    image = nvrtc._compile(SOURCE, nvrtc._architecture(driver))
    core.Device().set_current()
    scale = core.ObjectCode.from_cubin(image).get_kernel("known_scale")
    x, y, graph = dev(1), dev(0), Graph()
    node = graph.kernel(scale, 1, N, (y, x, f32(8), i32(N)))
    assert node.name == "known_scale"
    with graph.instantiate() as execution:
        execution.launch()
        same(y, 8.0)
        execution.update(node, args={2: f32(3)})
        execution.launch()
        same(y, 3.0)


def test_arguments_by_structure_and_bytes() -> None:
    from .kernels import Mixed

    out, graph = dev(0, 32), Graph()
    mixed = Mixed(1.5, 20, 3)
    graph.kernel(
        kernel("known_mixed"), 1, 32,
        (out, bytes(mixed), ctypes.c_ushort(400), numpy.int64(1 << 20), numpy.int8(5)),
    )  # fmt: skip
    run(graph)
    same(out, 1.5 + 20 + 3 + 400 + (1 << 20) + 5)


def test_a_programmatic_edge_survives() -> None:
    graph, x, y = Graph(), dev(1), dev(0)
    a = add_scale(graph, y, x, 2.0)
    b = add_scale(graph, x, y, 2.0)
    graph.link(a, b, kind="programmatic")
    assert [(e.kind, e.from_port) for e in graph.edges] == [("programmatic", 1)]
    outer = Graph()
    child = outer.child(graph)
    assert [e.kind for e in child.graph.edges] == ["programmatic"]


def test_streams_of_all_spellings_launch_it() -> None:
    graph, x, y = Graph(), dev(1), dev(0)
    add_scale(graph, y, x, 2.0)
    stream = torch.cuda.Stream()
    with graph.instantiate() as execution:
        for given in (
            None,
            stream,
            stream.cuda_stream,
            bindings.types.CUstream(stream.cuda_stream),
        ):
            y.zero_()
            sync()
            execution.launch(given)
            sync()
            same(y, 2.0)
