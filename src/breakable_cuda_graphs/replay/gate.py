"""TODO replay.gate.

The hard problem: TODO
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._driver import bindings, contexts

if TYPE_CHECKING:
    from .profile import _Profiler


class Gate:
    """The delay before one unit, and the marks around the unit."""

    def __init__(
        self, profiler: _Profiler, microseconds: float, events: Sequence[Any], is_probed: bool
    ) -> None:
        self._profiler, self._is_probed = profiler, is_probed
        self._begin, self._end, self._probe = events
        delay = profiler._delay
        assert delay is not None
        self._delay = delay
        self._microseconds = microseconds
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
        self._profiler._mark(self._begin)
        self._before = time.perf_counter_ns()

    def close(self) -> None:
        """Behind the unit."""
        after = time.perf_counter_ns()
        self._profiler._mark(self._end)
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
        profiler = self._profiler
        if not self._over.wait(self._microseconds / 2e6):
            with contexts.made_current(profiler._driver, profiler._sequence._context):
                profiler._mark(self._probe)
            self.is_marked = True

    def gpu(self, driver: bindings.Driver) -> float:
        """How long the stream worked at the unit, in microseconds."""
        end = self._probe if self.is_marked else self._end
        return max(0.0, 1e3 * float(driver.cuEventElapsedTime(self._begin, end)))
