"""Capturing into a graph: `with graph.capture(stream, after=...) as part`.

The hard problem: a capture that fails must leave the graph as it was, but the driver gives up a graph
that it was capturing into. So a recording fills a graph of its own, and its nodes are planted into
the target only when it has ended well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

from . import blocks, errors, frameworks, traps
from ._driver import bindings, capturing, contexts, reading, release, transplanting
from ._driver.handles import GraphHandle
from ._driver.threads import Home
from .frameworks.base import Found, Framework
from .frameworks.enclosed import Enclosed
from .frameworks.gone import Gone
from .journals import Journal, Page, open_recordings
from .nodes import Node
from .streams import as_handle, refuse_default
from .templates import Notes, Template

__all__ = ["Part", "Recording"]


class Recording(blocks.Unfinished):
    """A capture into a graph of its own. After the block: `.template`, and what it must keep alive.

    Raises `CaptureError` where the capture cannot begin or was lost, has host callbacks or draws
    random numbers, and `UnjoinedStreamError` for forked work that was not joined.
    """

    def __init__(self, driver: bindings.Driver, stream: Any, mode: str = "thread_local") -> None:
        super().__init__()
        if mode not in tuple(capturing.MODES):
            raise errors.bad_choice("mode", mode, tuple(capturing.MODES))
        self.driver, self._mode, self._given = driver, mode, stream
        self._enclosed: Enclosed | None = None
        self._template: Template | None = None
        self.frontier: list[int] = []
        self.keep: object = None  # what the graph's memory is kept by
        self.inputs: tuple[list[Found], list[int]] = ([], [])  # memory of others that it names
        self.also_keep: list[object] = []  # what was given up to it while it was open

    @property
    def stream(self) -> Any:
        """The stream of the capture."""
        assert self._enclosed is not None
        return self._enclosed.stream_object

    @property
    def handle(self) -> Any:
        """The same as the bindings' object."""
        return bindings.types.CUstream(as_handle(self.stream))

    @property
    def template(self) -> Template:
        """What was captured."""
        assert self._template is not None
        return self._template

    def page(self) -> Page:
        """Where to note what is captured now."""
        return Page(self.journal, 0)

    def __enter__(self) -> Recording:
        driver, stream = self.driver, self._given
        if stream is not None:
            refuse_default(stream)
        framework = frameworks.choose(driver, stream)
        if not contexts.ensure(driver, framework.context):
            raise errors.other_context()
        if stream is not None:
            handle = bindings.types.CUstream(as_handle(stream))
            if capturing.status(driver, handle) is not capturing.Status.NONE:
                raise errors.stream_is_captured()
        release.guard_collections()
        blocks.sweep()
        self.home = Home()
        self._enclosed = Enclosed(framework, stream, self._mode)
        try:
            blocks.unfinished[self] = None
            self._enclosed.begin()
            self.journal = Journal(driver, self.handle)
            open_recordings.append(self)
        except BaseException:
            self.put_back()
            raise
        self.is_abandoned = False  # from here on it is left by `__exit__`
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.is_abandoned = True
        if self.is_home() and self not in blocks.unfinished:  # the block around it has ended it
            if error is None:
                raise errors.block_not_open("part of a graph")
            return
        if not self.is_home():  # what is that thread's own, it has to put back
            if error is None:
                raise errors.left_elsewhere("part", self.home.is_in_parent())
            return
        enclosed = self._enclosed
        assert enclosed is not None
        try:
            self._close_journal()
            with release.relaxed_thread():  # a capture around this one must not hear of it
                if error is not None:
                    enclosed.abandon()
                else:
                    self._end(enclosed)
            blocks.unfinished.pop(self, None)
        except BaseException as problem:
            if error is None or not isinstance(problem, Exception):
                self.put_back()
                raise
            # The body's own error is the one to see.
            errors.note(error, errors.while_closing(problem))
        release.drain()

    def is_at_work(self) -> bool:
        """Whether this thread is inside its beginning or end."""
        return blocks.is_running(self, _WORK)

    def place(self) -> tuple[bindings.Driver, int]:
        """Where its stream is."""
        assert self._enclosed is not None
        return self.driver, self._enclosed.framework.context

    def put_back(self) -> None:
        """End the capture without wanting its graph; can be repeated."""
        self._close_journal()
        assert self._enclosed is not None
        with release.relaxed_thread():
            self._enclosed.abandon()
        blocks.unfinished.pop(self, None)

    def _close_journal(self) -> None:
        with contextlib.suppress(ValueError):  # it is closed already
            open_recordings.remove(self)

    def _end(self, enclosed: Enclosed) -> None:
        driver = self.driver
        failed = True
        try:
            info = driver.capture_info(self.handle)
            survey, nodes = None, []
            if info.graph is not None:
                reader = reading.KernelReader(driver)
                survey = reading.Survey(reader, info.graph, info.dependencies)
                nodes = driver.graph_nodes(info.graph)
            unjoined = _unjoined(survey)  # before the end: a failed one takes the nodes along
            captured = enclosed.end(survey)
            problem = _problem(enclosed.framework, survey, captured)
            if survey is not None and survey.missed:
                problem = unjoined
            if captured.graph is None:
                lost = errors.recording_lost(driver.error("cuStreamEndCapture", captured.code))
                problem = unjoined if captured.code == capturing.UNJOINED else lost
            if problem is not None:
                captured.close()
                raise problem
            if survey is not None:
                self.inputs = enclosed.inputs(survey)
                for piece in self.inputs[0]:
                    if isinstance(piece.storage, Gone):
                        captured.close()
                        raise errors.recording_reads_what_is_gone(piece.storage.words)
            failed = False
        finally:
            enclosed.leave(failed)
        assert isinstance(captured.graph, GraphHandle)
        self.frontier = [int(node) for node in info.dependencies]
        self.keep = (enclosed.pool, captured.graph, captured.keep, self.also_keep)
        self._template = Template(
            driver, captured.graph, context=contexts.current(driver), is_open=False
        )
        self.journal.hand_over(self._template, 0, nodes)


_WORK = frozenset(
    method.__code__ for method in (Recording.__enter__, Recording.__exit__, Recording.put_back)
)


def _unjoined(survey: reading.Survey | None) -> Exception:
    """The error for a side stream that was not joined, should there be one."""
    names = [] if survey is None else survey.names(survey.missed or survey.dangling)
    return errors.unjoined(0, "its end", names, ())


def _problem(
    framework: Framework, survey: reading.Survey | None, captured: Any
) -> Exception | None:
    if survey is not None and reading.HOST in survey.kinds:
        return errors.recording_has_host_nodes()
    host_is_device = framework.driver.simulated and framework.name != "raw"
    if survey is not None and not host_is_device:
        copy = traps.pageable_copy(framework.driver, survey)
        if copy is not None:
            return errors.recording_copies_pageable(*copy)
    if captured.runner is not None:
        return errors.recording_draws()
    problem: Exception | None = captured.problem
    return problem


class Part:
    """What `graph.capture(...)` yields. Inside the block: `.stream`; after it the nodes as well.

    nodes: the nodes that were captured, in order.
    frontier: the nodes that work behind this part has to wait for: `after=part.frontier`. Where
        nothing was captured they are those that the part itself was to wait for.
    """

    def __init__(self, target: Template, stream: Any, after: Sequence[Node], mode: str) -> None:
        self._target, self._after = target, list(after)
        self._recording = Recording(target.driver, stream, mode)
        self._is_done = False
        self.nodes: tuple[Node, ...] = ()
        self.frontier: tuple[Node, ...] = ()

    @property
    def stream(self) -> Any:
        """The stream that is captured: pass it to what does not follow the current stream."""
        return self._recording.stream

    def __enter__(self) -> Part:
        if self._is_done:
            raise errors.part_is_used_up()
        self._is_done = True
        self._recording.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._recording.__exit__(kind, error, traceback)
        if error is None:
            with release.relaxed_thread():
                self._plant()

    def __del__(self) -> None:
        """A part that was entered by hand and never left: the next use of the library ends it."""
        recording = getattr(self, "_recording", None)
        if recording is not None:
            recording.is_abandoned = True

    def _plant(self) -> None:
        target, recording = self._target, self._recording
        target.require_open()
        nodes, frontier = plant(target, recording, target.handles(self._after))
        self.nodes = tuple(target.added(node) for node in nodes)
        by_handle = {node.handle: node for node in self.nodes}
        self.frontier = tuple(by_handle[int(node)] for node in frontier) or tuple(self._after)

    def __repr__(self) -> str:
        return f"<Part {len(self.nodes)} nodes>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise errors.not_copyable("captured part")


def plant(
    target: Template, recording: Recording, after: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Put what was recorded into a graph: the new nodes, and those that end it."""
    source, root, driver = recording.template, target.root, target.driver
    if target.parent is not None:
        check_body(source)
    ground = transplanting.Ground(driver, target.value, root.value, root.context)
    handle = source.handle
    assert isinstance(handle, GraphHandle)
    planted = transplanting.transplant(ground, handle, after, source.known)
    inputs = [piece.storage for piece in recording.inputs[0]]
    root.owners.keep([recording.keep, inputs, *source.owners.all()])
    root.known.update(planted.conditionals)
    _move_notes(source, root, planted)
    nodes = list(planted.nodes.values())
    if planted.is_child:
        return nodes, nodes
    return nodes, [planted.nodes[old] for old in recording.frontier]


def check_body(source: Template) -> None:
    """The bodies of conditional nodes take few kinds of nodes; refused before one is added."""
    driver = source.driver
    for node in driver.graph_nodes(source.value):
        if reading.node_type(driver, node) not in transplanting.IN_BODIES:
            raise errors.not_in_a_body(source.node(node).label)


def _move_notes(source: Template, root: Template, planted: transplanting.Planted) -> None:
    for old, notes in source.notes.items():
        new = planted.nodes.get(old)
        if new is not None and notes != Notes():
            root.notes[int(new)] = notes
    for first, _ in source.together.items():
        new = planted.nodes.get(first)
        if new is not None:
            work = planted.conditionals[int(new)]
            pair = _second_of(source, first, planted)
            root.together[int(new)] = (*work.bodies, *pair)


def _second_of(source: Template, first: int, planted: transplanting.Planted) -> tuple[int, ...]:
    """The bodies of the node that stands for the other half of a two-body conditional."""
    bodies = source.together[first]
    for old, work in source.known.items():
        if old != first and work.bodies and work.bodies[0] == bodies[-1]:
            return planted.conditionals[int(planted.nodes[old])].bodies
    return ()
