"""Captures that stand on their own: what is put into a graph, or into a body, afterwards.

The hard problem: such a capture may open while another one is open in the same thread (the body of a
conditional node), and getting a framework ready for it does what no capture survives. So the thread
is relaxed around that, and the capture has a stream and a pool of its own. On the simulated device
the recorder that is running already sees the body's operators too, and a second one would record
them twice.
"""

from __future__ import annotations

import contextlib
from typing import Any

from .._driver import bindings, contexts, enums, kernel_params, release, stream_capture, unfinished
from .._driver.handles import GraphHandle
from .._driver.survey import Survey, pageable_copy
from .._driver.threads import Home
from ..errors import bad_choice, note, other_context, while_closing
from ..frameworks import choose, companions
from ..frameworks.protocols import Found, Framework, Gone, Pool, Session
from ..frameworks.streams import as_handle, refuse_default
from . import errors
from .capture_notes import Journal, Page
from .state import Template


class Recording(unfinished.Unfinished):
    """A capture into a graph of its own. After the block: `.template`, and what it must keep alive.

    Raises `CaptureError` where the capture cannot begin or was lost, has host callbacks or draws
    random numbers, and `UnjoinedStreamError` for forked work that was not joined.
    """

    def __init__(self, driver: bindings.Driver, stream: Any, mode: str = "thread_local") -> None:
        super().__init__()
        if mode not in tuple(stream_capture.MODES):
            raise bad_choice("mode", mode, tuple(stream_capture.MODES))
        self.driver, self._mode, self._given = driver, mode, stream
        self.stream: Any = None  # of the capture, once it is open
        self._is_entered = False
        self._template: Template | None = None
        self.frontier: list[int] = []
        self.keep: object = None  # what the graph's memory is kept by
        self.inputs: tuple[list[Found], list[int]] = ([], [])  # memory of others that it names
        self.also_keep: list[object] = []  # what was given up to it while it was open

    @property
    def handle(self) -> Any:
        """The stream as the bindings' object."""
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
        framework = choose.framework_for(driver, stream)
        if not contexts.ensure(driver, framework.context):
            raise other_context()
        if stream is not None:
            handle = bindings.types.CUstream(as_handle(stream))
            if stream_capture.status(driver, handle) is not stream_capture.Status.NONE:
                raise errors.stream_is_captured()
        release.guard_collections()
        unfinished.sweep()
        self.home = Home()
        self._framework = framework
        with release.relaxed_thread():
            self._pool = framework.new_pool(None)
            self.stream = self._pool.lease(self) if stream is None else stream
        self._session = _session(framework, self._pool, self.stream, self._mode)
        try:
            unfinished.pending[self] = None
            with release.relaxed_thread():
                self._is_entered = True
                self._session.enter()
                self._session.begin()
            self.journal = Journal(driver, self.handle)
            open_recordings.append(self)
        except BaseException:
            self.put_back()
            raise
        self.is_abandoned = False  # from here on it is left by `__exit__`
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.is_abandoned = True
        if self.is_home() and self not in unfinished.pending:  # the block around it has ended it
            if error is None:
                raise errors.block_not_open("part of a graph")
            return
        if not self.is_home():  # what is that thread's own, it has to put back
            if error is None:
                raise errors.left_elsewhere("part", self.home.is_in_parent())
            return
        try:
            self._close_journal()
            with release.relaxed_thread():  # a capture around this one must not hear of it
                if error is not None:
                    self.abandon()
                else:
                    self._end()
            unfinished.pending.pop(self, None)
        except BaseException as problem:
            if error is None or not isinstance(problem, Exception):
                self.put_back()
                raise
            # The body's own error is the one to see.
            note(error, while_closing(problem))
        release.drain()

    def is_at_work(self) -> bool:
        """Whether this thread is inside its beginning or end."""
        work = (Recording.__enter__, Recording.__exit__, Recording.put_back)
        return unfinished.is_running(self, frozenset(method.__code__ for method in work))

    def place(self) -> tuple[bindings.Driver, int]:
        """Where its stream is."""
        return self.driver, self._framework.context

    def put_back(self) -> None:
        """End the capture without wanting its graph; can be repeated."""
        self._close_journal()
        with release.relaxed_thread():
            self.abandon()
        unfinished.pending.pop(self, None)

    def abandon(self) -> None:
        """End the capture and restore what its beginning changed; can be repeated."""
        self._leave(failed=True)

    def _leave(self, failed: bool) -> None:
        session = self._session
        try:
            if failed:
                session.abandon()
        finally:
            try:
                if self._is_entered:
                    session.leave(failed)
                    self._is_entered = False
            finally:
                self._pool.end_lease(self, keep=session.uses_workspace)

    def _close_journal(self) -> None:
        with contextlib.suppress(ValueError):  # it is closed already
            open_recordings.remove(self)

    def _end(self) -> None:
        driver, session = self.driver, self._session
        failed = True
        try:
            info = driver.capture_info(self.handle)
            survey, nodes = None, []
            if info.graph is not None:
                reader = kernel_params.KernelReader(driver)
                survey = Survey(reader, info.graph, info.dependencies)
                nodes = driver.graph_nodes(info.graph)
            unjoined = _unjoined(survey)  # before the end: a failed one takes the nodes along
            captured = session.end(survey)
            problem = _problem(self._framework, survey, captured)
            if survey is not None and survey.missed:
                problem = unjoined
            if captured.graph is None:
                lost = errors.recording_lost(driver.error("cuStreamEndCapture", captured.code))
                problem = unjoined if captured.code == enums.CAPTURE_UNJOINED else lost
            if problem is not None:
                captured.close()
                raise problem
            if survey is not None:
                self.inputs = session.inputs(survey)
                for piece in self.inputs[0]:
                    if isinstance(piece.storage, Gone):
                        captured.close()
                        raise errors.recording_reads_what_is_gone(piece.storage.words)
            failed = False
        finally:
            self._leave(failed)
        assert isinstance(captured.graph, GraphHandle)
        self.frontier = [int(node) for node in info.dependencies]
        self.keep = (self._pool, captured.graph, captured.keep, self.also_keep)
        self._template = Template(
            driver, captured.graph, context=contexts.current(driver), is_open=False
        )
        self.journal.hand_over(self._template, 0, nodes)


def _unjoined(survey: Survey | None) -> Exception:
    """The error for a side stream that was not joined, should there be one."""
    names = [] if survey is None else survey.names(survey.missed or survey.dangling)
    return errors.unjoined(0, "its end", names, ())


def _problem(framework: Framework, survey: Survey | None, captured: Any) -> Exception | None:
    if survey is not None and enums.HOST in survey.kinds:
        return errors.recording_has_host_nodes()
    host_is_device = framework.driver.simulated and framework.name != "raw"
    if survey is not None and not host_is_device:
        copy = pageable_copy(framework.driver, survey)
        if copy is not None:
            return errors.recording_copies_pageable(*copy)
    if captured.runner is not None:
        return errors.recording_draws()
    problem: Exception | None = captured.problem
    return problem


def _session(framework: Framework, pool: Pool, stream: Any, mode: str) -> Session:
    if framework.driver.simulated and release.open_captures():
        from ..frameworks.raw import RawFramework, RawSession

        if isinstance(framework, RawFramework):
            session = RawSession(framework, stream, mode)
            session.names_streams = framework.name == "raw"  # torch's operators name none
            return session
    return companions.session(framework, pool, stream, mode, ())


# ---------------------------------------------------------------- whose journal

#: `Graph.capture` blocks and bodies that are open, of all threads; the innermost last.
open_recordings: list[Recording] = []


def open_recording() -> Recording | None:
    """The innermost that the calling thread is in."""
    if open_recordings:
        unfinished.sweep()  # one that nobody will leave is none that something could be noted in
        for each in reversed(list(open_recordings)):
            if each.is_home() and not each.is_abandoned:
                return each
    return None
