"""Memory comes back, stays where graphs need it, and is left alone at replay."""

from __future__ import annotations

import contextlib
import gc
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from breakable_cuda_graphs import (
    CaptureError,
    CUDAGraphSequence,
    StaleInputError,
    breakable_graph,
    no_graph,
)

from .helpers import (
    MODES,
    Boom,
    bump,
    busy,
    canaries,
    check,
    check_canaries,
    check_replays,
    close,
    dev,
    in_thread,
    same,
    sync,
    torch,
)

pytestmark = pytest.mark.gpu

ROUNDS, SETTLED = 20, 8


def flat(one_round: Callable[[int], Any]) -> None:
    """After the first rounds neither the GPU nor torch may lose memory, and nobody empties caches.

    What a round returns lives until the next round's is there, as an output of a model does.
    """
    free, used, kept = [], [], []
    gc.collect()
    gc.freeze()  # what was there before is not looked at again: each collection is quick
    try:
        for number in range(ROUNDS):
            kept[:] = [one_round(number)]
            gc.collect()
            sync()
            free.append(torch.cuda.mem_get_info()[0])
            used.append(torch.cuda.memory_allocated())
    finally:
        gc.unfreeze()
    lost, grown = free[SETTLED] - free[-1], used[-1] - used[SETTLED]
    assert lost < 4 << 20, f"the GPU lost {lost} bytes in {ROUNDS - SETTLED - 1} rounds"
    assert grown < 1 << 20, f"torch holds {grown} bytes more"


def product_with_breaks(seq: Any, weight: Any) -> Any:
    with breakable_graph(seq):
        h = weight @ weight
        for _ in range(4):
            bump(h)
            h = h @ weight
    return h


@pytest.fixture
def weight() -> Any:
    made = torch.randn(512, 512, device="cuda") / 30
    made @ made
    return made


@pytest.mark.parametrize("output", ["output kept", "output dropped"])
@pytest.mark.parametrize("how", ["a new one, reset", "a new one, dropped", "the same one"])
def test_rounds_of_capture_replay_and_release_are_flat(how: str, output: str, weight: Any) -> None:
    kept = CUDAGraphSequence()

    def one_round(number: int) -> Any:
        seq = kept if how == "the same one" else CUDAGraphSequence()
        out = product_with_breaks(seq, weight)
        seq.replay()
        sync()
        if how != "a new one, dropped":
            seq.reset()
        return out if output == "output kept" else None

    flat(one_round)


def test_rounds_with_a_torch_graph_in_the_pool_of_a_sequence_are_flat(weight: Any) -> None:
    """The graph may live longer than the sequence; the pool ends with the last of them."""

    def one_round(number: int) -> Any:
        seq, graph, x = CUDAGraphSequence(), torch.cuda.CUDAGraph(), dev(1)
        product_with_breaks(seq, weight)
        with torch.cuda.graph(graph, pool=seq.pool()):
            y = x * 2
        del seq
        gc.collect()
        product_with_breaks(CUDAGraphSequence(), weight)  # a use of the library in between
        graph.replay()
        same(y, 2.0)
        return graph

    flat(one_round)


def test_rounds_with_random_numbers_and_side_streams_are_flat() -> None:
    x, side = torch.ones(1 << 20, device="cuda"), torch.cuda.Stream()

    def one_round(number: int) -> None:
        seq = CUDAGraphSequence()
        with breakable_graph(seq):
            main = torch.cuda.current_stream()
            h = torch.nn.functional.dropout(x, 0.5)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                h.record_stream(side)
                other = h + 1
            main.wait_stream(side)
            other.record_stream(main)
            bump(h)
            torch.rand_like(h).mul_(other)
        seq.replay()
        sync()
        seq.reset()

    flat(one_round)


def test_rounds_of_captures_that_fail_are_flat(weight: Any) -> None:
    def one_round(number: int) -> None:
        def fail(place: int) -> None:
            if place == number % 3:
                raise Boom

        seq = CUDAGraphSequence()
        with pytest.raises(Boom), breakable_graph(seq):
            h = weight @ weight
            fail(0)
            bump(h)
            h = torch.nn.functional.dropout(h, 0.5) @ weight
            fail(1)
            bump(h)
            h @ weight
            fail(2)

    flat(one_round)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sync_of_host", ["item", "cpu", "synchronize"])
def test_rounds_of_captures_that_a_host_sync_kills_are_flat(
    sync_of_host: str, mode: str, weight: Any
) -> None:
    def one_round(number: int) -> None:
        with (
            pytest.raises((RuntimeError, CaptureError)),
            breakable_graph(CUDAGraphSequence(), capture_error_mode=mode),
        ):
            h = (weight @ weight).sum()
            if sync_of_host == "synchronize":
                torch.cuda.current_stream().synchronize()
            else:
                getattr(h, sync_of_host)()

    flat(one_round)


def reserved_after_a_first_capture() -> int:
    """Which leaves workspaces behind for good."""
    check(lambda t: t * 2).reset()
    sync()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())


def test_a_reset_gives_the_memory_back_and_leaves_results_alone() -> None:
    seq, x = CUDAGraphSequence(), dev(1, 8 << 20)
    before = reserved_after_a_first_capture()
    for added in (1.0, 2.0):
        with breakable_graph(seq):
            result = (x + added)[:8].clone()
            bump(result)
            (x * 2).sum()
        assert torch.cuda.memory_reserved() >= before + (32 << 20)
        seq.replay()
        sync()
        seq.reset()
        assert torch.cuda.memory_reserved() <= before + (8 << 20)
        guards = canaries()
        same(result, 2.0 + added)
        check_canaries(guards)
        del guards
        torch.cuda.empty_cache()


def test_a_pool_that_was_shown_keeps_its_memory_until_its_sequence_is_dropped() -> None:
    seq, x = CUDAGraphSequence(), dev(1, 8 << 20)
    before = reserved_after_a_first_capture()
    pool = tuple(seq.pool())
    with breakable_graph(seq):
        (x * 2).sum()
    seq.reset()
    assert torch.cuda.memory_reserved() >= before + (32 << 20)
    assert seq.pool() == pool
    del seq
    gc.collect()
    CUDAGraphSequence().reset()  # a use of the library
    assert torch.cuda.memory_reserved() <= before + (8 << 20)


@pytest.mark.parametrize("how", ["good", "failing"])
def test_hundreds_of_sequences_take_no_memory_of_the_host(how: str) -> None:
    """What torch keeps for the pinned half of each pool that has gone goes now and then."""
    x = dev(1)

    def one_round() -> None:
        with contextlib.suppress(Boom), breakable_graph(CUDAGraphSequence()):
            x.add_(1)
            if how == "failing":
                raise Boom

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    for _ in range(192):
        one_round()
    before = resident()
    for _ in range(192):  # without it 25 KiB each: 4.7 MiB
        one_round()
    assert resident() - before < 5 << 19


def test_replays_take_no_device_memory(weight: Any) -> None:
    seq = CUDAGraphSequence()
    out = product_with_breaks(seq, weight)
    seq.replay()
    sync()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(20):
        seq.replay()
    sync()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert bool(out.isfinite().all())


# ---------------------------------------------------------------- release at awkward moments


@pytest.mark.parametrize("how", ["reset", "deleted", "reset and deleted", "captured again"])
def test_a_sequence_may_go_while_its_replay_runs(how: str) -> None:
    x, out, seq = dev(1), dev(0), CUDAGraphSequence()
    with breakable_graph(seq):
        busy(20)
        t = x * 2
        busy(20)
        bump(t)
        u = t + 1
        busy(20)
        out.copy_(t + u)
    del t, u
    stream = torch.cuda.Stream()
    sync()
    with torch.cuda.stream(stream):
        seq.replay()
    if how != "deleted":
        seq.reset()
    if how == "captured again":
        with breakable_graph(seq):
            z = x * 3
        seq.replay()
        same(z, 3.0)
    if "deleted" in how:
        del seq
    gc.collect()
    torch.cuda.empty_cache()
    guards = canaries(64, 64)
    stream.synchronize()
    same(out, 7.0, "the output of a replay whose sequence is gone")
    check_canaries(guards)


def garbage(count: int = 3) -> None:
    """Leave captured and replayed sequences behind in reference cycles."""
    for _ in range(count):
        x, seq = dev(1), CUDAGraphSequence()
        with breakable_graph(seq):
            y = torch.rand_like(x)
            bump(y)
            z = y @ y
        seq.replay()
        cycle: list[Any] = [seq, x, y, z, torch.cuda.Stream(), torch.cuda.Event()]
        cycle.append(cycle)


@pytest.fixture
def no_automatic_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["first segment", "second segment", "break"])
@pytest.mark.usefixtures("no_automatic_collection")
def test_cycles_collected_in_the_middle_of_a_capture_are_harmless(where: str, mode: str) -> None:
    def collect(place: str) -> None:
        if place == where:
            found.append(gc.collect())

    found: list[int] = []
    collect_in_break = no_graph(collect)
    garbage()
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq, capture_error_mode=mode):
        y = x * 2
        collect("first segment")
        y = y + 1
        bump(y)
        collect_in_break("break")
        y = y * 3
        collect("second segment")
        z = y + torch.zeros_like(y)
    assert found[0], "there was something to collect"
    check_replays(seq, x, z, lambda t: (t * 2 + 2) * 3)


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
@pytest.mark.usefixtures("no_automatic_collection")
def test_cycles_collected_by_another_thread_in_a_capture_are_harmless(mode: str) -> None:
    garbage()
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq, capture_error_mode=mode):
        y = x * 2
        assert in_thread(gc.collect)
        bump(y)
        z = y + 1
    check_replays(seq, x, z, lambda t: t * 2 + 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_dropped_inside_anothers_segment_is_harmless(mode: str) -> None:
    held = []
    x = dev(1)
    for _ in range(3):
        old = CUDAGraphSequence()
        with breakable_graph(old):
            bump(x * 2)
        old.replay()
        held.append(old)
    del old
    seq = CUDAGraphSequence()
    with breakable_graph(seq, capture_error_mode=mode):
        y = x * 2
        held.pop()
        y = y + 1
        held.pop().reset()
        bump(y)
        held.clear()
        z = y * 3
    check_replays(seq, x, z, lambda t: (t * 2 + 2) * 3)


# ---------------------------------------------------------------- workspaces of cuBLAS


SHAPES = {"square": (256, 256, 256), "deep": (64, 8192, 64)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_stranger_may_clear_the_workspaces_and_replays_stay_right(shape: Any, dtype: Any) -> None:
    m, k, n = shape
    a, b = (torch.randn(s, device="cuda", dtype=dtype) for s in ((m, k), (k, n)))
    bias, seq = torch.randn(n, device="cuda", dtype=dtype), CUDAGraphSequence()

    def body() -> Any:
        h = a @ b
        bump(h)
        return torch.addmm(bias, h, h.t().contiguous())

    with breakable_graph(seq):
        out = body()
    seq.replay()
    sync()
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    guards = canaries(64, 1 << 18)
    for _ in range(3):
        a.normal_()
        seq.replay()
        close(out.float(), body().float(), tolerance=0.02)
    check_canaries(guards)


def test_workspaces_are_made_again_after_a_clear_and_take_no_more() -> None:
    from breakable_cuda_graphs.frameworks.pytorch import workspaces

    stream = CUDAGraphSequence().stream
    workspaces.make(0, stream)
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() < held
    for _ in range(2):
        workspaces.make(0, stream)
        assert torch.cuda.memory_allocated() <= held


def test_resetting_one_sequence_leaves_the_products_of_another(weight: Any) -> None:
    first, second, stream = CUDAGraphSequence(), CUDAGraphSequence(), torch.cuda.Stream()
    with breakable_graph(first, stream=stream):
        a = weight @ weight
    with breakable_graph(second, stream=stream):
        b = weight @ weight + 1
    first.replay()
    close(a, weight @ weight)
    first.reset()
    del first, a
    gc.collect()
    torch.cuda.empty_cache()
    guards = canaries(64, 1 << 18)
    weight.normal_()
    second.replay()
    close(b, weight @ weight + 1)
    check_canaries(guards)


def test_the_first_product_on_a_new_stream_may_be_in_a_segment(weight: Any) -> None:
    for _ in range(3):
        seq = CUDAGraphSequence()
        with breakable_graph(seq, stream=torch.cuda.Stream()):
            out = weight @ weight
            bump(out)
        seq.replay()
        close(out, weight @ weight + 1)


def test_products_in_breaks_and_segments_do_not_disturb_each_other(weight: Any) -> None:
    @no_graph
    def eager_product(t: Any, target: Any) -> None:
        target.copy_(t @ t)

    def body(x: Any) -> Any:
        h = x.view(8, 8) @ x.view(8, 8)
        target = torch.empty_like(h)
        eager_product(h, target)
        return target @ h + 1

    check(body, compare=close)


def test_an_input_that_dies_before_its_segment_has_ended_is_refused() -> None:
    """Torch has its memory back by then: a replay would read whatever lies there."""
    held, x, out, seq = [dev(3)], dev(1), dev(0), CUDAGraphSequence()
    with breakable_graph(seq):
        out.copy_(x + held.pop())
    with pytest.raises(StaleInputError, match="given back before the segment had ended"):
        seq.replay()
    seq.reset()
    with breakable_graph(seq):
        out.copy_(x + 4)
    assert seq.unwatched == ()
    seq.replay()
    same(out, 5)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_words_that_are_left_over_in_a_large_argument_make_nothing_stale(count: int) -> None:
    """A list of tensors is handed over in a struct of kilobytes, of which the rest is not filled."""
    tensors = [torch.zeros(4, device="cuda") for _ in range(count)]
    for number in range(4):
        seq = CUDAGraphSequence()
        with breakable_graph(seq):
            torch._foreach_add_(tensors, 1.0)
        gc.collect()
        seq.replay()
        assert [tensor[0].item() for tensor in tensors] == [number + 1.0] * count
