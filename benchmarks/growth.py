"""Growth; the hard problem is to keep the driver's own growth out of ours.

A graph that reads more inputs has more nodes, and the driver takes longer to launch it. So each
question has a control with the same graphs: the same work captured without watching, or a bare
loop over the very graphs' like. What is reported is how the *difference* to the control grows.
Arguments come in a tuple, which is given to a break as it is; a list is made anew for each replay,
since what the body does to it must not show in the next one, and that is measured beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from . import rivals
from .harness import Call, Case, by_rival, difference, interleave, ratio, shallow, spread
from .progress import Progress
from .record import Report, Settings

QUESTION = (
    "Does a replay get slower with the number of watched inputs, of nodes in a segment, of "
    "sequences alive?"
)
INPUTS = (1, 10, 100, 1000, 10000)
QUICK_INPUTS = (1, 100, 10000)
NODES = (1, 10, 100, 1000, 4000)
QUICK_NODES = (1, 100, 1000)
ALIVE = (1, 10, 100, 1000)
QUICK_ALIVE = (1, 100)
BREAKS = 8
LABELS = {
    "arguments": "inputs are arguments of a break, watched",
    "arguments-off": "the same, not watched",
    "listed": "the same, watched, in a list, which each replay makes anew",
    "read": "inputs are read by captured work, watched",
    "read-off": "the same, not watched",
    "control": "bare loop over the same number of graphs",
}


def run(settings: Settings, report: Report, progress: Progress) -> None:
    report.labels.update(rivals.LABELS | LABELS)
    inputs(settings, report, progress)
    nodes(settings, report, progress)
    alive(settings, report, progress)


def sync() -> None:
    torch.cuda.current_stream().synchronize()


# --- watched inputs -----------------------------------------------------------------------------


def inputs(settings: Settings, report: Report, progress: Progress) -> None:
    sizes = settings.pick(INPUTS, QUICK_INPUTS)
    off, on = rivals.ours_both()
    cases, keep = [], []
    for count in sizes:
        tensors = [torch.zeros(4, device="cuda") for _ in range(count)]
        x = torch.zeros(32, device="cuda")
        keep.append((tensors, x))
        for tail, api in (("", on), ("-off", off)):
            call = break_arguments(api, tuple(tensors), x)
            cases.append(Case(f"arguments{tail}", count, shallow(call, sync, 5)))
            call = captured_reads(api, tensors)
            cases.append(Case(f"read{tail}", count, shallow(call, sync, 5)))
        call = break_arguments(on, tensors, x)
        cases.append(Case("listed", count, shallow(call, sync, 5)))
    measure(
        report,
        progress,
        "inputs",
        "Watched inputs",
        "inputs",
        cases,
        settings.pick(60, 10),
    )
    table = by_rival(cases)
    for kind in ("arguments", "read"):
        for count in (sizes[0], sizes[-1]):
            cost = difference(table[kind][count], table[f"{kind}-off"][count])
            report.figure("watching costs a replay", f"{count:g} inputs", kind, cost)
    few, many = (table["arguments"][count] for count in (sizes[0], sizes[-1]))
    report.aim(
        f"a replay with {sizes[-1]:g} watched inputs against one with {sizes[0]:g} (flat)",
        ratio(many, few),
        at_most=1.05,
    )
    watched, unwatched = table["read"][sizes[-1]], table["read-off"][sizes[-1]]
    report.aim(
        f"a replay that reads {sizes[-1]:g} inputs, watched against not watched (flat)",
        ratio(watched, unwatched),
        at_most=1.05,
    )


def break_arguments(
    api: rivals.Breakable, tensors: Sequence[torch.Tensor], x: torch.Tensor
) -> Call:
    """Two one-kernel segments around a break that gets all tensors at once: the graphs never grow."""
    got: list[int] = []
    look = api.no_graph(lambda all_of_them: got.append(len(all_of_them)))
    idle = api.no_graph(lambda all_of_them: None)
    checked = two_segments(api, x, lambda: look(tensors))
    got.clear()
    checked.replay()
    if got != [len(tensors)]:
        raise AssertionError(f"the break got {got} tensors instead of {len(tensors)}")
    checked.reset()
    call: Call = two_segments(api, x, lambda: idle(tensors)).replay
    return call


def two_segments(api: rivals.Breakable, x: torch.Tensor, between: Call) -> Any:
    sequence = api.sequence()
    with api.block(sequence):
        x.add_(1)
        between()
        x.add_(1)
    return sequence


def captured_reads(api: rivals.Breakable, tensors: Sequence[torch.Tensor]) -> Call:
    """One segment that adds one to every tensor, by as few kernels as torch can."""
    sequence = api.sequence()
    with api.block(sequence):
        torch._foreach_add_(list(tensors), 1.0)
    before = [float(tensor[0]) for tensor in (tensors[0], tensors[-1])]
    sequence.replay()
    after = [float(tensor[0]) for tensor in (tensors[0], tensors[-1])]
    if any(b + 1 != a for b, a in zip(before, after, strict=True)):
        raise AssertionError(f"captured reads: {before} became {after}")
    call: Call = sequence.replay
    return call


# --- nodes a segment ----------------------------------------------------------------------------


def nodes(settings: Settings, report: Report, progress: Progress) -> None:
    sizes = settings.pick(NODES, QUICK_NODES)
    here = rivals.ours(check_input_liveness=False)
    cases, keep = [], []
    wait = waker(here)
    for count in sizes:
        x = torch.zeros(32, device="cuda")
        work = repeat(partial(x.add_, 1), count)
        call, graphs = same_graphs(here, work, 1)
        keep.append((x, graphs))
        for rival, replay in call.items():
            check_adds(rival, replay, x, 2 * count)
            cases.append(Case(rival, count, shallow(replay, wait, 3)))
    measure(
        report,
        progress,
        "nodes",
        "Nodes a segment, two segments",
        "nodes a segment",
        cases,
        settings.pick(40, 8),
    )
    over_the_control(report, "nodes", sizes, by_rival(cases))


def waker(api: rivals.Breakable) -> Call:
    """Waits for the device, and wakes the host as after a short wait.

    Thousands of nodes take the device milliseconds, in which the host's caches go cold: one
    cuCtxGetCurrent then took ten times as long on an H200's host. That would be growth with the wait.
    """
    x = torch.zeros(32, device="cuda")
    calls, graphs = same_graphs(api, partial(x.add_, 1), 1)

    def wait(_keep: Any = graphs) -> None:
        sync()
        for call in calls.values():
            call()
            sync()

    return wait


def repeat(work: Call, times: int) -> Call:
    def repeated() -> None:
        for _ in range(times):
            work()

    return repeated


def same_graphs(
    api: rivals.Breakable, work: Call, breaks: int
) -> tuple[dict[str, Call], list[Any]]:
    """Our replay and the bare loop's, of `breaks` + 1 graphs of `work` each."""
    idle = api.no_graph(rivals.noop)
    sequence = api.sequence()
    with api.block(sequence):
        for index in range(breaks + 1):
            if index:
                idle()
            work()
    graphs = rivals.torch_graphs(breaks + 1, work)
    stream = torch.cuda.current_stream().cuda_stream
    control = rivals.bare_loop(rivals.executables(graphs), stream)
    return {"ours": sequence.replay, "control": control}, graphs


def check_adds(rival: str, replay: Call, x: torch.Tensor, adds: int) -> None:
    x.zero_()
    replay()
    if set(x.tolist()) != {float(adds)}:
        raise AssertionError(f"{rival}: {set(x.tolist())} after {adds} additions of one")


# --- sequences alive ----------------------------------------------------------------------------


def alive(settings: Settings, report: Report, progress: Progress) -> None:
    """The same replay again while more and more others live; the control drifts along."""
    sizes = settings.pick(ALIVE, QUICK_ALIVE)
    rounds = settings.pick(60, 10)
    here = rivals.ours(check_input_liveness=False)
    x, y = (torch.zeros(32, device="cuda") for _ in range(2))
    calls, graphs = same_graphs(here, lambda: x.add_(1), BREAKS)
    for rival, replay in calls.items():
        check_adds(rival, replay, x, BREAKS + 1)
    others: list[Any] = []
    pool = None
    cases: list[Case] = []
    progress.begin("growth, sequences alive", rounds * len(sizes))
    for count in sizes:
        while len(others) < count - 1:
            others.append(another(here, y, pool))
            pool = pool or others[0].pool()
        now = [Case(rival, count, shallow(call, sync, 5)) for rival, call in calls.items()]
        interleave(now, rounds, progress.tick)
        cases += now
    del graphs
    report.plot("alive", "Sequences alive", x="sequences alive", y="microseconds a replay")
    report.add_cases("alive", cases)
    over_the_control(report, "alive", sizes, by_rival(cases))


def another(api: rivals.Breakable, y: torch.Tensor, pool: Any) -> Any:
    """One more living sequence with a break, all in one pool; it is replayed once."""
    idle = api.no_graph(rivals.noop)
    sequence = api.sequence(pool)
    with api.block(sequence):
        y.add_(1)
        idle()
        y.add_(1)
    sequence.replay()
    return sequence


# --- shared -------------------------------------------------------------------------------------


def measure(
    report: Report,
    progress: Progress,
    plot: str,
    title: str,
    x: str,
    cases: Sequence[Case],
    rounds: int,
) -> None:
    progress.begin(f"growth, {x}", rounds)
    interleave(cases, rounds, progress.tick)
    report.plot(plot, title, x=x, y="microseconds a replay")
    report.add_cases(plot, cases)


def over_the_control(
    report: Report,
    group: str,
    sizes: Sequence[int],
    table: dict[str, dict[float, list[float]]],
) -> None:
    for rival, samples in table.items():
        for count in (sizes[0], sizes[-1]):
            report.figure(group, f"at {count:g}", rival, spread(samples[count]))
    first, last = (ratio(table["ours"][n], table["control"][n]) for n in (sizes[0], sizes[-1]))
    report.figure(group, f"against the bare loop at {sizes[0]:g}", "ours", first, "x")
    report.figure(group, f"against the bare loop at {sizes[-1]:g}", "ours", last, "x")
    grown = difference(
        [a - b for a, b in zip(table["ours"][sizes[-1]], table["control"][sizes[-1]], strict=True)],
        [a - b for a, b in zip(table["ours"][sizes[0]], table["control"][sizes[0]], strict=True)],
    )
    report.aim(
        f"{group}: growth over the bare loop's from {sizes[0]:g} to {sizes[-1]:g} (flat)",
        grown,
        at_most=1.0,
        unit="us",
    )
