"""The two kinds of pieces that a sequence is made of: captured ones and eager ones.

The hard problem: what runs a captured segment is not always its own executable: neighbours are
joined into one graph. A segment therefore knows its graph (what was captured) and, apart from it, what
launches it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from .._driver import contexts, kernel_params, set_params
from .._driver.handles import ExecHandle, GraphHandle
from .._driver.stream_order import CompletionMark
from ..errors import not_copyable
from ..frameworks.protocols import Runner
from ..graph.capture_notes import Journal
from ..graph.clone import edited_clone, twins
from ..graph.errors import exec_is_closed, graph_is_inside
from ..graph.exec import GraphExec
from ..graph.graph import Graph, face_of
from ..graph.state import Shadow, Template
from . import errors
from .addresses import Knowing, Places
from .pytree import Own
from .source_lines import Place, line_of
from .static_results import StaticResult


class SegmentHost(Knowing, Protocol):
    """What a segment asks of the sequence that runs it."""

    _context: int
    _turn: Any  # taken by whoever replays or edits
    _mark: CompletionMark | None  # the end of the last replay


@dataclass(slots=True)
class Seat:
    """What launches a segment: an executable, and the segment's place in it."""

    executable: ExecHandle  # its own, or the joined one
    node: Any = None  # the child node that stands for it in a joined graph


class GraphSegment:
    """Work captured between two breaks; it may be empty. Made by a capture, not by users.

    graph: what was captured, to be looked at; its nodes show what will run, edits included.
    exec: edits whatever executable really runs the segment.
    line: where the user's code was when it began ("file.py:12"); "" for a graph built by hand.
    """

    # What a new one has, here: captures have to be quick.
    _place: Place | None = None  # where the user's code was when the capture of it began
    _seat: Seat | None = None  # one attribute: executable and place change at once
    _closed = False
    _home: weakref.ref[SegmentHost] | None = None
    _seen: Template | None = None  # made when somebody looks
    _editor: GraphExec | None = None

    def __init__(
        self, index: int, graph: GraphHandle, node_kinds: frozenset[int],
        runner: Runner | None,
    ) -> None:  # fmt: skip
        self.index = index
        self._handle = graph
        self._kinds = node_kinds
        self._runner = runner

    @property
    def line(self) -> str:
        """Where the user's code was when it began ("file.py:12"); "" for a graph built by hand."""
        return line_of(self._place)

    @property
    def _sequence(self) -> SegmentHost | None:
        """The sequence that runs this segment; None before it belongs to one, and once that is gone."""
        return None if self._home is None else self._home()

    @property
    def _template(self) -> Template:
        if self._seen is None:
            self._seen = self._new_template()
        return self._seen

    def _new_template(self) -> Template:
        me, graph = weakref.ref(self), self._handle

        def is_alive() -> bool:
            segment = me()
            return segment is not None and not segment._closed

        home = self._sequence
        context = (home._context if home is not None else 0) or contexts.current(graph.driver)
        template = Template(graph.driver, graph, context=context, is_open=False, is_alive=is_alive)
        template.shown = Shadow()
        template.draws = self._runner is not None
        if home is not None:
            template.resolver, template.lease = Places(home).name, home._pool
        return template

    def _note(self, journal: Journal) -> None:
        """Take over what was noted while this was captured: it goes with its block."""
        graph = self._handle
        nodes = graph.driver.graph_nodes(graph.value)
        journal.hand_over(self._template, self.index, nodes)

    @classmethod
    def _of_graph(cls, index: int, graph: Graph) -> GraphSegment:
        """A segment that runs a graph which was built by hand; nothing can be added to it any more."""
        template = graph._template
        template.require_open()
        if template.parent is not None:
            raise graph_is_inside()
        template.finish()
        kinds = frozenset(
            kernel_params.node_type(template.driver, node) for _, node in template.walk()
        )
        assert isinstance(template.handle, GraphHandle)
        made = cls(index, template.handle, kinds, None)
        template.is_open, template.shown = False, Shadow()
        made._seen = template
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copyable(type(self).__name__)

    def belong(self, sequence: SegmentHost) -> None:
        """The sequence that runs this segment: its turn, its mark, and whose memory is whose."""
        self._home = weakref.ref(sequence)
        if self._seen is not None:
            self._seen.resolver, self._seen.lease = Places(sequence).name, sequence._pool

    @property
    def graph(self) -> Graph:
        """The captured graph. It belongs to the sequence: nothing can be added to it or removed."""
        return face_of(self._template)

    @property
    def exec(self) -> GraphExec:
        """Edits the executable that runs this segment, alone or joined with others; never a second.

        Edits reach the next replay. Once the sequence was reset it is closed.
        """
        if self._editor is None:
            shadow = self._template.shown
            assert shadow is not None
            self._editor = GraphExec(self._template, SegmentTarget(self), shadow, [])
        return self._editor

    @property
    def is_empty(self) -> bool:
        """Whether nothing was captured; such a segment is not launched."""
        return not self._kinds

    def _edited(self) -> GraphHandle:
        """The graph as it will run, for a copy in another capture."""
        shadow = None if self._seen is None else self._seen.shown
        if shadow is None or shadow.is_empty:
            return self._handle
        return edited_clone(self._template, shadow)

    @property
    def _executable(self) -> ExecHandle | None:
        """What launches the segment; None: nothing yet."""
        return None if self._seat is None else self._seat.executable

    @property
    def _joined(self) -> Any:
        """The child node that stands for the segment in what is launched; None: it is that itself."""
        return None if self._seat is None else self._seat.node

    def _reapply(self, seat: Seat) -> None:
        """Bring the edits to an executable that was made anew and is to launch the segment."""
        shadow = None if self._seen is None else self._seen.shown
        if shadow is not None and not shadow.is_empty:
            GraphExec(self._template, SegmentTarget(self, seat), shadow, [])._reapply()

    def close(self) -> None:
        """Give back what launches the segment, and its graph.

        Where somebody has looked into that, another thread may be reading it now: it goes with the last
        reference to it.
        """
        self._closed = True  # before it is asked who has looked: who looks from here on is refused
        if self._seat is not None:
            self._seat.executable.close()
        if self._runner is not None:
            self._runner.close()
        if self._seen is None:
            self._handle.close()

    def discard(self) -> None:
        """The same for a segment that nobody can have seen: its block has failed.

        Not with the last reference, which an exception may keep that is in a cycle or with the user: NCCL
        ends no communicator while a graph lives that has captured its work.
        """
        self.close()
        self._handle.close()

    def __repr__(self) -> str:
        what = "empty" if self.is_empty else "drawing" if self._runner else "captured"
        return f"<GraphSegment {self.index}: {what}>"


class EagerSegment:
    """A break: a call that runs as ordinary Python at each replay.

    `fn`, `args` and `kwargs` are what is called; arrays among the arguments are the stand-ins that
    replays see. `name` is the function's qualified name, `line` is where it was called at capture
    ("file.py:12"), and `scopes` are the `annotate` blocks around that call, from the outermost in.
    """

    def __init__(
        self, index: int, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str,
        place: Place | None = None, scopes: tuple[str, ...] = (), modes: Any = None,
        result: StaticResult | None = None, does_nothing: bool = False, own: Own | None = None,
    ) -> None:  # fmt: skip
        self.index = index
        self._own = own or {}  # containers that were given without arrays: the user's, as they are
        self.fn, self.args, self.kwargs = fn, args, kwargs
        self.name, self._place, self.scopes = name, place, scopes
        self._modes = modes
        self._result = result
        self._does_nothing = does_nothing  # force_no_graph: a border without a body

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copyable(type(self).__name__)

    @property
    def line(self) -> str:
        """Where it was called at capture: "file.py:12"."""
        return line_of(self._place)

    def call_and_fill(self, /, *args: Any, **kwargs: Any) -> None:
        """The body, and its result brought to its fixed places (what a replay calls)."""
        assert self._result is not None
        self._result.fill(self.fn(*args, **kwargs))

    def __repr__(self) -> str:
        return f"<EagerSegment {self.index}: {self.name}>"


# ---------------------------------------------------------------- edits


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
            raise exec_is_closed()
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

    def update_from(self, graph: Any) -> set_params.UpdateRefusal | None:
        segment = self._alive()
        driver, place = segment._handle.driver, self._place(segment)
        if place is None:
            return set_params.update_exec(driver, self.executable(), graph)
        code = set_params.set_child(driver, self.executable(), place, graph)
        return set_params.UpdateRefusal(code, 1, 0, 0) if code else None

    def launch(self, handle: int, stream: Any) -> None:
        segment, mark = self._alive(), self.mark
        if segment.is_empty:
            raise errors.segment_has_no_executable(True)
        if segment._runner is not None or segment._joined is not None or mark is None:
            raise errors.segment_cannot_be_launched()
        mark.order_after(handle, stream)
        segment._handle.driver.cuGraphLaunch(self.executable(), stream)
        mark.record(handle, stream)

    def _sequence(self) -> SegmentHost | None:
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
