"""Which streams a capture would have reached, from the events and the work that a run showed.

The hard problem: no capture is open, so the driver cannot be asked. What it would say is worked out
from its rule: a stream joins a capture when it waits for an event that was recorded on a stream of
the capture, and the capture ends well only if its first stream has waited, directly or by others,
for all work of the streams that joined.

Rule: CUDA programming guide, "Cross-stream Dependencies and Events" of stream capture.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from ..frameworks.streams import DEFAULT_STREAMS
from .frames import Stack
from .watching import Watch


class _Debt(NamedTuple):
    """Work of a side stream that nobody has waited for yet."""

    what: str
    stack: Stack


class _Recorded(NamedTuple):
    """What an event stands for."""

    event: Any  # kept, so that its identity is not used again
    is_inside: bool
    debts: frozenset[int]


class WatchedStreams:
    """The streams of one run; `main` stands for the stream of the capture."""

    def __init__(self, watch: Watch, main: int) -> None:
        self._watch, self._main = watch, main
        self._inside = {main}
        self._events: dict[int, _Recorded] = {}
        self._debts: dict[int, _Debt] = {}  # by number
        self._numbers = itertools.count()
        self._owed: dict[int, set[int]] = {}  # the debts that waiting for a stream would settle

    def recorded(self, key: int, event: Any, stream: int) -> None:
        """An event was recorded on a stream."""
        owed = frozenset(self._owed.get(stream, ()))
        self._events[key] = _Recorded(event, stream in self._inside, owed)

    def waited(self, key: int, stream: int) -> None:
        """A stream waits for an event from now on."""
        recorded = self._events.get(key)
        if recorded is None:
            return
        if recorded.is_inside:
            self._inside.add(stream)
        for owed in self._owed.values():
            owed -= recorded.debts
        if stream == self._main:
            for number in recorded.debts:
                self._debts.pop(number, None)
        else:
            self._owed.setdefault(stream, set()).update(recorded.debts & self._debts.keys())

    def worked(self, stream: int, what: str) -> None:
        """Work went to a stream."""
        if stream == self._main:
            return
        name = DEFAULT_STREAMS.get(stream)
        if name is not None:
            self._watch.note("stream", what, f"it went to the {name} stream")
        elif stream not in self._inside:
            self._watch.note(
                "stream", what, "it went to a stream that was not forked from the current"
            )
        else:
            owed = self._owed.setdefault(stream, set())
            for earlier in owed:  # to wait for this is to wait for them
                self._debts.pop(earlier, None)
            owed.clear()
            number = next(self._numbers)
            self._debts[number] = _Debt(what, self._watch.stack())
            owed.add(number)

    def ended(self) -> None:
        """The run is over: what was not joined is found."""
        for debt in self._debts.values():
            self._watch.note("stream", debt.what, "it was not joined again", debt.stack)
