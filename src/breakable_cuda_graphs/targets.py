"""Which executable an edit goes to, and by which node it knows each node.

The hard problem: what runs a segment of a sequence may be another executable than its own, one that was
joined from several, and which it is can change with the next capture. So nobody keeps an executable: an
edit asks a target, at each call anew.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from . import errors
from ._driver import editing, process, release
from ._driver.handles import ExecHandle
from ._driver.ordering import CompletionMark
from .copies import twins

if TYPE_CHECKING:
    from .segments import GraphSegment, Seat
    from .sequence import CUDAGraphSequence

__all__ = ["OwnTarget", "SegmentTarget", "Target"]


class Target(Protocol):
    """Which executable an edit goes to."""

    @property
    def mark(self) -> CompletionMark | None:
        """The end of the last work that may read what the executable names."""

    def executable(self) -> Any:
        """The CUgraphExec; raises once it is closed."""

    def twins(self) -> dict[int, Any] | None:
        """The nodes by which the executable knows those of the template; None: they are the same."""

    def update_from(self, graph: Any) -> editing.Refusal | None:
        """Give all nodes the parameters of another graph's."""

    def launch(self, handle: int, stream: Any) -> None:
        """Launch it on a stream."""

    def turn(self) -> AbstractContextManager[Any]:
        """Keep others from launching or editing meanwhile."""

    def close(self) -> None:
        """Give it back, if it is ours to give."""

    @property
    def closed(self) -> bool:
        """Whether it is gone."""


class OwnTarget:
    """An executable that belongs to its `GraphExec`."""

    def __init__(self, handle: ExecHandle, mark: CompletionMark) -> None:
        self.handle = handle
        self.driver = handle.driver
        self._mark: CompletionMark | None = mark
        self._lock = threading.RLock()
        self._epoch = process.epoch

    @property
    def mark(self) -> CompletionMark | None:
        return self._mark

    def executable(self) -> Any:
        return self.handle.value

    def twins(self) -> dict[int, Any] | None:
        return None

    def update_from(self, graph: Any) -> editing.Refusal | None:
        return editing.update_exec(self.driver, self.executable(), graph)

    def launch(self, handle: int, stream: Any) -> None:
        executable, mark = self.executable(), self._mark
        assert mark is not None
        mark.order_after(handle, stream)
        self.driver.cuGraphLaunch(executable, stream)
        mark.record(handle, stream)

    def turn(self) -> AbstractContextManager[Any]:
        return self._lock

    @property
    def closed(self) -> bool:
        return self.handle.closed

    def close(self) -> None:
        mark = self._mark
        if mark is not None and process.can_release(self._epoch):
            with release.relaxed_thread():
                mark.close()
                self.handle.close()
        self._mark = None

    def __del__(self, later: Any = release.later) -> None:
        mark = getattr(self, "_mark", None)
        if mark is not None:
            later(self._epoch, mark.close)


class SegmentTarget:
    """Which executable runs a segment, and by which node it knows each of the segment's.

    That is the one that runs it now, whichever it is, or the one in the seat that is given.
    """

    def __init__(self, segment: GraphSegment, seat: Seat | None = None) -> None:
        self._segment = weakref.ref(segment)
        self._given = seat
        #: what runs the segment, and the nodes in that by nodes of the segment
        self._known: tuple[object, dict[int, Any] | None] = (self, None)  # of nothing yet

    def _alive(self) -> GraphSegment:
        segment = self._segment()
        if segment is None or segment._closed:
            raise errors.exec_is_closed()
        return segment

    def executable(self) -> Any:
        segment = self._alive()
        seat = self._seat(segment)
        if seat is None:
            raise errors.segment_has_no_executable(segment.is_empty)
        return seat.executable.value

    def _seat(self, segment: GraphSegment) -> Seat | None:
        return self._given or segment._seat

    def twins(self) -> dict[int, Any] | None:
        segment = self._alive()
        runs = self._seat(segment)
        if self._known[0] is not runs:
            place, driver = self._place(segment), segment._handle.driver
            found = None
            if place is not None:
                copy = driver.cuGraphChildGraphNodeGetGraph(place)
                found = twins(driver, segment._template, copy)
            self._known = (runs, found)
        return self._known[1]

    def _place(self, segment: GraphSegment) -> Any:
        """The child node that stands for the segment in what is launched; None: it is that itself."""
        seat = self._seat(segment)
        return None if seat is None else seat.node

    def update_from(self, graph: Any) -> editing.Refusal | None:
        segment = self._alive()
        driver, place = segment._handle.driver, self._place(segment)
        if place is None:
            return editing.update_exec(driver, self.executable(), graph)
        code = editing.set_child(driver, self.executable(), place, graph)
        return editing.Refusal(code, 1, 0, 0) if code else None

    def launch(self, handle: int, stream: Any) -> None:
        segment, mark = self._alive(), self.mark
        if segment.is_empty:
            raise errors.segment_has_no_executable(True)
        if segment._runner is not None or segment._joined is not None or mark is None:
            raise errors.segment_cannot_be_launched()
        mark.order_after(handle, stream)
        segment._handle.driver.cuGraphLaunch(self.executable(), stream)
        mark.record(handle, stream)

    def _sequence(self) -> CUDAGraphSequence | None:
        segment = self._segment()
        return None if segment is None else segment._sequence

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        home = self._sequence()
        if home is None:
            yield
            return
        with home._turn:  # a break that edits the sequence that it is in has the turn already
            yield

    @property
    def mark(self) -> CompletionMark | None:
        home = self._sequence()
        return None if home is None else home._mark

    @property
    def closed(self) -> bool:
        segment = self._segment()
        return segment is None or segment._closed

    def close(self) -> None:
        """Does nothing: the executable is the sequence's."""
