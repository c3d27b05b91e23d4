"""CUDAGraphSequence: captured segments with eager breaks between them, and their replay.

The hard problem: `replay()` is called thousands of times a second and every check in it is paid
each time. So all that can be decided once is decided when a capture ends, in a plan: a flat list of
steps without empty segments and with neighbours joined. What a replay checks, it checks once, by
comparing plain values; only where one differs does it take the slow way.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from .._driver import bindings, completion, contexts, process, release, stream_capture, unfinished
from .._driver.completion import CompletionMark
from .._driver.errors import used_after_fork
from ..errors import CUDAError, bad_type, not_copyable
from ..frameworks import choose
from ..frameworks.protocols import Framework, Pool
from ..frameworks.streams import DEFAULT_STREAMS, as_handle
from ..graph.errors import stream_of_other_context
from ..sequence import append, nvtx, show
from ..sequence.errors import replay_after_failure, stale_input
from ..sequence.memory import Memory
from ..sequence.pages.assemble import sequence_page
from ..sequence.plan import Plan
from ..sequence.rebinding import rebind, report
from ..sequence.segments import EagerSegment, GraphSegment
from . import errors, profile
from .embed import embed
from .report import Profile

__all__ = ["BreakableCUDAGraph", "CUDAGraphSequence"]


class CUDAGraphSequence:
    """A sequence of CUDA graphs with eager Python between them; the breakable form of a CUDA graph.

    Fill it with `with breakable_graph(sequence): ...`, run it with `replay()`. Several captures
    append to each other. A sequence belongs to the device of its first capture.

    `pool` lets sequences share memory: another sequence's `pool()`, a
    `torch.cuda.graph_pool_handle()`, or a `torch.cuda.MemPool`. As with torch's own graphs,
    sequences that share a pool are replayed one at a time, and one's results may be overwritten by
    another's replay. Whether it is one is looked at when the pool is first needed: `TypeError` for
    anything else, `ValueError` for a pool of another device.

    Threads: replays of one sequence from several threads run one after the other.
    """

    def __init__(self, pool: Any = None) -> None:
        self._given_pool = pool
        self._is_pool_known = pool is not None  # by the user: it has to stay the same
        self._pool: Pool | None = None
        self._framework: Framework | None = None
        self._memory = Memory()
        self._segments: list[GraphSegment | EagerSegment] = []
        self._plan: Plan | None = None  # None: nothing to replay, or not now
        self._ranges: tuple[str, ...] = ()
        self._captured_by: object = None  # the block that is open on this sequence
        self._has_failed = False
        self._captured_at = 0.0  # the time of day at the end of the last capture
        self._next: _Next | None = None  # what a commit has decided and not written down yet
        self._context = 0  # the driver's context of the captures
        self._guests: list[object] = []  # what embedded sequences must keep for us
        self._epoch = process.epoch
        #: Taken by whoever replays, edits or empties this, one at a time. It knows its thread; and no
        #: line of Python, at which an interrupt could come, lies between its taking and its giving back.
        self._turn: Any = threading.RLock()
        self._handle = -1  # the stream of the last replay, and its bindings object
        self._stream: Any = None
        self._mark: CompletionMark | None = None

    # ---- replay

    def replay(self, stream: Any = None) -> None:
        """Run the captured segments and the breaks between them.

        `stream` is a stream-like object or a handle; without it the current stream of the captured
        device is used. Everything is ordered on that stream, breaks see it as current, and it waits
        for the sequence's last replay if that was on another. Inside another capture the sequence
        becomes part of it, where it can. Replaying an empty sequence does nothing.

        Raises `StaleInputError` if memory that it would read has been freed, `ReplayError` if the
        last capture failed, a break replays its own sequence or a break's result does not fit,
        `ProcessError` in a forked child, and whatever a break raises.
        """
        if self._plan is None or self._epoch != process.epoch or self._memory.stale is not None:
            self._refuse_unless_empty()
            return
        if self._turn._is_owned():  # a break that replays its own sequence would run for ever
            raise errors.reentered("replayed")
        with self._turn:
            plan = self._plan
            if plan is None:  # reset by another thread in between
                return
            here = plan.framework.current_stream()
            handle = here if stream is None else as_handle(stream)
            if handle != self._handle:
                self._note_stream(plan, stream, handle)
            if handle == here and self._is_at_home(plan):
                self._run(plan, handle, self._stream)
            else:
                self._replay_elsewhere(plan, stream, handle)

    def _note_stream(self, plan: Plan, stream: Any, handle: int) -> None:
        """Another handle than that of the last replay."""
        if plan.framework.lasts(stream, handle):
            completion.lasting.add(handle)
        self._handle, self._stream = handle, bindings.types.CUstream(handle)

    def _run(self, plan: Plan, handle: int, stream: Any) -> None:
        """The loop. `memory.stale` is set by a finalizer when a watched tensor dies."""
        launch, memory, mark = plan.launch, self._memory, self._mark
        assert mark is not None
        mark.order_after(handle, stream)
        try:
            for executable, call in plan.steps:
                if executable is not None:
                    (code,) = launch(executable, stream)
                    if code:
                        raise bindings.current().error("cuGraphLaunch", code)
                if call is not None:
                    call()
                    if memory.stale is not None:
                        raise stale_input(*memory.stale)
            mark.record(handle, stream)
        except BaseException:
            with contextlib.suppress(CUDAError):  # the break's own error is the one to see
                mark.record(handle, stream)
            raise

    def _is_at_home(self, plan: Plan) -> bool:
        """Whether context, stream and modes are such that the loop can run right here."""
        code, context = plan.current_context()
        return (
            not code
            and int(context) == self._context
            and plan.is_free(self._stream)
            and (not plan.has_breaks or plan.modes == plan.framework.modes())
            and (plan.follower is None or plan.follower.stands_at(self._handle))
        )

    def _replay_elsewhere(self, plan: Plan, stream: Any, handle: int) -> None:
        """The slow way: another context, stream or mode, or inside another capture."""
        driver, framework = bindings.current(), plan.framework
        unfinished.sweep()  # the capture that the stream is in may be one that nobody will end
        with contextlib.ExitStack() as stack:
            given = stream is not None and handle not in DEFAULT_STREAMS
            if given and contexts.of_stream(driver, handle) != self._context:
                raise stream_of_other_context()
            stack.enter_context(contexts.made_current(driver, self._context))
            if stream is not None and handle != framework.current_stream():
                stack.enter_context(framework.stream_current(stream))
            if stream_capture.status(driver, self._stream) is not stream_capture.Status.NONE:
                embed(self, plan, self._stream)
                return
            if plan.follower is not None:
                stack.enter_context(plan.follower.stream_current(handle))
            if plan.has_breaks and plan.modes != framework.modes():
                stack.enter_context(framework.in_modes(plan.modes))
            self._run(plan, handle, self._stream)

    def _refuse_unless_empty(self) -> None:
        if self._epoch != process.epoch:
            raise used_after_fork("sequence")
        unfinished.sweep()
        if self._is_capturing:
            raise errors.replay_while_capturing()
        if self._has_failed:
            raise replay_after_failure()
        if self._memory.stale is not None:
            raise stale_input(*self._memory.stale)

    # ---- what it is

    @property
    def segments(self) -> tuple[GraphSegment | EagerSegment, ...]:
        """Every segment in order, empty ones too: graph, break, graph, ..., graph."""
        return tuple(self._segments)

    @property
    def stream(self) -> Any:
        """The stream that captures run on: warm up there. Made on first use."""
        self._is_pool_known = True
        return self._ensure_pool(self._ensure_framework()).stream

    def pool(self) -> Any:
        """The handle of the sequence's memory pool, for another sequence or `torch.cuda.graph`."""
        self._is_pool_known = True
        return self._ensure_pool(self._ensure_framework()).handle

    @property
    def watched(self) -> tuple[str, ...]:
        """The memory of others that replays read or write and whose death is noticed, in words."""
        return self._memory.watched

    @property
    def unwatched(self) -> tuple[str, ...]:
        """Addresses that captured work uses and of which no owner is known, so none is watched."""
        return self._memory.unwatched

    def __len__(self) -> int:
        return len(self._segments)

    def __repr__(self) -> str:
        graphs = sum(isinstance(s, GraphSegment) for s in self._segments)
        breaks = len(self._segments) - graphs
        state = "capturing" if self._is_capturing else "failed" if self._has_failed else ""
        if self._memory.stale is not None:
            state = "stale"
        words = [f"{graphs} graph segments, {breaks} breaks", state]
        return f"<CUDAGraphSequence {', '.join(word for word in words if word)}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copyable(type(self).__name__)

    def __str__(self) -> str:
        """The sequence and its graphs on one page."""
        return show.sequence_page(self)

    def explain(self) -> str:
        """Which path replays take, on one page.

        Captured or not and when; the launches and calls of a replay, and what is joined in one; the
        memory that is owned, watched, or of unknown owner; what falls back, and why. Reads the graphs
        once; never changes them.
        """
        from ..sequence import summary  # it stands on this file

        return summary.page(self)

    def to_svg(self) -> str:
        """A picture of its segments with their nodes, and of the breaks between them."""
        return show.of_sequence(self)

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def to_html(self, path: str | os.PathLike[str], other: CUDAGraphSequence | None = None) -> None:
        """Write one page that shows the segments with their graphs drawn, and the breaks.

        Nodes have their launch shapes, their arguments, and what those are the addresses of. With
        `other`, both sequences are side by side, and what `Graph.diff` finds is marked: parts are
        paired by their place, nodes as the driver pairs them. The page needs no network. Raises
        `OSError` where the file cannot be written.
        """
        if other is not None and not isinstance(other, CUDAGraphSequence):
            raise bad_type("other", other, "a CUDAGraphSequence")
        page = sequence_page(self, other)  # if this fails, the file is as it was
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)

    # ---- what it costs

    def profile(self, iterations: int = 50, warmup: int = 5, stream: Any = None) -> Profile:
        """Replay it some times and measure where the time goes, on the host and on the device.

        iterations: how many replays are timed, each way of timing them.
        warmup: how many are done before that.
        stream: where to replay, as in `replay`.

        The report has a row for each segment and break: the work of the stream, the gap in which the
        stream waits for the host, the host's time, launches and nodes. `print(report)` is a table;
        `to_html`, `to_json` and `to_chrome_trace` write files.

        All of it are replays, about three times `iterations` of them (`report.replays` says how
        many): random numbers are drawn, and breaks do what they do. Other threads' replays of the
        sequence wait. Raises what `replay` raises; `ReplayError` too for an empty sequence and in a
        capture.
        """
        return profile.profile(self, iterations, warmup, stream)

    @property
    def ranges(self) -> tuple[str, ...]:
        """Named ranges of replays: "nvtx", "record_function", both, or none (the default).

        With `sequence.ranges = "nvtx"`, Nsight Systems shows each segment and break of a replay by
        name; with "record_function", `torch.profiler` does. The names are those of the breaks'
        functions and of the segments, inside of the `annotate` scopes: "layer 3/attend". Set it to
        None, and replays are again what they were: ranges are in the plan of a replay, and nothing
        in a replay asks for them.

        Setting it raises `ValueError` for another name, and `RuntimeError` where no library for it
        works: NVTX comes with the `nvtx` package, with torch built for CUDA, or with CuPy.
        """
        return self._ranges

    @ranges.setter
    def ranges(self, wanted: str | Iterable[str] | None) -> None:
        kinds = nvtx.checked(wanted)
        with self._turn:
            plan = self._plan
            if plan is not None:
                usual = plan.usual or plan
                self._plan = nvtx.with_ranges(self, usual, kinds) if kinds else usual
            self._ranges = kinds

    # ---- edits

    def rebind(self, moves: Any, verify: Callable[..., Any] | None = None) -> report.Rebound:
        """Move addresses: all that lies inside each `old` moves to its `new`, watching with it.

        moves: a mapping of `old` to `new`, or pairs: tensors, arrays or `(address, nbytes)`. Both
            sides have the same type, shape and layout, and lie in one allocation each.
        verify: where an address may be inside a tensor map, which is opaque: a function that captures
            the same work on other buffers and returns that sequence, so that it shows which words
            move. It is called with the new tensors, if it has parameters.

        Kernel arguments, copies, fills, child graphs and break arguments are changed, from the next
        replay on; the report says where. All or nothing: raises `ValueError` for what cannot be moved
        so, `TypeError` for what is no memory, `ReplayError` in a capture or a break of this sequence.
        """
        return rebind.rebind(self, moves, verify)

    def append(self, graph: Any) -> GraphSegment:
        """Place a `Graph` that was built by hand behind the segments; replays run it in turn.

        Edit it through `.exec` of the segment that is returned: nothing can be added to it any more.
        Raises `TypeError` for anything but a `Graph`, `RuntimeError` for one that is closed, inside
        another, or placed already, `ValueError` for one of another device, `ReplayError` after a
        failed capture.
        """
        return append.append(self, graph)

    # ---- reset and release

    def reset(self) -> None:
        """Forget all segments and give their memory back.

        A pool that was given, or that `pool()` or `stream` has shown, stays and keeps what it has. One
        that only this sequence knows goes, but for tensors of it that live on; the next capture makes
        another. Waits for a replay that is still running.

        Raises `CaptureError` in a capture of this sequence, `ReplayError` in one of its breaks,
        `ProcessError` in a forked child.
        """
        if self._epoch != process.epoch:
            raise used_after_fork("sequence")
        unfinished.sweep()
        if self._is_capturing:
            raise errors.reset_while_capturing()
        if self._has_turn:
            raise errors.reentered("reset")
        with self._turn:
            remains = self._strip()
            if not self._is_pool_known:  # no discard: copies in other captures may depend on it
                self._pool = self._mark = None
        self._has_failed = False
        if remains is not None:
            with release.relaxed_thread():
                remains()
        release.drain()

    @property
    def _has_turn(self) -> bool:
        """Whether this thread is inside a replay or an edit of the sequence."""
        return bool(self._turn._is_owned())

    def _strip(self) -> _Remains | None:
        """Take everything that was captured out of this object."""
        self._has_failed, self._plan = True, None  # half of it is not to be replayed
        held = (self._memory.kept(), self._guests, self._pool)
        if not self._segments and not held[0]:
            self._memory.clear()
            return None
        remains = _Remains(self._epoch, self._segments, self._mark, held)
        self._segments, self._guests = [], []
        self._memory.clear()
        return remains

    def __del__(self) -> None:
        if getattr(self, "_segments", None):
            self._strip()  # what comes of it queues itself

    # ---- for capture.py

    def _ensure_framework(self, stream: Any = None) -> Framework:
        """The framework of the captures: chosen anew while nothing has been captured.

        Until then torch may be imported, or initialise its CUDA, or another device become current.
        """
        if self._framework is None or not self._segments:
            chosen = choose.framework_for(bindings.current(), stream)
            if chosen is not self._framework:
                self._framework, self._pool = chosen, None
        assert self._framework is not None
        return self._framework

    def _ensure_pool(self, framework: Framework) -> Pool:
        if self._pool is None:
            with contexts.made_current(framework.driver, framework.context):
                pool = framework.new_pool(self._given_pool)
            self._mark, self._pool = pool.mark, pool
        return self._pool

    def _begin_capture(self, block: object) -> None:
        """A block opens: nothing of this sequence can be replayed until it has ended."""
        if self._epoch != process.epoch:
            raise used_after_fork("sequence")
        if self._has_turn:
            raise errors.reentered("captured")
        with self._turn:
            if self._is_capturing:
                raise errors.capture_while_capturing()
            self._captured_by, self._plan = block, None

    @property
    def _is_capturing(self) -> bool:
        return self._captured_by is not None

    def _commit(self, framework: Framework, added: Sequence[GraphSegment | EagerSegment]) -> None:
        """A block has ended well: its segments join the sequence, and a new plan is made."""
        segments = [*self._segments, *added]
        for segment in added:
            if isinstance(segment, GraphSegment):
                segment._belong(self)
        plan = Plan(bindings.current(), framework, self._ensure_pool(framework).mark, segments)
        self._next = _Next(segments, framework.context, plan)  # from here on nothing can fail
        self._finish_commit()

    def _finish_commit(self) -> bool:
        """Write down what a commit has decided; whether one has. An interrupt may make it twice."""
        if self._next is None:
            return False
        segments, context, plan = self._next
        plan.commit()
        self._segments, self._context = segments, context
        self._plan = self._ready(plan)
        self._captured_by, self._has_failed = None, False
        self._captured_at = time.time()
        self._next = None
        return True

    def _ready(self, plan: Plan) -> Plan | None:
        """What replays run: the plan, with named ranges in it where they are wanted."""
        if not plan.steps:
            return None
        return nvtx.with_ranges(self, plan, self._ranges) if self._ranges else plan

    def _give_up(self) -> None:
        """A capture that had ended well is of no use: drop all, and let a replay say so."""
        self.reset()
        self._has_failed = True

    def _roll_back(self) -> None:
        """A block has failed: the earlier segments stay, but a replay has to say so.

        A pool that holds nothing and that nobody has seen is given back at once: the exception may
        keep this sequence alive for a while.
        """
        self._has_failed, self._plan = True, None
        if not self._segments and not self._is_pool_known and self._pool is not None:
            self._pool.discard()
            self._pool = None
        self._captured_by = None


BreakableCUDAGraph = CUDAGraphSequence


class _Next(NamedTuple):
    """What a sequence is going to be."""

    segments: list[GraphSegment | EagerSegment]
    context: int
    plan: Plan


class _Remains:
    """What a sequence held, until no replay reads it any more.

    Called, it lets go of it; one that dies before it was called through queues itself.
    """

    _segments: Sequence[Any] = ()
    _keep: tuple[Any, ...] = ()

    def __init__(
        self,
        epoch: int,
        segments: Sequence[Any],
        mark: CompletionMark | None,
        keep: tuple[Any, ...],
    ) -> None:
        self._epoch, self._segments, self._mark, self._keep = epoch, segments, mark, keep

    def __call__(self) -> None:
        if self._mark is not None:
            self._mark.wait()
        for segment in self._segments:
            if isinstance(segment, GraphSegment):
                segment.close()
        self._segments, self._keep = (), ()

    def __del__(self, later: Any = release.later) -> None:
        if self._segments or self._keep:
            later(self._epoch, self)
