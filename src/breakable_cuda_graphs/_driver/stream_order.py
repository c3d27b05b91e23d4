"""Order between streams: who must wait for the last replay waits for its completion mark.

The hard problem: replays may come on any stream, memory may only be given back after the last of
them, and the stream of the last one may be gone by then. One event, recorded at the end of each
replay, answers for it; a replay on another stream first waits for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from . import bindings
from .enums import CONTEXT_IS_DESTROYED, NOT_READY
from .handles import EventHandle

#: Things that `hold` keeps before it waits.
_MOST_HELD = 256

#: Handles of streams that live as long as their context does: the legacy stream, and those that a
#: framework never destroys (it adds them). Of any other, the driver may give the handle to a new stream
#: once the old one has been destroyed, with its work still running; and 2 is one handle for the default
#: streams of all threads. So the same handle then does not mean the same stream.
lasting: set[int] = {0, 1}

_events: set[EventHandle] = set()


class CompletionMark:
    """The end of the last piece of work in an ordered set, on whichever stream it ran."""

    __slots__ = ("_event", "_held", "_lost", "_raw", "_record", "_stream", "driver")

    def __init__(self, driver: bindings.Driver) -> None:
        self.driver = driver
        self._event = EventHandle.create(driver)
        # The raw call and its handle: this is on replay's hot path.
        self._record, self._raw = driver.module.cuEventRecord, self._event.value
        self._lost = False
        self._stream = -1  # the handle of the stream of the last recording; -1: none yet
        self._held: list[object] = []  # see `hold`
        # The collector finalizes all of a cycle, the event too, although what is queued for release
        # still has to wait for it. Held here, it is out of any cycle's reach until `close()`. Last:
        # from here on it has to be closed.
        _events.add(self._event)

    def order_after(self, handle: int, stream: Any) -> None:
        """Make a stream (its handle, and its bindings object) wait for the mark."""
        if self._stream != -1 and (handle != self._stream or handle not in lasting):
            self.driver.cuStreamWaitEvent(stream, self._event.value, 0)

    def record(self, handle: int, stream: Any) -> None:
        """Set the mark at the present end of a stream."""
        (code,) = self._record(self._raw, stream)
        if code:
            raise self.driver.error("cuEventRecord", code)
        self._stream = handle

    def wait(self) -> None:
        """Block this thread until the marked work has ended.

        An error of the wait is no reason to stop: work in a context that is gone, or after a fault
        of the device, will not read anything any more.
        """
        if self._stream != -1 and not self._event.closed:
            self.driver.module.cuEventSynchronize(self._event.value)

    def is_done(self) -> bool:
        """Whether the marked work has ended; does not wait."""
        if self._stream == -1 or self._event.closed:
            return True
        with contextlib.suppress(Exception):  # no answer: as if it still ran
            (code,) = self.driver.module.cuEventQuery(self._event.value)
            return int(code) != NOT_READY
        return False

    def hold(self, things: Sequence[object]) -> None:
        """Keep what the marked work may still read, until a later call, or `close()`, finds it ended.

        Little is ever kept: a call that finds very much of it waits. The thread's capture mode has to
        be relaxed.
        """
        if not self.is_done():
            self._held.extend(things)
            if len(self._held) <= _MOST_HELD:
                return
            self.wait()
        self._held.clear()

    def is_lost(self) -> bool:
        """Whether the context that the event was made in has been destroyed, and all in it."""
        if not self._event.closed:
            with contextlib.suppress(Exception):  # no answer: what was known before
                (code,) = self.driver.module.cuEventQuery(self._event.value)
                self._lost = int(code) == CONTEXT_IS_DESTROYED
        return self._lost

    def close(self) -> None:
        """Wait, and give the event back; who waits later has nothing to wait for any more."""
        try:
            self.wait()
            self.is_lost()
        finally:
            self._held.clear()
            _events.discard(self._event)
            self._raw = None  # which the driver refuses
            self._event.close()


def join(driver: bindings.Driver, waiting: Any, earlier: Any) -> None:
    """Make one stream wait for all that is in another now (both outside any capture)."""
    if int(waiting) == int(earlier):
        return
    event = EventHandle.create(driver)
    try:
        driver.cuEventRecord(event.value, earlier)
        driver.cuStreamWaitEvent(waiting, event.value, 0)
    finally:
        event.close()
