"""Which memory captures use, and with whom they share it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph

from .helpers import Boom, bump, canaries, check_canaries, check_replays, dev, same, torch, warm_up

pytestmark = pytest.mark.gpu

BIG = 8 << 20  # floats: 32 MiB, a block of the allocator by itself


def capture_temporary(seq: Any, x: Any, added: float) -> tuple[Any, int]:
    """Capture out = 2 x + added through a big temporary; returns out and where that lay."""
    out = dev(0)
    with breakable_graph(seq):
        t = x.repeat(BIG // 64)
        address = t.data_ptr()
        t.mul_(2)
        bump(t)
        out.copy_(t[-64:] + (added - 1))
    return out, address


GIVEN: dict[str, Callable[[], Any]] = {
    "a graph pool handle": lambda: torch.cuda.graph_pool_handle(),
    "a memory pool": lambda: torch.cuda.MemPool(),
}


@pytest.mark.parametrize("make", GIVEN.values(), ids=GIVEN.keys())
def test_sequences_that_are_given_one_pool_share_memory(make: Callable[[], Any]) -> None:
    pool, x = make(), dev(1)
    first, second = CUDAGraphSequence(pool=pool), CUDAGraphSequence(pool=pool)
    a, where_a = capture_temporary(first, x, 5)
    b, where_b = capture_temporary(second, x, 7)
    assert where_a == where_b, "the second capture took memory of its own"
    for k in range(3):
        x.fill_(k)
        a.zero_()
        b.zero_()
        first.replay()
        second.replay()
        same(a, 2.0 * k + 5)
        same(b, 2.0 * k + 7)


def test_a_sequence_given_the_pool_of_another_shares_its_memory() -> None:
    x, first = dev(1), CUDAGraphSequence()
    a, where_a = capture_temporary(first, x, 5)
    second = CUDAGraphSequence(pool=first.pool())
    b, where_b = capture_temporary(second, x, 7)
    assert where_a == where_b
    assert second.pool() == first.pool()
    check_replays(first, x, a, lambda t: t * 2 + 5)
    check_replays(second, x, b, lambda t: t * 2 + 7)


def test_sequences_without_a_given_pool_share_nothing() -> None:
    x, first, second = dev(1), CUDAGraphSequence(), CUDAGraphSequence()
    a, where_a = capture_temporary(first, x, 5)
    b, where_b = capture_temporary(second, x, 7)
    assert where_a != where_b
    assert first.pool() != second.pool()
    for seq, out, added in [(second, b, 7), (first, a, 5), (second, b, 7)]:
        check_replays(seq, x, out, lambda t, added=added: t * 2 + added, values=(1.0, 2.0))


def test_the_pool_of_a_fresh_sequence_is_there_and_stays() -> None:
    seq, x = CUDAGraphSequence(), dev(1)
    pool = seq.pool()
    assert pool is not None
    capture_temporary(seq, x, 1)
    assert seq.pool() == pool
    seq.reset()
    assert seq.pool() == pool
    out, _ = capture_temporary(seq, x, 3)
    assert seq.pool() == pool
    check_replays(seq, x, out, lambda t: t * 2 + 3)


@pytest.mark.parametrize("how", ["reset", "deleted"])
def test_a_sequence_outlives_another_of_its_pool(how: str) -> None:
    x, first = dev(1), CUDAGraphSequence()
    capture_temporary(first, x, 5)
    second = CUDAGraphSequence(pool=first.pool())
    out, _ = capture_temporary(second, x, 7)
    first.reset()
    if how == "deleted":
        del first
    gc.collect()
    torch.cuda.empty_cache()
    guards = canaries()
    check_replays(second, x, out, lambda t: t * 2 + 7)
    check_canaries(guards)


def test_a_pool_can_be_captured_into_again_after_everything_in_it_was_reset() -> None:
    pool, x = torch.cuda.graph_pool_handle(), dev(1)
    for added in (3, 4, 5):
        seq = CUDAGraphSequence(pool=pool)
        out, _ = capture_temporary(seq, x, added)
        check_replays(seq, x, out, lambda t, added=added: t * 2 + added, values=(1.0, 2.0))
        seq.reset()
        del seq, out
        gc.collect()
        torch.cuda.empty_cache()


def test_a_torch_graph_may_use_the_pool_of_a_sequence() -> None:
    x, seq, graph, theirs = dev(1), CUDAGraphSequence(), torch.cuda.CUDAGraph(), dev(0)
    ours, _ = capture_temporary(seq, x, 5)
    with torch.cuda.graph(graph, pool=seq.pool()):
        theirs.copy_(x * 3 + 1)
    for k in range(3):
        x.fill_(k)
        seq.replay()
        graph.replay()
        same(ours, 2.0 * k + 5)
        same(theirs, 3.0 * k + 1)


def test_the_segments_of_a_sequence_reuse_each_others_memory() -> None:
    x, seq, addresses = dev(1), CUDAGraphSequence(), []
    out = dev(0)
    with breakable_graph(seq):
        for _ in range(6):
            t = x.repeat(BIG // 64)
            addresses.append(t.data_ptr())
            bump(t)
            out.add_(t[:64])
            del t
    assert len(set(addresses)) == 1, "breaks keep what they were given"
    out.zero_()
    x.fill_(2)
    seq.replay()
    same(out, 18.0)


def test_a_block_of_a_sequence_reuses_what_an_earlier_one_gave_back() -> None:
    x, seq = dev(1), CUDAGraphSequence()
    first, where_first = capture_temporary(seq, x, 5)
    second, where_second = capture_temporary(seq, x, 7)
    assert where_first == where_second
    for k in range(3):
        x.fill_(k)
        seq.replay()
        same(first, 2.0 * k + 5)
        same(second, 2.0 * k + 7)


def test_memory_of_a_capture_is_out_of_reach_for_eager_code() -> None:
    x, seq, out = dev(1), CUDAGraphSequence(), dev(0)
    with breakable_graph(seq):
        t = x * 2
        bump(t)
        u = t + 1
        bump(u)
        out.copy_(t + u)
    del t, u
    gc.collect()
    torch.cuda.empty_cache()
    guards = canaries(64, 64)
    check_replays(seq, x, out, lambda t: t * 2 + 1 + t * 2 + 3)
    check_canaries(guards)


def test_allocations_of_a_break_and_after_the_block_are_ordinary_ones() -> None:
    x, seq, kept = dev(1), CUDAGraphSequence(), []

    @no_graph
    def keep(t: Any) -> None:
        kept.append(t.clone())

    with breakable_graph(seq):
        y = x * 2
        keep(y)
        z = y + 1
    outside = dev(3, BIG)
    addresses = {outside.data_ptr(), kept[0].data_ptr()}
    del y, z
    seq.reset()
    del seq
    gc.collect()
    torch.cuda.empty_cache()
    guards = canaries()
    same(outside[:64], 3.0)
    assert not addresses & {bird.data_ptr() for bird in guards}
    check_canaries(guards)


def test_after_a_failed_capture_allocations_are_ordinary_ones_again() -> None:
    seq, x = CUDAGraphSequence(), dev(1)
    with pytest.raises(Boom), breakable_graph(seq):
        x + 1
        raise Boom
    outside = dev(3, BIG)
    seq.reset()
    del seq
    gc.collect()
    torch.cuda.empty_cache()
    guards = [dev(-7, BIG) for _ in range(4)]
    same(outside, 3.0)
    check_canaries(guards)


@pytest.mark.parametrize("pool", ["text", 3, (1, 2, 3), object()])
def test_what_is_no_pool_is_refused(pool: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        with breakable_graph(CUDAGraphSequence(pool=pool)):
            pytest.fail("the block was entered")


def test_a_memory_pool_kept_by_its_user_serves_a_sequence() -> None:
    pool, x = torch.cuda.MemPool(), dev(1)
    seq = CUDAGraphSequence(pool=pool.id)
    out, _ = capture_temporary(seq, x, 9)
    check_replays(seq, x, out, lambda t: t * 2 + 9)
    seq.reset()
    del seq
    gc.collect()


def test_a_warm_up_on_the_sequences_own_stream_needs_no_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream that nobody has used: its workspaces are made before the user sees it."""
    from breakable_cuda_graphs.frameworks.pytorch import capture_streams, workspaces

    monkeypatch.setattr(capture_streams, "_idle", {})
    weight, x = torch.ones(64, 64, device="cuda", requires_grad=True), dev(1)
    seq = CUDAGraphSequence()

    def work() -> Any:
        loss = (x @ weight).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        stream = seq.stream
    warm_up(seq, work)
    assert workspaces._ranges[stream.cuda_stream], "the workspace is in torch's ordinary memory"
    with breakable_graph(seq):  # a WorkspaceWarning would be an error
        loss = work()
    torch._C._cuda_clearCublasWorkspaces()
    assert weight.grad is not None
    for value in (1.0, 2.0):
        x.fill_(value)
        weight.grad.zero_()
        seq.replay()
        same(loss.detach().view(1), value * 64 * 64)
        same(weight.grad, value)


ASYNC = """
import torch
from breakable_cuda_graphs import CaptureError, CUDAGraphSequence, breakable_graph
x = torch.ones(4, device="cuda")
try:
    with breakable_graph(CUDAGraphSequence()):
        x * 2
except CaptureError as error:
    print(error)
print("afterwards", (x + 1).tolist(), torch.cuda.is_current_stream_capturing())
"""


def test_an_allocator_without_private_pools_is_refused_with_the_reason() -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    command = [sys.executable, "-c", ASYNC]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    first, last = done.stdout.splitlines()
    assert "cudaMallocAsync has no private pools" in first
    assert last == "afterwards [2.0, 2.0, 2.0, 2.0] False"


ROUTED = """
import contextlib
import gc
import torch
from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph

x = torch.ones(4, device="cuda")


def capture():
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        x * 2
    return seq


def segments(pool):
    return [each for each in torch.cuda.memory_snapshot() if each["segment_pool_id"] == pool]


other, seq = capture(), capture()
pool = tuple(seq.pool())
assert segments(pool), "nothing was captured into the pool"
torch.empty(40 << 20, dtype=torch.uint8, device="cuda")  # in torch's cache from here on
with contextlib.ExitStack() as stack:
    if ROUTE == "use_mem_pool":
        theirs = torch.cuda.MemPool()
        stack.enter_context(torch.cuda.use_mem_pool(theirs))
    else:
        with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.sum().item()
    del seq
    gc.collect()
    other.reset()  # what is queued is released here
    print(len(segments(pool)))
print(torch.cuda.memory_reserved() >= 40 << 20, (x + 1).tolist())
"""


@pytest.mark.parametrize("route", ["use_mem_pool", "a capture of the user's that failed"])
def test_a_sequence_may_go_while_memory_is_routed_to_a_pool_of_the_users(route: str) -> None:
    """The end of a `torch.cuda.MemPool` would end the process; and the user's cache is not emptied."""
    command = [sys.executable, "-c", f"ROUTE = {route!r}" + ROUTED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    left, afterwards = done.stdout.splitlines()
    assert left == "0"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13):
        assert afterwards == "True [2.0, 2.0, 2.0, 2.0]"
