"""Where each microsecond goes; the hard problem is that looking costs as much as what is looked at.

What a replay asks once are single calls: each is timed by itself, in a full loop, beside the replay
that contains them all; what is left over is the Python between them. A capture changes the process,
so its calls are timed inside of it, one clock around each call of the driver and of torch's graph, and
what the clocks cost is taken off. The line through two lengths tells a segment from a block.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from breakable_cuda_graphs._driver import bindings
from breakable_cuda_graphs.frameworks.pytorch import framework, workspaces

from . import rivals
from .harness import Case, by_rival, collector_off, difference, interleave, saturated, spread
from .progress import Progress
from .record import Report, Settings
from .replay import Counter

QUESTION = "Where does each microsecond go, of a replay and of the capture of a segment?"
CALLS = 256
SHORT, LONG = 8, 72
TORCH_CALLS = ("capture_begin", "capture_end", "reset")
ASKED = {
    "blocks_in_use": "torch.cuda.memory_snapshot: what is older than the breaks",
    "make": "cuBLAS made ready: a product on the capture stream",
}
LABELS = {
    "loop": "an empty call, in each of the lines below",
    "stream": "torch's current stream",
    "context": "cuCtxGetCurrent",
    "capturing": "whether the stream is in a capture",
    "modes": "grad, inference and autocast mode",
    "turn": "a lock",
    "mark": "cuEventRecord, for what has to wait for this replay",
    "launch": "cuGraphLaunch",
    "replay": "replay() of one segment, all of this and the Python between",
}


def run(settings: Settings, report: Report, progress: Progress) -> None:
    report.labels.update(rivals.LABELS | LABELS)
    replay(settings, report, progress)
    capture(settings, report, progress)


# --- replay -------------------------------------------------------------------------------------


def replay(settings: Settings, report: Report, progress: Progress) -> None:
    counter = Counter()
    sequence = captured(counter, 0)
    sync = torch.cuda.current_stream().synchronize
    cases = [
        Case(name, 1, saturated(call, sync, CALLS)) for name, call in parts_of(sequence).items()
    ]
    rounds = settings.pick(60, 10)
    progress.begin("where, replay", rounds)
    interleave(cases, rounds, progress.tick)
    samples = {name: sizes[1] for name, sizes in by_rival(cases).items()}
    for name, each in samples.items():
        own = each if name in ("loop", "replay") else None
        value = spread(own) if own else difference(each, samples["loop"])
        report.figure("a replay, call by call", "time", name, value)
    parts = [name for name in samples if name not in ("loop", "replay")]
    rest = [
        whole - sum(samples[name][turn] - samples["loop"][turn] for name in parts)
        for turn, whole in enumerate(samples["replay"])
    ]
    report.labels["rest"] = "the rest: Python"
    report.figure("a replay, call by call", "time", "rest", spread(rest))


def captured(counter: Counter, breaks: int) -> Any:
    api = rivals.ours(check_input_liveness=False)
    idle, sequence = api.no_graph(rivals.noop), api.sequence()
    with api.block(sequence):
        for _ in range(breaks):
            counter.add()
            idle()
        counter.add()
    return sequence


def parts_of(sequence: Any) -> dict[str, Callable[[], object]]:
    """The calls of a replay one by one, with the very objects that it uses."""
    sequence.replay()
    plan, mark = sequence._plan, sequence._mark
    handle, stream, turn = sequence._handle, sequence._stream, sequence._turn
    executable = plan.steps[0][0]

    def take_turn() -> None:
        with turn:
            pass

    return {
        "loop": lambda: None,
        "stream": lambda: plan.framework.current_stream(),
        "context": lambda: plan.current_context(),
        "capturing": lambda: plan.is_free(stream),
        "modes": lambda: plan.framework.modes(),
        "turn": take_turn,
        "mark": lambda: mark.record(handle, stream),
        "launch": lambda: plan.launch(executable, stream),
        "replay": sequence.replay,
    }


# --- capture ------------------------------------------------------------------------------------


class Clocks:
    """A clock around each call of a kind: how often it was made, and nanoseconds in all."""

    def __init__(self) -> None:
        self.spent: dict[str, list[int]] = {}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        clock, spent = time.perf_counter_ns, self.spent

        @functools.wraps(function, assigned=(), updated=())
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = clock()
            try:
                return function(*args, **kwargs)
            finally:
                entry = spent.setdefault(name, [0, 0])
                entry[0] += 1
                entry[1] += clock() - begin

        return timed

    def cost(self, calls: int = 4000) -> tuple[float, float]:
        """What one clock adds: inside of the time that it takes, and in all; nanoseconds."""
        timed = self.around("", rivals.noop)
        begin = time.perf_counter_ns()
        for _ in range(calls):
            timed()
        total = (time.perf_counter_ns() - begin) / calls
        count, inside = self.spent.pop("")
        return inside / count, total


class TimedDriver:
    """The bindings' module with a clock around each call of the driver."""

    def __init__(self, module: Any, clocks: Clocks) -> None:
        self._module, self._clocks = module, clocks

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name.startswith("cu") and not isinstance(value, type):
            value = self._clocks.around(name, value)
            setattr(self, name, value)
        return value


@contextmanager
def clocks_on(clocks: Clocks) -> Iterator[None]:
    """Inside, the library's driver calls, torch's graphs and what a block asks torch are timed."""
    before, graph = bindings.current(), torch.cuda.CUDAGraph
    owners: dict[str, Any] = {"blocks_in_use": framework, "make": workspaces}
    own = {name: getattr(owner, name) for name, owner in owners.items()}
    methods = {
        name: clocks.around(f"CUDAGraph.{name}", getattr(graph, name)) for name in TORCH_CALLS
    }
    bindings.use(bindings.Driver(TimedDriver(before.module, clocks), simulated=before.simulated))
    timed: Any = type("CUDAGraph", (graph,), methods)
    torch.cuda.CUDAGraph = clocks.around("CUDAGraph()", timed)
    for name, owner in owners.items():
        setattr(owner, name, clocks.around(ASKED[name], own[name]))
    try:
        yield
    finally:
        bindings.use(before)
        torch.cuda.CUDAGraph = graph
        for name, owner in owners.items():
            setattr(owner, name, own[name])


Cost = tuple[float, float]
"""How often something was called, and microseconds in all."""
Costs = dict[str, Cost]


def capture(settings: Settings, report: Report, progress: Progress) -> None:
    counter, rounds = Counter(), settings.pick(30, 6)
    rivals.warm_up(counter.add)
    progress.begin("where, capture", rounds)
    short: list[Costs] = []
    long: list[Costs] = []
    clocks = Clocks()
    with clocks_on(clocks):
        captured(counter, SHORT).reset()  # the new driver object makes its tables
        with collector_off():
            for _ in range(rounds):
                short.append(costs_of(counter, clocks, SHORT))
                long.append(costs_of(counter, clocks, LONG))
                progress.tick()
    lines = {name: line_of(name, short, long) for name in long[0]}
    report.table(
        "Capture of a segment with one kernel and a no-op break",
        COLUMNS,
        rows_of({name: slope for name, (slope, _) in lines.items()}),
    )
    report.table(
        "Beside that, once a block",
        COLUMNS,
        rows_of({name: fixed for name, (_, fixed) in lines.items()}),
    )
    report.notes.append(
        "Times of calls are taken inside the capture; what the clocks themselves cost is taken off. "
        "The last line is the Python of this library, torch's random generators and the captured "
        "kernel's own launch."
    )


COLUMNS = ("call", "times", "microseconds")
REST = "everything else"


def costs_of(counter: Counter, clocks: Clocks, breaks: int) -> Costs:
    """One capture: each kind of call, and what is left of the whole."""
    inside, total = clocks.cost()  # of one clock: within the time that it takes, and in all
    torch.cuda.synchronize()
    clocks.spent.clear()
    begin = time.perf_counter_ns()
    sequence = captured(counter, breaks)
    whole = time.perf_counter_ns() - begin
    spent = {name: (n, max(0.0, ns - inside * n)) for name, (n, ns) in clocks.spent.items()}
    calls = sum(count for count, _ in spent.values())
    rest = whole - total * calls - sum(ns for _, ns in spent.values())
    torch.cuda.synchronize()
    sequence.reset()
    found = {name: (float(count), ns / 1e3) for name, (count, ns) in spent.items()}
    found[REST] = (1.0, rest / 1e3)
    return found


def line_of(name: str, short: list[Costs], long: list[Costs]) -> tuple[Cost, Cost]:
    """One kind of call, for one more segment and beside the segments: medians over rounds."""
    first, second = ([each.get(name, (0.0, 0.0)) for each in costs] for costs in (short, long))
    slope, fixed = [], []
    for which in (0, 1):  # how often, and how long
        steps = [(b[which] - a[which]) / (LONG - SHORT) for a, b in zip(first, second, strict=True)]
        slope.append(spread(steps).median)
        fixed.append(spread([a[which] for a in first]).median - slope[-1] * (SHORT + 1))
    return (slope[0], slope[1]), (fixed[0], fixed[1])


def rows_of(costs: Costs) -> list[tuple[str, str, str]]:
    """The dearest first, what is left last, and a line for all of it."""
    named = sorted((n for n in costs if n != REST), key=lambda n: -costs[n][1])
    shown = [n for n in named if costs[n][0] >= 0.5 and costs[n][1] >= 0.05]
    rows = [(n, f"{costs[n][0]:.2g}", f"{costs[n][1]:.2f}") for n in shown]
    rows.append((REST, "", f"{costs[REST][1]:.2f}"))
    rows.append(("all", "", f"{sum(us for _, us in costs.values()):.2f}"))
    return rows
