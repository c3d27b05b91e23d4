"""Random numbers; the hard problem is that a replay is only right if its numbers are eager's.

A captured dropout reads the generator's seed and offset from the device, and someone has to put
them there before each replay. That is most of the cost, and a rival that left it out would look
fast and be wrong: every rival must first draw exactly what eager draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import dropout

from . import rivals
from .harness import Call, Case, by_rival, interleave, lines_by_round, ratio, shallow, spread
from .progress import Progress
from .record import Report, Settings

QUESTION = "What do segments that draw random numbers cost? One dropout a segment; host time."
SEGMENTS = (1, 2, 4, 8, 16, 32)
QUICK_SEGMENTS = (1, 4, 16)
SEED = 1234
LABELS = {
    "ours-plain": "breakable_cuda_graphs, no random numbers",
    "graphs": "torch.cuda.CUDAGraph.replay() a segment",
}

Drawn = tuple[Call, list[torch.Tensor]]
Build = Callable[[int], Drawn]


def run(settings: Settings, report: Report, progress: Progress) -> None:
    report.labels.update(rivals.LABELS | LABELS)
    sizes = settings.pick(SEGMENTS, QUICK_SEGMENTS)
    work = Work()
    sync = torch.cuda.current_stream().synchronize
    cases = []
    keep = []
    for rival, build in builders(work, settings, report).items():
        with rivals.tolerated(report, rival):
            drawn = [build(n) for n in sizes]
            for call, outputs in drawn:
                check(rival, work, call, outputs)
            keep.append(drawn)
            cases += [
                Case(rival, n, shallow(call, sync))
                for n, (call, _) in zip(sizes, drawn, strict=True)
            ]
    for n in sizes:
        cases.append(Case("ours-plain", n, shallow(plain(work, n), sync)))
    rounds = settings.pick(40, 8)
    progress.begin("random numbers", rounds)
    interleave(cases, rounds, progress.tick)
    report.plot("random", "Segments with one dropout", x="segments", y="microseconds a segment")
    report.add_cases("random", cases, per={n: n for n in sizes})
    summarise(report, cases)


class Work:
    """One dropout a segment; `eager(n)` says what n of them must give after seeding."""

    def __init__(self) -> None:
        self.x = torch.randn(4096, device="cuda")
        rivals.warm_up(self.once)

    def once(self) -> torch.Tensor:
        return dropout(self.x, 0.5, training=True)

    def eager(self, count: int) -> list[torch.Tensor]:
        return [self.once() for _ in range(count)]


def builders(work: Work, settings: Settings, report: Report) -> dict[str, Build]:
    found: dict[str, Build] = {
        "ours": broken(rivals.ours(), work),
        "graphs": lambda n: graphs(work, n),
        "whole": lambda n: whole(work, n),
    }
    for api in rivals.meta(settings, report):
        found[api.key] = broken(api, work)
    return found


def broken(api: rivals.Breakable, work: Work) -> Build:
    idle = api.no_graph(rivals.noop)

    def build(count: int) -> Drawn:
        sequence, outputs = api.sequence(), []
        with api.block(sequence):
            for index in range(count):
                if index:
                    idle()
                outputs.append(work.once())
        return sequence.replay, outputs

    return build


def graphs(work: Work, count: int) -> Drawn:
    outputs: list[torch.Tensor] = []
    made = rivals.torch_graphs(count, lambda: outputs.append(work.once()))
    return rivals.call_each([graph.replay for graph in made]), outputs


def whole(work: Work, count: int) -> Drawn:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work.eager(count)
    return graph.replay, outputs


def plain(work: Work, count: int) -> Call:
    """Our replay of as many segments without random numbers."""
    here = rivals.ours()
    idle = here.no_graph(rivals.noop)
    sequence = here.sequence()
    with here.block(sequence):
        for index in range(count):
            if index:
                idle()
            work.x.mul_(1.0)
    call: Call = sequence.replay
    return call


def check(rival: str, work: Work, call: Call, outputs: list[torch.Tensor]) -> None:
    """Two replays draw what eager draws from the same seed, and leave the generator as eager."""
    generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
    torch.cuda.manual_seed(SEED)
    expected = [work.eager(len(outputs)) for _ in range(2)]
    offset = generator.get_offset()
    torch.cuda.manual_seed(SEED)
    for wanted in expected:
        for output in outputs:
            output.fill_(float("nan"))
        call()
        torch.cuda.synchronize()
        for index, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
            if not torch.equal(got, want):
                raise AssertionError(f"{rival}: dropout {index} of {len(outputs)} is not eager's")
    if generator.get_offset() != offset:
        raise AssertionError(f"{rival}: the generator is at {generator.get_offset()}, not {offset}")


def summarise(report: Report, cases: list[Case]) -> None:
    table = by_rival(cases)
    lines = {rival: lines_by_round(sizes) for rival, sizes in table.items()}
    slopes = {rival: [line.slope for line in fits] for rival, fits in lines.items()}
    for rival, fits in lines.items():
        report.figure("random", "slope a segment", rival, spread(slopes[rival]))
        report.figure(
            "random", "against torch's graphs", rival, ratio(slopes[rival], slopes["graphs"]), "x"
        )
        report.figure(
            "random", "fixed cost a replay", rival, spread([line.intercept for line in fits])
        )
    report.aim(
        "a segment with dropout, against torch.cuda.CUDAGraph.replay()",
        ratio(slopes["ours"], slopes["graphs"]),
        at_most=1.05,
    )
