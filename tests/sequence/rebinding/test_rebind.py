"""rebind gives a captured sequence other memory: everywhere, or nowhere."""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import weakref
from typing import Any

import numpy
import pytest

from breakable_cuda_graphs import (
    CUDAError,
    CUDAGraphSequence,
    Graph,
    GraphSegment,
    breakable_graph,
    force_no_graph,
    no_graph,
)
from breakable_cuda_graphs._driver.bindings import types
from breakable_cuda_graphs.sequence import append
from breakable_cuda_graphs.sequence.rebinding.rebind import rebind
from breakable_cuda_graphs.simulator import SimulatedKernel
from graphs import N, array, scale, scale_kernel
from helping import watched_driver

torch: Any = pytest.importorskip("torch")


@no_graph
def mix(t: Any, w: Any) -> None:
    t.add_(w)


@no_graph
def add_sum(t: Any, s: Any) -> None:
    t.add_(s.sum())


def full(value: float, n: int = N) -> Any:
    return torch.full((n,), float(value))


class Scene:
    """z = (x * 2 + w) * 3, where a break adds w."""

    def __init__(self, **options: Any) -> None:
        self.x, self.w, self.z, self.seq = full(1), full(10), full(0), CUDAGraphSequence()
        with breakable_graph(self.seq, **options):
            y = self.x * 2
            mix(y, self.w)
            torch.mul(y, 3, out=self.z)

    def check(self, right: float, out: Any = None) -> None:
        target = self.z if out is None else out
        target.fill_(-1)
        self.seq.replay()
        assert target.tolist() == [right] * N


def test_every_segment_and_break_is_reached(device: Any) -> None:
    scene = Scene()
    scene.check(36)
    x, w, z = full(2), full(20), full(0)
    scene.z.fill_(-7)
    report = rebind(scene.seq, {scene.x: x, scene.w: w, scene.z: z})
    assert report.nodes == 2
    assert report.words >= 2
    assert report.arguments == 1
    assert "break mix" in str(report)
    scene.check(72, z)
    assert scene.z.tolist() == [-7] * N, "the old output"
    x.fill_(3)
    w.fill_(30)
    scene.check(108, z)
    rebind(scene.seq, {x: scene.x, w: scene.w, z: scene.z})
    scene.check(36)
    assert z.tolist() == [108.0] * N
    scene.seq.reset()


@pytest.mark.parametrize("edits", [1, 2])
def test_a_rebind_that_fails_halfway_changes_nothing(device: Any, edits: int) -> None:
    """What was changed before the call that failed is changed back."""
    with watched_driver(device) as driver:
        scene, seen = Scene(), []
        x, w, z = full(2), full(20), full(0)

        def fail(place: int, name: str, go: Any) -> Any:
            seen.extend([name] * (name == "cuGraphExecKernelNodeSetParams"))
            is_the_one = name == "cuGraphExecKernelNodeSetParams" and len(seen) == edits
            return (types.CUresult(2),) if is_the_one else go()

        driver.answer = fail
        with pytest.raises(CUDAError, match="cuGraphExecKernelNodeSetParams"):
            rebind(scene.seq, {scene.x: x, scene.w: w, scene.z: z})
        driver.answer = None
        assert len(seen) == 2 * edits - 1
        scene.check(36)
        assert z.tolist() == [0] * N, "the new output was written to"
        words = {a.as_pointer() for a in scene.seq.segments[0].graph.nodes[0].args if a.size == 8}
        assert scene.x.data_ptr() in words
        rebind(scene.seq, {scene.x: x, scene.w: w, scene.z: z})
        scene.check(72, z)
        scene.seq.reset()


def test_nodes_tell_the_new_addresses(device: Any) -> None:
    scene, x = Scene(), full(2)
    rebind(scene.seq, [(scene.x, x)])
    words = {a.as_pointer() for a in scene.seq.segments[0].graph.nodes[0].args if a.size == 8}
    assert x.data_ptr() in words
    assert scene.x.data_ptr() not in words
    scene.seq.reset()


def test_slices_move_with_their_base(device: Any) -> None:
    half = N // 2
    base, new, out, seq = full(1), full(5), full(0, half), CUDAGraphSequence()
    with breakable_graph(seq):
        upper = base[half:] * 2
        mix(upper, base[:half])
        torch.add(upper, base[:half], out=out)
    seq.replay()
    assert out.tolist() == [4.0] * half
    rebind(seq, {base: new})
    new[half:].fill_(7)
    seq.replay()
    assert out.tolist() == [24.0] * half
    seq.reset()


def test_a_part_of_a_tensor_moves_alone(device: Any) -> None:
    base, new, seq = full(1), full(50, 4), CUDAGraphSequence()
    low, high = full(0, 4), full(0, 4)
    with breakable_graph(seq):
        torch.mul(base[:4], 2, out=low)
        torch.mul(base[4:], 2, out=high)
    rebind(seq, {base[4:]: new})
    seq.replay()
    assert low.tolist() == [2.0] * 4
    assert high.tolist() == [100.0] * 4
    seq.reset()


def test_a_swap_is_done_at_once(device: Any) -> None:
    a, b, out, seq = full(1), full(5), full(0), CUDAGraphSequence()
    with breakable_graph(seq):
        torch.sub(a, b, out=out)
    rebind(seq, {a: b, b: a})
    seq.replay()
    assert out.tolist() == [4.0] * N
    seq.reset()


def test_ranges_of_bytes_are_moved_too(device: Any) -> None:
    scene, x = Scene(), full(2)
    rebind(scene.seq, [((scene.x.data_ptr(), 4 * N), (x.data_ptr(), 4 * N))])
    scene.check(42)
    scene.seq.reset()


BAD = {
    "another shape": lambda old: full(2, N // 2),
    "a larger shape": lambda old: full(2, 2 * N),
    "another dtype": lambda old: full(2).double(),
    "another layout": lambda old: full(2, 2 * N)[::2],
    "a part of the old": lambda old: old[1:],
}


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_refused_and_changes_nothing(device: Any, what: str) -> None:
    scene = Scene()
    with pytest.raises(ValueError, match=r"shape|dtype|strides"):
        rebind(scene.seq, {scene.x: BAD[what](scene.x)})
    with pytest.raises(ValueError, match="size"):
        rebind(scene.seq, [((scene.x.data_ptr(), 4 * N), (scene.z.data_ptr(), 4))])
    for wrong in (5, "x", [scene.x], {scene.x: 5}, [(scene.x, "y")]):
        with pytest.raises(TypeError):
            rebind(scene.seq, wrong)
    scene.check(36)
    scene.seq.reset()


def test_overlaps_are_refused(device: Any) -> None:
    scene, big = Scene(), full(2, 2 * N)
    with pytest.raises(ValueError, match="targets overlap"):
        rebind(scene.seq, {scene.x: big[:N], scene.w: big[1 : N + 1]})
    with pytest.raises(ValueError, match="old ranges overlap"):
        rebind(scene.seq, [(scene.x, big[:N]), (scene.x, big[N:])])
    address = scene.x.data_ptr()
    with pytest.raises(ValueError, match="a part of what is moved"):
        rebind(scene.seq, [((address, 16), (address + 8, 16))])
    scene.check(36)
    scene.seq.reset()


def test_what_the_sequence_does_not_know_changes_nothing(device: Any) -> None:
    scene = Scene()
    report = rebind(scene.seq, {full(1): full(2)})
    assert (report.nodes, report.words, report.arguments) == (0, 0, 0)
    scene.check(36)
    assert rebind(CUDAGraphSequence(), {full(1): full(2)}).nodes == 0
    scene.seq.reset()


def test_watching_moves_to_the_new_tensors(device: Any) -> None:
    scene, x = Scene(), full(2)
    rebind(scene.seq, {scene.x: x})
    scene.x = None
    gc.collect()
    scene.check(42)
    del x
    gc.collect()
    with pytest.raises(RuntimeError, match="rebind"):
        scene.seq.replay()
    with pytest.raises(RuntimeError, match="freed"):
        rebind(scene.seq, {scene.w: full(1)})
    scene.seq.reset()


def test_a_swap_leaves_both_watched(device: Any) -> None:
    a, b, out, seq = full(1), full(5), full(0), CUDAGraphSequence()
    with breakable_graph(seq):
        torch.sub(a, b, out=out)
    rebind(seq, {a: b, b: a})
    assert len(seq.watched) == 3
    del b
    gc.collect()
    with pytest.raises(RuntimeError, match="rebind"):
        seq.replay()
    seq.reset()


def test_memory_that_was_owned_is_owned_at_its_new_place(device: Any) -> None:
    scene = Scene(keep_inputs=True)
    rebind(scene.seq, {scene.x: full(2)})
    gc.collect()
    scene.check(42)
    scene.seq.reset()


def test_old_memory_is_let_go_when_no_replay_reads_it(device: Any) -> None:
    """A server that moves at each request must not keep all the requests."""
    scene, alive = Scene(), []
    for value in range(20):
        new = full(value)
        alive.append(weakref.ref(new.untyped_storage()))
        rebind(scene.seq, {scene.x: new})
        scene.x = new
        scene.check((value * 2 + 10) * 3)
    del new
    gc.collect()
    assert [value for value, storage in enumerate(alive) if storage() is not None] == [19]
    scene.seq.reset()


def test_edits_in_between_are_moved_and_kept(device: Any) -> None:
    """What was read once for a rebind is brought up to date by every edit."""
    seq, graph, x, y = CUDAGraphSequence(), Graph(), full(1), full(0)
    node = scale(graph, y, x, 2.0)
    segment = append.append(seq, graph)
    places = [x, full(3), full(5), full(7)]
    for number, (old, new) in enumerate(itertools.pairwise(places)):
        assert rebind(seq, {old: new}).words == 1
        segment.exec.update(node, args={2: numpy.float32(number + 1)})
        seq.replay()
        assert y.tolist() == [new[0].item() * (number + 1)] * N
    other = full(11)
    segment.exec.update(node, args={1: other})
    assert rebind(seq, {places[-1]: full(0)}).words == 0
    assert rebind(seq, {other: x}).words == 1
    seq.replay()
    assert y.tolist() == [3.0] * N
    seq.reset()


def test_arguments_without_memory_of_their_own_are_no_hindrance(device: Any) -> None:
    x, other, sparse = full(1), full(0), torch.eye(N).to_sparse()
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        add_sum(x, s=sparse)
    seq.rebind({x: other})
    seq.replay()
    assert other.tolist() == [N] * N
    assert "1 break" in str(seq)


def test_static_results_of_breaks_move(device: Any) -> None:
    @no_graph(outputs="static")
    def twice(t: Any) -> Any:
        return t * 2

    @no_graph(outputs="static")
    def same(t: Any) -> Any:
        return t.add_(1)

    x, out, seq = full(1), full(0), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x + 1
        made = twice(y)
        kept = same(x)
        torch.add(made, kept, out=out)
    x.fill_(1)
    seq.replay()
    assert out.tolist() == [6.0] * N
    new_made, new_x = full(0), full(10)
    rebind(seq, {made: new_made, x: new_x})
    seq.replay()
    assert new_made.tolist() == [22.0] * N
    assert out.tolist() == [33.0] * N
    seq.reset()


def test_an_edit_made_before_is_moved_and_one_after_is_kept(device: Any) -> None:
    seq, graph, x, other, y = CUDAGraphSequence(), Graph(), full(1), full(5), full(0)
    node = scale(graph, y, x, 2.0)
    segment = append.append(seq, graph)
    segment.exec.update(node, args={1: other})
    new = full(7)
    rebind(seq, {other: new})
    seq.replay()
    assert y.tolist() == [14.0] * N
    segment.exec.update(node, args={2: numpy.float32(3)})
    seq.replay()
    assert y.tolist() == [21.0] * N
    seq.reset()


def test_fused_segments_are_reached(device: Any) -> None:
    x, y, z, seq = full(1), full(0), full(0), CUDAGraphSequence()
    with breakable_graph(seq):
        torch.mul(x, 2, out=y)
        force_no_graph()
        torch.mul(y, 3, out=z)
    first, last = (s for s in seq.segments if isinstance(s, GraphSegment))
    assert first._executable is last._executable
    new_x, new_y = full(5), full(0)
    rebind(seq, {x: new_x, y: new_y})
    seq.replay()
    assert new_y.tolist() == [10.0] * N
    assert z.tolist() == [30.0] * N
    seq.reset()


def test_copies_and_fills_move_and_must_lie_inside(device: Any) -> None:
    seq, graph, x, y = CUDAGraphSequence(), Graph(), full(1), full(0)
    fill = graph.memset(y, 0, 16)
    graph.memcpy(y, x, 4 * N, after=fill)
    append.append(seq, graph)
    new_x, new_y = full(5), full(0)
    rebind(seq, {x: new_x, y: new_y})
    seq.replay()
    assert new_y.tolist() == [5.0] * N
    assert y.tolist() == [0.0] * N
    with pytest.raises(ValueError, match="beyond the old memory"):
        rebind(seq, {new_x[:4]: full(0, 4)})
    seq.reset()


def test_nodes_inside_child_graphs_move(device: Any) -> None:
    seq, inner, outer, x, y = CUDAGraphSequence(), Graph(), Graph(), full(1), full(0)
    scale(inner, y, x, 2.0)
    outer.child(inner)
    append.append(seq, outer)
    new = full(5)
    rebind(seq, {x: new})
    seq.replay()
    assert y.tolist() == [10.0] * N
    seq.reset()


# ---------------------------------------------------------------- words that only look like addresses


class Numbers(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_void_p), ("number", ctypes.c_uint64))


def numbered(x: Any, number: int) -> tuple[CUDAGraphSequence, list[tuple[int, int]]]:
    """A sequence with one kernel that is given an address and a number in a structure."""
    seen: list[tuple[int, int]] = []
    kernel = SimulatedKernel(
        lambda pair: seen.append((pair.pointer, pair.number)), (Numbers,), name="numbered"
    )
    seq, graph = CUDAGraphSequence(), Graph()
    graph.kernel(kernel, 1, 1, (Numbers(x.data_ptr(), number),))
    append.append(seq, graph)
    return seq, seen


def test_addresses_inside_structures_move(device: Any) -> None:
    x, new = full(1), full(2)
    seq, seen = numbered(x, x.data_ptr() + 8)
    report = rebind(seq, {x: new})
    assert report.words == 2
    seq.replay()
    assert seen == [(new.data_ptr(), new.data_ptr() + 8)]
    seq.reset()


@pytest.mark.parametrize(("offset", "why"), [(3, "aligned"), (4 * N, "past the end")])
def test_words_that_may_be_something_else_are_left_and_reported(
    device: Any, offset: int, why: str
) -> None:
    x, new = full(1), full(2)
    seq, seen = numbered(x, x.data_ptr() + offset)
    report = rebind(seq, {x: new})
    (doubt,) = report.doubts
    assert why in doubt.why
    assert (doubt.argument, doubt.offset, doubt.value) == (0, 8, x.data_ptr() + offset)
    seq.replay()
    assert seen == [(new.data_ptr(), x.data_ptr() + offset)]
    seq.reset()


def test_a_second_capture_unmasks_a_number(device: Any) -> None:
    x, new, other = full(1), full(2), full(3)
    number = x.data_ptr() + 8
    seq, seen = numbered(x, number)
    kernel = seq.segments[0].graph.nodes[0].function

    def again() -> CUDAGraphSequence:
        second, graph = CUDAGraphSequence(), Graph()
        graph.kernel(kernel, 1, 1, (Numbers(other.data_ptr(), number),))
        append.append(second, graph)
        return second

    report = rebind(seq, {x: new}, verify=again)
    assert [doubt.why for doubt in report.doubts] == ["it did not move in verify"]
    seq.replay()
    assert seen == [(new.data_ptr(), number)]
    seq.reset()


class Map(ctypes.Structure):
    """What a Hopper kernel is given: more than a tensor map's bytes, with addresses inside."""

    _fields_ = (("words", ctypes.c_uint64 * 20),)


def mapped(x: Any, kernel: SimulatedKernel, hidden: int = 0) -> CUDAGraphSequence:
    value = Map()
    value.words[2], value.words[9] = x.data_ptr(), hidden
    seq, graph = CUDAGraphSequence(), Graph()
    graph.kernel(kernel, 1, 1, (value,))
    append.append(seq, graph)
    return seq


def test_an_address_that_may_be_in_a_tensor_map_needs_proof(device: Any) -> None:
    seen: list[int] = []
    kernel = SimulatedKernel(
        lambda value: seen.append(value.words[2]), (Map,), name="hopper", packed=True
    )
    x, new, other = full(1), full(2), full(3)
    seq = mapped(x, kernel)
    with pytest.raises(ValueError, match=r"tensor map.*verify"):
        rebind(seq, {x: new})
    with pytest.raises(ValueError, match="same buffers"):
        rebind(seq, {x: new}, verify=lambda: mapped(x, kernel))
    with pytest.raises(ValueError, match="other work"):
        rebind(seq, {x: new}, verify=lambda: mapped(other, scale_map_kernel()))
    with pytest.raises(ValueError, match="no address"):
        rebind(seq, {x: new}, verify=lambda: mapped(other, kernel, hidden=12345))
    seq.replay()
    assert seen == [x.data_ptr()]
    rebind(seq, {x: new}, verify=lambda t: mapped(t, kernel))
    seq.replay()
    assert seen[-1] == new.data_ptr()
    rebind(seq, {new: x}, verify=lambda: mapped(other, kernel))
    seq.replay()
    assert seen[-1] == x.data_ptr()
    seq.reset()


def scale_map_kernel() -> SimulatedKernel:
    return SimulatedKernel(lambda value: None, (Map,), name="another", packed=True)


def test_other_memory_that_begins_where_the_old_ends_is_no_doubt(device: Any) -> None:
    both, new, seq = full(1, 2 * N), full(5), CUDAGraphSequence()
    low, high = both[:N].clone(), both[N:]
    graph = Graph()
    scale(graph, high, both[:N], 2.0)
    append.append(seq, graph)
    seq._memory.watch(high.data_ptr(), high.untyped_storage(), "high", "read")
    assert rebind(seq, [(both[:N], new)]).doubts == ()
    seq._memory._watched.pop(high.data_ptr())
    (doubt,) = rebind(seq, [(new, low), ((high.data_ptr() - 4, 4), (both.data_ptr(), 4))]).doubts
    assert doubt.why == "just past the end of the old memory"
    seq.reset()


def test_an_error_of_verify_is_its_own_and_it_is_called_once(device: Any) -> None:
    scene, calls = Scene(), []

    def wrong() -> Any:
        calls.append(1)
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        rebind(scene.seq, {scene.x: full(2)}, verify=wrong)
    assert calls == [1]
    scene.check(36)
    scene.seq.reset()


def test_words_that_a_graph_writes_move_with_their_memory(device: Any) -> None:
    seq, graph, word = CUDAGraphSequence(), Graph(), numpy.zeros(4, "u4")
    graph.batch_mem_op(
        [("write", word[2:], numpy.uint32(7)), ("wait_eq", word[2:], numpy.uint32(7))]
    )
    append.append(seq, graph)
    new = numpy.zeros(4, "u4")
    assert rebind(seq, [(word, new)]).words == 2
    seq.replay()
    assert (word.tolist(), new.tolist()) == ([0] * 4, [0, 0, 7, 0])
    seq.reset()


# ---------------------------------------------------------------- failures


def test_a_driver_that_refuses_one_edit_keeps_all_as_they_were(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, x, z = Scene(), full(2), full(0)
    real, calls = device.driver.cuGraphExecKernelNodeSetParams, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            return (type(real(*args)[0])(1),)
        return real(*args)

    from breakable_cuda_graphs import UpdateError
    from breakable_cuda_graphs._driver import bindings

    with monkeypatch.context() as patch:
        patch.setattr(bindings.current(), "cuGraphExecKernelNodeSetParams", None, raising=False)
        patch.delattr(bindings.current(), "cuGraphExecKernelNodeSetParams")
        patch.setattr(device.driver, "cuGraphExecKernelNodeSetParams", failing)
        with pytest.raises(UpdateError, match="refused"):
            rebind(scene.seq, {scene.x: x, scene.z: z})
    words = {a.data for a in scene.seq.segments[2].graph.nodes[0].args}
    assert z.data_ptr().to_bytes(8, "little") not in words
    scene.seq.reset()


def test_a_break_cannot_rebind_its_own_sequence(device: Any) -> None:
    x, new, seq, errors = full(1), full(2), CUDAGraphSequence(), []

    @no_graph
    def naughty(t: Any) -> None:
        if seq.segments:
            try:
                rebind(seq, {x: new})
            except RuntimeError as error:
                errors.append(error)

    with breakable_graph(seq):
        y = x * 2
        naughty(y)
        y.add_(1)
    seq.replay()
    assert len(errors) == 1
    assert "rebound" in str(errors[0])
    seq.reset()


def test_random_moves_agree_with_eager(device: Any) -> None:
    scene, chosen = Scene(), random.Random(7)
    names = {"x": scene.x, "w": scene.w, "z": scene.z}
    for _ in range(20):
        moves = {}
        for name in chosen.sample(sorted(names), chosen.randint(1, 3)):
            new = torch.rand(N)
            moves[names[name]] = new
            names[name] = new
        rebind(scene.seq, moves)
        names["z"].fill_(-1)
        scene.seq.replay()
        expected = (names["x"] * 2 + names["w"]) * 3
        assert torch.equal(names["z"], expected)
    scene.seq.reset()


def test_arrays_of_nobody_are_kept_alive(device: Any) -> None:
    seq, graph, x, y = CUDAGraphSequence(), Graph(), array(1), array()
    scale(graph, y, x, 2.0, kernel=scale_kernel())
    append.append(seq, graph)
    new = array(5)
    rebind(seq, [(x, new)])
    seq.replay()
    assert (y == 10).all()
    assert seq._memory.owned >= 1
    seq.reset()
