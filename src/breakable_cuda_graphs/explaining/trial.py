"""Capture a function with the proposed marks, and compare its replays with eager runs.

The hard problem: equal results for equal inputs prove little, since a number that was frozen at
capture is right for the inputs of the capture. So all runs begin from the same state, and the
comparison is made a second time with other numbers in the arguments (halved, in reverse order). How
much eager runs differ among themselves is measured; replays may differ by four times as much.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..capture.breakable_graph import breakable_graph
from ..capture.breaks import no_graph
from ..replay.sequence import CUDAGraphSequence
from .frames import Stack, stack_of
from .marking import marked
from .report import Check, Mark
from .watching import Watch

_ROOM = 4.0

#: What eager runs may differ by, in parts of the largest number: rounding of atomics, not more.
_NOISE = 0.01


class Failure(NamedTuple):
    """Why a trial capture failed, and where."""

    error: Exception
    stack: Stack

    def __str__(self) -> str:
        place = self.stack.user
        where = f" at {place} in {place.function}" if place is not None else ""
        return f"{type(self.error).__name__}{where}: {self.error}"


class Trial:
    """Runs of one function: eager, captured, replayed."""

    def __init__(self, watch: Watch, sequence: CUDAGraphSequence, call: Callable[[], Any]) -> None:
        self.watch, self.sequence, self.call = watch, sequence, call

    def capture(self, marks: tuple[Mark, ...]) -> tuple[Any, Failure | None]:
        """Capture once with these marks; returns the captured result, or why there is none."""
        mode = "relaxed" if self.watch.saw_other_threads else "thread_local"
        generators = self.watch.generators
        try:
            with (
                _marked(marks),
                breakable_graph(self.sequence, None, mode, generators=generators),
            ):
                return self.call(), None
        except Exception as error:
            return None, Failure(error, stack_of(error.__traceback__, self.watch.home))

    def check(
        self, marks: tuple[Mark, ...], state: Any, first: list[Any]
    ) -> tuple[Check, Failure | None]:
        """Capture, and compare with `first`, what the watched run gave, and more eager runs.

        `state` is a `SavedMemory`; the watched run began from it.
        """
        from .memory import difference, size

        eager = [first]
        for _ in range(2):
            state.restore()
            eager.append(state.outcome(self.call()))
        spread = max(difference(eager[2], each) for each in eager[:2])
        if spread > _NOISE * max(map(size, eager)):
            return _failed(
                "not done: eager runs from equal memory differ from each other, so there is nothing to "
                "compare with. The function changes state of Python's (a counter, a list, a cache)."
            ), None
        state.restore()
        result, failure = self.capture(marks)
        if failure is not None:
            return _failed(f"the capture with these marks failed: {failure}"), failure
        return self._compared(state, result, eager[2], _ROOM * spread), None

    def _compared(self, state: Any, result: Any, expected: list[Any], tolerance: float) -> Check:
        """Replays against eager runs, on the given inputs and then on changed ones."""
        from .memory import difference

        told = "on the given inputs"
        try:
            state.restore()
            apart = difference(expected, self._replayed(state, result))
        except Exception as error:
            return self._broken(error, tolerance, told)
        state.restore()
        if apart > tolerance or not state.change():
            return self._said(apart, tolerance, told)
        try:
            expected = state.outcome(self.call())
        except Exception as error:
            told += f" (with other numbers in them it raises {type(error).__name__}: {error})"
            return self._said(apart, tolerance, told)
        state.restore()
        state.change()
        try:
            apart = max(apart, difference(expected, self._replayed(state, result)))
        except Exception as error:
            return self._broken(error, tolerance, "on changed inputs")
        return self._said(apart, tolerance, "on the given inputs and on changed ones")

    def _replayed(self, state: Any, result: Any) -> list[Any]:
        """What a replay leaves in what the captured call returned, and in the memory that it writes."""
        self.sequence.replay()
        found: list[Any] = state.outcome(result)
        return found

    def _parts(self) -> str:
        count = len(self.sequence)
        return f"captured as {count} segment{'' if count == 1 else 's'}"

    def _broken(self, error: Exception, tolerance: float, told: str) -> Check:
        """A replay failed where eager code did not."""
        text = f"{self._parts()}, but a replay failed {told}: {type(error).__name__}: {error}"
        return Check(True, False, math.inf, tolerance, len(self.sequence), text)

    def _said(self, apart: float, tolerance: float, told: str) -> Check:
        parts = self._parts()
        equal = apart <= tolerance
        measured = f"at most {tolerance:g} accepted, as measured on eager runs"
        if equal:
            text = f"{parts}; replays equal eager runs {told} (difference {apart:g}, {measured})"
        else:
            size = "in kind or shape" if math.isinf(apart) else f"by {apart:g}"
            text = f"{parts}, but replays differ from eager runs {size} {told} ({measured})"
        return Check(True, equal, apart, tolerance, len(self.sequence), text)


def _failed(text: str) -> Check:
    return Check(False, None, None, None, 0, text)


@contextlib.contextmanager
def _marked(marks: tuple[Mark, ...]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for mark in marks:
            assert mark.place.callee is not None
            decorator = no_graph(outputs="static") if "static" in mark.decorator else no_graph
            callee, code = mark.place.callee, mark.place.code
            stack.enter_context(marked(callee, code, mark.callers, decorator))
        yield
