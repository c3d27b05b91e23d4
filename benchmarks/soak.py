"""Soak: does anything grow, or go wrong, over very many replays and captures?

The hard problem is to tell growth from warm-up: memory is read after a first stretch that may grow,
and again at the end, by torch's counters and by the driver's; and the values at the end are compared
with eager code that draws the same random numbers.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from typing import Any

import torch

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph

from .progress import Progress
from .record import Report, Settings

QUESTION = "Do memory and values stay as they are over very many replays and captures?"
REPLAYS, QUICK_REPLAYS = 100_000, 2_000
ROUNDS, QUICK_ROUNDS = 1_000, 50
SIZE = 1 << 14


def run(settings: Settings, report: Report, progress: Progress) -> None:
    replays(settings.pick(REPLAYS, QUICK_REPLAYS), report)
    rounds(settings.pick(ROUNDS, QUICK_ROUNDS), report)


def used() -> tuple[int, int, int]:
    """Bytes: allocated by torch, taken from the device, resident on the host."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.memory_allocated(), total - free, resident


def grown(report: Report, title: str, stretch: Callable[[int], None], count: int) -> None:
    """Run a tenth to settle, then the rest, and report what has grown since."""
    stretch(count // 10)
    before, began = used(), time.perf_counter()
    stretch(count - count // 10)
    seconds = time.perf_counter() - began
    after = used()
    rows = [
        (what, old, new, new - old)
        for what, old, new in zip(
            ("torch allocated", "device in use", "host resident, at most"),
            before,
            after,
            strict=True,
        )
    ]
    report.table(
        f"{title}: {count} in all, {seconds:.1f} s after settling",
        ("bytes", "after a tenth", "at the end", "grown"),
        rows,
    )


def replays(count: int, report: Report) -> None:
    """Breaks, dropout in segments and in a break, a side stream, static results."""
    x, out, side = torch.rand(SIZE, device="cuda"), torch.zeros(SIZE, device="cuda"), Side()
    sequence = CUDAGraphSequence()
    with breakable_graph(sequence):
        body(x, out, side)
    torch.manual_seed(11)

    def stretch(times: int) -> None:
        for _ in range(times):
            sequence.replay()

    grown(report, "replays", stretch, count)
    check(sequence, x, out, side)


def check(sequence: Any, x: Any, out: Any, side: Any) -> None:
    """After all that: right for new inputs, random numbers included."""
    for seed in range(5):
        x.copy_(torch.rand(SIZE, device="cuda"))
        torch.manual_seed(seed)
        sequence.replay()
        got, state = out.clone(), torch.cuda.get_rng_state()
        torch.manual_seed(seed)
        body(x, out, side)
        assert torch.equal(got, out), f"a replay differs from eager for seed {seed}"
        assert torch.equal(state, torch.cuda.get_rng_state()), "the generator is elsewhere"


class Side:
    """A side stream, made once."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()


@no_graph(outputs="static")
def noise(t: Any) -> Any:
    return t + torch.rand_like(t)


@no_graph
def bump(t: Any) -> None:
    t.add_(1)


def body(x: Any, out: Any, side: Side) -> None:
    main = torch.cuda.current_stream()
    h = torch.nn.functional.dropout(x, 0.5)
    side.stream.wait_stream(main)
    with torch.cuda.stream(side.stream):
        other = h * 2
    main.wait_stream(side.stream)
    h = noise(h + other)
    h = torch.nn.functional.dropout(h, 0.1)
    bump(h)
    out.copy_(h * 3)


def rounds(count: int, report: Report) -> None:
    """Capture, replay and reset, over and over, one sequence and new ones; every fifth capture fails."""
    x, out, side = torch.rand(SIZE, device="cuda"), torch.zeros(SIZE, device="cuda"), Side()
    kept = CUDAGraphSequence()

    def stretch(times: int) -> None:
        for number in range(times):
            sequence = kept if number % 2 else CUDAGraphSequence()
            if number % 10 in (4, 9):
                fail(sequence, x)
            with breakable_graph(sequence):
                body(x, out, side)
            sequence.replay()
            sequence.reset()

    grown(report, "rounds of capture, replay and reset", stretch, count)


def fail(sequence: Any, x: Any) -> None:
    try:
        with breakable_graph(sequence):
            (x + 1).sum().item()
    except RuntimeError:
        sequence.reset()
    else:
        raise AssertionError("a host read was captured")
