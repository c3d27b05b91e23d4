"""What a sequence consists of, and how it changes: begin, commit, roll back, reset.

The hard problem: a capture may fail, and an interrupt may come, at any line, while other threads wait to
replay. So a commit is worked out completely first, then written down by steps that cannot fail and may be
taken twice. What was captured is never half there.

`CUDAGraphSequence` (replay/sequence.py) adds the replay and what people call. Everything below that room
takes this class.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from .._driver import bindings, contexts, process, release, unfinished
from .._driver.errors import used_after_fork
from .._driver.stream_order import CompletionMark
from ..errors import not_copyable
from ..frameworks import choose
from ..frameworks.protocols import Framework, Pool
from . import errors, nvtx
from .memory import Memory
from .plan import Plan
from .segments import EagerSegment, GraphSegment


class SequenceState:
    """The segments of a sequence, its memory and its plan. Made as a `CUDAGraphSequence`."""

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
        return f"<{type(self).__name__} {', '.join(word for word in words if word)}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copyable(type(self).__name__)

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
                self._plan = nvtx.with_ranges(self._segments, usual, kinds) if kinds else usual
            self._ranges = kinds

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

    def _refuse_unless_empty(self) -> None:
        if self._epoch != process.epoch:
            raise used_after_fork("sequence")
        unfinished.sweep()
        if self._is_capturing:
            raise errors.replay_while_capturing()
        if self._has_failed:
            raise errors.replay_after_failure()
        if self._memory.stale is not None:
            raise errors.stale_input(*self._memory.stale)

    # ---- captures

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
                segment.belong(self)
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
        return nvtx.with_ranges(self._segments, plan, self._ranges) if self._ranges else plan

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
