"""Times of the device: events with a clock, work that only takes time, and the two clocks compared.

The hard problem: an event tells when a stream came to it, not whether the stream was working or
waiting just before. Behind a delay that outlasts the submission of what follows, a stream never
waits; so the delay is what tells work and waiting apart. It is a graph of small fills, because that
needs no compiler, ends by itself whatever the host does, and is one call however long it takes.

Times between events: CUDA Driver API, cuEventElapsedTime (resolution about half a microsecond).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import bindings, contexts, editing, works
from .handles import EventHandle, ExecHandle, GraphHandle, Owner

_FILLS = 32  # in one delay: some fifty microseconds on an H200
_FILL_BYTES = 256
_TRIES = 5


class TimedEvent(EventHandle):
    """An event that notes the device's time."""

    __slots__ = ()

    @classmethod
    def create(cls, driver: bindings.Driver) -> TimedEvent:
        return cls.make(driver, "cuEventCreate", 0)


class TimedEvents:
    """So many timed events, given back together."""

    def __init__(self, driver: bindings.Driver, count: int) -> None:
        self._driver = driver
        self._events = [TimedEvent.create(driver) for _ in range(count)]
        self.values: list[Any] = [event.value for event in self._events]

    def since(self, start: Any, events: Sequence[Any]) -> list[float]:
        """Microseconds from one recorded event to each of the others."""
        elapsed = self._driver.cuEventElapsedTime
        return [1e3 * elapsed(start, event) for event in events]

    def close(self) -> None:
        """Give all of them back."""
        for event in self._events:
            event.close()


class _Buffer(Owner):
    """A little memory of the device."""

    __slots__ = ()
    _destroy = "cuMemFree"


class Delay:
    """Work that takes time and does nothing else."""

    def __init__(self, driver: bindings.Driver, stream: Any) -> None:
        self._driver, self._stream = driver, stream
        self._buffer = _Buffer.make(driver, "cuMemAlloc", _FILL_BYTES)
        self._graph = GraphHandle.create(driver)
        fill = works.Fill(
            int(self._buffer.value), 0, 1, _FILL_BYTES, context=contexts.current(driver)
        )
        # On the simulated driver work takes the host's time: one fill there.
        nodes: list[Any] = []
        for _ in range(1 if driver.simulated else _FILLS):
            nodes.append(editing.add(driver, self._graph.value, nodes[-1:], fill))
        self._exec = ExecHandle.instantiate(self._graph)
        self.microseconds = self._measured()

    def _measured(self) -> float:
        """How long one launch takes, as the stream sees it."""
        driver, stream = self._driver, self._stream
        events = TimedEvents(driver, 2)
        try:
            before, after = events.values
            self.launch(2)
            driver.cuEventRecord(before, stream)
            self.launch(8)
            driver.cuEventRecord(after, stream)
            driver.cuEventSynchronize(after)
            return max(events.since(before, [after])[0] / 8, 1.0)
        finally:
            events.close()

    def launch(self, times: int) -> None:
        """Put the delay into the stream, that many times."""
        for _ in range(times):
            self._driver.cuGraphLaunch(self._exec.value, self._stream)

    def close(self) -> None:
        """Give the graph and its memory back; the stream must have passed it."""
        self._exec.close()
        self._graph.close()
        self._buffer.close()


class Clocks(NamedTuple):
    """One moment on both clocks: an event, and the host's time of it, known to `error` microseconds."""

    event: Any
    nanoseconds: int
    error: float


def compare_clocks(driver: bindings.Driver, stream: Any, events: Sequence[Any]) -> Clocks:
    """Record each of some events on an empty stream, and take the one that was waited for least."""
    best: Clocks | None = None
    for event in events[:_TRIES]:
        driver.cuStreamSynchronize(stream)
        before = time.perf_counter_ns()
        driver.cuEventRecord(event, stream)
        driver.cuEventSynchronize(event)
        after = time.perf_counter_ns()
        error = (after - before) / 2e3
        if best is None or error < best.error:
            best = Clocks(event, (before + after) // 2, error)
    assert best is not None
    return best


def instantiated_bytes(driver: bindings.Driver, graphs: Sequence[Any], copies: int) -> float | None:
    """The device memory that one executable of each graph takes, in bytes; None if none can be made.

    There is no getter: executables are made until the driver's free memory has changed, which it
    does by two megabytes at a time; `copies` of each make the answer finer.
    """
    made: list[ExecHandle] = []
    try:
        free_before = driver.cuMemGetInfo()[0]
        for graph in graphs:
            for _ in range(copies):
                made.append(ExecHandle.instantiate(graph))
        return float(max(0, free_before - driver.cuMemGetInfo()[0]) / copies)
    finally:
        for executable in made:
            executable.close()
