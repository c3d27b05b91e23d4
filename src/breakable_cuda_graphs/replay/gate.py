"""The delay before one unit of a profiled replay, and the marks around the unit.

The hard problem: the stream must not wait for the host while the unit runs, or waiting would count as work.
So the unit is submitted behind a delay. A break that waits for the device itself cannot be queued ahead:
there another thread marks the end of what was submitted, halfway through the delay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from .._driver import bindings, contexts, timing


class Gate:
    """The delay before one unit, and the marks around the unit."""

    def __init__(
        self, driver: bindings.Driver, context: int, stream: Any, delay: timing.Delay,
        microseconds: float, events: Sequence[Any], is_probed: bool,
    ) -> None:  # fmt: skip
        self._driver, self._context, self._stream = driver, context, stream
        self._delay, self._microseconds = delay, microseconds
        self._begin, self._end, self._probe = events
        self._is_probed = is_probed
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_marked = False
        self._before = self.cpu = 0.0

    def open(self) -> None:
        """Before the unit: nothing of it runs until the host is done with it."""
        if self._is_probed:
            self._thread = threading.Thread(target=self._mark_work, daemon=True)
            self._thread.start()
        self._delay.launch(self._microseconds)
        self._mark(self._begin)
        self._before = time.perf_counter_ns()

    def close(self) -> None:
        """Behind the unit."""
        after = time.perf_counter_ns()
        self._mark(self._end)
        self.cpu = (after - self._before) / 1e3
        self.cancel()

    def cancel(self) -> None:
        """The unit is over, or the replay."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _mark_work(self) -> None:
        """In another thread, halfway through the delay: all is submitted, and the host waits."""
        if not self._over.wait(self._microseconds / 2e6):
            with contexts.made_current(self._driver, self._context):
                self._mark(self._probe)
            self.is_marked = True

    def _mark(self, event: Any) -> None:
        self._driver.cuEventRecord(event, self._stream)

    @property
    def gpu(self) -> float:
        """How long the stream worked at the unit, in microseconds."""
        end = self._probe if self.is_marked else self._end
        return max(0.0, 1e3 * float(self._driver.cuEventElapsedTime(self._begin, end)))
