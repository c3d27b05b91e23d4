"""What the ranks of tests/test_distributed.py do: gloo between them, a simulated device in each."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph
from breakable_cuda_graphs.distributed import capture_together, compare
from breakable_cuda_graphs.simulator import simulated_device
from helping import assert_nothing_open
from ranks import end_here, told


@contextmanager
def device() -> Iterator[None]:
    gc.freeze()  # what torch's modules hold is not looked through at each segment
    with simulated_device(seed=1) as made:
        yield
        assert_nothing_open(made)
        assert made.findings == []


@no_graph
def reduce_all(t: Any) -> None:
    dist.all_reduce(t)


@no_graph
def other_break(t: Any) -> None:
    t.add_(1)


class Scene:
    """out = (sum over the ranks of 2 x) + 1, with the sum as a break."""

    def __init__(self, rank: int) -> None:
        self.x = torch.full((4,), float(rank + 1))
        self.out = torch.empty(4)
        self.seq = CUDAGraphSequence()

    def body(self, before: Callable[[], Any] = lambda: None) -> None:
        y = self.x * 2
        before()
        reduce_all(y)
        self.out.copy_(y + 1)

    def values(self, rank: int) -> list[float]:
        """What replays give for two inputs."""
        found = []
        for value in (1.0, 4.0):
            self.x.fill_((rank + 1) * value)
            self.seq.replay()
            found.append(self.out[0].item())
        return found


def fail_on(rank: int, which: int) -> Callable[[], None]:
    def fail() -> None:
        if rank == which:
            raise KeyError("mine")

    return fail


def barriers(rank: int, world: int) -> dict[str, Any]:
    """barrier_fn, and capture_together, with an all-reduce as the break."""
    report: dict[str, Any] = {}
    with device():
        order: list[str] = []

        def barrier() -> None:
            dist.barrier()
            order.append("barrier")

        @no_graph
        def step(t: Any) -> None:
            order.append("break")
            dist.all_reduce(t)

        scene = Scene(rank)
        with breakable_graph(scene.seq, barrier_fn=barrier):
            order.append("segment")
            y = scene.x * 2
            step(y)
            order.append("segment")
            scene.out.copy_(y + 1)
        report["plain order"], order[:] = list(order), []
        report["plain"] = scene.values(rank)
        report["order at replay"], order[:] = list(order), []

        scene = Scene(rank)
        time.sleep(0.2 * rank)  # the ranks are not in step by themselves
        with capture_together(scene.seq, barrier_fn=lambda: order.append("barrier")):
            scene.body(lambda: time.sleep(0.2 * (1 - rank)))
        report["together"] = scene.values(rank)
        report["barriers together"] = list(order)
        report["fingerprint"] = compare(scene.seq)
        with capture_together(scene.seq):  # appended
            scene.body()
        report["appended"] = scene.values(rank)
        half = dist.new_group([0]), dist.new_group([1])
        alone = Scene(rank)
        with capture_together(alone.seq, group=half[rank]):
            alone.out.copy_(alone.x * 2)
        report["alone"] = alone.values(rank)
        with told(report, "not in the group"):
            compare(alone.seq, half[1 - rank])
    return report


def failures(rank: int, world: int) -> dict[str, Any]:
    """One rank fails; the others hear of it at once, and all can go on."""
    report: dict[str, Any] = {}
    with device():
        for which in range(world):
            scene = Scene(rank)
            with told(report, f"rank {which} fails in a segment"):
                with capture_together(scene.seq):
                    scene.body(fail_on(rank, which))
            with told(report, f"rank {which} fails in a segment, replay"):
                scene.seq.replay()
            with capture_together(scene.seq):
                scene.body()
            report[f"after {which}"] = scene.values(rank)

        scene = Scene(rank)
        with told(report, "rank 1 fails in the last segment"), capture_together(scene.seq):
            scene.body()
            fail_on(rank, 1)()
        report["segments kept"] = len(scene.seq)

        scene = Scene(rank)
        with capture_together(scene.seq):
            scene.body()
        with told(report, "rank 0 fails when it commits"), capture_together(scene.seq):
            scene.body()
            if rank == 0:
                scene.seq._commit = fail_commit
        scene.seq.__dict__.pop("_commit", None)
        with told(report, "replay after a failed commit"):
            scene.seq.replay()

        scene = Scene(rank)
        with told(report, "other breaks"), capture_together(scene.seq):
            y = scene.x * 2
            (reduce_all if rank else other_break)(y)
        scene = Scene(rank)
        with told(report, "one break less"), capture_together(scene.seq):
            y = scene.x * 2
            if rank:
                other_break(y)
        with told(report, "the rank that enters wrongly"):
            with capture_together(scene.seq, stream=0 if rank == 0 else None):
                other_break(scene.x * 2)
        with capture_together(scene.seq):
            scene.body()
        report["at last"] = scene.values(rank)
    return report


def fail_commit(*_: Any) -> None:
    raise MemoryError("no room")


def lateness(rank: int, world: int) -> dict[str, Any]:
    """A rank that does not come in time; it comes later, and both hear of it."""
    report: dict[str, Any] = {}
    with device():
        scene = Scene(rank)
        with told(report, "late"), capture_together(scene.seq, timeout=0.5):
            y = scene.x * 2
            time.sleep(1.5 * rank)
            other_break(y)
            y.add_(1)
        dist.barrier()
        with capture_together(scene.seq):
            scene.body()
        report["afterwards"] = scene.values(rank)
    return report


def out_of_step(rank: int, world: int) -> dict[str, Any]:
    """Ranks that fail where the others are already in, come too late for a collective, or stay away."""
    report: dict[str, Any] = {}
    with device():
        scene = Scene(rank)
        barrier = fail_on(rank, 1)
        with told(report, "barrier_fn fails"), capture_together(scene.seq, barrier_fn=barrier):
            scene.body()
        with told(report, "only one has a barrier_fn"):
            options = {"barrier_fn": lambda: None} if rank else {}
            with capture_together(scene.seq, **options):
                scene.body()
        scene = Scene(rank)
        with told(report, "late for a collective"), capture_together(scene.seq, timeout=0.5):
            scene.body(lambda: time.sleep(1.5 * rank))
        with told(report, "stays away"):
            if rank == 0:
                with capture_together(scene.seq, timeout=0.5):
                    scene.body()
        dist.barrier()
        for which in ("first", "second"):
            time.sleep(0.3 * rank)  # rank 0 has failed in the second before rank 1 begins the first
            with told(report, f"the {which} of two"), capture_together(scene.seq, timeout=5):
                scene.body(fail_on(rank, 0))
        with told(report, "does not compare"):
            if rank == 1:
                compare(scene.seq, timeout=0.5)
        dist.barrier()
        with capture_together(scene.seq, timeout=10):
            scene.body()
        report["at last"] = scene.values(rank)
        report["compared"] = compare(scene.seq, timeout=10)
    return report


def comparisons(rank: int, world: int) -> dict[str, Any]:
    """Captures that differ between the ranks, each in another way."""
    report: dict[str, Any] = {}

    def compared(name: str, body: Callable[[Any], Any]) -> None:
        scene = Scene(rank)
        with breakable_graph(scene.seq):
            kept.append(body(scene.x))
        with told(report, name):
            report[f"{name} fingerprint"] = compare(scene.seq, timeout=10)

    with device():
        kept: list[Any] = []
        compared("equal", lambda x: (x * 2, other_break(x), x + 1))
        compared("values", lambda x: x * (rank + 2))
        compared("operator", lambda x: (x * 2, x.sqrt() if rank else x.exp()))
        compared("order", lambda x: (x.exp(), x.sqrt()) if rank else (x.sqrt(), x.exp()))
        compared("nodes", lambda x: [x * 2 for _ in range(2 + rank)])
        compared("segments", lambda x: [other_break(x) for _ in range(1 + rank)])
        compared("names", lambda x: other_break(x) if rank else reduce_nothing(x))
        compared(
            "second segment",
            lambda x: (
                x + 1,
                other_break(x),
                [x + 1] * (1 + 0 * rank),
                x.sqrt() if rank else x + 2,
            ),
        )
        with told(report, "one does not come"):
            if rank == 0:
                compare(CUDAGraphSequence(), timeout=0.3)
        kept.clear()
    return report


@no_graph
def reduce_nothing(t: Any) -> None:
    t.add_(1)


def captured_collective(rank: int, world: int) -> dict[str, Any]:
    """An all-reduce inside of a segment: on the CPU the host does it, so it cannot be captured."""
    report: dict[str, Any] = {}
    with device():
        scene = Scene(rank)
        with told(report, "captured"), breakable_graph(scene.seq):
            y = scene.x * 2
            dist.all_reduce(y)
            scene.out.copy_(y + 1)
        with breakable_graph(scene.seq):
            scene.body()
        report["afterwards"] = scene.values(rank)
    return report


def all_at_once(rank: int, world: int) -> dict[str, Any]:
    """To start a process with torch in it takes longer than all that it does here.

    At the end rank 1 dies in a capture, with its report written.
    """
    programs = (barriers, failures, lateness, out_of_step, comparisons, captured_collective)
    report: dict[str, Any] = {each.__name__: each(rank, world) for each in programs}
    with device():
        scene = Scene(rank)
        with told(report, "death"), capture_together(scene.seq, timeout=1.0):
            y = scene.x * 2
            if rank == 1:
                end_here(rank, report)
            reduce_all(y)
    return report
