"""The calls of the simulated driver: cuStream* and cuEvent*, but for the calls about captures.

The hard problem: an event stands for work that has been done or for nodes of a capture, and each call
has to ask which.
"""

from __future__ import annotations

import time
from typing import Any

from ..._driver.enums import (
    BLOCKING_SYNC,
    CAPTURE_UNSUPPORTED,
    CONTEXT_IS_DESTROYED,
    DISABLE_TIMING,
    ILLEGAL_STATE,
    INTERPROCESS,
    INVALID_HANDLE,
    INVALID_VALUE,
    NON_BLOCKING,
)
from ..captures import Captures
from ..contexts import Contexts
from ..stream_state import CapturedState, Event, RecordEvent, Stream, WaitEvent
from ..streams import EXTERNAL, GREATEST_PRIORITY, LEAST_PRIORITY, LEGACY, PER_THREAD, StreamTable
from ..world import DriverCalls, Handle, Refusal, as_int, call, types


class StreamCalls(DriverCalls):
    """cuStream* and cuEvent*, but for the calls about captures."""

    streams: StreamTable
    contexts: Contexts
    captures: Captures

    @call(1)
    def cuStreamCreate(self, Flags: int) -> Any:
        return self._new_stream(int(Flags), 0)

    @call(1)
    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        return self._new_stream(
            int(flags), max(GREATEST_PRIORITY, min(LEAST_PRIORITY, int(priority)))
        )

    def _new_stream(self, flags: int, priority: int) -> Any:
        if flags & ~NON_BLOCKING:
            raise Refusal(INVALID_VALUE)
        return self.streams.live.add(Stream(self.contexts.current(), flags, priority)).handle

    @call()
    def cuStreamDestroy(self, hStream: Handle) -> None:
        if as_int(hStream) in (*LEGACY, PER_THREAD):
            raise Refusal(INVALID_HANDLE)
        stream = self.streams.live.find(hStream)
        if stream is not None:
            self.captures.guard_release(f"stream {stream.address:#x}", refuse=False)
            if stream.capture is not None:
                self.world.find(f"cuStreamDestroy: stream {stream.address:#x} is capturing")
                self.captures.lose(stream)
        self.streams.live.release(hStream)

    @call(1)
    def cuStreamGetFlags(self, hStream: Handle) -> int:
        stream = self.streams.get(hStream)
        self.captures.conflict(stream)  # odd, and so on a device in every mode
        return stream.flags

    @call(1)
    def cuStreamGetId(self, hStream: Handle) -> int:
        stream = self.streams.get(hStream)
        if stream.capture is not None and not self.captures.is_sound(stream):
            raise Refusal(CAPTURE_UNSUPPORTED)
        return stream.identity

    @call(1)
    def cuStreamGetPriority(self, hStream: Handle) -> int:
        stream = self.streams.get(hStream)
        self.captures.guard_valid(stream)
        return stream.priority

    @call(1)
    def cuStreamGetCtx(self, hStream: Handle) -> Any:
        stream = self.streams.get(hStream)
        self.captures.guard_valid(stream)
        return stream.context.handle

    @call(1)
    def cuStreamGetDevice(self, hStream: Handle) -> Any:
        return types.CUdevice(self.streams.get(hStream).context.device.ordinal)

    def _look_at(self, hStream: Handle) -> None:
        stream = self.streams.get(hStream)
        if stream.legacy:
            self.captures.guard_legacy(stream.context)
        self.captures.conflict(stream)
        self.captures.guard_unsafe()

    cuStreamQuery = call(name="cuStreamQuery")(_look_at)
    cuStreamSynchronize = call(name="cuStreamSynchronize")(_look_at)

    @call()
    def cuCtxSynchronize(self) -> None:
        context = self.contexts.current()
        self.captures.conflict_in(context)
        self.captures.guard_unsafe()

    @call()
    def cuStreamWaitEvent(self, hStream: Handle, hEvent: Handle, Flags: int) -> None:
        stream = self.streams.usable(hStream)
        if stream.capture is not None and not as_int(hEvent):
            self.captures.invalidate(stream.capture)
        event = self.streams.event(hEvent)
        if int(Flags) == EXTERNAL:
            if stream.capture is None:
                raise Refusal(ILLEGAL_STATE)
            self.captures.add(stream, WaitEvent(event))
        elif int(Flags) != 0:
            raise Refusal(INVALID_VALUE)
        else:
            self.captures.wait(stream, event)

    # ---- events

    @call(1)
    def cuEventCreate(self, Flags: int) -> Any:
        flags = int(Flags)
        alone = flags & INTERPROCESS and not flags & DISABLE_TIMING
        if flags & ~(BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS) or alone:
            raise Refusal(INVALID_VALUE)
        return self.streams.events.add(Event(self.contexts.current(), flags)).handle

    @call()
    def cuEventDestroy(self, hEvent: Handle) -> None:
        event = self.streams.events.find(hEvent)
        if event is not None:
            self.captures.guard_release(f"event {event.address:#x}", refuse=False)
        gone = self.streams.events.release(hEvent)
        if not self.contexts.is_live(gone.context):
            raise Refusal(CONTEXT_IS_DESTROYED)

    @call()
    def cuEventRecord(self, hEvent: Handle, hStream: Handle) -> None:
        self._record(hEvent, hStream, 0)

    @call()
    def cuEventRecordWithFlags(self, hEvent: Handle, hStream: Handle, flags: int) -> None:
        self._record(hEvent, hStream, int(flags))

    def _record(self, hEvent: Handle, hStream: Handle, flags: int) -> None:
        stream, event = self.streams.usable(hStream), self.streams.event(hEvent)
        if event.context is not stream.context:
            raise Refusal(INVALID_HANDLE)
        if flags not in (0, EXTERNAL):
            raise Refusal(INVALID_VALUE)
        if flags and stream.capture is None:
            raise Refusal(ILLEGAL_STATE)
        if flags:
            self.captures.add(stream, RecordEvent(event))
        elif stream.capture is not None:
            event.captured = CapturedState(stream.capture, dict(stream.dependencies))
        else:
            event.recorded, event.captured = time.perf_counter(), None

    def _look_at_event(self, hEvent: Handle) -> None:
        event = self.streams.event(hEvent)
        if event.captured is not None:
            raise Refusal(self.captures.ask(event.captured.capture))
        self.captures.guard_unsafe()

    cuEventQuery = call(name="cuEventQuery")(_look_at_event)
    cuEventSynchronize = call(name="cuEventSynchronize")(_look_at_event)

    @call(1)
    def cuEventElapsedTime(self, hStart: Handle, hEnd: Handle) -> float:
        start, end = self.streams.event(hStart), self.streams.event(hEnd)
        for captured in (start.captured, end.captured):
            if captured is not None:
                raise Refusal(self.captures.ask(captured.capture))
        if (start.flags | end.flags) & DISABLE_TIMING:
            raise Refusal(INVALID_HANDLE)
        if start.recorded is None or end.recorded is None:
            raise Refusal(INVALID_HANDLE)
        return (end.recorded - start.recorded) * 1e3
