"""What a captured graph says is what was launched: names, shapes, arguments, scopes."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from breakable_cuda_graphs import CUDAGraphSequence, GraphSegment, annotate, breakable_graph
from breakable_cuda_graphs.graph.nodes import KernelNode, MemcpyNode, MemsetNode

from . import libraries
from .helpers import N, bump, dev, same, sync, torch, warm_up
from .kernels import (
    BLOCK,
    Mixed,
    cupy_scale,
    f32,
    found,
    i32,
    kernel,
    launch,
    launch_scale,
    numba_scale,
    triton_double,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*Grid size.*"),  # Numba on small launches
]


def capture(body: Any, warm: bool = True) -> CUDAGraphSequence:
    """Capture a body once it has run on the sequence's stream."""
    seq = CUDAGraphSequence()
    if warm:
        warm_up(seq, body)
    with breakable_graph(seq):
        body()
    sync()
    return seq


def kernels(seq: Any) -> list[KernelNode]:
    return [node for _, node in found(seq, "")]


def words_of(node: KernelNode) -> set[int]:
    return {
        int.from_bytes(arg.data[at : at + 8], "little")
        for arg in node.args
        for at in range(0, arg.size - 7, 8)
    }


def test_a_known_kernel_tells_all_of_its_launch() -> None:
    kernel()
    x, y = dev(1), dev(0)
    seq = capture(lambda: launch_scale(y, x, 2.0), warm=False)
    ((_, node),) = found(seq, "known_scale")
    assert node.name == node.mangled_name == "known_scale"
    assert (node.grid, node.block) == ((-(-N // BLOCK), 1, 1), (BLOCK, 1, 1))
    assert [(a.offset, a.size) for a in node.args] == [(0, 8), (8, 8), (16, 4), (20, 4)]
    assert node.args[0].as_pointer() == y.data_ptr()
    assert node.args[1].as_pointer() == x.data_ptr()
    assert (node.args[2].as_float32(), node.args[3].as_int32()) == (2.0, N)
    assert node.attrs.cluster == (1, 1, 1)
    assert not node.attrs.cooperative


def test_arguments_of_many_sizes() -> None:
    out, mixed = dev(0, 32), Mixed(1.5, 20, 3)
    args = (out, mixed, ctypes.c_ushort(400), ctypes.c_longlong(1 << 20), ctypes.c_byte(5))
    function = kernel("known_mixed")
    seq = capture(lambda: launch(function, 1, 32, *args), warm=False)
    ((_, node),) = found(seq, "known_mixed")
    assert [a.size for a in node.args] == [8, 16, 2, 8, 1]
    assert [a.offset for a in node.args] == [0, 8, 24, 32, 40]
    whole = node.args[1].as_struct(Mixed)
    assert (whole.scale, whole.shift, whole.flag) == (1.5, 20, 3)
    assert node.args[2].as_uint16() == 400
    assert node.args[3].as_int64() == 1 << 20
    assert node.args[4].as_int8() == 5


def test_names_are_demangled_and_shared_memory_is_told() -> None:
    out = dev(0, 32)
    mangled, shared = kernel("_Z13known_mangledPf"), kernel("known_shared")

    def body() -> None:
        launch(mangled, 1, 32, out)
        launch(shared, 1, 32, out, shared_bytes=128)

    seq = capture(body, warm=False)
    ((_, one),), ((_, two),) = found(seq, "known_mangled"), found(seq, "known_shared")
    assert one.name == "known_mangled(float*)"
    assert one.mangled_name == "_Z13known_mangledPf"
    assert two.shared_bytes == 128


def test_an_elementwise_kernel_of_torch() -> None:
    x, y = dev(1, 1000), dev(2, 1000)
    out = dev(0, 1000)
    seq = capture(lambda: torch.add(x, y, out=out))
    (node,) = kernels(seq)
    assert "elementwise_kernel" in node.name
    assert {x.data_ptr(), y.data_ptr(), out.data_ptr()} <= words_of(node)
    assert node.grid[0] * node.block[0] * 8 >= 1000
    whats = {address.value: address.what for address in node.addresses}
    assert "input" in whats[x.data_ptr()] or "other" in whats[x.data_ptr()]


def test_addresses_say_whose_memory_they_are_in() -> None:
    x, out = dev(1), dev(0)

    def body() -> None:
        y = x * 2
        bump(y)
        torch.add(y * 3, 1, out=out)

    seq = capture(body)
    told = {address.what.split(",")[0] for node in kernels(seq) for address in node.addresses}
    assert told - {"other"} == {
        "input",
        "pool block",
        f"break argument 0 of {seq.segments[1].name}",
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrix_products_of_cublas(dtype: str) -> None:
    a, b = (torch.randn(256, 256, device="cuda", dtype=getattr(torch, dtype)) for _ in "ab")
    out = torch.empty_like(a)
    seq = capture(lambda: torch.mm(a, b, out=out))
    nodes = kernels(seq)
    assert nodes
    for node in nodes:
        assert node.name
        assert all(n >= 1 for n in (*node.grid, *node.block))
        assert sum(arg.size for arg in node.args) > 0
        assert all(len(arg.data) == arg.size for arg in node.args)
    assert out.data_ptr() in set().union(*(words_of(node) for node in nodes))
    expected = a @ b
    out.zero_()
    seq.replay()
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-1)


def test_copies_and_fills_of_a_stream() -> None:
    x, y, pinned = dev(1), dev(0), torch.zeros(N).pin_memory()

    def body() -> None:
        y.copy_(x)
        y.zero_()
        pinned.copy_(x, non_blocking=True)

    seq = capture(body)
    nodes = seq.segments[0].graph.nodes
    copies = [node for node in nodes if isinstance(node, MemcpyNode)]
    fills = [node for node in nodes if isinstance(node, MemsetNode)]
    ends = {(node.src, node.dst) for node in copies}
    assert (x.data_ptr(), pinned.data_ptr()) in ends
    assert all(node.nbytes == 4 * N for node in copies)
    for node in fills:
        assert (node.dst, node.nbytes, node.value) == (y.data_ptr(), 4 * N, 0)


def test_a_kernel_of_triton() -> None:
    known_triton = triton_double()
    x, y = dev(1, 1000), dev(0, 1000)
    seq = capture(lambda: known_triton[(8,)](y, x, 1000, BLOCK=128))
    ((_, node),) = found(seq, "known_triton")
    assert node.grid == (8, 1, 1)
    assert {x.data_ptr(), y.data_ptr()} <= words_of(node)


def test_a_kernel_of_cupy() -> None:
    cupy, raw = libraries.cupy(), cupy_scale()
    x, y = dev(1), dev(0)
    args = (cupy.asarray(y), cupy.asarray(x), f32(2), i32(N))
    seq = capture(lambda: raw((1,), (N,), args))
    ((_, node),) = found(seq, "known_cupy")
    assert [a.size for a in node.args] == [8, 8, 4, 4]
    assert node.args[2].as_float32() == 2.0
    assert {x.data_ptr(), y.data_ptr()} <= words_of(node)


def test_a_kernel_of_numba() -> None:
    cuda, known_numba = libraries.numba_cuda(), numba_scale()
    x, y = dev(1), dev(0)
    args = cuda.as_cuda_array(y), cuda.as_cuda_array(x), f32(2)
    known_numba[1, N](*args)
    sync()
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)
        known_numba[1, N, stream](*args)
    ((_, node),) = found(seq, "known_numba")
    assert node.block == (N, 1, 1)
    assert {x.data_ptr(), y.data_ptr()} <= words_of(node)
    assert node.args[-1].data == struct.pack("<f", 2.0)


def bf16(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def attending(backend: str) -> tuple[Any, tuple[Any, ...]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    parts = tuple(bf16(1, 4, 128, 64) for _ in range(3))

    def attend() -> None:
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            torch.nn.functional.scaled_dot_product_attention(*parts)

    return attend, parts


def works() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Work of each library's, and the tensors that its kernels name."""
    x, y, out = dev(1, 1000), dev(2, 1000), dev(0, 1000)
    a, b = (torch.randn(256, 256, device="cuda") for _ in "ab")
    wide, high = bf16(512, 512), bf16(512, 512)
    product, large = torch.empty_like(a), torch.empty_like(wide)
    return {
        "elementwise": (lambda: torch.add(x, y, out=out), (x, y, out)),
        "softmax": (lambda: torch.softmax(a, 1), (a,)),
        "reduction": (lambda: a.sum(0), (a,)),
        "cublas float32": (lambda: torch.mm(a, b, out=product), (a, b, product)),
        "cublas bfloat16": (lambda: torch.mm(wide, high, out=large), (wide, high, large)),
        "cutlass": attending("EFFICIENT_ATTENTION"),
        "flash attention": attending("FLASH_ATTENTION"),
    }


def profiled(work: Any, stream: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...], int]]:
    """Name, grid, block and shared memory of each kernel that work launches, by the profiler."""
    import json
    import tempfile
    from pathlib import Path

    from torch.profiler import ProfilerActivity, profile

    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=both, acc_events=True) as found:
        with torch.cuda.stream(stream):
            work()
        sync()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    launches = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    return [
        (e["name"], tuple(e["args"]["grid"]), tuple(e["args"]["block"]), e["args"]["shared memory"])
        for e in launches
    ]


@pytest.mark.parametrize(
    "name",
    [
        "elementwise", "softmax", "reduction", "cublas float32", "cublas bfloat16", "cutlass",
        "flash attention",
    ],
)  # fmt: skip
def test_names_and_shapes_are_those_that_the_profiler_sees(name: str) -> None:
    work, tensors = works()[name]
    with torch.no_grad():
        seq = capture(work)
        launches = profiled(work, seq.stream)
    nodes = kernels(seq)
    told = [(node.name, node.grid, node.block) for node in nodes]
    assert told == [launch[:3] for launch in launches]
    for node, (*_, shared) in zip(nodes, launches, strict=True):
        assert node.shared_bytes <= shared, "the profiler adds the static part"
    words = set().union(*(words_of(node) for node in nodes))
    assert {tensor.data_ptr() for tensor in tensors} <= words


def test_scopes_and_edges_of_an_mlp() -> None:
    layers = [torch.nn.Linear(64, 64, device="cuda") for _ in range(3)]
    x = torch.randn(8, 64, device="cuda")

    def body() -> None:
        with torch.no_grad():
            y = x
            for number, layer in enumerate(layers):
                with annotate(f"layer {number}"):
                    y = torch.relu(layer(y))

    seq = capture(body)
    nodes = seq.segments[0].graph.nodes
    assert {node.scope for node in nodes} == {"layer 0", "layer 1", "layer 2"}
    assert [node.scope for node in nodes] == sorted(node.scope for node in nodes)
    assert len(seq.segments[0].graph.edges) >= len(nodes) - 1
    assert "layer 1" in str(seq.segments[0].graph)
    assert "digraph" in seq.segments[0].graph.to_dot()
    assert "digraph" in seq.segments[0].graph.to_dot(verbose=True)


def test_two_captures_of_one_model_have_one_fingerprint() -> None:
    layer = torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
    xs = [torch.randn(8, 64, device="cuda", dtype=torch.bfloat16) for _ in "ab"]

    def body(x: Any) -> Any:
        with torch.no_grad():
            y = torch.relu(layer(x))
            bump(y)
            return y * 2

    seqs = [capture(lambda x=x: body(x)) for x in xs]
    prints = [
        [s.graph.fingerprint() for s in seq.segments if isinstance(s, GraphSegment)] for seq in seqs
    ]
    assert prints[0] == prints[1]
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    other = capture(lambda: body(x))
    assert other.segments[0].graph.fingerprint() != prints[0][0]
    changes = seqs[0].segments[0].graph.diff(other.segments[0].graph)
    assert any(change.field in ("grid", "fn", "topology") for change in changes)


def test_what_was_read_survives_edits_and_reset() -> None:
    x, y = dev(1), dev(0)
    kernel()
    seq = capture(lambda: launch_scale(y, x, 2.0), warm=False)
    ((segment, node),) = found(seq, "known_scale")
    args = node.args
    segment.exec.update(node, args={2: f32(5)})
    assert args[2].as_float32() == 2.0
    seq.replay()
    same(y, 5.0)
    seq.reset()
    assert args[2].as_float32() == 2.0
    assert node.name == "known_scale"
    with pytest.raises(RuntimeError, match="reset"):
        segment.graph.nodes  # noqa: B018


def test_lines_are_kept_where_that_was_asked_for() -> None:
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq, record_stacks=True):
        y = x * 2
        y.add_(1)
    nodes = seq.segments[0].graph.nodes
    if not nodes[0].stack:
        pytest.skip("record_stacks is not wired up")
    assert "test_lines_are_kept" in nodes[0].stack[-1]
    assert nodes[0].stack != nodes[1].stack


def test_a_thousand_nodes_are_read_in_a_moment() -> None:
    import time

    x = dev(1)

    def body() -> None:
        y = x
        for _ in range(1000):
            y = y + 1

    seq = capture(body)
    graph = seq.segments[0].graph
    graph.nodes  # noqa: B018
    began = time.perf_counter()
    nodes = graph.nodes
    seconds = time.perf_counter() - began
    assert len(nodes) == 1000
    assert seconds < 2.0, f"{seconds:.3f} s for 1,000 nodes"
