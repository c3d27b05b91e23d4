"""Timing: the one hard problem is that the machine drifts more than the rivals differ.

Clocks, caches and the queue of the GPU change over seconds by more than the few percent that we
want to tell apart. Two rivals timed one after the other therefore measure the drift. The answer
is `interleave`: a round visits every case once, in a fresh random order, and there are many
rounds. A case's sample in a round is one short turn (`shallow`, `saturated`, `elapsed`), and all
comparisons (ratios, slopes) are made round by round before the median over rounds is taken.

Nothing in this file imports torch: what belongs to the device comes in as callables.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

Call = Callable[[], object]
Turn = Callable[[], float]
Tick = Callable[[], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """A median and how far the samples lie around it."""

    median: float
    q1: float
    q3: float
    best: float
    count: int


def spread(samples: Sequence[float]) -> Spread:
    """Summarise `samples`; quartiles are inclusive, so they are never outside of the data."""
    if not samples:
        raise ValueError("no samples: nothing was measured")
    if len(samples) == 1:
        only = samples[0]
        return Spread(only, only, only, only, 1)
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, q1, q3, min(samples), len(samples))


@dataclass(frozen=True)
class Line:
    slope: float
    intercept: float


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Least squares of the *relative* error: `y = intercept + slope * x`, weights `1 / y**2`.

    The cost of 512 segments is hundreds of times that of one. With equal weights one percent of
    noise at the right end would be several times the whole fixed cost; timing noise is relative,
    so the weights are.
    """
    if len({x for x, _ in points}) < 2:
        raise ValueError("a line needs two different sizes")
    if any(y <= 0 for _, y in points):
        raise ValueError("relative weights need positive times")
    weights = [1.0 / (y * y) for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    covariance = sum(
        w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)
    )
    variance = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = covariance / variance
    return Line(slope, mean_y - slope * mean_x)


@dataclass
class Case:
    """One rival at one size: `turn()` measures it once, `samples` has one figure a round."""

    rival: str
    size: float
    turn: Turn
    samples: list[float] = field(default_factory=list)


def interleave(
    cases: Sequence[Case], rounds: int, tick: Tick | None = None, *, warm: int = 1, seed: int = 0
) -> None:
    """Run every case once a round, in a new order each round; the garbage collector is off."""
    order = list(cases)
    shuffle = random.Random(seed).shuffle
    with collector_off():
        for case in order * warm:
            case.turn()
        for _ in range(rounds):
            shuffle(order)
            for case in order:
                case.samples.append(case.turn())
            if tick is not None:
                tick()


@contextmanager
def collector_off() -> Iterator[None]:
    """No collection inside a timed part: 90 ms with torch loaded, and at random."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def shallow(call: Call, sync: Call, repeats: int = 3) -> Turn:
    """Host microseconds of one call into an empty queue; the wait for the device is not timed."""
    clock = time.perf_counter_ns

    def turn() -> float:
        times = []
        sync()
        call()  # brings this rival's code and handles back into the caches
        for _ in range(repeats):
            sync()
            begin = clock()
            call()
            times.append(clock() - begin)
        sync()
        return statistics.median(times) / 1e3

    return turn


def saturated(call: Call, sync: Call, calls: int) -> Turn:
    """Host microseconds a call when many follow each other and the queue is never empty."""
    clock = time.perf_counter_ns
    loop = range(calls)

    def turn() -> float:
        sync()
        call()
        begin = clock()
        for _ in loop:
            call()
        end = clock()
        sync()
        return (end - begin) / calls / 1e3

    return turn


def finished(call: Call, sync: Call, calls: int) -> Turn:
    """Microseconds a call until the device is done: what a user waits for."""
    clock = time.perf_counter_ns
    loop = range(calls)

    def turn() -> float:
        sync()
        begin = clock()
        for _ in loop:
            call()
        sync()
        return (clock() - begin) / calls / 1e3

    return turn


def elapsed(make: Callable[[], T], drop: Callable[[T], object], sync: Call) -> Turn:
    """Microseconds to make something; what it leaves behind is dropped outside of the time."""
    clock = time.perf_counter_ns

    def turn() -> float:
        sync()
        begin = clock()
        made = make()
        end = clock()
        sync()
        drop(made)
        return (end - begin) / 1e3

    return turn


def calls_for(launches: int, per_call: int) -> int:
    """How many calls make about `launches` launches, at least four."""
    return max(4, launches // per_call)


# --- what the samples say -------------------------------------------------------------------


def by_rival(cases: Sequence[Case]) -> dict[str, dict[float, list[float]]]:
    """Group samples; rivals in order of first appearance, sizes ascending."""
    table: dict[str, dict[float, list[float]]] = {}
    for case in cases:
        table.setdefault(case.rival, {})[case.size] = case.samples
    return {rival: dict(sorted(sizes.items())) for rival, sizes in table.items()}


def lines_by_round(sizes: Mapping[float, Sequence[float]]) -> list[Line]:
    """One fitted line a round: their spread says how well the slope is known."""
    rounds = min(len(samples) for samples in sizes.values())
    return [fit_line([(x, samples[r]) for x, samples in sizes.items()]) for r in range(rounds)]


def paired(
    first: Sequence[float], second: Sequence[float], combine: Callable[[float, float], float]
) -> Spread:
    """Combine two rivals round by round, so that what both drifted by cancels."""
    return spread([combine(a, b) for a, b in zip(first, second, strict=False)])


def ratio(first: Sequence[float], second: Sequence[float]) -> Spread:
    """Round by round. A round in which the second took no time that shows tells nothing: it is left out."""
    rounds = [(a, b) for a, b in zip(first, second, strict=False) if b]
    return spread([a / b for a, b in rounds] or [float("nan")])


def difference(first: Sequence[float], second: Sequence[float]) -> Spread:
    return paired(first, second, lambda a, b: a - b)


def clock_overhead(samples: int = 2000) -> Spread:
    """Microseconds that two readings of the clock cost; part of every shallow figure."""
    clock = time.perf_counter_ns
    times = []
    for _ in range(samples):
        begin = clock()
        times.append((clock() - begin) / 1e3)
    return spread(times)
