"""Streams and events, and where work goes that is given to a stream.

The hard problem: one call means three things. On a stream that captures, work becomes a node; on
the legacy default stream it would wait for every blocking stream of its context, which is an error
while one of them captures; anywhere else it runs. `Streams.submit` is the one place that decides.

There is no asynchrony: eager work has finished when the call returns. (Queries therefore never
answer "not ready", and the order of eager work is the order of the calls.)
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .contexts import Context, Contexts
from .graphs import Edge, Node
from .memory import Memory
from .nodes import PROGRAMMATIC, Host, Kernel, MemAlloc, MemFree, RecordEvent, Run, WaitEvent, Work
from .world import (
    CONTEXT_IS_DESTROYED,
    ILLEGAL_STATE,
    INVALID_HANDLE,
    INVALID_VALUE,
    Calls,
    Code,
    Handle,
    Refusal,
    Registry,
    World,
    as_int,
    call,
    new_address,
    new_identity,
    types,
)

if TYPE_CHECKING:
    from .captures import Capture, Captures

LEGACY, PER_THREAD = (0, 1), 2
NON_BLOCKING = 1
BLOCKING_SYNC, DISABLE_TIMING, INTERPROCESS = 1, 2, 4
EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL, CU_EVENT_WAIT_EXTERNAL

LEAST_PRIORITY, GREATEST_PRIORITY = 0, -5

UNSUPPORTED = 900


@dataclass(eq=False)
class Stream:
    """A stream. While it captures, `dependencies` is what its next node will wait for."""

    context: Context
    flags: int = 0
    priority: int = 0
    legacy: bool = False
    address: int = field(default_factory=new_address)
    identity: int = field(default_factory=new_identity)
    capture: Capture | None = None
    dependencies: dict[Node, Edge] = field(default_factory=dict)

    @property
    def blocking(self) -> bool:
        return not self.flags & NON_BLOCKING


@dataclass(frozen=True)
class CapturedState:
    """What an event recorded in a capture stands for."""

    capture: Capture
    dependencies: dict[Node, Edge]


@dataclass(eq=False)
class Event:
    """An event; its last record was at a time, or in a capture."""

    context: Context
    flags: int = 0
    address: int = field(default_factory=new_address)
    recorded: float | None = None
    captured: CapturedState | None = None

    @property
    def handle(self) -> Any:
        return types.CUevent(self.address)


class Streams:
    """All streams and events of one driver."""

    def __init__(self, world: World, contexts: Contexts, memory: Memory) -> None:
        self.world = world
        self.contexts = contexts
        self.memory = memory
        self.captures: Captures  # set by the driver: captures need streams too
        self.live: Registry[Stream] = Registry(world, "stream", INVALID_HANDLE)
        self.events: Registry[Event] = Registry(world, "event", INVALID_HANDLE)
        self._legacy: dict[Context, Stream] = {}

    # ---- finding one

    def get(self, handle: Handle) -> Stream:
        """The stream behind a handle; 0 and 1 are the legacy stream, 2 is the thread's own."""
        number = as_int(handle)
        if number in LEGACY:
            context = self.contexts.current()
            if context not in self._legacy:
                self._legacy[context] = Stream(context, legacy=True)
            return self._legacy[context]
        if number == PER_THREAD:
            return self._per_thread(self.contexts.current())
        stream = self.live.get(number)
        if not self.contexts.is_live(stream.context):
            self.world.find(
                f"{self.world.thread.call} used {self.live.name(number)} after its context was "
                f"destroyed: the driver crashes"
            )
            raise Refusal(CONTEXT_IS_DESTROYED)
        return stream

    def event(self, handle: Handle) -> Event:
        """The event behind a handle, whose context is still there."""
        event = self.events.get(handle)
        if not self.contexts.is_live(event.context):
            raise Refusal(CONTEXT_IS_DESTROYED)
        return event

    def _per_thread(self, context: Context) -> Stream:
        own: dict[Context, Stream] = self.world.thread.__dict__.setdefault("streams", {})
        if context not in own:
            own[context] = Stream(context)
        return own[context]

    def usable(self, handle: Handle) -> Stream:
        """A stream that may be given work now; misuse ends the capture that it harms."""
        stream = self.get(handle)
        if stream.legacy:
            self.captures.guard_legacy(stream.context)
        self.captures.guard_valid(stream)
        return stream

    # ---- giving work

    def submit(self, stream: Stream, work: Work) -> None:
        """Do the work, or make it a node of the capture that the stream is in."""
        if stream.capture is not None:
            self._capture(stream, work)
        else:
            self.world.afterwards(lambda: self._run(work))

    def _capture(self, stream: Stream, work: Work) -> None:
        if isinstance(work, Kernel) and _is_programmatic(work):
            for node, edge in list(stream.dependencies.items()):
                if isinstance(node.work, Kernel) and edge == Edge():
                    stream.dependencies[node] = Edge(1, 1, 0)
        if isinstance(work, Host):
            work = Host(work.function, work.user_data, [])
        self.captures.add(stream, work)

    def _run(self, work: Work) -> Code:
        run = Run(self.world, self.memory)
        work.run(run)
        return run.code

    # ---- stream-ordered memory

    def allocate(self, stream: Stream, size: int) -> int:
        """`cuMemAllocAsync`: memory now, or an allocation node."""
        if stream.capture is None:
            self.captures.guard_unsafe()
            return self.memory.allocate(size, 2, stream.context).address if size else 0
        if not size:
            return 0
        block = self.memory.reserve_for_graph(size, stream.context)
        self.captures.add(stream, MemAlloc(block.address, size, stream.context.device.ordinal))
        return block.address

    def free(self, stream: Stream, address: int) -> None:
        """`cuMemFreeAsync`: back now, or a free node."""
        if stream.capture is not None:
            if not address:
                return
            if not self.memory.is_of_graph(address):
                raise Refusal(INVALID_VALUE)
            self.captures.add(stream, MemFree(address))
            return
        self.captures.guard_unsafe()
        if self.memory.is_allocated_by_graph(address):
            self.memory.graph_frees(address)
        elif address:
            self.memory.release(address, 2)


def _is_programmatic(work: Kernel) -> bool:
    raw = work.attribute(PROGRAMMATIC)
    return raw is not None and bool(raw[0])


class StreamCalls(Calls):
    """cuStream* and cuEvent*, but for the calls about captures."""

    streams: Streams
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
        stream = Stream(self.contexts.current(), flags, priority)
        self.streams.live.add(stream.address, stream)
        return types.CUstream(stream.address)

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
            raise Refusal(UNSUPPORTED)
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

    @call()
    def cuStreamQuery(self, hStream: Handle) -> None:
        self._look_at(self.streams.get(hStream))

    @call()
    def cuStreamSynchronize(self, hStream: Handle) -> None:
        self._look_at(self.streams.get(hStream))

    def _look_at(self, stream: Stream) -> None:
        if stream.legacy:
            self.captures.guard_legacy(stream.context)
        self.captures.conflict(stream)
        self.captures.guard_unsafe()

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
        event = Event(self.contexts.current(), flags)
        self.streams.events.add(event.address, event)
        return event.handle

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

    def _record(self, event_handle: Handle, stream_handle: Handle, flags: int) -> None:
        stream = self.streams.usable(stream_handle)
        event = self.streams.event(event_handle)
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

    @call()
    def cuEventQuery(self, hEvent: Handle) -> None:
        self._look_at_event(hEvent)

    @call()
    def cuEventSynchronize(self, hEvent: Handle) -> None:
        self._look_at_event(hEvent)

    def _look_at_event(self, handle: Handle) -> None:
        event = self.streams.event(handle)
        if event.captured is not None:
            raise Refusal(self.captures.ask(event.captured.capture))
        self.captures.guard_unsafe()

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
