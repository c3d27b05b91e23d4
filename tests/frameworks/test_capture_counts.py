"""What one more segment of a torch capture costs, in counts. Times are for benchmarks/.

The hard problem: a capture is a long way through the library, and each step that is added to it looks
small. So the calls of the driver and of torch are held exactly, and the library's own work by a bound.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

#: A segment with one kernel, and a break that does nothing.
CALLS = {
    "CUDAGraph": 1,
    "CUDAGraph.capture_begin": 1,
    "cuCtxGetCurrent": 1,  # the break may have come on a thread that works in another context
    "Generator.set_state": 1,  # the segment counts draws from the true offset on
    "cuStreamGetCaptureInfo": 1,
    "cuGraphGetNodes": 1,
    "cuGraphKernelNodeGetParams": 1,
    "Generator.get_state": 1,
    "cuStreamEndCapture": 1,
    "cuStreamBeginCapture": 1,  # the dummy that closes torch's books
    "cuEventRecordWithFlags": 1,  # its node
    "CUDAGraph.capture_end": 1,
    "CUDAGraph.reset": 1,
    "cuEventRecord": 1,  # the generators were refilled: what follows on other streams waits for that
    "cuGraphInstantiate": 1,
}
#: Bytecodes are counted differently by each Python: there is room for that.
FRAMES, BYTECODES = 98, 2570
WATCHING_FRAMES, WATCHING_BYTECODES = 103, 2660


@pytest.fixture(scope="module")
def counts() -> Any:
    command = [sys.executable, str(Path(__file__).with_name("counting.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def of_others(counts: dict[str, float]) -> dict[str, float]:
    return {name: n for name, n in counts.items() if name not in ("frames", "bytecodes")}


def test_a_segment_more_costs_these_calls_and_no_other(counts):
    assert of_others(counts["plain"]) == CALLS


def test_watching_asks_no_one_about_addresses_that_it_knows(counts):
    assert of_others(counts["watching"]) == CALLS


def test_the_librarys_own_work_for_a_segment_is_bounded(counts):
    assert 50 < counts["plain"]["frames"] <= FRAMES
    assert 1000 < counts["plain"]["bytecodes"] <= BYTECODES
    assert counts["watching"]["frames"] <= WATCHING_FRAMES
    assert counts["watching"]["bytecodes"] <= WATCHING_BYTECODES
