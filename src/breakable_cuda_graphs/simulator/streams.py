"""Streams and events, and where work goes that is given to a stream.

The hard problem: one call means three things. On a stream that captures, work becomes a node; on
the legacy default stream it would wait for every blocking stream of its context, which is an error
while one of them captures; anywhere else it runs. `StreamTable.submit` is the one place that decides.

There is no asynchrony: eager work has finished when the call returns. (Queries therefore never
answer "not ready", and the order of eager work is the order of the calls.)
"""

from __future__ import annotations

from .._driver.enums import (
    CONTEXT_IS_DESTROYED,
    DEVICE_MEMORY,
    INVALID_HANDLE,
    INVALID_VALUE,
    PROGRAMMATIC,
)
from .captures import Captures
from .contexts import Context, Contexts
from .graphs import EdgeData, Op, Run
from .memory import SimulatedMemory
from .nodes import Host, KernelOp, MemAlloc, MemFree
from .stream_state import Event, Stream
from .world import Code, Handle, Refusal, Registry, World, as_int

LEGACY, PER_THREAD = (0, 1), 2

EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL, CU_EVENT_WAIT_EXTERNAL

LEAST_PRIORITY, GREATEST_PRIORITY = 0, -5


class StreamTable:
    """All streams and events of one driver."""

    def __init__(
        self, world: World, contexts: Contexts, memory: SimulatedMemory, captures: Captures
    ) -> None:
        self.world = world
        self.contexts = contexts
        self.memory = memory
        self.captures = captures
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

    def submit(self, stream: Stream, work: Op) -> None:
        """Do the work, or make it a node of the capture that the stream is in."""
        if stream.capture is not None:
            self._capture(stream, work)
        else:
            self.world.afterwards(lambda: self._run(work))

    def _capture(self, stream: Stream, work: Op) -> None:
        if isinstance(work, KernelOp) and _is_programmatic(work):
            for node, edge in list(stream.dependencies.items()):
                if isinstance(node.work, KernelOp) and edge == EdgeData():
                    stream.dependencies[node] = EdgeData(1, 1, 0)
        if isinstance(work, Host):
            work = Host(work.function, work.user_data, [])
        self.captures.add(stream, work)

    def _run(self, work: Op) -> Code:
        run = Run(self.world, self.memory)
        work.run(run)
        return run.code

    # ---- stream-ordered memory

    def allocate(self, stream: Stream, size: int) -> int:
        """`cuMemAllocAsync`: memory now, or an allocation node."""
        if stream.capture is None:
            self.captures.guard_unsafe()
            return self.memory.allocate(size, DEVICE_MEMORY, stream.context).address if size else 0
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
        self.memory.free(address)


def _is_programmatic(work: KernelOp) -> bool:
    raw = work.attribute(PROGRAMMATIC)
    return raw is not None and bool(raw[0])
