"""What the ranks of tests/gpu/test_ranks.py do: one process a rank, NCCL or gloo between them.

The hard problem: a replay that leaves the sum over the ranks out looks right on one rank. So what
is expected is computed on each rank alone, from whole weights, for other inputs at each replay.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, force_no_graph, no_graph
from breakable_cuda_graphs._driver import release
from breakable_cuda_graphs.distributed import capture_together, compare
from ranks import end_here, told

REPLAYS = 100
WIDTH, HIDDEN, ROWS = 256, 512, 8


def use_device(rank: int) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())


class Layers:
    """A tensor-parallel MLP: the rank's half of the hidden units, and all of them to compare with."""

    def __init__(self, rank: int, world: int) -> None:
        torch.manual_seed(1)  # the same weights on all ranks
        up, down = torch.randn(WIDTH, HIDDEN) / 16, torch.randn(HIDDEN, WIDTH) / 22
        mine = slice(rank * HIDDEN // world, (rank + 1) * HIDDEN // world)
        self.whole = up.cuda(), down.cuda()
        self.up, self.down = up[:, mine].cuda(), down[mine].cuda()
        self.x = torch.zeros(ROWS, WIDTH, device="cuda")
        self.out = torch.zeros(ROWS, WIDTH, device="cuda")

    def partial(self) -> Any:
        """What this rank adds to the sum."""
        return torch.relu(self.x @ self.up) @ self.down

    def expected(self) -> Any:
        return torch.relu(self.x @ self.whole[0]) @ self.whole[1] + self.x

    def error_of(self, seq: Any) -> float:
        """The largest relative error of many replays."""
        worst = 0.0
        for number in range(REPLAYS):
            self.x.copy_(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)))
            self.out.fill_(float("nan"))
            seq.replay()
            want = self.expected()
            error = float((self.out - want).abs().max() / want.abs().max())
            worst = max(worst, error if error == error else 1e9)
        return worst


@no_graph
def reduce_all(t: Any) -> None:
    dist.all_reduce(t)


works: list[Any] = []


@no_graph
def begin_reduce(t: Any) -> None:
    works.append(dist.all_reduce(t, async_op=True))


@no_graph
def finish_reduce() -> None:
    works.pop().wait()


def in_a_break(layers: Layers) -> None:
    y = layers.partial()
    reduce_all(y)
    layers.out.copy_(y + layers.x)


def captured(layers: Layers) -> None:
    y = layers.partial()
    dist.all_reduce(y)
    layers.out.copy_(y + layers.x)


def captured_asynchronous(layers: Layers) -> None:
    y = layers.partial()
    work = dist.all_reduce(y, async_op=True)
    z = layers.x * 1
    work.wait()
    layers.out.copy_(y + z)


def over_two_breaks(layers: Layers) -> None:
    y = layers.partial()
    begin_reduce(y)
    z = layers.x * 1
    finish_reduce()
    layers.out.copy_(y + z)


def captured_and_split(layers: Layers) -> None:
    y = layers.partial()
    force_no_graph()
    dist.all_reduce(y)
    force_no_graph()
    layers.out.copy_(y + layers.x)


def both(layers: Layers) -> None:
    """Half of the sum by a captured collective, half by an eager one, in turn."""
    y = layers.partial() * 0.5
    dist.all_reduce(y)
    z = layers.partial() * 0.5
    reduce_all(z)
    dist.all_reduce(layers.x * 0)
    layers.out.copy_(y + z + layers.x)


def warm_up(layers: Layers, body: Callable[[Layers], None], rounds: int = 2) -> None:
    for _ in range(rounds):
        body(layers)
    torch.cuda.synchronize()


def nccl(rank: int, world: int) -> dict[str, Any]:
    """Collectives in segments and in breaks, their errors, and the end of the process group."""
    use_device(rank)
    report: dict[str, Any] = {}
    layers = Layers(rank, world)
    warm_up(layers, captured_asynchronous)
    kept = []
    for body in (
        in_a_break,
        captured,
        captured_asynchronous,
        over_two_breaks,
        captured_and_split,
        both,
    ):
        with told(report, f"{body.__name__} problem"):
            seq = CUDAGraphSequence()
            with capture_together(seq, timeout=20):
                body(layers)
            report[body.__name__] = layers.error_of(seq)
            report[f"{body.__name__} nodes"] = [
                node.label[:60]
                for segment in seq.segments
                if hasattr(segment, "graph")
                for node in segment.graph.nodes
            ]
            compare(seq, timeout=20)
            kept.append(seq)
    for mode in ("thread_local", "relaxed"):
        with told(report, f"{mode} problem"):
            seq = CUDAGraphSequence()
            with breakable_graph(seq, capture_error_mode=mode, barrier_fn=dist.barrier):
                both(layers)
            report[mode] = layers.error_of(seq)
            kept.append(seq)
    with told(report, "random problem"):
        report["random"] = random_numbers(rank, world, kept)
    with told(report, "borders problem"):
        borders(report, layers)
    with told(report, "failures problem"):
        failures(report, rank, world, layers, kept)
    with told(report, "last problem"):
        report["at last"] = layers.error_of(kept[1])
    for seq in kept:
        seq.reset()
    del seq
    kept.clear()
    torch.cuda.synchronize()
    release.drain()
    report["left"] = [release.open_captures(), release.pending()]
    report["destroy_process_group"] = end_of_group(rank)
    if report["destroy_process_group"] == "hangs":
        end_here(rank, report)
    return report


def end_of_group(rank: int) -> str:
    """When a process group ends: NCCL waits for the last graph that uses its communicator."""
    is_over = threading.Event()

    def destroy() -> None:
        use_device(rank)
        dist.destroy_process_group()
        is_over.set()

    threading.Thread(target=destroy, daemon=True).start()
    if is_over.wait(10):
        return "at once"
    gc.collect()
    return "after a collection" if is_over.wait(10) else "hangs"


def random_numbers(rank: int, world: int, kept: list[Any]) -> bool:
    """Dropout before a captured sum: replays draw what the eager code draws."""
    x = torch.arange(1024.0, device="cuda")
    out = torch.empty_like(x)

    def body() -> None:
        y = torch.nn.functional.dropout(x, 0.5)
        dist.all_reduce(y)
        out.copy_(y + torch.rand_like(y))

    body()
    seq = CUDAGraphSequence()
    kept.append(seq)
    with breakable_graph(seq):
        body()
    right = True
    for seed in range(3):
        torch.cuda.manual_seed(seed)  # of this rank; the same on all
        eager = []
        for _ in range(2):
            body()
            eager.append(out.clone())
        torch.cuda.manual_seed(seed)
        for want in eager:
            out.fill_(float("nan"))
            seq.replay()
            right = right and bool(torch.equal(out, want))
    return right


def borders(report: dict[str, Any], layers: Layers) -> None:
    """wait() on the other side of a border is an error, and does no lasting harm."""
    world = dist.get_world_size()
    gathered = torch.empty(world * ROWS, WIDTH, device="cuda")
    held: list[Any] = []

    def gather() -> None:
        held.append(dist.all_gather_into_tensor(gathered, layers.x, async_op=True))

    def wait() -> None:
        held.pop().wait()

    gather()
    wait()
    for name, first, second in (
        ("begun in a segment, waited for in a break", gather, no_graph(wait)),
        ("begun in a break, waited for in a segment", no_graph(gather), wait),
        ("begun in a segment, never waited for", gather, lambda: None),
    ):
        with told(report, name), breakable_graph(CUDAGraphSequence()):
            layers.x.mul(2)
            first()
            layers.x.mul(3)
            second()
            layers.x.mul(4)
        held.clear()
        torch.cuda.synchronize()
        dist.all_reduce(torch.ones(4, device="cuda"))
        torch.cuda.synchronize()


def failures(
    report: dict[str, Any], rank: int, world: int, layers: Layers, kept: list[Any]
) -> None:
    """A rank fails beside captured collectives; then all capture again."""
    for which in range(world):
        seq = CUDAGraphSequence()
        with told(report, f"rank {which} fails"), capture_together(seq, timeout=20):
            captured(layers)
            if rank == which:
                raise KeyError("mine")
            reduce_all(layers.x)
        with capture_together(seq, timeout=20):
            captured(layers)
        report[f"after {which}"] = layers.error_of(seq)
        kept.append(seq)
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        if rank == 1:
            layers.x.mul(2)
        captured(layers)
    with told(report, "different"):
        compare(seq, timeout=20)
    kept.append(seq)


def gloo(rank: int, world: int) -> dict[str, Any]:
    """Ranks that share one device: the host sums, in breaks."""
    torch.cuda.set_device(0)
    report: dict[str, Any] = {}
    layers = Layers(rank, world)
    warm_up(layers, in_a_break)
    order: list[str] = []

    def barrier() -> None:
        order.append("barrier")

    @no_graph
    def step(t: Any) -> None:
        order.append("break")
        dist.all_reduce(t)

    seq = CUDAGraphSequence()
    time.sleep(0.3 * rank)
    with capture_together(seq, barrier_fn=barrier, timeout=20):
        y = layers.partial()
        order.append("segment")
        step(y)
        layers.out.copy_(y + layers.x)
    report["order"], order[:] = list(order), []
    report["error"] = layers.error_of(seq)
    report["order of a replay"] = order[:1]
    report["fingerprint"] = compare(seq, timeout=20)
    for which in range(world):
        with told(report, f"rank {which} fails"), capture_together(seq, timeout=20):
            y = layers.partial()
            if rank == which:
                raise KeyError("mine")
            reduce_all(y)
        with told(report, f"rank {which} fails, replay"):
            seq.replay()
        with capture_together(seq, timeout=20):
            in_a_break(layers)
        report[f"after {which}"] = layers.error_of(seq)
    other = CUDAGraphSequence()
    with breakable_graph(other):
        layers.out.copy_(layers.x.exp() if rank else layers.x.sqrt())
    with told(report, "different"):
        compare(other, timeout=20)
    with told(report, "captured"), breakable_graph(CUDAGraphSequence()):
        y = layers.x * 2
        dist.all_reduce(y)
    torch.cuda.synchronize()
    report["at last"] = layers.error_of(seq)
    return report
