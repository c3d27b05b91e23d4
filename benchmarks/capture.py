"""Capture; the hard problem is that a capture changes the process that it is measured in.

It makes pools, streams and executables, which the next capture finds or has to wait for. So each
sample captures into a fresh sequence with a pool of its own, everything made is dropped after the
clock has stopped, and all rivals take turns. The line over the number of segments then separates
what a segment costs from what a block costs.

Two floors: `books` is what torch itself does at the least (`capture_begin`, work, `capture_end`,
which instantiates); `driver` are the driver's calls alone, without torch's allocator or random
numbers being told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import rivals
from .harness import Call, Case, Turn, by_rival, elapsed, interleave, lines_by_round, ratio, spread
from .progress import Progress
from .record import Report, Settings
from .replay import Counter

QUESTION = (
    "What does capturing one segment cost, and how long is it from nothing to the end of the "
    "first replay? One kernel a segment, a no-op break between, a fresh pool each time."
)
BREAKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_BREAKS = (1, 8, 32)
FIRST_BREAKS = (1, 32, 256)
QUICK_FIRST_BREAKS = (1, 32)
LONGEST_TURN_US = 400_000.0
LABELS = {
    "context": "torch.cuda.graph a segment",
    "books": "CUDAGraph.capture_begin and capture_end alone",
    "driver": "the driver's calls alone",
}

Capture = Callable[[int], Any]


class Way:
    """One way to capture n + 1 segments: `make(n)`, then `replay` and `drop` what it made."""

    def __init__(self, make: Capture, replay: Callable[[Any], Any], drop: Callable[[Any], Any]):
        self.make, self.replay, self.drop = make, replay, drop


def run(settings: Settings, report: Report, progress: Progress) -> None:
    report.labels.update(rivals.LABELS | LABELS)
    counter = Counter()
    rivals.warm_up(counter.add)
    found = checked(ways(counter, settings, report), counter, report)

    breaks = settings.pick(BREAKS, QUICK_BREAKS)
    cases = affordable(found, breaks, report, capture_turn)
    rounds = settings.pick(15, 5)
    progress.begin("capture, a segment", rounds)
    interleave(cases, rounds, progress.tick)
    report.plot(
        "segment", "Capture", x="breaks", y="microseconds a segment, with its break", log_y=True
    )
    report.add_cases("segment", cases, per={n: n + 1 for n in breaks})
    summarise(report, cases)
    report.notes.append(
        "Torch's books alone, with nothing between the segments, are what any way of capturing that "
        "torch knows of has to pay: an aim below them cannot be met. What ours pays besides is "
        "listed call by call under `where`."
    )

    breaks = settings.pick(FIRST_BREAKS, QUICK_FIRST_BREAKS)
    cases = affordable(found, breaks, report, first_replay_turn)
    progress.begin("capture, first replay", rounds)
    interleave(cases, rounds, progress.tick)
    report.plot(
        "first",
        "From nothing to the end of the first replay",
        x="breaks",
        y="microseconds",
        log_y=True,
    )
    report.add_cases("first", cases)


def capture_turn(way: Way, breaks: int) -> Turn:
    return elapsed(lambda: way.make(breaks), way.drop, torch.cuda.synchronize)


def first_replay_turn(way: Way, breaks: int) -> Turn:
    def make() -> Any:
        made = way.make(breaks)
        way.replay(made)
        torch.cuda.current_stream().synchronize()
        return made

    return elapsed(make, way.drop, torch.cuda.synchronize)


# --- ways to capture ----------------------------------------------------------------------------


def ways(counter: Counter, settings: Settings, report: Report) -> dict[str, Way]:
    found: dict[str, Way] = {}
    for api in [*rivals.ours_both(), *rivals.meta(settings, report)]:
        found[api.key] = Way(
            sequence_capture(api, counter), lambda seq: seq.replay(), lambda seq: seq.reset()
        )
    found["books"] = Way(lambda n: books(counter, n), replay_graphs, reset_graphs)
    found["context"] = Way(lambda n: contexts(counter, n), replay_graphs, reset_graphs)
    found["driver"] = driver_way(counter.add)
    return found


def sequence_capture(api: rivals.Breakable, counter: Counter) -> Capture:
    idle, x = api.no_graph(rivals.noop), counter.tensor

    def capture(breaks: int) -> Any:
        sequence = api.sequence()
        with api.block(sequence):
            for _ in range(breaks):
                x.add_(1)
                idle()
            x.add_(1)
        return sequence

    return capture


def books(counter: Counter, breaks: int) -> list[Any]:
    return rivals.torch_graphs(breaks + 1, counter.add)


def contexts(counter: Counter, breaks: int) -> list[Any]:
    pool = torch.cuda.graph_pool_handle()
    graphs = []
    for _ in range(breaks + 1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            counter.add()
        graphs.append(graph)
    return graphs


def replay_graphs(graphs: Sequence[Any]) -> None:
    for graph in graphs:
        graph.replay()


def reset_graphs(graphs: Sequence[Any]) -> None:
    for graph in graphs:
        graph.reset()


def driver_way(work: Call) -> Way:
    """Begin, work, end, instantiate: nothing but the driver. Relaxed, since torch is not told."""
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    flags = int(driver.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
    flags |= int(driver.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY)

    def check(result: tuple[Any, ...]) -> Any:
        if result[0]:
            raise RuntimeError(f"driver error {int(result[0])}")
        return result[1] if len(result) > 1 else None

    def make(breaks: int) -> list[tuple[Any, Any]]:
        made = []
        with rivals.side_stream() as stream:
            handle = driver.CUstream(stream.cuda_stream)
            for _ in range(breaks + 1):
                check(driver.cuStreamBeginCapture(handle, mode))
                work()
                graph = check(driver.cuStreamEndCapture(handle))
                made.append((graph, check(driver.cuGraphInstantiate(graph, flags))))
        return made

    def replay(made: Sequence[tuple[Any, Any]]) -> None:
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        for _, executable in made:
            check(driver.cuGraphLaunch(executable, stream))

    def drop(made: Sequence[tuple[Any, Any]]) -> None:
        for graph, executable in made:
            check(driver.cuGraphExecDestroy(executable))
            check(driver.cuGraphDestroy(graph))

    return Way(make, replay, drop)


# --- which of them, and how large ---------------------------------------------------------------


def checked(
    found: dict[str, Way], counter: Counter, report: Report, breaks: int = 4
) -> dict[str, Way]:
    """The ways whose replay does the work."""
    right = {}
    for rival, way in found.items():
        with rivals.tolerated(report, rival):
            made = way.make(breaks)
            counter.reset()
            way.replay(made)
            if counter.values() != {breaks + 1.0}:
                raise AssertionError(f"{rival}: {counter.values()} after {breaks} breaks")
            way.drop(made)
            right[rival] = way
    return right


def affordable(
    found: dict[str, Way],
    sizes: Sequence[int],
    report: Report,
    turn: Callable[[Way, int], Turn],
) -> list[Case]:
    """All sizes for all ways, but for those of which one turn would take too long: said so."""
    cases = []
    for rival, way in found.items():
        probe = turn(way, 4)
        probe()
        per_segment = probe() / 5
        for n in sizes:
            if per_segment * (n + 1) <= LONGEST_TURN_US or n == sizes[0]:
                cases.append(Case(rival, n, turn(way, n)))
            elif not any(rival in note for note in report.notes):
                limit = LONGEST_TURN_US / 1e3
                report.notes.append(
                    f"`{rival}` from {n} breaks on is left out: a capture would take over "
                    f"{limit:g} ms."
                )
    return cases


def summarise(report: Report, cases: Sequence[Case]) -> None:
    table = {
        rival: {n + 1: samples for n, samples in sizes.items()}
        for rival, sizes in by_rival(cases).items()
    }
    lines = {rival: lines_by_round(sizes) for rival, sizes in table.items() if len(sizes) > 1}
    slopes = {rival: [line.slope for line in fits] for rival, fits in lines.items()}
    for rival, fits in lines.items():
        report.figure("capture", "slope a segment", rival, spread(slopes[rival]))
        report.figure(
            "capture", "against torch's books", rival, ratio(slopes[rival], slopes["books"]), "x"
        )
        report.figure(
            "capture", "fixed cost a block", rival, spread([line.intercept for line in fits])
        )
    off, on, theirs = (slopes.get(key) for key in ("ours-unwatched", "ours-watching", "meta"))
    report.aim(
        "not watching: Meta's slope relative to ours",
        ratio(theirs, off) if theirs and off else None,
        at_least=3.0,
    )
    report.aim(
        "not watching: slope relative to the driver's calls plus torch's own books",
        ratio(off, slopes["books"]) if off else None,
        at_most=1.3,
    )
    report.aim(
        "watching: slope relative to Meta's",
        ratio(on, theirs) if theirs and on else None,
        at_most=1.0,
    )
