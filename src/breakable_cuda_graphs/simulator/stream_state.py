"""What a stream, an event and a capture are: plain state that calls change.

The hard problem: streams name the capture that they are in, captures name their streams, and events remember
either. So all of them stand in one file, below the rules.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from .._driver.enums import EVENT_RECORD, EVENT_WAIT, NON_BLOCKING
from .contexts import Context
from .graphs import EdgeData, GraphData, NodeData, Op, Run
from .world import DriverObject, new_identity, types


@dataclass(frozen=True)
class RecordEvent(Op):
    kind = EVENT_RECORD
    event: Event

    def run(self, run: Run) -> None:
        self.event.recorded = time.perf_counter()
        self.event.captured = None


@dataclass(frozen=True)
class WaitEvent(Op):
    kind = EVENT_WAIT
    event: Event


NONE, ACTIVE, INVALIDATED, ENDED = range(4)


@dataclass(eq=False)
class Capture:
    """One capture sequence, from begin to end."""

    mode: int
    thread: object
    origin: Stream
    graph: GraphData
    identity: int = field(default_factory=new_identity)
    status: int = ACTIVE
    streams: list[Stream] = field(default_factory=list)
    #: nodes that may stay unjoined: taken out of a dependency set by the user
    let_go: set[NodeData] = field(default_factory=set)
    #: nodes that streams made; those that were added to the graph by hand need no join
    captured: set[NodeData] = field(default_factory=set)


@dataclass(eq=False)
class Stream(DriverObject):
    """A stream. While it captures, `dependencies` is what its next node will wait for."""

    handle_type = types.CUstream
    context: Context
    flags: int = 0
    priority: int = 0
    legacy: bool = False
    identity: int = field(default_factory=new_identity)
    capture: Capture | None = None
    dependencies: dict[NodeData, EdgeData] = field(default_factory=dict)

    @property
    def blocking(self) -> bool:
        return not self.flags & NON_BLOCKING


@dataclass(frozen=True)
class CapturedState:
    """What an event recorded in a capture stands for."""

    capture: Capture
    dependencies: dict[NodeData, EdgeData]


@dataclass(eq=False)
class Event(DriverObject):
    """An event; its last record was at a time, or in a capture."""

    handle_type = types.CUevent
    context: Context
    flags: int = 0
    recorded: float | None = None
    captured: CapturedState | None = None
