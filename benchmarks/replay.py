"""Replay; the hard problem is to tell the cost of a segment from that of a break and of a replay.

They differ by tenths of a microsecond and come together in every measurement. So the same kernel
is replayed with 1 to 512 no-op breaks and a line is fitted over the number of segments: its slope
is one segment with one break, its intercept what a replay costs however long it is. What a break
costs is the difference of two slopes, ours and that of a loop which only launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import rivals
from .harness import (
    Call,
    Case,
    Line,
    by_rival,
    calls_for,
    difference,
    interleave,
    lines_by_round,
    ratio,
    saturated,
    shallow,
    spread,
)
from .progress import Progress
from .record import Report, Settings

QUESTION = (
    "What does one graph segment cost at replay, what a no-op break, and what a replay however "
    "long it is? One kernel a segment; host time."
)
BREAKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_BREAKS = (1, 8, 32, 128)
Build = Callable[[int], Call]


def run(settings: Settings, report: Report, progress: Progress) -> None:
    report.labels.update(rivals.LABELS)
    breaks = settings.pick(BREAKS, QUICK_BREAKS)
    found = builders(max(breaks), settings, report)  # kept: it holds tensors and graphs
    calls = checked_calls(found, breaks, report)
    sync = torch.cuda.current_stream().synchronize

    empty = [Case(rival, n, shallow(call, sync)) for (rival, n), call in calls.items()]
    measure(report, progress, "shallow", "Empty queue: one replay", empty, settings.pick(60, 12))

    launches = settings.pick(2048, 512)
    full = [
        Case(rival, n, saturated(call, sync, calls_for(launches, n + 1)))
        for (rival, n), call in calls.items()
    ]
    measure(
        report,
        progress,
        "saturated",
        "Full queue: replays back to back",
        full,
        settings.pick(20, 5),
    )


def measure(
    report: Report,
    progress: Progress,
    condition: str,
    title: str,
    cases: Sequence[Case],
    rounds: int,
) -> None:
    if not report.notes:
        report.notes.append(
            "What a replay pays however long it is, is listed call by call under `where`: its checks "
            "(context, capture, modes), the lock, and the event that a release, a reset and a replay "
            "on another stream wait for."
        )
    progress.begin(f"replay, {condition}", rounds)
    interleave(cases, rounds, progress.tick)
    report.plot(condition, title, x="breaks", y="microseconds a segment, with its break")
    report.add_cases(condition, cases, per={case.size: case.size + 1 for case in cases})
    summarise(report, condition, cases)


# --- the rivals ---------------------------------------------------------------------------------


class Counter:
    """A small tensor to which each segment adds one, so that a replay can be checked."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(32, device="cuda")

    def add(self) -> None:
        self.tensor.add_(1)

    def reset(self) -> None:
        self.tensor.zero_()

    def values(self) -> set[float]:
        torch.cuda.synchronize()
        return set(self.tensor.tolist())


class CupyCounter:
    """The same for CuPy's array."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def reset(self) -> None:
        self.array.fill(0)
        torch.cuda.synchronize()

    def values(self) -> set[float]:
        torch.cuda.synchronize()
        return set(self.array.tolist())


Rivals = dict[str, tuple[Build, Counter | CupyCounter]]


def builders(most: int, settings: Settings, report: Report) -> Rivals:
    """For each rival, a function from the number of breaks to its replay, and its counter."""
    found: Rivals = {}
    for api in [rivals.ours(), *rivals.meta(settings, report)]:
        with rivals.tolerated(report, api.key):
            check_breaks_run(api)
            own = Counter()
            found[api.key] = (sequence_builder(api, own), own)
    counter = Counter()
    rivals.warm_up(counter.add)
    stream = torch.cuda.current_stream().cuda_stream
    graphs = rivals.torch_graphs(most + 1, counter.add)
    handles = rivals.executables(graphs)
    replays = [graph.replay for graph in graphs]
    floor = rivals.FloorLauncher()
    found["floor"] = (lambda n: floor.loop(handles[: n + 1], stream), counter)
    found["bare"] = (lambda n: rivals.bare_loop(handles[: n + 1], stream), counter)
    found["bare-call"] = (lambda n: rivals.bare_loop_with_calls(handles[: n + 1], stream), counter)
    found["torch"] = (lambda n: rivals.call_each(replays[: n + 1]), counter)
    found["eager"] = (lambda n: rivals.call_each([counter.add] * (n + 1)), counter)
    return found


def sequence_builder(api: rivals.Breakable, counter: Counter) -> Build:
    idle = api.no_graph(rivals.noop)

    def build(breaks: int) -> Call:
        x = counter.tensor
        sequence = api.sequence()
        with api.block(sequence):
            for _ in range(breaks):
                x.add_(1)
                idle()
            x.add_(1)
        replay: Call = sequence.replay
        return replay

    return build


def check_breaks_run(api: rivals.Breakable) -> None:
    """Each break runs at each replay, in its place: it sees what the segments before it did."""
    x = torch.zeros(1, device="cuda")
    seen: list[float] = []
    look = api.no_graph(lambda: seen.append(x.item()))
    sequence = api.sequence()
    with api.block(sequence):
        for _ in range(3):
            x.add_(1)
            look()
        x.add_(1)
    x.zero_()
    seen.clear()
    sequence.replay()
    sequence.replay()
    if seen != [1, 2, 3, 5, 6, 7] or x.item() != 8:
        raise AssertionError(f"{api.key}: in two replays the breaks saw {seen}, not 1 2 3 5 6 7")
    sequence.reset()


def checked_calls(
    found: Rivals, breaks: Sequence[int], report: Report
) -> dict[tuple[str, int], Call]:
    """Build every replay and see that it does its work before anything is timed."""
    calls = {}
    for rival, (build, counter) in found.items():
        with rivals.tolerated(report, rival):
            calls.update({(rival, n): checked(rival, n, build, counter) for n in breaks})
    return calls


def checked(rival: str, n: int, build: Build, counter: Counter | CupyCounter) -> Call:
    call = build(n)
    counter.reset()
    call()
    call()
    if counter.values() != {2.0 * (n + 1)}:
        raise AssertionError(f"{rival}, {n} breaks: {counter.values()} after two replays")
    return call


# --- what the samples say -----------------------------------------------------------------------


def segment_lines(sizes: dict[float, list[float]]) -> list[Line]:
    """A line a round over the number of *segments*: n breaks make n + 1 of them."""
    return lines_by_round({n + 1: samples for n, samples in sizes.items()})


def summarise(report: Report, condition: str, cases: Sequence[Case]) -> None:
    lines = {rival: segment_lines(sizes) for rival, sizes in by_rival(cases).items()}
    slopes = {rival: [line.slope for line in fits] for rival, fits in lines.items()}
    fixed = {rival: [line.intercept for line in fits] for rival, fits in lines.items()}
    for rival in lines:
        report.figure(condition, "slope a segment", rival, spread(slopes[rival]))
        report.figure(
            condition, "against the C loop", rival, ratio(slopes[rival], slopes["floor"]), "x"
        )
        report.figure(
            condition, "against the bare loop", rival, ratio(slopes[rival], slopes["bare"]), "x"
        )
        report.figure(condition, "a break", rival, difference(slopes[rival], slopes["bare"]))
        report.figure(condition, "fixed cost a replay", rival, spread(fixed[rival]))
        report.figure(
            condition, "fixed over the bare loop", rival, difference(fixed[rival], fixed["bare"])
        )
    aims(report, condition, slopes, fixed)


def aims(
    report: Report,
    condition: str,
    slopes: dict[str, list[float]],
    fixed: dict[str, list[float]],
) -> None:
    here = slopes["ours"]
    report.aim(
        f"{condition}: slope relative to the C loop",
        ratio(here, slopes["floor"]),
        at_most=1.15,
    )
    report.aim(
        f"{condition}: slope relative to a bare Python loop",
        ratio(here, slopes["bare"]),
        at_most=1.08,
    )
    report.aim(
        f"{condition}: a no-op break", difference(here, slopes["bare"]), at_most=0.25, unit="us"
    )
    report.aim(
        f"{condition}: Meta's slope relative to ours",
        ratio(slopes["meta"], here) if "meta" in slopes else None,
        at_least=1.4,
    )
    report.aim(
        f"{condition}: fixed cost over that of the bare loop, about a microsecond",
        difference(fixed["ours"], fixed["bare"]),
        at_most=1.25,
        unit="us",
    )
