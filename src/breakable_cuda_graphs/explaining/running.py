"""`explain`: one watched eager run of a function, and what follows from it.

The hard problem: to watch a function, torch's modes, the interpreter's profile function, a driver's
and some classes' functions and torch's sync warnings are all switched. They are switched on in one
`with`, so that whatever the function does they are switched off again in the reverse order; and only
one function in a process is watched at a time.

The run stands where a capture would: on a stream of its own, which is current for torch. It leaves
that stream warmed up, and what it compiles compiled.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .._driver import bindings, stream_capture
from .._driver.stream_order import join
from ..capture import open_blocks
from ..errors import not_callable
from ..frameworks.protocols import Framework
from ..frameworks.streams import as_handle
from ..replay.sequence import CUDAGraphSequence
from ..sequence import pytree
from ..sequence.static_results import is_unfinished
from . import errors
from .calls import PatchedCalls
from .proposing import Proposal, propose
from .report import Check, Explanation
from .streams import WatchedStreams
from .trial import Failure, Trial
from .watching import Watch

_lock = threading.Lock()

#: A trial capture says one thing at a time: so many are made at most, without torch.
_TRIALS = 20

_COMPILED = (
    "inside functions of torch.compile operators were not watched, for that would compile them anew: "
    "there only compilation, and on a device waits inside of torch, are seen"
)

_BARE = (
    "without torch only calls of the driver, CuPy and Numba are seen, and what trial captures refuse; "
    "what a capture bakes in without a word (host values, replaced memory) is not"
)


def explain(fn: Callable[..., Any], *args: Any, check: bool = False, **kwargs: Any) -> Explanation:
    """Run a function once eagerly and list what in it would break a capture.

        report = explain(model, x)
        print(report)

    Found are reads and waits of the host (`.item()`, `nonzero`, boolean masks, printing, `.cpu()`,
    `synchronize`), copies from pageable memory, memory that the call replaces, moves or keeps, work on
    streams outside of the capture, random generators that it does not know, compilation and autotuning,
    collectives and host callbacks. What runs in functions marked `@no_graph` is left out.

    fn: a function, module or other callable. It runs on a stream of its own that waits for the
        current one, and the current one for it; with what it does to its arguments.
    args, kwargs: what it is called with.
    check: also capture it, with the proposed functions marked for the time of it, and compare replays
        with eager runs: on the given arguments, and on changed ones (floating tensors halved and
        reversed). Runs `fn` four times more. The contents of the arguments, and of other tensors that it
        was seen to write, are put back before each run and at the end; state of Python's is not.

    Returns an `Explanation`: `.findings`, `.marks`, `.check`, and a page of text with `print`. It is true
    where nothing was found and no check failed. Raises what `fn` raises; `TypeError` if that is not callable,
    or returns a generator or an awaitable, whose work would not have been seen;
    `RuntimeError` inside a capture, under a profiler, or while another thread explains. Without torch
    it knows what the driver's, CuPy's and Numba's calls and trial captures show, and compares nothing.
    """
    if not callable(fn):
        raise not_callable("fn", fn)
    if not _lock.acquire(blocking=False):
        raise errors.explain_is_running()
    try:
        return _Run(fn, args, kwargs).report(check)
    finally:
        _lock.release()


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The user's function is called from this very frame: stacks are looked at up to here."""
    result = fn(*args, **kwargs)
    for _, leaf in pytree.leaves(result):
        if is_unfinished(leaf):
            raise errors.explain_unfinished(type(leaf).__name__)
    return result


class _Run:
    """One function with its arguments."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._name = str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)
        self._call = functools.partial(_call, fn, args, kwargs)
        self._args, self._kwargs = args, kwargs
        self._driver = bindings.current()
        torch = sys.modules.get("torch")
        if torch is not None and not self._driver.simulated and torch.cuda.is_available():
            torch.cuda.init()
        self._sequence = CUDAGraphSequence()
        self._framework: Framework = self._sequence._ensure_framework()
        self._device = "cpu" if self._driver.simulated else "cuda"
        self._has_torch = self._framework.name in ("torch", "simulated torch")
        self._refuse_capture()
        self._watch = Watch(_call.__code__, self._framework.arrays.owns)
        self._notes: list[str] = []

    def _refuse_capture(self) -> None:
        current = bindings.types.CUstream(self._framework.current_stream())
        is_captured = stream_capture.status(self._driver, current) is not stream_capture.Status.NONE
        if is_captured or open_blocks.find() is not None:
            raise errors.explain_in_capture()

    def report(self, check: bool) -> Explanation:
        """Run, propose, and capture if that is asked for or the only way to know."""
        with self._on_a_stream():
            if self._has_torch:
                proposal, checked = self._with_torch(check)
            else:
                proposal, checked = self._without_torch(check)
        return Explanation(
            self._name, tuple(self._watch.findings), *proposal, checked, tuple(self._notes)
        )

    @contextlib.contextmanager
    def _on_a_stream(self) -> Iterator[None]:
        """The stream of the trial captures is current, in order with the caller's."""
        stream = self._sequence.stream
        inner = bindings.types.CUstream(as_handle(stream))
        outer = bindings.types.CUstream(self._framework.current_stream())
        join(self._driver, inner, outer)
        try:
            with self._framework.stream_current(stream):
                yield
        finally:
            join(self._driver, outer, inner)

    # ---- with torch

    def _with_torch(self, check: bool) -> tuple[Proposal, Check | None]:
        from .compiling import CompiledCode, compilations_noted
        from .growing import Growth
        from .memory import SavedMemory, storages_of
        from .operators import Operators

        state = SavedMemory(self._args, self._kwargs, self._device) if check else None
        watch, streams = self._watch, self._streams()
        growth = Growth(watch, self._device, state.save if state is not None else None)
        operators = Operators(
            watch, streams, growth, state, self._framework.current_stream, self._device
        )
        compiled = CompiledCode(watch, operators)
        with (
            PatchedCalls(watch, streams).patched(self._driver),
            compilations_noted(watch, compiled),
            operators.listening(),
            watch.returns_noted(compiled.profile),
        ):
            result = self._call()
        streams.ended()
        first = state.outcome(result) if state is not None else []
        results = storages_of(result)
        del result
        gc.collect()
        growth.ended(results)
        if compiled.was_seen:
            self._notes.append(_COMPILED)
        proposal = propose(watch)
        if state is None:
            return proposal, None
        try:
            return self._checked(proposal, state, first)
        finally:
            state.restore()

    def _checked(
        self, proposal: Proposal, state: Any, first: list[Any]
    ) -> tuple[Proposal, Check | None]:
        """Try the proposal; what a trial refuses changes it, and it is tried again."""
        trial = Trial(self._watch, self._sequence, self._call)
        while True:
            checked, failure = trial.check(proposal.marks, state, first)
            if failure is None or not self._note_refusal(failure):
                return proposal, checked
            before, proposal = proposal, propose(self._watch)
            if proposal.marks == before.marks:
                return proposal, checked

    def _note_refusal(self, failure: Failure) -> bool:
        """A trial capture was refused; whether that is news."""
        before = len(self._watch.findings)
        kind, text = type(failure.error).__name__, str(failure.error)
        self._watch.note("refused", kind, text, failure.stack, unless_known=True)
        return len(self._watch.findings) > before

    def _streams(self) -> WatchedStreams:
        return WatchedStreams(self._watch, as_handle(self._sequence.stream))

    # ---- without torch

    def _without_torch(self, check: bool) -> tuple[Proposal, Check | None]:
        """What the calls show, and then what captures refuse, one after the other."""
        watch, streams = self._watch, self._streams()
        with PatchedCalls(watch, streams).patched(self._driver), watch.returns_noted():
            self._call()
        streams.ended()
        self._notes.append(_BARE)
        trial = Trial(watch, self._sequence, self._call)
        proposal, captured = propose(watch), False
        text = "the capture was refused"
        for _ in range(_TRIALS):
            _, failure = trial.capture(proposal.marks)
            captured = failure is None
            if failure is None:
                text = f"captured as {len(self._sequence)} segments; results were not compared"
                break
            text = f"the capture with these marks failed: {failure}"
            marks, is_news = proposal.marks, self._note_refusal(failure)
            proposal = propose(watch)
            if not is_news or proposal.marks == marks:
                break
        if not check:
            return proposal, None
        count = len(self._sequence) if captured else 0
        return proposal, Check(captured, None, None, None, count, text)
