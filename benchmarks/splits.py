"""Splits without work; the hard problem is to see the GPU's time past that of the host.

`force_no_graph()` with nothing eager behind it must cost nothing at replay: one launch, and on the
device no gap between what used to be one graph. Host and device are timed apart: for the device a
spinning kernel holds the stream until everything is queued, so that the host is never waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import rivals
from .harness import Call, Case, Turn, by_rival, interleave, ratio, shallow, spread
from .progress import Progress
from .record import Report, Settings
from .replay import Build, Counter, Rivals, checked_calls

QUESTION = "What do `force_no_graph()` splits cost when nothing eager runs between the segments?"
SPLITS = (1, 4, 16, 64, 256, 512)
QUICK_SPLITS = (1, 16, 128)
CYCLES_PER_US = 2000  # of the spinning kernel; a faster clock only makes the spin shorter
LABELS = {
    "ours-split": "breakable_cuda_graphs, n splits",
    "ours-unsplit": "breakable_cuda_graphs, no split",
    "meta-split": "Meta 0.1.0, n splits",
}


def run(settings: Settings, report: Report, progress: Progress) -> None:
    report.labels.update(rivals.LABELS | LABELS)
    splits = settings.pick(SPLITS, QUICK_SPLITS)
    found = builders(settings, report)  # kept: it holds the tensors
    calls = checked_calls(found, splits, report)
    sync = torch.cuda.current_stream().synchronize
    rounds = settings.pick(40, 8)
    conditions: dict[str, tuple[str, Callable[[Call], Turn]]] = {
        "host": ("Host time of one replay", lambda call: shallow(call, sync)),
        "device": ("Device time of one replay", on_device),
    }
    for condition, (title, turn) in conditions.items():
        cases = [Case(rival, n, turn(call)) for (rival, n), call in calls.items()]
        progress.begin(f"splits, {condition} time", rounds)
        interleave(cases, rounds, progress.tick)
        report.plot(condition, title, x="splits", y="microseconds a replay", log_y=True)
        report.add_cases(condition, cases)
        summarise(report, condition, cases)


def on_device(call: Call, room_us: float = 1500.0, at_most: int = 10) -> Turn:
    """Device microseconds a call, between two events, all queued before the first begins.

    The spin must outlast the queueing: both are sized by the host time of one call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    host_us = shallow(call, torch.cuda.current_stream().synchronize)()
    calls = max(1, min(at_most, int(room_us / host_us)))
    spin_cycles = int(2 * CYCLES_PER_US * (host_us * calls + 200))

    def turn() -> float:
        torch.cuda.current_stream().synchronize()
        torch.cuda._sleep(spin_cycles)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / calls

    return turn


def builders(settings: Settings, report: Report) -> Rivals:
    found: Rivals = {}
    counter = Counter()
    found["whole"] = (lambda n: whole(counter, n + 1), counter)
    own, split = Counter(), Counter()
    here = rivals.ours()
    found["ours-unsplit"] = (lambda n: captured(here, own, n + 1, lambda: None), own)
    found["ours-split"] = (lambda n: captured(here, split, n + 1, here.split), split)
    for api in rivals.meta(settings, report):
        theirs = Counter()
        found["meta-split"] = (meta_builder(api, theirs), theirs)
    return found


def meta_builder(api: rivals.Breakable, counter: Counter) -> Build:
    return lambda n: captured(api, counter, n + 1, api.split)


def whole(counter: Counter, kernels: int) -> Call:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(kernels):
            counter.add()
    replay: Call = graph.replay
    return replay


def captured(api: rivals.Breakable, counter: Counter, kernels: int, split: Call) -> Call:
    sequence = api.sequence()
    with api.block(sequence):
        for index in range(kernels):
            if index:
                split()
            counter.add()
    replay: Call = sequence.replay
    return replay


def summarise(report: Report, condition: str, cases: Sequence[Case]) -> None:
    table = by_rival(cases)
    largest = max(table["whole"])
    reference = table["whole"]
    for rival, sizes in table.items():
        report.figure(condition, f"{largest:g} splits", rival, spread(sizes[largest]))
        report.figure(
            condition, "against one graph", rival, ratio(sizes[largest], reference[largest]), "x"
        )
    report.aim(
        f"{condition} time with {largest:g} splits, against one torch.cuda.graph (the same)",
        ratio(table["ours-split"][largest], reference[largest]),
        at_most=1.05,
    )
