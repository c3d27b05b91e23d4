"""How many examples random tests try, and what the suites have counted.

The hard problem: a suite that silently tries nothing passes. So what was tried is counted where it is
tried, by name, and printed by `conftest.py` at the end of a run.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

#: How many programs each random test tries, in place of its own number; then they are others each time.
VARIABLE = "BREAKABLE_CUDA_GRAPHS_PROGRAMS"


def examples(usual: int) -> Any:
    """Hypothesis' settings for a test of programs: `usual` ones, or as many as the variable says."""
    from hypothesis import HealthCheck, settings

    wanted = int(os.environ.get(VARIABLE, "0"))
    return settings(
        max_examples=wanted or usual,
        derandomize=not wanted,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


_tallies: dict[str, Counter[str]] = {}


def tally(name: str) -> Counter[str]:
    """The counter of that name: `tally("programs")["replays"] += 1`."""
    return _tallies.setdefault(name, Counter())


def lines() -> list[str]:
    """One line for each counter that has counted something."""
    return [
        f"{name}: " + ", ".join(f"{count} {what}" for what, count in counter.items())
        for name, counter in _tallies.items()
        if counter
    ]
