"""What a replay costs, in counts: driver calls, bytecodes, allocations. Times are for benchmarks/.

The hard problem: a time on this machine says nothing about another one, but a loop that grew a call,
a closure or an object a step did so for everybody. Each number here is the slope between two lengths.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import breakable_cuda_graphs  # noqa: E402
from breakable_cuda_graphs import (  # noqa: E402
    CUDAGraphSequence,
    breakable_graph,
    no_graph,
)
from helping import capture, settle, watched_driver  # noqa: E402

SOURCE = str(Path(breakable_cuda_graphs.__file__).parent)

#: Bytecodes of the library for one more segment and its break; a plain loop has about 20.
OPCODES_A_STEP = 32

#: ... and for all that a replay does besides.
OPCODES_A_REPLAY = 270


@no_graph
def nothing(t: Any) -> None:
    pass


def sequence_of(breaks: int, inputs: int = 1) -> tuple[Any, Any]:
    """A sequence with so many breaks and a segment before and after each."""
    keep = [torch.ones(1) for _ in range(inputs)]

    def body() -> None:
        for index in range(breaks):
            keep[index % inputs].add_(1)
            nothing(keep[index % inputs])
        for index in range(breaks, inputs):
            keep[index].add_(1)
        keep[0].mul_(1)

    return capture(body)[0], keep


def driver_calls(device: Any, breaks: int) -> Counter[str]:
    with watched_driver(device) as driver:
        seq, _keep = sequence_of(breaks)
        seq.replay()
        driver.calls.clear()
        seq.replay()
        calls = Counter(driver.calls)
        seq.reset()
        del seq
        settle()
    return calls


def opcodes_of(seq: Any) -> int:
    """How many bytecodes of the library one replay runs (the simulator is not counted)."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        path = frame.f_code.co_filename
        if not path.startswith(SOURCE) or "/simulator/" in path:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        seq.replay()
    finally:
        sys.settrace(before)
    return count


def test_a_segment_more_is_one_driver_call_more(device):
    few, many = driver_calls(device, 4), driver_calls(device, 12)
    assert many - few == Counter({"cuGraphLaunch": 8})
    assert few["cuGraphLaunch"] == 5


def test_a_replay_asks_the_driver_three_things_besides(device):
    calls = driver_calls(device, 4)
    del calls["cuGraphLaunch"]
    assert calls == Counter({"cuCtxGetCurrent": 1, "cuStreamIsCapturing": 1, "cuEventRecord": 1})


def test_a_step_is_a_few_bytecodes(device):
    counts = []
    for breaks in (4, 24):
        seq, _keep = sequence_of(breaks)
        seq.replay()
        counts.append(opcodes_of(seq))
        seq.reset()
    slope = (counts[1] - counts[0]) / 20
    assert 10 < slope <= OPCODES_A_STEP, f"{slope} bytecodes a step"
    assert counts[0] - 4 * slope <= OPCODES_A_REPLAY, f"{counts[0] - 4 * slope} a replay"


def test_watched_inputs_cost_nothing_at_replay(device):
    counts = []
    for inputs in (1, 40):
        seq, _keep = sequence_of(1, inputs)
        assert len(seq.watched) == inputs
        seq.replay()
        counts.append(opcodes_of(seq))
        seq.reset()
    assert counts[0] == counts[1]


def test_static_outputs_do_not_make_other_steps_dearer(device):
    @no_graph(outputs="static")
    def fixed(t: Any) -> Any:
        return 1

    x = torch.ones(1)
    counts = []
    for breaks in (2, 12):
        with breakable_graph(seq := CUDAGraphSequence()):
            fixed(x)
            for _ in range(breaks):
                x.add_(1)
                nothing(x)
        seq.replay()
        counts.append(opcodes_of(seq))
        seq.reset()
    assert (counts[1] - counts[0]) / 10 <= OPCODES_A_STEP


class _Quick:
    """A driver whose launches and records do nothing, so that only the library allocates."""

    def __init__(self, module: Any, types: Any) -> None:
        self._good = (types.CUresult(0),)

    def launch(self, executable: Any, stream: Any) -> Any:
        return self._good


def allocated(seq: Any, rounds: int) -> int:
    """Bytes that are kept after so many replays and were not before, in files of the library."""
    seq.replay()
    gc.collect()
    tracemalloc.start(1)
    try:
        seq.replay()
        before = tracemalloc.take_snapshot()
        for _ in range(rounds):
            seq.replay()
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    ours = [tracemalloc.Filter(True, SOURCE + "/*"), tracemalloc.Filter(False, SOURCE + "/sim*")]
    differences = after.filter_traces(ours).compare_to(before.filter_traces(ours), "lineno")
    return sum(each.size_diff for each in differences)


def test_replays_keep_no_memory(device):
    seq, _keep = sequence_of(8)
    assert allocated(seq, 50) <= 256  # the frames of the last one, not a byte a replay


def test_the_peak_of_a_replay_does_not_grow_with_its_length(device):
    from breakable_cuda_graphs._driver import bindings

    peaks = []
    for breaks in (10, 200):
        seq, _keep = sequence_of(breaks)
        seq.replay()
        quick = _Quick(device.driver, bindings.types)
        seq._plan.launch = quick.launch
        gc.collect()
        tracemalloc.start(1)
        try:
            seq.replay()
            tracemalloc.reset_peak()
            start, _ = tracemalloc.get_traced_memory()
            seq.replay()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        peaks.append(peak - start)
        seq.reset()
    assert peaks[1] <= peaks[0] + 512, f"peaks {peaks}"
