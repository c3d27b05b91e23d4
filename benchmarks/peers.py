"""Other libraries' graphs; the hard problem is that importing a library changes what others cost.

With CuPy in the process, a replay of ours makes its stream CuPy's current one too; `torch.compile`
installs hooks. So these peers come last, apart from `replay`, and ours and the bare loop are
measured again beside them. Each peer launches one graph a segment with a no-op call between, the
way in which a region is split by hand.
"""

from __future__ import annotations

from typing import Any

import torch

from . import rivals
from .harness import Call, Case, by_rival, interleave, ratio, shallow, spread
from .progress import Progress
from .record import Report, Settings
from .replay import Counter, CupyCounter, Rivals, checked_calls, segment_lines, sequence_builder

QUESTION = (
    "What does one graph a segment cost with CuPy's, cuda.core's and torch's other ways to make "
    "graphs? Host time, empty queue."
)
BREAKS = (1, 4, 16, 64)
QUICK_BREAKS = (1, 8)
LABELS = {
    "callables": "torch.cuda.make_graphed_callables a segment",
    "compiled": 'torch.compile(mode="reduce-overhead") a segment',
}


def run(settings: Settings, report: Report, progress: Progress) -> None:
    report.labels.update(rivals.LABELS | LABELS)
    breaks = settings.pick(BREAKS, QUICK_BREAKS)
    found = builders(max(breaks), settings, report)  # kept: it holds tensors and graphs
    calls = checked_calls(found, breaks, report)
    sync = torch.cuda.current_stream().synchronize
    cases = [Case(rival, n, shallow(call, sync)) for (rival, n), call in calls.items()]
    rounds = settings.pick(40, 8)
    progress.begin("peers", rounds)
    interleave(cases, rounds, progress.tick)
    report.plot(
        "shallow",
        "Empty queue: one replay",
        x="breaks",
        y="microseconds a segment, with its break",
        log_y=True,
    )
    report.add_cases("shallow", cases, per={n: n + 1 for n in breaks})
    summarise(report, cases)


def builders(most: int, settings: Settings, report: Report) -> Rivals:
    counter, own = Counter(), Counter()
    rivals.warm_up(counter.add)
    stream = torch.cuda.current_stream().cuda_stream
    graphs = rivals.torch_graphs(most + 1, counter.add)
    handles = rivals.executables(graphs)
    replays = [graph.replay for graph in graphs]
    found: Rivals = {
        "ours": (sequence_builder(rivals.ours(), own), own),
        "bare": (lambda n: rivals.bare_loop(handles[: n + 1], stream), counter),
        "torch": (lambda n: rivals.call_each(replays[: n + 1]), counter),
    }
    with rivals.tolerated(report, "core"):
        core = rivals.core_launches(most + 1, counter.add)
        found["core"] = (lambda n: rivals.call_each(core[: n + 1]), counter)
    with rivals.tolerated(report, "cupy"):
        launches, array = rivals.cupy_launches(most + 1, stream)
        found["cupy"] = (lambda n: rivals.call_each(launches[: n + 1]), CupyCounter(array))
    with rivals.tolerated(report, "callables"):
        chain = Chain(counter, graphed)
        found["callables"] = (chain.build, counter)
    if settings.quick:
        report.absent["compiled"] = "left out of a quick run: it compiles for too long"
    else:
        with rivals.tolerated(report, "compiled"):
            chain = Chain(counter, compiled)
            found["compiled"] = (chain.build, counter)
    return found


class Chain:
    """n + 1 calls of a graphed function, each on the last one's result, starting at the counter.

    Such functions own their inputs and outputs, so the last result is copied back: once a
    replay, which goes into the fixed cost and not into the slope."""

    def __init__(self, counter: Counter, make: Any) -> None:
        self.counter, self.one_more = counter, make(counter.tensor)

    def build(self, breaks: int) -> Call:
        x, one_more, between = self.counter.tensor, self.one_more, rivals.noop

        def replay() -> None:
            with torch.no_grad():
                value = one_more(x)
                for _ in range(breaks):
                    between()
                    value = one_more(value)
                x.copy_(value)

        return replay


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def graphed(sample: torch.Tensor) -> Any:
    """Every call of a graphed callable copies its argument in and hands its own output back."""
    return torch.cuda.make_graphed_callables(plus_one, (torch.zeros_like(sample),))


def compiled(sample: torch.Tensor) -> Any:
    """Inductor's graph trees, which own their memory: each call's result is cloned out of them."""
    function = torch.compile(plus_one, mode="reduce-overhead")

    def one_more(x: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return function(x).clone()

    with torch.no_grad():
        for _ in range(4):  # compile, warm up, record
            one_more(sample.clone())
    return one_more


def summarise(report: Report, cases: list[Case]) -> None:
    lines = {rival: segment_lines(sizes) for rival, sizes in by_rival(cases).items()}
    slopes = {rival: [line.slope for line in fits] for rival, fits in lines.items()}
    for rival, fits in lines.items():
        report.figure("peers", "slope a segment", rival, spread(slopes[rival]))
        report.figure("peers", "against ours", rival, ratio(slopes[rival], slopes["ours"]), "x")
        fixed = [line.intercept for line in fits]
        report.figure("peers", "fixed cost a replay", rival, spread(fixed))
