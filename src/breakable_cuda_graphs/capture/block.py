"""One open block: open a segment, break, open the next, close.

The hard problem: user code runs between every two of our driver calls and may fail, be interrupted,
call from another thread or hide an error. A block therefore always knows one thing, whether a
segment is open, and whatever happens passes through `put_back`; the user's exception is
never replaced, and a block that lost a segment is poisoned, so that nothing goes on as if it had
not. State changes are: prepare, one driver call, commit.

An interrupt can hit any line, also of what repairs the damage of another one. So a block counts as
abandoned except while its body or one of its methods runs, and what puts everything back is a list of
steps that can be repeated: whoever uses the library next goes through all of them again.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

from .._driver import bindings, contexts, enums, kernel_params, release, stream_capture, unfinished
from .._driver.stream_capture import Status
from .._driver.stream_order import join
from .._driver.survey import Survey
from ..errors import CaptureError, ProcessError, ReplayError, note, other_context, while_closing
from ..frameworks import companions
from ..frameworks.protocols import Captured, Found, Framework
from ..frameworks.streams import DEFAULT_STREAMS, as_handle, refuse_default
from ..graph.errors import left_elsewhere, unjoined
from ..sequence import pytree, source_lines
from ..sequence.memory import Memory, Rules, Use
from ..sequence.segments import EagerSegment, GraphSegment
from ..sequence.state import SequenceState
from . import errors, open_blocks, refusals
from .break_call import BreakCalls
from .stacks import StackRecorder

_END = "the end of the block"  # where a last segment ends

_KERNELS = frozenset({enums.KERNEL})

_OURS = (CaptureError, ReplayError, ProcessError)


class Block(open_blocks.OpenBlock):
    """One open `breakable_graph` block."""

    def __init__(
        self, sequence: SequenceState, stream: Any, mode: str,
        barrier_fn: Callable[[], object] | None, generators: tuple[Any, ...], rules: Rules,
        host_nodes: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.driver = bindings.current()
        self.sequence = sequence
        self.mode = mode
        self._barrier_fn = barrier_fn
        self._rules = rules
        self._allows_host_nodes = host_nodes == "allow"
        self._debug = os.environ.get(refusals.VARIABLE, "") not in ("", "0")
        self.framework: Framework = self._choose_framework(stream)
        self._context_before = 0  # of another device, which was current before this block
        try:
            self._enter_device()
            self._prepare(stream, generators)
        except BaseException:
            self._leave_device()
            raise
        self._breaks = BreakCalls(self.framework, self.session, sequence._memory, rules)
        self._host_is_device = self.driver.simulated and self.framework.name != "raw"
        self._ambient: Any = None
        self._segments: list[GraphSegment | EagerSegment] = []
        self._first_index = 0  # earlier blocks of the sequence have made so many
        self._memory_mark: Any = None
        self._reader = kernel_params.KernelReader(self.driver)
        self._place = source_lines.user_place()  # where the present segment began
        self._stacks: StackRecorder | None = None
        self.before_commit: Callable[[], object] | None = None  # all has been captured well

    def _choose_framework(self, stream: Any) -> Framework:
        if stream is None:
            return self.sequence._ensure_framework()
        refuse_default(stream)
        framework = self.sequence._ensure_framework(stream)
        if contexts.of_stream(self.driver, as_handle(stream)) != framework.context:
            raise errors.capture_stream_of_other_device()
        return framework

    def _prepare(self, stream: Any, generators: tuple[Any, ...]) -> None:
        """The pool, the stream and the session, with the sequence's device current."""
        self._pool = self.sequence._ensure_pool(self.framework)
        try:
            self._stream_object = self._pool.lease(self) if stream is None else stream
            self.stream = bindings.types.CUstream(as_handle(self._stream_object))
            self.handle = int(self.stream)
            self.session = companions.session(
                self.framework, self._pool, self._stream_object, self.mode, generators
            )
        except BaseException:
            self._pool.end_lease(self, keep=False)
            raise

    # ---- the device

    def _enter_device(self) -> None:
        """Make the sequence's device current for as long as the block is open."""
        before = contexts.instead_of(self.driver, self.framework.context)
        if before is None:
            raise other_context()
        self._context_before = before
        if before:
            contexts.make_current(self.driver, self.framework.context)

    def _come_home(self) -> None:
        """The body may have left another device current, or a context of its own (to be kept)."""
        left = contexts.instead_of(self.driver, self.framework.context)
        if left is None:
            self._context_before = contexts.current(self.driver)
        if left != 0:
            contexts.make_current(self.driver, self.framework.context)

    def _leave_device(self) -> None:
        if self._context_before and self.is_home():
            contexts.make_current(self.driver, self._context_before)
        self._context_before = 0

    # ---- open and close

    def open(self, record_stacks: bool) -> None:
        """Begin the first segment. Whatever fails, everything is as it was before."""
        try:
            unfinished.pending[self] = None
            self._refuse_nesting()
            self._memory_mark = self.sequence._memory.mark()
            self.sequence._begin_capture(self)
            self._first_index = len(self.sequence._segments)
            with release.relaxed_thread():
                self._ambient = bindings.types.CUstream(self.framework.current_stream())
                self.session.enter()
                self._pool.mark.order_after(self.handle, self.stream)
                join(self.driver, self.stream, self._ambient)
            open_blocks.add(self)
            self._begin_segment()
            if record_stacks:
                self._stacks = StackRecorder(self.page)
                self._stacks.start()
        except BaseException as error:
            self._end(True, error)
            raise

    def _refuse_nesting(self) -> None:
        """Before any change: neither stream may be in a capture already."""
        ambient = bindings.types.CUstream(self.framework.current_stream())
        for stream in (self.stream, ambient):
            if stream_capture.status(self.driver, stream) is not Status.NONE:
                raise errors.nested_block(bool(open_blocks.find()))
        if any(block.handle == self.handle for block in open_blocks.open_blocks):
            raise errors.nested_block(True)

    def close(self, error: BaseException | None) -> None:
        """End the block: with the body's exception, or with a sequence that can be replayed.

        On another thread what belongs to the block's own cannot be put back, nor a capture be ended that
        is not relaxed: the block stays abandoned, and its own thread ends it. With an error it may be
        the collector that found a generator, in the middle of anything: nothing is done at all.
        """
        if not self.is_home():
            if error is None:
                is_in_parent = self.home.is_in_parent()
                if self.mode == "relaxed" and not is_in_parent:
                    with release.relaxed_thread():
                        self._abandon_segment()
                raise left_elsewhere("block", is_in_parent)
            return
        try:
            if error is not None:
                with contextlib.suppress(Exception):  # neither may take the error's place
                    self._come_home()
                    self._advise(error)
            else:
                self._come_home()
                self._raise_poison()
                self._end_segment(_END)
                if self.before_commit is not None:
                    self.before_commit()
                self._commit()
        except BaseException as problem:
            self._end(True, problem)
            raise
        else:
            self._end(error is not None, error)

    def _commit(self) -> None:
        """All segments have been captured: make what replays them."""
        with release.relaxed_thread():
            # From the commit on another thread may replay: it has to wait for what the breaks did.
            self._pool.mark.record(self.handle, self.stream)
            self.sequence._commit(self.framework, self._segments)

    def _end(self, failed: bool, error: BaseException | None) -> None:
        """Put everything back. What goes wrong here is only noted on an error that is on its way."""
        try:
            problems = self.put_back(failed)
            if problems:  # what was in the way may be gone: memory, say
                self.put_back(failed)
        except BaseException:  # an interrupt: once more, from the first step on
            self.put_back()
            raise
        release.drain()
        if problems and error is None:
            raise problems[0]
        if error is not None:
            for other in problems:
                note(error, while_closing(other))

    def is_at_work(self) -> bool:
        """Whether this thread is inside the block's beginning or end."""
        work = (Block.open, Block.close, Block.put_back)
        return unfinished.is_running(self, frozenset(method.__code__ for method in work))

    def place(self) -> tuple[bindings.Driver, int]:
        """Where its streams are."""
        return self.driver, self.framework.context

    def put_back(self, failed: bool = True) -> list[Exception]:
        """Try each step whatever became of the one before; returns what went wrong.

        Each does nothing where there is nothing left to do.
        """
        problems = []
        for step in (
            self._stop_stacks,
            self._abandon_segment,
            functools.partial(self.session.leave, failed),
            self._join_others,
            functools.partial(open_blocks.remove, self),
            self._end_lease,
            self._roll_back,
            self._leave_device,
        ):
            try:
                step()
            except Exception as problem:
                problems.append(problem)
        self._breaks.forget()
        self.poison = None  # it may hold this frame: no cycle is left for the collector
        if not self.is_open:  # one that could not be ended is tried again by the next use
            unfinished.pending.pop(self, None)
        return problems

    def _stop_stacks(self) -> None:
        if self._stacks is not None:
            self._stacks.stop()
            self._stacks = None

    def _end_lease(self) -> None:
        self._pool.end_lease(self, keep=self.session.uses_workspace)

    def _join_others(self) -> None:
        """Let the ambient stream, and the next replay wherever it runs, wait for what breaks did."""
        if self._ambient is None:
            return
        with release.relaxed_thread():
            join(self.driver, self._ambient, self.stream)
            self._pool.mark.record(self.handle, self.stream)

    def _roll_back(self) -> None:
        """Take out of the sequence what this block has put into it, unless it is to stay."""
        if self.sequence._captured_by is self and not self.sequence._finish_commit():
            with release.relaxed_thread():
                for segment in self._segments:
                    if isinstance(segment, GraphSegment):
                        segment.discard()
            self.sequence._memory.back_to(self._memory_mark)
            self.sequence._roll_back()

    # ---- one segment

    def _begin_segment(self) -> None:
        self.is_open = True  # before the call: what fails halfway has to be ended too
        try:
            self.session.begin()
        except BaseException as error:
            self.poison = error
            # Another thread's call may kill a capture as it begins.
            if not isinstance(error, CaptureError) and refusals.speaks_of_capture(error):
                for text in (errors.place(self.next_index), *errors.advice(self.mode, error)):
                    note(error, text)
            try:
                self._abandon_segment()
            except Exception as problem:
                note(error, while_closing(problem))
            raise

    def _end_segment(self, where: str) -> None:
        """End the open segment and keep its graph, or raise what was wrong with it."""
        try:
            self._finish_segment(self.next_index, where)
        except BaseException as error:
            self.poison = error  # the body may hide it
            raise

    def _finish_segment(self, index: int, where: str) -> None:
        if self._stacks is not None:
            self._stacks.flush()
        info = self.driver.capture_info(self.stream)
        survey = None
        names: list[str] = []
        streams: list[int] = []
        if info.graph is not None:
            survey = Survey(self._reader, info.graph, info.dependencies)
            if survey.dangling:
                names = survey.names(survey.missed or survey.dangling)
                if self._debug:
                    streams = refusals.unjoined_streams(self.driver, info, survey.dangling)
        captured = self.session.end(survey)
        graph, problem = captured.graph, captured.problem
        self.is_open = graph is None  # what is left of it then is ended by `abandon`
        if survey is not None and survey.kinds != _KERNELS:
            problem = problem or refusals.find_trap(
                self.driver, survey, index, where, is_last=where == _END,
                allows_host_nodes=self._allows_host_nodes, host_is_device=self._host_is_device,
            )  # fmt: skip
        if survey is not None and survey.missed:
            problem = unjoined(index, where, names, streams)
        if graph is None:
            cause = self.driver.error("cuStreamEndCapture", captured.code)
            problem = refusals.reason(index, where, self.mode, cause, names, streams)
        if problem is not None:
            self._refuse(captured, problem)
        assert graph is not None
        assert survey is not None
        if captured.keep is not None:
            self.keep(captured.keep)
        segment = GraphSegment(index, graph, frozenset(survey.kinds), captured.runner)
        segment._place = self._place
        if self.journal is not None:
            segment._note(self.journal)
        self._segments.append(segment)
        if self._rules.looks_into_segments:
            memory = self.sequence._memory
            memory.note_segment(survey, self.session, self._rules, index, self._place)

    def _refuse(self, captured: Captured, error: Exception) -> None:
        """A segment that ended cannot be used: give it back, poison the block, raise."""
        with release.relaxed_thread():
            captured.close()
        self.poison = error
        raise error

    def _abandon_segment(self) -> None:
        """End whatever is open, wanting nothing of it. Does nothing where nothing is open."""
        if self.is_open:
            self.session.abandon()
            self.is_open = False

    @property
    def next_index(self) -> int:
        """The place in `sequence.segments` of what is captured now, or comes next."""
        return self._first_index + len(self._segments)

    # ---- breaks

    def holds_stream(self, handle: int) -> bool:
        """Whether a stream is this block's own, or one that was forked from it into its capture."""
        if handle == self.handle:
            return True
        if not self.is_open or handle in DEFAULT_STREAMS:
            return False
        capture = self.driver.capture_info(bindings.types.CUstream(handle)).id
        return capture != 0 and capture == self.driver.capture_info(self.stream).id

    def border(self, name: str, does_nothing: Callable[[], None]) -> None:
        """`force_no_graph`: end the segment and begin the next, with nothing in between."""
        if self.in_break:
            return
        self._check_whole(name)
        self._end_segment(name)
        self._place = source_lines.user_place()
        segment = EagerSegment(
            self.next_index, does_nothing, (), {}, name=name, place=self._place,
            scopes=self._open_scopes(), does_nothing=True,
        )  # fmt: skip
        self._segments.append(segment)
        self._begin_segment()

    def run_break(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *,
        name: str, stub: Callable[..., Any] | None, static: bool,
    ) -> Any:  # fmt: skip
        """A call of a function marked @no_graph in this block's capture."""
        if self.in_break:
            return function(*args, **kwargs)  # a break inside a break is a plain call
        self._check_whole(name)
        self._end_segment(f"the break {name}")
        self._place = source_lines.user_place()
        self.in_break = name
        try:
            if self._barrier_fn is not None:
                self._barrier_fn()
            call = self._breaks.call if self._is_stream_current() else self._call_on_stream
            value, segment = call(
                function, args, kwargs, name, stub, static, self.next_index, self._place,
                self._open_scopes(), self._check_return,
            )  # fmt: skip
            self._segments.append(segment)
            if len(unfinished.pending) > 1 and unfinished.end_inside(self):
                raise errors.left_open_in_a_break(name)
        except BaseException as error:
            self.poison = error
            unfinished.end_inside(self)
            raise
        finally:
            self.in_break = ""
        self._begin_segment()
        return value

    def _check_return(self, name: str) -> None:
        """A body has returned: it must have left the capture stream current."""
        if self.framework.current_stream() != self.handle and not self.session.has_new_company():
            is_open = unfinished.end_inside(self)
            left = errors.left_open_in_a_break if is_open else errors.other_stream_left_current
            raise left(name)

    def _call_on_stream(self, *args: Any) -> Any:
        """A break's call where the body has made another stream current than the capture's."""
        follower = companions.follower(self.framework)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.framework.stream_current(self._stream_object))
            if follower is not None:
                stack.enter_context(follower.stream_current(self.handle))
            return self._breaks.call(*args)

    def _is_stream_current(self) -> bool:
        """Whether the capture stream is the current one, as a break needs it."""
        follower = companions.follower(self.framework)
        follows = follower is None or follower.stands_at(self.handle)
        return follows and self.framework.current_stream() == self.handle

    def _open_scopes(self) -> tuple[str, ...]:
        return () if self.journal is None else self.journal.open_labels

    # ---- embedding other sequences

    def embed_break(self, segment: EagerSegment) -> None:
        """Make a break of another sequence, which is replayed in this block, one of ours."""
        body = segment.fn if segment._result is None else segment.call_and_fill
        if segment._does_nothing:
            return
        args, kwargs = pytree.renewed_call(
            segment.args, segment.kwargs, self._breaks.find_arrays, segment._own
        )
        self.run_break(body, args, kwargs, name=segment.name, stub=None, static=False)

    def keep(self, thing: object, memory: Memory | None = None) -> None:
        """Keep something for as long as the sequence's segments live, and watch what it watches."""
        self.sequence._guests.append(thing)
        if memory is not None:
            self.sequence._memory.adopt(memory)

    def take_inputs(self, found: list[Found], unknown: list[int], role: Use) -> None:
        """Watch, or own, memory that captured work names, as the block was told to."""
        if self._rules.looks_into_segments:
            memory = self.sequence._memory
            memory.take(found, unknown, self.session, self._rules, role)

    # ---- errors

    def _check_whole(self, name: str) -> None:
        """Before a break: the block must be sound, and this the thread that may end a segment."""
        self._raise_poison()
        if self.in_body:
            raise errors.break_in_a_body(name, self.in_body)
        if self.mode != "relaxed" and not self.is_home():
            raise errors.other_thread(self.next_index, f"the break {name}", self.mode)
        if not contexts.ensure(self.driver, self.framework.context):
            raise errors.break_on_other_device(name)

    def _raise_poison(self) -> None:
        if self.poison is not None:
            if isinstance(self.poison, CaptureError):
                raise self.poison
            raise errors.poisoned(self.poison) from self.poison

    def _advise(self, error: BaseException) -> None:
        """Notes on the user's exception, where it has to do with the capture."""
        if not self.is_open or isinstance(error, _OURS):
            return  # ours say what to do themselves
        company = self.session.had_company or len(open_blocks.open_blocks) > 1
        is_lost = stream_capture.status(self.driver, self.stream) is Status.INVALIDATED
        advice = refusals.advice(
            error, self.next_index, self.mode, company=company, is_lost=is_lost
        )
        if not self._allows_host_nodes and refusals.holds_host_node(self.driver, self.stream):
            advice.append(str(errors.host_nodes(self.next_index)))  # CuPy stumbles over its own
        for text in advice:
            note(error, text)
