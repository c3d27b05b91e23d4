"""Times of the device: events with a clock, work that only takes time, and the two clocks compared.

The hard problem: an event tells when a stream came to it, not whether the stream was working or
waiting just before. Behind a delay that outlasts the submission of what follows, a stream never
waits; so the delay is what tells work and waiting apart. It has to end by itself whatever the host
does (a break may wait for the device), and to cost the host far less time than it takes. A kernel
that looks at the clock does; where there is no compiler for it, a graph of fills, the larger the
slower its launch is.

Times between events: CUDA Driver API, cuEventElapsedTime (resolution about half a microsecond).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from . import bindings, contexts, node_params, nvrtc, set_params
from .handles import EventHandle, ExecHandle, GraphHandle, Owner

_SOURCE = """
extern "C" __global__ void pass_time(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
"""

_FILLS = 32  # in one graph
_FILL_BYTES = (1 << 10, 1 << 20, 1 << 23, 1 << 25)  # tried in turn
_WORTH = 4  # a launch of fills has to take the device so many times what it takes the host
_TRIES = 5


class TimedEvent(EventHandle):
    """An event that notes the device's time."""

    __slots__ = ()
    _flags = 0


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
    _destroy, _what = "cuMemFree", "buffer"


class Delay(Protocol):
    """Work that takes time and does nothing else."""

    def launch(self, microseconds: float) -> None:
        """Put it into the stream, for at least so long."""

    def close(self) -> None:
        """Give back what it needs; the stream must have passed it."""


def delay(driver: bindings.Driver, stream: Any) -> Delay:
    """The best delay that there is for a stream."""
    try:
        return _Spin(driver, stream)
    except RuntimeError:  # no compiler, or none that fits the device
        return _Fills(driver, stream)


class _Spin:
    """One thread of the device that looks at the clock."""

    def __init__(self, driver: bindings.Driver, stream: Any) -> None:
        self._driver, self._stream = driver, stream
        self._kernel = nvrtc.function(driver, _SOURCE, "pass_time")

    def launch(self, microseconds: float) -> None:
        if microseconds > 0:
            arguments = (int(microseconds * 1e3),), (ctypes.c_uint64,)
            shape = (1, 1, 1, 1, 1, 1)
            self._driver.cuLaunchKernel(self._kernel, *shape, 0, self._stream, arguments, 0)

    def close(self) -> None:
        """The module stays, as all that are compiled at run time do."""


class _Fills:
    """A graph of fills of memory, launched as often as it takes."""

    def __init__(self, driver: bindings.Driver, stream: Any) -> None:
        self._driver, self._stream = driver, stream
        self._made: list[Owner] = []
        for size in _FILL_BYTES:
            self._exec = self._instantiate(size)
            self._microseconds, host = self._measured()
            if self._microseconds > _WORTH * host:
                break

    def _instantiate(self, size: int) -> ExecHandle:
        driver = self._driver
        buffer = _Buffer.make(driver, "cuMemAlloc", size)
        graph = GraphHandle.create(driver)
        fill = node_params.Fill(int(buffer.value), 0, 1, size, context=contexts.current(driver))
        nodes: list[Any] = []
        for _ in range(_FILLS):
            nodes.append(set_params.add(driver, graph.value, nodes[-1:], fill))
        executable = ExecHandle.instantiate(graph)
        self._made += (executable, graph, buffer)
        return executable

    def _measured(self) -> tuple[float, float]:
        """How long one launch takes the stream and the host, in microseconds."""
        driver, stream = self._driver, self._stream
        events = TimedEvents(driver, 2)
        try:
            before, after = events.values
            self._launch_once()  # what the first launch does besides is not measured
            driver.cuStreamSynchronize(stream)
            self._launch_once()  # the stream is busy while the next one is submitted
            driver.cuEventRecord(before, stream)
            start = time.perf_counter_ns()
            self._launch_once()
            host = (time.perf_counter_ns() - start) / 1e3
            driver.cuEventRecord(after, stream)
            driver.cuEventSynchronize(after)
            return max(events.since(before, [after])[0], 1.0), host
        finally:
            events.close()

    def _launch_once(self) -> None:
        self._driver.cuGraphLaunch(self._exec.value, self._stream)

    def launch(self, microseconds: float) -> None:
        for _ in range(-(-int(microseconds) // int(self._microseconds))):
            self._launch_once()

    def close(self) -> None:
        for owner in self._made:
            owner.close()


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
    """The device memory that one executable of each graph takes, in bytes; None if it does not show.

    There is no getter, and the driver takes memory in large pieces: so many executables of each are
    made, and what its free memory has lost is divided by their number. The more, the finer.
    """
    made: list[ExecHandle] = []
    try:
        before = driver.cuMemGetInfo()[0]
        for _ in range(copies):
            for graph in graphs:
                made.append(ExecHandle.instantiate(graph))
        taken = before - driver.cuMemGetInfo()[0]
        return float(taken / copies) if taken > 0 else None
    finally:
        for executable in made:
            executable.close()
