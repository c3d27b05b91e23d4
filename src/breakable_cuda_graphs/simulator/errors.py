"""TODO simulator.errors.

The hard problem: TODO
"""

from __future__ import annotations

from collections.abc import Sequence


def misused(sentences: Sequence[str], seed: int) -> AssertionError:
    return AssertionError(
        f"misuse on the simulated device (seed {seed}), which a CUDA driver may answer with a crash:"
        + "".join(f"\n  - {sentence}" for sentence in sentences)
    )
