"""Rebind; the hard problem is that its rival, a copy, costs nothing until the device is busy.

A copy of the input is one call for the host and its bytes for the device; rebinding is host work for
every node that names the input, and nothing for the device. So the two are compared by what a user waits
for: from the new tensor to the end of the replay that used it. The captured work reads a few numbers of
the input only, so that the replay itself costs the same for every size.

Nodes are timed by themselves first: many kernels that all name the tensor which moves, to and fro. Two
others stand beside that: the driver's call for each node alone, and capturing the same work anew. The
first move of a sequence is timed apart, because it reads the nodes that later ones know.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from . import rivals
from .harness import (
    Call,
    Case,
    Spread,
    Turn,
    by_rival,
    elapsed,
    finished,
    interleave,
    lines_by_round,
    ratio,
    shallow,
    spread,
)
from .progress import Progress
from .record import Report, Settings

QUESTION = (
    "What does it cost to give a captured sequence another input: rebinding, a node, and from which "
    "size on is it cheaper than copying the input in?"
)
NODES = (1, 4, 16, 64, 256, 1024)
QUICK_NODES = (1, 16, 256)
KB, MB = 1 << 10, 1 << 20
SIZES = (4 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB)
QUICK_SIZES = (4 * KB, 256 * KB, 16 * MB, 256 * MB)
USERS = (1, 16)
"""How many kernels name the input."""
READ = 1024
"""How many numbers of the input a kernel reads, whatever its size."""
LABELS = {
    "ours": "rebind",
    "first": "the first rebind of a sequence",
    "driver": "cuGraphExecKernelNodeSetParams a node, nothing else",
    "capture": "reset and capture anew",
    "copy": "copy the input in",
    **{f"ours-{n}": f"rebind, {n} node{'s' if n > 1 else ''}" for n in USERS},
    **{f"copy-{n}": f"copy the input in, {n} node{'s' if n > 1 else ''}" for n in USERS},
}


def run(settings: Settings, report: Report, progress: Progress) -> None:
    report.labels.update(rivals.LABELS | LABELS)
    nodes(settings, report, progress)
    inputs(settings, report, progress)


def sync() -> None:
    torch.cuda.current_stream().synchronize()


class Scene:
    """A sequence of `count` kernels that read an input, which is `tensors[0]` at first."""

    def __init__(self, count: int, tensors: Sequence[torch.Tensor]) -> None:
        self.count, self.tensors = count, tensors
        self.out = torch.zeros(READ, device="cuda")
        self.api = rivals.ours()
        self.sequence = self.api.sequence()
        self.at = 0  # which of the tensors it reads now
        self.capture()

    def capture(self) -> None:
        """Capture it, or capture it anew."""
        self.sequence.reset()
        source = self.tensors[self.at][:READ]
        with self.api.block(self.sequence):
            self.out.zero_()
            for _ in range(self.count):
                self.out.add_(source)

    def move(self) -> None:
        """To the other tensor, or back."""
        old, self.at = self.at, 1 - self.at
        self.sequence.rebind({self.tensors[old]: self.tensors[self.at]})

    def check(self) -> None:
        """A replay reads the tensor that it should."""
        self.sequence.replay()
        sync()
        wanted = float(self.tensors[self.at][0]) * self.count
        if set(self.out.tolist()) != {wanted}:
            raise AssertionError(f"{self.out[0]} instead of {wanted} after a move")


def pair(nbytes: int) -> list[torch.Tensor]:
    """Two tensors of this size, of ones and of twos."""
    return [torch.full((nbytes // 4,), value, device="cuda") for value in (1.0, 2.0)]


# --- a node -------------------------------------------------------------------------------------


def nodes(settings: Settings, report: Report, progress: Progress) -> None:
    """Host time of a rebind by the number of kernels that name what moves."""
    cases: list[Case] = []
    scenes = []
    for count in settings.pick(NODES, QUICK_NODES):
        scene = Scene(count, pair(4 * READ))
        for _ in range(3):
            scene.check()
            scene.move()
        scenes.append(scene)
        cases.append(Case("ours", count, shallow(scene.move, sync)))
        cases.append(Case("first", count, first_move(count, scene.tensors)))
        cases.append(Case("driver", count, shallow(driver_calls(scene), sync)))
        cases.append(Case("capture", count, elapsed(scene.capture, lambda _: None, sync)))
    report.checks.append("A replay after each of three moves read the tensor that it was moved to.")
    rounds = settings.pick(25, 6)
    progress.begin("rebind, nodes", rounds)
    interleave(cases, rounds, progress.tick)
    for scene in scenes:
        scene.check()
    report.plot("nodes", "One rebind", x="nodes", y="microseconds", log_y=True)
    report.add_cases("nodes", cases)
    fits = {rival: lines_by_round(sizes) for rival, sizes in by_rival(cases).items()}
    slopes = {rival: [line.slope for line in lines] for rival, lines in fits.items()}
    for rival, lines in fits.items():
        report.figure("nodes", "a node", rival, spread(slopes[rival]))
        report.figure("nodes", "fixed", rival, spread([line.intercept for line in lines]))
        against = ratio(slopes[rival], slopes["driver"])
        report.figure("nodes", "a node, against the driver's call", rival, against, "x")


def first_move(count: int, tensors: Sequence[torch.Tensor]) -> Turn:
    """The first rebind of a sequence, which reads its nodes; capture and reset are not timed."""

    def turn() -> float:
        scene = Scene(count, tensors)
        sync()
        begin = time.perf_counter_ns()
        scene.move()
        end = time.perf_counter_ns()
        scene.sequence.reset()
        return (end - begin) / 1e3

    return turn


def driver_calls(scene: Scene) -> Call:
    """The calls that any edit has to make, with parameters that are there already."""
    from cuda.bindings import driver

    segment = scene.sequence.segments[0]
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for _ in range(scene.count):
            scene.out.add_(scene.tensors[0][:READ])
    graph.instantiate()
    raw = driver.CUgraph(graph.raw_cuda_graph())
    executable = driver.CUgraphExec(graph.raw_cuda_graph_exec())
    _, found, count = driver.cuGraphGetNodes(raw, len(segment.graph) + 1)
    kernels = []
    for node in found[:count]:
        code, params = driver.cuGraphKernelNodeGetParams(node)
        if code:
            raise RuntimeError(f"cuGraphKernelNodeGetParams failed with {int(code)}")
        kernels.append((node, params))
    change = driver.cuGraphExecKernelNodeSetParams

    def call(keep: Any = graph) -> None:
        for node, params in kernels:
            (code,) = change(executable, node, params)
            if code:
                raise RuntimeError(f"cuGraphExecKernelNodeSetParams failed with {int(code)}")

    return call


# --- an input -----------------------------------------------------------------------------------


def inputs(settings: Settings, report: Report, progress: Progress) -> None:
    """From a new input to the end of the replay that used it, by its size."""
    sizes = settings.pick(SIZES, QUICK_SIZES)
    cases: list[Case] = []
    keep = []
    for size in sizes:
        new = pair(size)
        for count in USERS:
            moved, copied = Scene(count, new), Scene(count, [new[0].clone()])
            for _ in range(2):
                moved.move()
                moved.check()
            calls = settings.pick(20, 6)
            cases.append(
                Case(f"ours-{count}", size, finished(partial(by_move, moved), sync, calls))
            )
            turn = finished(by_copy(copied, new), sync, calls)
            cases.append(Case(f"copy-{count}", size, turn))
            keep.append((moved, copied))
    rounds = settings.pick(25, 6)
    progress.begin("rebind, inputs", rounds)
    interleave(cases, rounds, progress.tick)
    names = {float(size): size_name(size) for size in sizes}
    report.plot(
        "inputs", "A new input and one replay", x="bytes of the input", y="microseconds", log_y=True
    )
    report.add_cases("inputs", cases, names=names)
    summarise(report, by_rival(cases), sizes)


def by_move(scene: Scene) -> None:
    scene.move()
    scene.sequence.replay()


def by_copy(scene: Scene, new: Sequence[torch.Tensor]) -> Call:
    """The usual way: the captured input is overwritten."""
    state = [0]

    def call() -> None:
        state[0] = 1 - state[0]
        scene.tensors[0].copy_(new[state[0]])
        scene.sequence.replay()

    return call


def summarise(
    report: Report, table: dict[str, dict[float, list[float]]], sizes: Sequence[int]
) -> None:
    for count in USERS:
        moved, copied = table[f"ours-{count}"], table[f"copy-{count}"]
        for size in (sizes[0], sizes[-1]):
            name = f"at {size_name(size)}"
            report.figure("inputs", name, f"ours-{count}", spread(moved[size]))
            report.figure("inputs", name, f"copy-{count}", spread(copied[size]))
            against = ratio(moved[size], copied[size])
            report.figure("inputs", f"{name}, against copying", f"ours-{count}", against, "x")
        found = crossings(moved, copied)
        if found is None:
            report.notes.append(
                f"With {count} node{'s' if count > 1 else ''} one of the two is cheaper at every size."
            )
        else:
            report.figure("inputs", "as dear as copying from", f"ours-{count}", found, "KiB")


def crossings(moved: dict[float, list[float]], copied: dict[float, list[float]]) -> Spread | None:
    """The size, in KiB, from which on copying is dearer, round by round.

    Between two sizes both are taken for straight lines over the logarithm of the size. None where one
    of them is cheaper at every size in most of the rounds.
    """
    sizes = sorted(moved)
    rounds = min(len(samples) for samples in (*moved.values(), *copied.values()))
    found = []
    for r in range(rounds):
        gaps = [copied[size][r] - moved[size][r] for size in sizes]
        # From the right: the last size at which copying is no dearer, and the next.
        last = max((place for place, gap in enumerate(gaps) if gap <= 0), default=None)
        if last is None or last == len(sizes) - 1:
            continue
        low, high = gaps[last], gaps[last + 1]
        part = -low / (high - low)
        logs = [math.log(sizes[last]), math.log(sizes[last + 1])]
        found.append(math.exp(logs[0] + part * (logs[1] - logs[0])) / KB)
    return spread(found) if 2 * len(found) > rounds else None


def size_name(size: float) -> str:
    return f"{size / MB:g} MB" if size >= MB else f"{size / KB:g} KB"
