"""rebind on the device: equal to eager at the new addresses; tensor maps only with proof."""

from __future__ import annotations

import random
from typing import Any

import pytest

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph
from breakable_cuda_graphs.rebinding import rebind

from .helpers import dev, same, sync, torch, warm_up

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


def test_random_moves_of_an_mlp_in_float32() -> None:
    """Products in float32 pass plain addresses; bfloat16's go through tensor maps (below)."""
    torch.manual_seed(0)
    names = {
        "x": torch.randn(32, 128, device="cuda"),
        "w1": torch.randn(128, 128, device="cuda"),
        "w2": torch.randn(128, 128, device="cuda"),
        "out": torch.zeros(32, 128, device="cuda"),
    }
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False

    def body(x: Any, w1: Any, w2: Any, out: Any) -> None:
        h = torch.relu(x @ w1)
        mix(h, h)
        torch.mm(h, w2, out=out)

    seq = CUDAGraphSequence()
    try:
        warm_up(seq, lambda: body(**names))
        with breakable_graph(seq):
            body(**names)
        chosen = random.Random(3)
        proven = False
        for _ in range(20):
            moves = {}
            for name in chosen.sample(sorted(names), chosen.randint(1, 4)):
                new = torch.randn_like(names[name])
                moves[names[name]], names[name] = new, new
            proven = _rebind(seq, moves, body, names) or proven
            names["out"].fill_(float("nan"))
            seq.replay()
            expected = torch.empty_like(names["out"])
            body(names["x"], names["w1"], names["w2"], expected)
            torch.testing.assert_close(names["out"], expected, rtol=1e-4, atol=1e-2)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _rebind(seq: Any, moves: Any, body: Any, names: dict[str, Any]) -> bool:
    """Rebind; with a second capture where an address may be in a tensor map. Whether it was."""
    try:
        rebind(seq, moves)
        return False
    except ValueError as error:
        if "tensor map" not in str(error):
            raise

    def again() -> Any:
        second = CUDAGraphSequence()
        others = {name: torch.empty_like(value) for name, value in names.items()}
        warm_up(second, lambda: body(**others))
        with breakable_graph(second):
            body(**others)
        return second

    rebind(seq, moves, verify=again)
    return True


@pytest.mark.parametrize("size", [256, 1024])
def test_hopper_products_need_proof_and_are_right_with_it(size: int) -> None:
    torch.manual_seed(1)
    names = {
        "a": torch.randn(size, size, device="cuda", dtype=torch.bfloat16),
        "b": torch.randn(size, size, device="cuda", dtype=torch.bfloat16),
        "out": torch.zeros(size, size, device="cuda", dtype=torch.bfloat16),
    }

    def body(a: Any, b: Any, out: Any) -> None:
        torch.mm(a, b, out=out)

    seq = CUDAGraphSequence()
    warm_up(seq, lambda: body(**names))
    with breakable_graph(seq):
        body(**names)
    for _ in range(5):
        moves = {}
        for name in names:
            new = torch.randn_like(names[name])
            moves[names[name]], names[name] = new, new
        opaque = any(
            node.kind == "kernel" and any(arg.size >= 128 for arg in node.args)
            for node in seq.segments[0].graph.nodes
        )
        needed = _rebind(seq, moves, body, names)
        assert needed == opaque or torch.cuda.get_device_capability()[0] < 9
        names["out"].zero_()
        seq.replay()
        torch.testing.assert_close(
            names["out"], names["a"] @ names["b"], rtol=2e-2, atol=2e-1 * size**0.5
        )


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
