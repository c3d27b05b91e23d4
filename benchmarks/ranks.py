"""Capture and replay against the number of ranks; the hard problem is that ranks wait for each other.

What one rank measures contains what the others did in the meantime. So all ranks take the same
turns in the same order (the shuffle has one seed), meet before each turn outside of the time, and a
turn's figure is the slowest rank's: nobody is done earlier.

The ranks are processes of their own, with a GPU each and NCCL between them:
`python -m benchmarks.ranks RANK WORLD FOLDER QUICK` is one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import rivals
from .harness import Case, Turn, by_rival, elapsed, finished, interleave, ratio, shallow, spread
from .progress import Progress
from .record import ROOT, Report, Settings

QUESTION = "What do capture and replay of tensor-parallel layers cost, against the number of ranks?"
WORLDS = (1, 2, 4, 8)
LAYERS, WIDTH, ROWS = 16, 1024, 8
TIMEOUT = 150.0  # seconds for all of one world
LABELS = {
    "ours-break": "all-reduce as a break",
    "ours-together": "the same, captured in step (capture_together)",
    "ours-captured": "all-reduce captured",
    "whole": "all-reduce captured by torch.cuda.graph",
    "eager": "eager",
}
CONDITIONS = {
    "capture": ("Capture", "microseconds a capture"),
    "host": ("Host time of one replay", "microseconds a replay"),
    "finished": ("Replay until the device is done", "microseconds a replay"),
}


def run(settings: Settings, report: Report, progress: Progress) -> None:
    report.labels.update(rivals.LABELS | LABELS)
    folder = rivals.scratch("ranks-")
    cases: dict[str, list[Case]] = {condition: [] for condition in CONDITIONS}
    progress.begin("worlds", len(WORLDS))
    for world in WORLDS:
        if world > torch.cuda.device_count():
            report.absent[f"{world} ranks"] = (
                f"needs {world} GPUs, and this machine has {torch.cuda.device_count()}"
            )
        else:
            for condition, samples in measured(world, folder, settings.quick).items():
                cases[condition] += [
                    Case(rival, world, nothing, figures) for rival, figures in samples.items()
                ]
            report.checks.append(f"{world} ranks: every rival's output equals the eager one")
        progress.tick()
    report.notes.append(
        f"{LAYERS} layers, each a product of {ROWS} x {WIDTH} by its rank's part of {WIDTH} x {WIDTH} "
        "and an all-reduce; more ranks have less of the matrix each. A figure is the slowest rank's."
    )
    for condition, (title, unit) in CONDITIONS.items():
        report.plot(condition, title, x="ranks", y=unit, log_y=True)
        report.add_cases(condition, cases[condition])
        summarise(report, condition, cases[condition])


def summarise(report: Report, condition: str, cases: list[Case]) -> None:
    table = by_rival(cases)
    for rival, sizes in table.items():
        for world, samples in sizes.items():
            report.figure(condition, f"{world:g} ranks", rival, spread(samples))
        first, last = min(sizes), max(sizes)
        if last > first:
            growth = ratio(sizes[last], sizes[first])
            report.figure(condition, f"{last:g} against {first:g}", rival, growth, "x")


def nothing() -> float:
    """The turn of a case that another process has measured."""
    return 0.0


def measured(world: int, folder: Path, quick: bool) -> dict[str, dict[str, list[float]]]:
    """condition -> rival -> one figure a round: the slowest rank's."""
    home = folder / str(world)
    home.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(rank), str(world), str(home), str(int(quick))],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]
    problems = []
    try:
        for process in processes:
            _, said = process.communicate(timeout=TIMEOUT)
            if process.returncode:
                problems.append(said.decode(errors="replace")[-1500:])
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if problems:
        raise RuntimeError(f"{world} ranks failed: " + "\n".join(problems))
    found = [json.loads((home / f"{rank}.json").read_text()) for rank in range(world)]
    return {
        condition: {
            rival: [
                max(figures)
                for figures in zip(*(each[condition][rival] for each in found), strict=True)
            ]
            for rival in found[0][condition]
        }
        for condition in found[0]
    }


# --- one rank -----------------------------------------------------------------------------------


class Layers:
    """This rank's part of each matrix, and the tensors that captures read and write."""

    def __init__(self, rank: int, world: int) -> None:
        random = torch.Generator().manual_seed(0)
        part = WIDTH // world
        self.mine = slice(rank * part, (rank + 1) * part)
        self.weights = [
            (torch.randn(WIDTH, WIDTH, generator=random)[self.mine] / WIDTH**0.5).cuda()
            for _ in range(LAYERS)
        ]
        self.x = torch.randn(ROWS, WIDTH, generator=random).cuda()
        self.out = torch.empty_like(self.x)

    def run(self, reduce: Callable[[Any], Any]) -> None:
        y = self.x
        for weight in self.weights:
            y = y[:, self.mine] @ weight
            reduce(y)
        self.out.copy_(y)


@dataclass
class Way:
    """How a rival captures, replays what it made, and gives it back."""

    make: Callable[[], Any]
    replay: Callable[[Any], Any]
    drop: Callable[[Any], Any]


def ways(layers: Layers) -> dict[str, Way]:
    import torch.distributed as dist

    from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph
    from breakable_cuda_graphs.distributed import capture_together

    marked = no_graph(dist.all_reduce)

    def ours(block: Any, reduce: Callable[[Any], Any]) -> Way:
        def make() -> Any:
            sequence = CUDAGraphSequence()
            with block(sequence):
                layers.run(reduce)
            return sequence

        return Way(make, CUDAGraphSequence.replay, CUDAGraphSequence.reset)

    def whole() -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers.run(dist.all_reduce)
        return graph

    return {
        "ours-break": ours(breakable_graph, marked),
        "ours-together": ours(capture_together, marked),
        "ours-captured": ours(breakable_graph, dist.all_reduce),
        "whole": Way(whole, torch.cuda.CUDAGraph.replay, torch.cuda.CUDAGraph.reset),
    }


def take_turns(rank: int, world: int, quick: bool) -> dict[str, dict[str, list[float]]]:
    import torch.distributed as dist

    layers = Layers(rank, world)
    found = ways(layers)
    sync = torch.cuda.current_stream().synchronize
    layers.run(dist.all_reduce)
    sync()
    expected = layers.out.clone()

    def met(turn: Turn) -> Turn:
        def together() -> float:
            dist.barrier()
            return turn()

        return together

    def eager() -> None:
        layers.run(dist.all_reduce)

    made = {rival: way.make() for rival, way in found.items()}
    for rival, way in found.items():
        layers.out.fill_(float("nan"))
        way.replay(made[rival])
        sync()
        torch.testing.assert_close(layers.out, expected, rtol=1e-3, atol=1e-4, msg=rival)
    calls = {
        rival: (lambda way=way, one=made[rival]: way.replay(one)) for rival, way in found.items()
    }
    calls["eager"] = eager
    cases = {
        "capture": [
            Case(rival, world, met(elapsed(way.make, way.drop, sync)))
            for rival, way in found.items()
        ],
        "host": [Case(rival, world, met(shallow(call, sync))) for rival, call in calls.items()],
        "finished": [
            Case(rival, world, met(finished(call, sync, 20))) for rival, call in calls.items()
        ],
    }
    rounds = {
        "capture": 6 if quick else 30,
        "host": 6 if quick else 40,
        "finished": 6 if quick else 40,
    }
    for condition, listed in cases.items():
        interleave(listed, rounds[condition])
    for rival, way in found.items():
        way.drop(made[rival])
    return {
        condition: {case.rival: case.samples for case in listed}
        for condition, listed in cases.items()
    }


def rank_main(rank: int, world: int, folder: Path, quick: bool) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", rank),
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        found = take_turns(rank, world, quick)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "1")
