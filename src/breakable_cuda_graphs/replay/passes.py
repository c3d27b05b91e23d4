"""The times of some replays, and the means that a profile is made of.

The hard problem: a rare long replay must not move a figure, and the parts of a replay have to add up to the
whole. So the same middle half of the replays is taken for the whole and for each part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class Pass(NamedTuple):
    """What was seen of some replays: for each, the times at its marks in microseconds.

    was_marked: of those with delays, in which units another thread has marked the end of the work.
    """

    gpu: list[list[float]]
    cpu: list[list[float]]
    was_marked: list[list[bool]]


def marker(record: Any, events: Iterator[Any], stream: Any, stamps: list[int]) -> Any:
    """A call that notes the host's time and records the next event: as little as it can be."""
    clock, note = time.perf_counter_ns, stamps.append

    def mark() -> None:
        note(clock())
        record(next(events), stream)

    return mark


def follows(marked: Pass, number: int) -> bool:
    """Whether a replay came right behind the one before it; between rounds others were made."""
    return 0 < number < len(marked.cpu) and marked.cpu[number][0] == marked.cpu[number - 1][-1]


def shares(count: int, parts: int) -> list[int]:
    """A number in so many parts that differ by one at most."""
    return [count // parts + (number < count % parts) for number in range(parts)]


def inner_half(values: Sequence[float]) -> list[int]:
    """The places of the values that are neither in the lowest nor in the highest quarter."""
    order = sorted(range(len(values)), key=values.__getitem__)
    cut = len(values) // 4
    return order[cut : len(values) - cut]


def middle(values: Sequence[float]) -> float:
    """The mean of the inner half: a rare long replay does not move it."""
    chosen = inner_half(values)
    return sum(values[number] for number in chosen) / len(chosen)


def mean_steps(times: Sequence[Sequence[float]]) -> list[float]:
    """The mean distances between the marks of some replays; they add up to the mean total."""
    count = len(times)
    return [
        sum(each[mark + 1] - each[mark] for each in times) / count
        for mark in range(len(times[0]) - 1)
    ]
