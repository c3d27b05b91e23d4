"""Memory; the hard problem is that a process never gives everything back.

Contexts, kernels, handles and workspaces stay once they are there, so the first rival measured
would pay for all. Every rival is therefore captured and dropped once before anything is measured,
and then measured in turns against what the process held just before. Pool bytes are those of all
private pools in the allocator's snapshot, since a pool that is asked for its id is not given back by
our `reset()`; what the driver lost beyond torch's reservation are the executables; the host's part is
the resident set.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from breakable_cuda_graphs._driver import release

from . import rivals
from .harness import Spread, spread
from .progress import Progress
from .record import Report, Settings

QUESTION = (
    "What does the same model keep in memory when it is captured whole, by Meta's package and "
    "here? With a break after each layer; also ten shapes in one pool."
)
LAYERS, WIDTH, BATCH = 12, 2048, 4096
BUCKETS = tuple(BATCH - 384 * index for index in range(10))
MIB = 2**20
STAGES = ("after a replay", "after reset()", "after it is dropped")
COUNTERS = ("pool", "reserved", "executables", "host")


def run(settings: Settings, report: Report, progress: Progress) -> None:
    report.labels.update(rivals.LABELS)
    model = Model()
    found = subjects(model, settings, report)
    found = usable(found, model, report)
    rounds = settings.pick(5, 2)
    progress.begin("memory", rounds * 2)
    report.plot("one", "One shape: pool after a replay", x="", y="MiB", bars=True)
    report.plot("ten", "Ten shapes in one pool", x="", y="MiB", bars=True)
    one = study(found, (BATCH,), rounds, progress)
    ten = study(found, BUCKETS, rounds, progress)
    for group, title, results in (("one", "One shape", one), ("ten", "Ten shapes", ten)):
        write(report, group, title, results)
    aims(report, one, ten)


class Model:
    """A multi-layer perceptron without gradients, and the step that a break interrupts."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = [torch.nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(LAYERS)]
        self.inputs = {size: torch.randn(size, WIDTH, device="cuda") for size in BUCKETS}

    def step(self, batch: int, between: Callable[[torch.Tensor], object]) -> torch.Tensor:
        hidden = self.inputs[batch]
        with torch.no_grad():
            for layer in self.layers:
                hidden = torch.nn.functional.gelu(layer(hidden))
                between(hidden)
        return hidden


def look(hidden: torch.Tensor) -> None:
    """The break: a host-side step that only needs to see the activations."""


# --- what holds the memory ----------------------------------------------------------------------


@dataclass
class Subject:
    """One rival: capture a batch into a pool (or a new one); `pool` of what was captured."""

    key: str
    capture: Callable[[Model, int, Any], tuple[Any, torch.Tensor]]

    def check(self, model: Model) -> None:
        """One capture that is right; it also pays for what a process never gives back."""
        graph, output = self.capture(model, BATCH, None)
        model.inputs[BATCH].normal_()
        wanted = model.step(BATCH, look)
        output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        error = ((output - wanted).norm() / wanted.norm()).item()
        if not error < 1e-3:
            raise AssertionError(f"{self.key}: relative error {error}")
        graph.reset()


def usable(found: dict[str, Subject], model: Model, report: Report) -> dict[str, Subject]:
    """The subjects that are right; what each one's first capture leaves behind is written down."""
    right = {}
    for key, subject in found.items():
        with rivals.tolerated(report, key):
            before = footprint()
            subject.check(model)
            for counter, value in growth(before).items():
                left = spread([value / MIB])
                report.figure("Left by the first capture of the process", counter, key, left, "MiB")
            right[key] = subject
    report.notes.append(
        "What the first capture leaves behind is measured once, in the order of the table: later "
        "rows find what earlier ones left, workspaces of libraries among it."
    )
    return right


def subjects(model: Model, settings: Settings, report: Report) -> dict[str, Subject]:
    for size in (BUCKETS[0], BUCKETS[-1]):
        rivals.warm_up(partial(model.step, size, look))
    found = {"whole": Subject("whole", capture_whole)}
    for api in [rivals.ours(), *rivals.meta(settings, report)]:
        found[api.key] = Subject(api.key, capture_broken(api))
    return found


def capture_whole(model: Model, batch: int, pool: Any) -> tuple[Any, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = model.step(batch, look)
    return graph, output


def capture_broken(
    api: rivals.Breakable,
) -> Callable[[Model, int, Any], tuple[Any, torch.Tensor]]:
    between = api.no_graph(look)

    def capture(model: Model, batch: int, pool: Any) -> tuple[Any, torch.Tensor]:
        sequence = api.sequence(pool)
        with api.block(sequence):
            output = model.step(batch, between)
        return sequence, output

    return capture


# --- measuring ----------------------------------------------------------------------------------


def settle() -> None:
    """Let go of everything that nobody holds: what is dropped, our library gives back at its next use."""
    torch.cuda.synchronize()
    gc.collect()
    release.drain()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()


def footprint() -> dict[str, float]:
    """Bytes held now; `executables` is what the driver misses beyond torch's reservation."""
    settle()
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return {
        "pool": float(pool_bytes()),
        "reserved": float(reserved),
        "executables": float(total - free - reserved),
        "host": float(resident()),
    }


def pool_bytes() -> int:
    segments = torch.cuda.memory_snapshot()
    return sum(each["total_size"] for each in segments if any(each.get("segment_pool_id", ())))


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


Results = dict[str, dict[str, dict[str, list[float]]]]
"""rival -> stage -> counter -> one growth in MiB a round"""


def study(
    found: dict[str, Subject], batches: Sequence[int], rounds: int, progress: Progress
) -> Results:
    model = Model()
    results: Results = {
        key: {stage: {counter: [] for counter in COUNTERS} for stage in STAGES} for key in found
    }
    for turn in range(rounds + 1):  # the first is a warm-up and is not kept
        for key, subject in found.items():
            grown = life(subject, model, batches)
            if turn:
                for stage, counters in grown.items():
                    for counter, value in counters.items():
                        results[key][stage][counter].append(value / MIB)
        if turn:
            progress.tick()
    return results


def life(subject: Subject, model: Model, batches: Sequence[int]) -> dict[str, dict[str, float]]:
    """Capture, replay, reset, drop; how much more than before is held after each stage."""
    before = footprint()
    graphs, outputs, pool = [], [], None
    for batch in batches:
        graph, output = subject.capture(model, batch, pool)
        graphs.append(graph)
        outputs.append(output)
        if len(batches) > 1 and pool is None:
            pool = graph.pool()
    for graph in graphs:
        graph.replay()
    stages = {}
    # outputs are let go of first: what stays is what the library keeps, not what the user does
    outputs.clear()
    del output
    stages[STAGES[0]] = growth(before)
    for graph in graphs:
        graph.reset()
    stages[STAGES[1]] = growth(before)
    graphs.clear()
    del graph, pool
    stages[STAGES[2]] = growth(before)
    return stages


def growth(before: dict[str, float]) -> dict[str, float]:
    now = footprint()
    return {counter: now[counter] - before[counter] for counter in COUNTERS}


# --- what was found -----------------------------------------------------------------------------


def write(report: Report, group: str, title: str, results: Results) -> None:
    for rival, stages in results.items():
        for stage, counters in stages.items():
            for counter, samples in counters.items():
                report.figure(f"{title}, {stage}", counter, rival, spread(samples), "MiB")
    stage = STAGES[0]
    names = {float(index): counter for index, counter in enumerate(COUNTERS)}
    for rival, stages in results.items():
        points = [
            {"x": x, "name": name, "per": 1, **vars(spread(stages[stage][name]))}
            for x, name in names.items()
        ]
        report.series.append({"plot": group, "rival": rival, "unit": "MiB", "points": points})


def aims(report: Report, one: Results, ten: Results) -> None:
    for name, results in (("one shape", one), ("ten shapes", ten)):
        report.aim(
            f"{name}: pool bytes against the whole-graph capture",
            against(results, "pool"),
            at_most=1.0,
        )
        report.aim(
            f"{name}: reserved bytes against the whole-graph capture",
            against(results, "reserved"),
            at_most=1.0,
        )
    kept = zip(*(one[key][STAGES[1]]["reserved"] for key in ("ours", "whole")), strict=True)
    report.aim(
        "one shape, after reset(): reserved bytes more than after the whole-graph's",
        spread([a - b for a, b in kept]),
        at_most=0.0,
        unit="MiB",
    )


def against(results: Results, counter: str) -> Spread | None:
    ours, whole = (results[key][STAGES[0]][counter] for key in ("ours", "whole"))
    if not all(whole):
        return None
    return spread([a / b for a, b in zip(ours, whole, strict=True)])
