"""rebind on the device: equal to eager at the new addresses; tensor maps only with proof."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from breakable_cuda_graphs import CUDAGraphSequence, GraphSegment, breakable_graph, no_graph
from breakable_cuda_graphs.graph.nodes import KernelNode
from breakable_cuda_graphs.sequence.rebinding.rebind import rebind

from .helpers import close, dev, same, sync, torch, warm_up

pytestmark = pytest.mark.gpu


@no_graph
def mix(t: Any, w: Any) -> None:
    t.add_(w)


class Scene:
    """z = (x * 2 + w) * 3, where a break adds w."""

    def __init__(self) -> None:
        self.x, self.w, self.z, self.seq = dev(1), dev(10), dev(0), CUDAGraphSequence()
        with breakable_graph(self.seq):
            y = self.x * 2
            mix(y, self.w)
            torch.mul(y, 3, out=self.z)
        sync()


def test_every_segment_and_break_is_reached() -> None:
    scene = Scene()
    scene.seq.replay()
    same(scene.z, 36.0)
    x, w, z = dev(2), dev(20), dev(0)
    report = rebind(scene.seq, {scene.x: x, scene.w: w, scene.z: z})
    assert report.nodes == 2
    assert report.arguments == 1
    scene.z.zero_()
    scene.seq.replay()
    same(z, 72.0)
    same(scene.z, 0.0)
    rebind(scene.seq, {x: scene.x, w: scene.w, z: scene.z})
    scene.seq.replay()
    same(scene.z, 36.0)


@pytest.mark.parametrize("what", ["another shape", "another dtype", "on the host"])
def test_what_does_not_fit_is_refused(what: str) -> None:
    scene = Scene()
    new = {
        "another shape": lambda: dev(2, 8),
        "another dtype": lambda: dev(2).half(),
        "on the host": lambda: torch.ones(scene.x.numel()),
    }[what]()
    with pytest.raises(ValueError, match=r"shape|dtype|host|device"):
        rebind(scene.seq, {scene.x: new})
    scene.seq.replay()
    same(scene.z, 36.0)


def test_a_range_must_lie_in_one_allocation() -> None:
    scene = Scene()
    with pytest.raises(ValueError, match="allocation"):
        rebind(scene.seq, [((scene.x.data_ptr(), 1 << 40), (scene.z.data_ptr(), 1 << 40))])


class Mover:
    """A captured body whose tensors are moved to new memory, and what eager work gives there.

    `makers` makes the tensors by name; the body takes them by name and writes into `out`.
    """

    def __init__(self, body: Callable[..., Any], makers: dict[str, Callable[[], Any]]) -> None:
        self.body, self.makers = body, makers
        self.names = {name: make() for name, make in makers.items()}
        self.seq = self.capture(self.names)
        self.moved: set[str] = set()
        self.proofs = 0

    def capture(self, names: dict[str, Any]) -> CUDAGraphSequence:
        seq = CUDAGraphSequence()
        warm_up(seq, lambda: self.body(**names))
        with breakable_graph(seq):
            self.body(**names)
        return seq

    def again(self) -> CUDAGraphSequence:
        """The same work on buffers of its own: the proof for addresses in tensor maps."""
        return self.capture({name: make() for name, make in self.makers.items()})

    def move(self, names: Iterable[str]) -> None:
        """Move by rebind; by a second capture where it is refused without one."""
        moves = {}
        for name in names:
            new = self.makers[name]()
            moves[self.names[name]], self.names[name] = new, new
            self.moved.add(name)
        try:
            rebind(self.seq, moves)
        except ValueError as error:
            if "tensor map" not in str(error):
                raise
            rebind(self.seq, moves, verify=self.again)
            self.proofs += 1

    def is_opaque(self) -> bool:
        """Whether a kernel has an argument that may hold a tensor map, and the device has them."""
        graphs = [part.graph for part in self.seq.segments if isinstance(part, GraphSegment)]
        kernels = [node for graph in graphs for node in graph.nodes if isinstance(node, KernelNode)]
        large = any(arg.size >= 128 for node in kernels for arg in node.args)
        return large and bool(torch.cuda.get_device_capability()[0] >= 9)

    def check(self, tolerance: float) -> None:
        expected = torch.full_like(self.names["out"], float("nan"))
        self.body(**{**self.names, "out": expected})
        self.names["out"].fill_(float("nan"))
        self.seq.replay()
        close(self.names["out"], expected, "the replay at the new addresses", tolerance)

    def move_at_random(self, rounds: int, tolerance: float) -> None:
        chosen = random.Random(3)
        for _ in range(rounds):
            self.move(chosen.sample(sorted(self.names), chosen.randint(1, len(self.names))))
            self.check(tolerance)
        assert self.moved == set(self.names), "not everything was moved"


def normal(*shape: int, dtype: str = "bfloat16") -> Callable[[], Any]:
    """Makes a tensor of small random numbers."""
    return lambda: torch.randn(*shape, device="cuda", dtype=getattr(torch, dtype)) / 8


def mlp(x: Any, w1: Any, w2: Any, bias: Any, out: Any) -> None:
    h = torch.relu(x @ w1)
    mix(h, bias)
    torch.mm(h, w2, out=out)


def mlp_makers(rows: int, width: int, dtype: str) -> dict[str, Callable[[], Any]]:
    return {
        "x": normal(rows, width, dtype=dtype),
        "w1": normal(width, width, dtype=dtype),
        "w2": normal(width, width, dtype=dtype),
        "bias": normal(rows, width, dtype=dtype),
        "out": normal(rows, width, dtype=dtype),
    }


def test_random_moves_of_an_mlp_in_float32() -> None:
    torch.manual_seed(0)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        Mover(mlp, mlp_makers(32, 128, "float32")).move_at_random(20, 1e-4)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_random_moves_of_an_mlp_in_bfloat16() -> None:
    torch.manual_seed(0)
    mover = Mover(mlp, mlp_makers(256, 512, "bfloat16"))
    mover.move_at_random(20, 2e-2)
    assert bool(mover.proofs) == mover.is_opaque()


TOKENS, WIDTH, HEADS = 256, 512, 8


def attention(x: Any, w_in: Any, w_out: Any, bias: Any, out: Any) -> None:
    """Products, a break that shifts the queries, attention, a product."""
    heads = (x @ w_in).view(TOKENS, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
    q, k, v = (part.contiguous()[None] for part in heads.unbind(0))
    mix(q, bias)
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.mm(mixed[0].transpose(0, 1).reshape(TOKENS, WIDTH), w_out, out=out)


def attention_makers() -> dict[str, Callable[[], Any]]:
    return {
        "x": normal(TOKENS, WIDTH),
        "w_in": normal(WIDTH, 3 * WIDTH),
        "w_out": normal(WIDTH, WIDTH),
        "bias": normal(1, HEADS, TOKENS, WIDTH // HEADS),
        "out": normal(TOKENS, WIDTH),
    }


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_random_moves_of_an_attention_block(backend: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    with sdpa_kernel([getattr(SDPBackend, backend)]):
        mover = Mover(attention, attention_makers())
        mover.move_at_random(20, 2e-2)
    assert bool(mover.proofs) == mover.is_opaque()


def test_a_move_that_was_refused_for_a_tensor_map_changes_nothing() -> None:
    torch.manual_seed(0)
    mover = Mover(attention, attention_makers())
    if not mover.is_opaque():
        pytest.skip("this device has no tensor maps")
    moves = {mover.names[name]: mover.makers[name]() for name in ("x", "w_out", "bias")}
    with pytest.raises(ValueError, match="verify="):
        rebind(mover.seq, moves)
    mover.check(2e-2)


@pytest.mark.parametrize("size", [256, 1024])
def test_hopper_products_need_proof_and_are_right_with_it(size: int) -> None:
    torch.manual_seed(1)

    def product(a: Any, b: Any, out: Any) -> None:
        torch.mm(a, b, out=out)

    mover = Mover(product, {name: normal(size, size) for name in ("a", "b", "out")})
    for _ in range(5):
        mover.move(mover.names)
        mover.check(2e-2)
    assert mover.proofs == (5 if mover.is_opaque() else 0)
    assert mover.is_opaque() or size == 256 or torch.cuda.get_device_capability()[0] < 9


def test_watching_moves_to_the_new_tensors() -> None:
    scene, x = Scene(), dev(2)
    rebind(scene.seq, {scene.x: x})
    del scene.x
    scene.seq.replay()
    same(scene.z, 42.0)
    del x
    with pytest.raises(RuntimeError):
        scene.seq.replay()


def test_segments_with_random_numbers_are_reached() -> None:
    x, out, seq = dev(1), dev(0), CUDAGraphSequence()
    with breakable_graph(seq):
        torch.mul(x, torch.rand(x.numel(), device="cuda"), out=out)
    new, target = dev(100), dev(0)
    rebind(seq, {x: new, out: target})
    torch.manual_seed(4)
    seq.replay()
    torch.manual_seed(4)
    same(target, new * torch.rand(x.numel(), device="cuda"))
