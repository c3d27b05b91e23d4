"""CUDAGraphSequence: captured segments with eager breaks between them, and their replay.

The hard problem: `replay()` is called thousands of times a second and every check in it is paid
each time. So all that can be decided once is decided when a capture ends, in a plan: a flat list of
steps without empty segments and with neighbours joined. What a replay checks, it checks once, by
comparing plain values; only where one differs does it take the slow way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from .._driver import bindings, contexts, process, stream_capture, stream_order, unfinished
from ..errors import CUDAError, bad_type
from ..frameworks.streams import DEFAULT_STREAMS, as_handle
from ..graph.errors import stream_of_other_context
from ..sequence import append, html, show, summary
from ..sequence.errors import reentered, stale_input
from ..sequence.plan import Plan
from ..sequence.rebinding import rebind
from ..sequence.rebinding.report import Rebound
from ..sequence.segments import GraphSegment
from ..sequence.state import SequenceState
from . import profile
from .embed import embed
from .report import Profile


class CUDAGraphSequence(SequenceState):
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
            raise reentered("replayed")
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
            stream_order.lasting.add(handle)
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

    # ---- what it is

    def __str__(self) -> str:
        """The sequence and its graphs on one page."""
        return show.sequence_page(self)

    def explain(self) -> str:
        """Which path replays take, on one page.

        Captured or not and when; the launches and calls of a replay, and what is joined in one; the
        memory that is owned, watched, or of unknown owner; what falls back, and why. Reads the graphs
        once; never changes them.
        """
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
        page = html.page(self, other)  # if this fails, the file is as it was
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

    # ---- edits

    def rebind(self, moves: Any, verify: Callable[..., Any] | None = None) -> Rebound:
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


BreakableCUDAGraph = CUDAGraphSequence
