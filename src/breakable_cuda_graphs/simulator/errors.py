"""The text of the error that `simulated_device` ends with.

The hard problem: misuse is found long after the line that did it, so every finding is a whole sentence, and
the seed is there, with which the same order can be run again.
"""

from __future__ import annotations

from collections.abc import Sequence


def misused(sentences: Sequence[str], seed: int) -> AssertionError:
    return AssertionError(
        f"misuse on the simulated device (seed {seed}), which a CUDA driver may answer with a crash:"
        + "".join(f"\n  - {sentence}" for sentence in sentences)
    )
