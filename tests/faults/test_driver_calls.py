"""Any driver call of any program may fail: one clear error, nothing left, and the next run is right.

By default a part of the faults is tried, the same ones each time, and each call at least once in some
program; `BREAKABLE_CUDA_GRAPHS_FAULTS=all` tries all of them (some minutes). The counts are printed with
`pytest -s`, and by the last test of this file.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from faults.injecting import calls_of, chosen, faults_of, problem_of  # noqa: E402
from faults.programs import PROGRAMS  # noqa: E402

EVERYTHING = os.environ.get("BREAKABLE_CUDA_GRAPHS_FAULTS", "") == "all"
SHARE = 1 if EVERYTHING else 24

_counts: dict[str, tuple[int, int, int]] = {}  # program -> (calls, faults, findings)


@pytest.mark.timeout(1200 if EVERYTHING else 120)
@pytest.mark.parametrize("name", PROGRAMS)
def test_any_driver_call_may_fail(asked_collector: Any, name: str) -> None:
    calls = calls_of(PROGRAMS[name])
    faults = [fault for call in calls for fault in faults_of(*call)]
    tried = chosen(faults, name, SHARE)
    wrong = []
    for fault in tried:
        problem = problem_of(name, fault)
        if problem is not None:
            wrong.append(f"{fault}: {problem}")
    _counts[name] = len(calls), len(tried), len(wrong)
    assert not wrong, f"{len(wrong)} of {len(tried)}:\n" + "\n".join(wrong[:30])
    assert len(calls) > 20
    assert len(tried) > 5


def test_the_counts(capsys: Any) -> None:
    """What this run has tried."""
    if set(_counts) != set(PROGRAMS):
        pytest.skip("only a part of the programs was run")
    calls, tried, findings = (sum(column) for column in zip(*_counts.values(), strict=True))
    with capsys.disabled():
        print(
            f"\nfaults in driver calls: {len(_counts)} programs, {calls} calls, "
            f"{tried} faults, {findings} findings"
        )
    assert findings == 0
