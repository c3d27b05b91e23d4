"""Where the time of a replay goes: on the host, on the device, and while one waits for the other.

The hard problem: an event in a stream says when the stream got there, not whether it worked or
waited before. So the same replay is timed in four ways, in turn:

1. as it is, to know what all the others have to add up to;
2. with an event and the host's time between its units: how long the stream takes from one to the
   next, work and waiting together. What the events add, the difference to the first, is taken out
   of all units alike, so that they add up to the replay;
3. with a delay before each unit that outlasts its submission: then the stream never waits, and what
   it takes is work;
4. where a break waits for the device itself, nothing can be queued ahead of that. There the end of
   what it had submitted when it began to wait is marked by another thread, while it waits; from
   there on the stream runs at the host's pace, and all of it counts as waiting.

What the second takes longer than the third or fourth is the gap. All of it are replays: random
numbers are drawn, breaks do what they do. The hot path of `replay()` knows nothing of this; the
timed forms are plans whose steps have calls in between.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from .._driver import bindings, contexts, enums, process, release, stream_capture, timing
from ..errors import bad_type, too_few
from ..frameworks.streams import as_handle
from ..sequence.errors import reentered, stale_input
from ..sequence.memory import Memory
from ..sequence.plan import BREAK, Plan, Step, Unit, units_of
from ..sequence.segments import EagerSegment, GraphSegment
from . import errors
from .gate import Gate
from .passes import Pass, follows, inner_half, marker, mean_steps, middle, shares
from .report import Profile, Row, TimelineEntry

_ROUNDS = 5  # the ways of timing take turns, so that a slow moment of the machine meets all of them
_GATED, _LEAST_GATED = 10, 4  # replays with delays
_MOST_GATES = 2000  # delays in all of them
_MOST_EVENTS = 8192  # alive at once
_SHOWN = 3  # replays on the timeline
_LONGEST_DELAY = 50_000.0  # microseconds before one unit
_WAIT_DELAY = 2_000.0  # at least so long before a break that waits, for a thread to wake up in
_MOST_COPIES = 256  # of each executable, to see their memory
_MOST_COPIED_NODES = 20_000

_Steps = list[Step]


class Replayable(Protocol):
    """What is asked of a sequence: how it replays, with this plan or another."""

    _plan: Plan | None
    _memory: Memory
    _context: int
    _epoch: int
    _pool: Any
    _turn: Any
    _handle: int
    _stream: Any

    @property
    def segments(self) -> tuple[GraphSegment | EagerSegment, ...]: ...

    @property
    def _has_turn(self) -> bool: ...

    def replay(self, stream: Any = None) -> None: ...

    def _refuse_unless_empty(self) -> None: ...

    def _is_at_home(self, plan: Plan) -> bool: ...

    def _run(self, plan: Plan, handle: int, stream: Any) -> None: ...

    def _replay_elsewhere(self, plan: Plan, stream: Any, handle: int) -> None: ...


def profile(sequence: Replayable, iterations: int, warmup: int, stream: Any = None) -> Profile:
    """See `CUDAGraphSequence.profile`."""
    for name, number, least in (("iterations", iterations, 1), ("warmup", warmup, 0)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise bad_type(name, number, "an int")
        if number < least:
            raise too_few(name, number, least)
    plan = sequence._plan
    if plan is None or sequence._epoch != process.epoch:
        sequence._refuse_unless_empty()
        raise errors.nothing_to_profile()
    if sequence._has_turn:
        raise reentered("profiled")
    with contexts.made_current(plan.framework.driver, sequence._context):
        handle = plan.framework.current_stream() if stream is None else as_handle(stream)
        driver = plan.framework.driver
        if (
            stream_capture.status(driver, bindings.types.CUstream(handle))
            is not stream_capture.Status.NONE
        ):
            raise errors.profile_in_capture()
        with contextlib.closing(_Profiler(sequence, plan, stream, handle)) as profiler:
            return profiler.run(iterations, warmup)


class _Profiler:
    """One call of `profile`."""

    def __init__(self, sequence: Replayable, plan: Plan, stream: Any, handle: int) -> None:
        self._sequence, self._plan, self._given = sequence, plan, stream
        self._driver, self._handle = plan.framework.driver, handle
        self._stream = bindings.types.CUstream(handle)
        self._record = self._driver.module.cuEventRecord
        self._units = units_of(sequence.segments, plan)
        self._replays = 0
        self._held: list[Any] = []
        with self._quiet():
            anchors = self._events(5)
            self._clock = timing.compare_clocks(self._driver, self._stream, anchors.values)
            self._delay: timing.Delay | None = None

    def close(self) -> None:
        """Let the stream pass what was put into it, and give everything back."""
        with self._quiet():
            self._driver.module.cuStreamSynchronize(self._stream)
            for thing in self._held:
                thing.close()

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Calls that would harm captures of other threads do not."""
        with release.relaxed_thread():
            yield

    def _events(self, count: int) -> timing.TimedEvents:
        made = timing.TimedEvents(self._driver, count)
        self._held.append(made)
        return made

    def _drop(self, events: timing.TimedEvents) -> None:
        self._held.remove(events)
        events.close()

    # ---- the passes

    def run(self, iterations: int, warmup: int) -> Profile:
        for _ in range(warmup):
            self._replay_plainly()
        plain, marked = Pass([], [], []), Pass([], [], [])
        for count in shares(iterations, min(_ROUNDS, iterations)):
            self._time_plain(count, plain)
            self._time_marked(count, marked)
        stamp = self._stamp_cost()
        with self._turn():
            few = max(_LEAST_GATED, _MOST_GATES // len(self._units))
            work, waits = self._work(marked, min(iterations, _GATED, few))
        return self._report(iterations, plain, marked, stamp, work, waits)

    def _time_plain(self, count: int, result: Pass) -> None:
        """Replays as they are, with one event between each two of them."""
        while count:
            part = min(count, _MOST_EVENTS)
            count -= part
            with self._quiet():
                events = self._events(part + 1)
                self._synchronize()
            times = []
            self._replay_plainly()  # the stream is as full as it gets when the first one begins
            self._mark(events.values[0])
            for event in events.values[1:]:
                before = time.perf_counter_ns()
                self._replay_plainly()
                times.append((time.perf_counter_ns() - before) / 1e3)
                self._mark(event)
            with self._quiet():
                self._synchronize()
                at = events.since(self._clock.event, events.values)
                self._drop(events)
            result.gpu.extend([a, b] for a, b in itertools.pairwise(at))
            result.cpu.extend([0.0, taken] for taken in times)

    def _time_marked(self, count: int, result: Pass) -> None:
        """Replays with a mark before the first unit and behind each."""
        marks = len(self._units) + 1
        while count:
            part = max(1, min(count, _MOST_EVENTS // marks))
            count -= part
            with self._quiet():
                events = self._events(part * marks + 1)
                self._synchronize()
            stamps: list[int] = []
            plan = self._plan.with_steps(self._marked_steps(events.values, stamps))
            self._replay_plainly()
            with self._turn():
                for _ in range(part):
                    self._replay(plan)
                self._mark(events.values[-1])
            stamps.append(time.perf_counter_ns())
            with self._quiet():
                self._synchronize()
                gpu = events.since(self._clock.event, events.values)
                self._drop(events)
            cpu = [(stamp - self._clock.nanoseconds) / 1e3 for stamp in stamps]
            for first in range(0, part * marks, marks):
                result.gpu.append(gpu[first : first + marks + 1])
                result.cpu.append(cpu[first : first + marks + 1])

    def _marked_steps(self, events: Sequence[Any], stamps: list[int]) -> _Steps:
        mark = marker(self._record, iter(events), self._stream, stamps)
        steps: _Steps = [(None, mark)]
        for unit in self._units:
            steps += _followed(unit.step, mark)
        return steps

    def _stamp_cost(self) -> float:
        """What one mark costs the host, in microseconds: it is in every unit's time."""
        count = 64
        with self._quiet():
            events, stamps = self._events(count), list[int]()
            mark = marker(self._record, iter(events.values), self._stream, stamps)
            for _ in range(count):
                mark()
            self._synchronize()
            self._drop(events)
        return statistics.median((b - a) / 1e3 for a, b in itertools.pairwise(stamps))

    # ---- work and waiting

    def _work(self, marked: Pass, count: int) -> tuple[list[float], list[bool]]:
        """For each unit how long the stream works at it, and whether it waits for the device.

        On the simulated driver all work is done when its call returns: nothing ever waits.
        """
        if self._driver.simulated:
            return [float("inf")] * len(self._units), [False] * len(self._units)
        with self._quiet():
            self._delay = timing.delay(self._driver, self._stream)
            self._held.append(self._delay)
        quickest = [
            min(cpu[number + 1] - cpu[number] for cpu in marked.cpu)
            for number in range(len(self._units))
        ]
        # Several times as long as the host takes when it is quickest, and long enough to be seen.
        delays = [min(4 * taken + 200.0, _LONGEST_DELAY) for taken in quickest]
        gated = self._time_gated(delays, count, ())
        work = [middle([gpu[number] for gpu in gated.gpu]) for number in range(len(self._units))]
        suspects = [
            number
            for number, unit in enumerate(self._units)
            if unit.kind == BREAK
            and 3 * quickest[number] < delays[number]
            and statistics.median(cpu[number] for cpu in gated.cpu) > 0.7 * delays[number]
        ]
        waits = [False] * len(self._units)
        if suspects:
            delays = [
                max(delay, _WAIT_DELAY) if number in suspects else 0.0
                for number, delay in enumerate(delays)
            ]
            probed = self._time_gated(delays, count, suspects)
            for number in suspects:
                marked_at = [
                    gpu[number]
                    for gpu, was in zip(probed.gpu, probed.was_marked, strict=True)
                    if was[number]
                ]
                if 2 * len(marked_at) > count:  # it was still waiting when the delay was half over
                    waits[number], work[number] = True, middle(marked_at)
        return work, waits

    def _time_gated(self, delays: Sequence[float], count: int, probed: Sequence[int]) -> Pass:
        """Each unit behind its delay; those that are probed up to where the host begins to wait."""
        result = Pass([], [], [])
        many = len(self._units)
        for _ in range(count):
            with self._quiet():
                events = self._events(3 * many)
                self._synchronize()
            gates = [
                self._gate(delay, events.values[3 * n : 3 * n + 3], n in probed)
                for n, delay in enumerate(delays)
            ]
            steps: _Steps = []
            for unit, gate in zip(self._units, gates, strict=True):
                steps += [(None, gate.open), *_followed(unit.step, gate.close)]
            try:
                self._replay(self._plan.with_steps(steps))
            finally:
                for gate in gates:
                    gate.cancel()
            with self._quiet():
                self._synchronize()
                result.gpu.append([gate.gpu for gate in gates])
                self._drop(events)
            result.cpu.append([gate.cpu for gate in gates])
            result.was_marked.append([gate.is_marked for gate in gates])
        return result

    def _gate(self, microseconds: float, events: Sequence[Any], is_probed: bool) -> Gate:
        assert self._delay is not None
        context = self._sequence._context
        return Gate(
            self._driver, context, self._stream, self._delay, microseconds, events, is_probed
        )

    # ---- replays

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """No other thread replays the sequence meanwhile."""
        sequence = self._sequence
        with sequence._turn:
            if sequence._plan is not self._plan:
                raise errors.changed_while_profiled()
            if sequence._handle != self._handle:
                sequence._handle, sequence._stream = self._handle, self._stream
            yield

    def _replay(self, plan: Plan) -> None:
        """What `CUDAGraphSequence.replay` does once it has its turn, with another plan."""
        self._replays += 1
        sequence, given, handle = self._sequence, self._given, self._handle
        if sequence._memory.stale is not None:
            raise stale_input(*sequence._memory.stale)
        is_current = given is None or handle == plan.framework.current_stream()
        if is_current and sequence._is_at_home(plan):
            sequence._run(plan, handle, sequence._stream)
        else:
            sequence._replay_elsewhere(plan, given, handle)

    def _replay_plainly(self) -> None:
        self._replays += 1
        self._sequence.replay(self._given)

    def _mark(self, event: Any) -> None:
        self._driver.cuEventRecord(event, self._stream)

    def _synchronize(self) -> None:
        self._driver.cuStreamSynchronize(self._stream)

    # ---- the result

    def _report(
        self, iterations: int, plain: Pass, marked: Pass, stamp: float, work: Sequence[float],
        waits: Sequence[bool],
    ) -> Profile:  # fmt: skip
        chosen = inner_half([gpu[-1] - gpu[0] for gpu in marked.gpu])
        gpu = mean_steps([marked.gpu[number] for number in chosen])
        cpu = mean_steps([marked.cpu[number] for number in chosen])
        profiled = sum(gpu)
        plain_totals = [each[1] - each[0] for each in plain.gpu]
        replay = middle(plain_totals)
        # What the marks have added to the stream's time is measured too, and belongs to no unit.
        mark = max(0.0, profiled - replay) / len(gpu)
        gpu = [max(0.0, taken - mark) for taken in gpu]
        rows = self._rows(
            gpu, [taken - stamp for taken in cpu], [each - mark for each in work], waits
        )
        pool = self._sequence._pool
        with self._quiet():
            pool_bytes = None if pool is None else pool.nbytes()
            executable_bytes = self._executable_bytes()
        return Profile(
            sequence=repr(self._sequence),
            device=self._device_name(),
            simulated=self._driver.simulated,
            iterations=iterations,
            replays=self._replays,
            replay_us=replay,
            fastest_us=min(plain_totals),
            slowest_us=max(plain_totals),
            cpu_us=middle([cpu[1] for cpu in plain.cpu]),
            profiled_us=profiled,
            mark_us=stamp,
            clock_error_us=self._clock.error,
            pool_bytes=pool_bytes,
            executable_bytes=executable_bytes,
            rows=rows,
            timeline=self._timeline(marked, work),
        )

    def _rows(
        self, gpu: Sequence[float], cpu: Sequence[float], work: Sequence[float],
        waits: Sequence[bool],
    ) -> tuple[Row, ...]:  # fmt: skip
        """One a unit, and one for what a replay does besides: the last of `gpu` and of `cpu`."""
        total = sum(gpu)
        rows = []
        for number, unit in enumerate(self._units):
            busy = min(max(0.0, work[number]), gpu[number])
            gap = gpu[number] - busy
            rows.append(self._row(unit, busy, gap, cpu[number], total, waits[number]))
        rest = Row(
            kind="replay", name="start and end", scope="", line="", segments=(), gpu_us=0.0,
            gap_us=gpu[-1], cpu_us=max(0.0, cpu[-1]), launches=0, nodes=0,
            share=gpu[-1] / total, waits=False,
        )  # fmt: skip
        return (*rows, rest)

    def _row(
        self, unit: Unit, busy: float, gap: float, cpu: float, total: float, waits: bool
    ) -> Row:
        return Row(
            kind=unit.kind, name=unit.name, scope=unit.scope, line=unit.line,
            segments=unit.segments, gpu_us=busy, gap_us=gap, cpu_us=max(0.0, cpu),
            launches=None if unit.kind == BREAK else 1,
            nodes=None if unit.kind == BREAK else unit.nodes,
            share=(busy + gap) / total, waits=waits,
        )  # fmt: skip

    def _timeline(self, marked: Pass, work: Sequence[float]) -> tuple[TimelineEntry, ...]:
        """A few replays in a row, the one whose time is in the middle among them."""
        totals = [gpu[-1] - gpu[0] for gpu in marked.gpu]
        central = sorted(range(len(totals)), key=totals.__getitem__)[len(totals) // 2]
        in_a_row = [central]
        while len(in_a_row) < _SHOWN and follows(marked, in_a_row[-1] + 1):
            in_a_row.append(in_a_row[-1] + 1)
        while len(in_a_row) < _SHOWN and follows(marked, in_a_row[0]):
            in_a_row.insert(0, in_a_row[0] - 1)
        first = in_a_row[0]
        start = min(marked.cpu[first][0], marked.gpu[first][0])
        blocks: list[TimelineEntry] = []
        for number in in_a_row:
            gpu, cpu = marked.gpu[number], marked.cpu[number]
            for unit in range(len(self._units)):
                busy = min(work[unit], gpu[unit + 1] - gpu[unit])
                blocks.append(
                    TimelineEntry(
                        number - first, unit, cpu[unit] - start, cpu[unit + 1] - cpu[unit],
                        gpu[unit] - start, gpu[unit + 1] - gpu[unit], busy,
                    )
                )  # fmt: skip
        return tuple(blocks)

    def _executable_bytes(self) -> float | None:
        """Measured by making executables anew; None where that takes too long, or cannot be."""
        graphs = [
            part._handle
            for part in self._plan.parts
            if isinstance(part, GraphSegment) and part._kinds.isdisjoint(enums.NO_CHILDREN)
        ]
        nodes = sum(unit.nodes for unit in self._units)
        copies = min(_MOST_COPIES, _MOST_COPIED_NODES // max(nodes, 1))
        if self._driver.simulated or not graphs or not copies:
            return None
        return timing.instantiated_bytes(self._driver, graphs, copies)

    def _device_name(self) -> str:
        if self._driver.simulated:
            return "simulated device"
        device = self._driver.cuCtxGetDevice()
        name = self._driver.cuDeviceGetName(96, device)
        return bytes(name).split(b"\0")[0].decode(errors="replace")


def _followed(step: Step, call: Callable[[], None]) -> _Steps:
    """A unit's launch or call, and then another call."""
    executable, own = step
    return [(executable, call)] if own is None else [(None, own), (None, call)]
