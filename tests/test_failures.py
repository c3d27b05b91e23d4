"""Whatever fails, and wherever: one clear exception, nothing open, nothing kept, the next one works.

The hard problem: a library that is right when all goes well has a hundred lines at which it may not.
So the places are not chosen: each program here is run once to count its driver calls, and then once
for each of them with that call failing; and once for each line of the library with an interrupt there.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import re
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import breakable_cuda_graphs  # noqa: E402
from breakable_cuda_graphs import (  # noqa: E402
    CaptureError,
    CUDAError,
    CUDAGraphSequence,
    ReplayError,
    breakable_graph,
    force_no_graph,
    no_graph,
)
from breakable_cuda_graphs import blocks as open_blocks  # noqa: E402
from breakable_cuda_graphs._driver import bindings, release  # noqa: E402
from breakable_cuda_graphs.simulator import simulated_device, tensors  # noqa: E402
from helping import (  # noqa: E402
    MODES,
    Boom,
    a_stream,
    assert_nothing_left,
    assert_nothing_open,
    capture,
    forked,
    settle,
    text_of,
    watched_driver,
)

SOURCE = str(Path(breakable_cuda_graphs.__file__).parent)


# ---------------------------------------------------------------- programs


@no_graph
def bump(t: Any) -> None:
    t.add_(1)


@no_graph(outputs="static")
def parts(t: Any) -> dict[str, Any]:
    return {"double": t * 2, "same": t, "sum": t.sum()}


@no_graph
def fail(t: Any) -> None:
    raise Boom(f"in a break at {t.shape}")


def plain(x: Any, side: Any) -> Any:
    return (x * 2 + 1).relu()


def with_breaks(x: Any, side: Any) -> Any:
    y = x * 2
    bump(y)
    y = y + 1
    bump(y)
    bump(y)
    return y * 3


def with_a_side_stream(x: Any, side: Any) -> Any:
    y = x * 2
    with forked(side):
        z = y + 4
    bump(y)
    return y + z


def with_static_outputs(x: Any, side: Any) -> Any:
    out = parts(x + 0)
    return out["double"] + out["same"] * out["sum"]


def nested(x: Any, side: Any) -> Any:
    @no_graph
    def outer(t: Any) -> None:
        bump(t)
        t.mul_(2)

    y = x + 1
    outer(y)
    return y - 5


def forced(x: Any, side: Any) -> Any:
    y = x * 2
    force_no_graph()
    y = y + 1
    force_no_graph()
    force_no_graph()
    bump(y)
    force_no_graph()
    return y * 3


def failing(x: Any, side: Any) -> Any:
    y = x * 2
    bump(y)
    y = y + 1
    raise Boom("in a segment")


def failing_in_a_break(x: Any, side: Any) -> Any:
    y = x * 2
    fail(y)
    return y


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "no break": plain,
    "breaks": with_breaks,
    "side stream": with_a_side_stream,
    "static outputs": with_static_outputs,
    "nested": nested,
    "forced": forced,
}
FAILING: dict[str, Callable[[Any, Any], Any]] = {
    "failing": failing,
    "failing in a break": failing_in_a_break,
}


def run(body: Callable[[Any, Any], Any], side: Any, seq: Any = None, **options: Any) -> Any:
    """Capture a program and compare two replays with eager runs of the same."""
    x = torch.zeros(4)
    seq = CUDAGraphSequence() if seq is None else seq
    with breakable_graph(seq, **options):
        y = body(x, side)
    for value in (1.0, -2.0):
        x.copy_(torch.arange(4) + value)
        wanted = body(x.clone(), side)
        y.fill_(float("nan"))
        seq.replay()
        assert y.tolist() == wanted.tolist(), f"replayed {y.tolist()}, not {wanted.tolist()}"
    return seq


def attempt(work: Callable[[], Any]) -> BaseException | None:
    """What a run raised; its frames are cleared, as they are once a user has handled it."""
    try:
        work()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        return error.with_traceback(None)
    return None


# ---------------------------------------------------------------- the user's code fails

PLACES = ("first line", "segment", "break", "after a break", "second break", "last line")


def body_with_places(x: Any, place: str | None, boom: Callable[[], Any]) -> Any:
    def here(name: str) -> None:
        if name == place:
            boom()

    here("first line")
    y = x * 2
    here("segment")
    no_graph(here)("break")
    bump(y)
    y = y + 1
    here("after a break")
    no_graph(here)("second break")
    y = y * 2
    here("last line")
    return y


def check_aftermath(seq: Any, repair: bool) -> None:
    """The half-made sequence is refused, and captures rightly afterwards."""
    with pytest.raises(ReplayError, match="failed"):
        seq.replay()
    if repair:
        seq.reset()
        seq.replay()  # empty: does nothing
        assert len(seq) == 0
    x = torch.ones(3)
    _, y = capture(lambda: body_with_places(x, None, lambda: None), seq)
    x.fill_(4)
    seq.replay()
    assert y.tolist() == [(4 * 2 + 2) * 2] * 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_the_users_exception_surfaces_as_the_same_object(device, place, mode):
    cause = KeyError("the cause")
    mine, seq, x = Boom("mine"), CUDAGraphSequence(), torch.ones(3)

    def boom() -> None:
        raise mine from cause

    with pytest.raises(Boom) as info, breakable_graph(seq, capture_error_mode=mode):
        body_with_places(x, place, boom)
    assert info.value is mine
    assert info.value.__cause__ is cause
    assert "boom" in [frame.name for frame in traceback.extract_tb(info.value.__traceback__)]
    assert_nothing_open(device)
    check_aftermath(seq, repair=mode != "relaxed")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit, GeneratorExit])
@pytest.mark.parametrize("place", PLACES)
def test_exceptions_of_every_kind_surface(device, place, error):
    mine, seq = error("mine"), CUDAGraphSequence()

    def boom() -> None:
        raise mine

    with pytest.raises(error) as info, breakable_graph(seq):
        body_with_places(torch.ones(3), place, boom)
    assert info.value is mine
    assert_nothing_open(device)
    check_aftermath(seq, repair=True)


def test_an_exception_that_the_body_handles_harms_nothing(device):
    x = torch.ones(3)

    def body() -> Any:
        y = x * 2
        try:
            raise Boom
        except Boom:
            y = y + 1
        bump(y)
        return y

    seq, y = capture(body)
    x.fill_(5)
    seq.replay()
    assert y.tolist() == [12] * 3


@pytest.mark.parametrize("place", ["barrier", "stub", "break"])
def test_what_fails_at_a_break_ends_the_block_and_leaves_earlier_ones(device, place):
    mine, x = Boom(place), torch.ones(3)

    def raises(*_: Any) -> None:
        raise mine

    seq, y = capture(lambda: x + 1)
    stub = raises if place == "stub" else None
    marked = no_graph(raises if place == "break" else lambda t: None, capture_stub=stub)
    options = {"barrier_fn": raises} if place == "barrier" else {}
    with pytest.raises(Boom) as info, breakable_graph(seq, **options):
        marked(x * 2)
    assert info.value is mine
    assert len(seq) == 1
    assert_nothing_open(device)
    with pytest.raises(ReplayError, match="incomplete"):
        seq.replay()
    capture(lambda: y.mul_(3), seq)
    x.fill_(2)
    seq.replay()
    assert y.tolist() == [9] * 3


def test_a_break_whose_error_was_swallowed_poisons_the_block(device):
    seq, x, reached = CUDAGraphSequence(), torch.ones(3), []

    def body() -> None:
        y = x * 2
        try:
            fail(y)
        except Boom:
            pass
        reached.append("after it")
        try:
            bump(y)
        except CaptureError as error:
            assert "Boom" in str(error)
            reached.append("refused")

    with pytest.raises(CaptureError, match="went on as if it had not"):
        capture(body, seq)
    assert reached == ["after it", "refused"]
    assert_nothing_open(device)
    check_aftermath(seq, repair=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("read", [lambda t: t.sum().item(), print, lambda t: t[t > 0], bool])
def test_a_hidden_sync_names_the_line_and_the_cure(device, capsys, mode, read):
    seq, x = CUDAGraphSequence(), torch.ones(1)
    with (
        pytest.raises(RuntimeError, match="captur") as info,
        breakable_graph(seq, capture_error_mode=mode),
    ):
        bump(x)
        y = x * 2
        read(y)
    text = text_of(info.value)
    assert "@no_graph" in text
    assert "segment 2" in text
    assert ("thread_local" in text) == (mode == "global")
    assert_nothing_open(device)


@pytest.mark.parametrize("where", ["the end of the block", "bump"])
def test_a_swallowed_sync_is_refused_with_the_segment(device, where):
    seq, x = CUDAGraphSequence(), torch.ones(3)

    def body() -> None:
        bump(x)
        y = x * 2
        try:
            y.sum().item()
        except RuntimeError:
            pass
        if where == "bump":
            bump(y)

    with pytest.raises(CaptureError, match="was invalidated") as info:
        capture(body, seq)
    assert where in str(info.value)
    assert info.value.segment == 2
    assert "@no_graph" in str(info.value)
    assert isinstance(info.value.__cause__, CUDAError)
    assert_nothing_open(device)
    check_aftermath(seq, repair=True)


def test_a_failed_capture_keeps_the_segments_of_earlier_blocks_only(device):
    x = torch.ones(3)
    seq, y = capture(lambda: x + 1)
    with pytest.raises(Boom), breakable_graph(seq):
        bump(y)
        raise Boom
    assert len(seq) == 1
    assert "failed" in repr(seq)


def test_failed_captures_leave_nothing_however_many(device):
    x = torch.ones(3)
    seq = CUDAGraphSequence()
    for _ in range(20):
        with pytest.raises(Boom), breakable_graph(seq):
            y = x * 2
            bump(y)
            raise Boom
    settle()
    kept = [line for line in device.leaks() if "graph" in line]
    assert kept == []


def test_a_failing_break_ends_the_replay_and_the_next_starts_afresh(device):
    x, out, do_fail = torch.ones(3), torch.zeros(3), []

    @no_graph
    def maybe(t: Any) -> None:
        if do_fail:
            raise Boom

    def body() -> None:
        y = x * 2
        maybe(y)
        out.copy_(y)

    seq, _ = capture(body)
    do_fail.append(True)
    x.fill_(7)
    with pytest.raises(Boom):
        seq.replay()
    assert out.tolist() == [0, 0, 0]
    assert_nothing_open(device)
    do_fail.clear()
    seq.replay()
    assert out.tolist() == [14] * 3


def test_an_abandoned_block_is_ended_by_the_next_use(device):
    seq, x = CUDAGraphSequence(), torch.ones(3)

    def enter_and_forget() -> None:
        breakable_graph(seq).__enter__()
        x.mul(2)

    enter_and_forget()
    gc.collect()
    y = capture(lambda: x + 1)[1]
    assert_nothing_open(device)
    assert y.shape == (3,)
    with pytest.raises(ReplayError, match="failed"):
        seq.replay()


def test_a_block_that_was_left_cannot_be_left_again(device):
    block = breakable_graph(CUDAGraphSequence())
    with block:
        pass
    with pytest.raises(CaptureError, match="not open"):
        block.__exit__(None, None, None)


# ---------------------------------------------------------------- a driver call fails

#: Calls that begin nothing and whose failure has no meaning of its own.
NEVER_FAIL = {"cuGetErrorString", "cuGetErrorName", "cuDriverGetVersion", "cuInit"}

#: What a call may plausibly answer: out of memory, a fault of earlier work, a capture that is lost.
CODES = {
    "cuStreamEndCapture": (901, 904, 2),
    "cuStreamBeginCapture": (2, 401),
    "cuStreamGetCaptureInfo": (901, 2),
    "cuLaunchKernel": (2, 700),
    "cuGraphInstantiate": (2, 1),
    "cuGraphLaunch": (2, 700),
    "cuStreamIsCapturing": (),  # it can fail for the legacy stream only
    "cuEventSynchronize": (700,),
    "cuEventQuery": (600, 700),
    "cuThreadExchangeStreamCaptureMode": (),
}
OUT_OF_MEMORY = (2,)

#: The recorder would run an operator eagerly if it could not learn that a capture is open.
ASKED_BY_USERS = {"cuStreamIsCapturing"}

#: Failing, these have done their work all the same: the error is that of some earlier work.
DONE_ANYWAY = {"cuStreamEndCapture", "cuEventRecord", "cuStreamWaitEvent", "cuEventSynchronize"}


class Failure(NamedTuple):
    """The k-th call of a program fails with a code."""

    place: int
    name: str
    code: int
    outputs: int


def failures(device: Any, body: Callable[[Any, Any], Any], side: Any) -> Iterator[Failure]:
    """Every way in which one driver call of a program may fail."""
    found: list[Failure] = []
    with watched_driver(device) as driver:

        def note(place: int, name: str, go: Callable[[], Any]) -> Any:
            values = go()
            if name not in NEVER_FAIL and not (name in ASKED_BY_USERS and asked_by_the_recorder()):
                for code in CODES.get(name, OUT_OF_MEMORY):
                    found.append(Failure(place, name, code, len(values) - 1))
            return values

        driver.answer = note
        attempt(lambda: run(body, side))
        settle()
    yield from found


def asked_by_the_recorder() -> bool:
    """Whether a call is the simulator's own, which stands for the user's library there."""
    frame, files = sys._getframe(3), []
    while frame is not None and len(files) < 2:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return any("/simulator/tensors" in name for name in files)


def fail_at(device: Any, failure: Failure) -> Callable[[int, str, Callable[[], Any]], Any]:
    def answer(place: int, name: str, go: Callable[[], Any]) -> Any:
        if place != failure.place:
            return go()
        assert name == failure.name, "the program took another course"
        if name.endswith("Destroy") or name in DONE_ANYWAY:
            code, *values = go()
            if name == "cuStreamEndCapture" and int(code) == 0:
                device.driver.cuGraphDestroy(values[0])
        return (bindings.types.CUresult(failure.code), *(None,) * failure.outputs)

    return answer


def is_clear(error: BaseException | None, failure: Failure, own: type | None) -> bool:
    """Whether an error is the user's own, or names the call that failed (None: it did no harm)."""
    if error is None or (own is not None and isinstance(error, own)):
        return True
    if isinstance(error, CUDAError):
        return error.call == failure.name or failure.name in str(error)
    if isinstance(error, CaptureError):
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)  # an operator's own


@pytest.mark.parametrize("name", [*PROGRAMS, *FAILING])
def test_any_driver_call_may_fail(device, name):
    body = PROGRAMS.get(name) or FAILING[name]
    own = Boom if name in FAILING else None
    wrong, count = [], 0
    with a_stream() as side:
        for failure in failures(device, body, side):
            count += 1
            problem = problem_of(device, body, side, failure, own)
            if problem is not None:
                wrong.append(f"{failure}: {problem}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:20])
    assert count > 30


def problem_of(
    device: Any, body: Callable[[Any, Any], Any], side: Any, failure: Failure, own: type | None
) -> str | None:
    """Run a program with one failure, then right; in words what was wrong, if anything was."""
    before = device.leaks()
    with watched_driver(device) as driver:
        seq = CUDAGraphSequence()
        driver.answer = fail_at(device, failure)
        error = attempt(lambda: run(body, side, seq))
        driver.answer = None
        try:
            assert is_clear(error, failure, own), f"unclear: {type(error).__name__}: {error}"
            assert_nothing_open(device)
            again = attempt(lambda: run_again(body, side, seq, own))
            assert again is None, f"the next capture failed: {type(again).__name__}: {again}"
            assert_nothing_open(device)
            seq = again = error = None
            assert_nothing_left(device, besides=before)
        except AssertionError as wrong:
            text = str(wrong)[:300]
        else:
            return None
        seq = again = error = None
        settle()
        device.driver.world._findings.clear()
    return text


def run_again(body: Callable[[Any, Any], Any], side: Any, seq: Any, own: type | None) -> None:
    """The same sequence again, and a fresh one; a program that fails by itself fails as before."""
    seq.reset()
    for each in (seq, CUDAGraphSequence()):
        if own is None:
            run(body, side, each)
        else:
            with pytest.raises(own):
                run(body, side, each)
            run(plain, side, each)


# ---------------------------------------------------------------- an interrupt at any line


def at_the_end_of_a_with(frame: Any) -> bool:
    """Where `__exit__` is about to be called: the interpreter looks for signals after calls only."""
    code, at = frame.f_code.co_code, frame.f_lasti
    names = [dis.opname[code[place]] for place in range(at, min(at + 6, len(code)), 2)]
    same = code[at : at + 2] == code[at + 2 : at + 4] == code[at + 4 : at + 6]
    return names == ["LOAD_CONST"] * 3 and same


class Hangs(BaseException):
    """A call did not come back."""


@contextlib.contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """A lock that an interrupt has left taken must not stop the tests."""

    def stop(*_: Any) -> None:
        raise Hangs("a call did not come back")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Interrupter:
    """Raises KeyboardInterrupt at the k-th line of some of the library's files that a thread runs.

    A line counts the first few times only: how often a loop over the tensors of the process runs
    depends on what else is alive, and would make the k-th line another one each time.
    """

    VISITS = 4

    def __init__(self, place: int, files: frozenset[str]) -> None:
        self.place, self.files, self.seen, self.where = place, files, 0, ""
        self.visits: Counter[tuple[str, int]] = Counter()

    def _counts(self, frame: Any) -> bool:
        line = frame.f_code.co_filename, frame.f_lineno
        self.visits[line] += 1
        return self.visits[line] <= self.VISITS and not at_the_end_of_a_with(frame)

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "call":
            path = frame.f_code.co_filename
            is_ours = path.startswith(SOURCE) and "/simulator/" not in path
            if frame.f_code.co_name in ("died", "__del__"):
                return None  # the interpreter only reports what is raised in a finalizer
            return self if is_ours and path.rpartition("/")[2] in self.files else None
        if event == "line" and self._counts(frame):
            self.seen += 1
            if self.seen == self.place:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt(self.where)
        return self

    def run(self, work: Callable[[], Any]) -> BaseException | None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return attempt(work)
        finally:
            sys.settrace(before)


def lines_of(work: Callable[[], Any], files: frozenset[str]) -> int:
    """How many lines of these files a piece of work runs."""
    counter = Interrupter(-1, files)
    counter.run(work)
    return counter.seen


def interrupted(
    device: Any, side: Any, place: int, files: frozenset[str]
) -> tuple[str, str] | None:
    """Interrupt a program at one line: where that was, and in words what was wrong afterwards."""
    interrupter, before = Interrupter(place, files), device.leaks()
    seq = CUDAGraphSequence()
    error: BaseException | None = interrupter.run(lambda: run(interruptible, side, seq))
    wrong = ""
    if not interrupter.where:
        return None  # the program was shorter this time
    try:
        with no_longer_than(0.7):
            again = attempt(lambda: run(plain, side, CUDAGraphSequence()))
            assert again is None, f"the next capture failed: {type(again).__name__}: {again}"
            again = attempt(lambda: (seq.reset(), run(plain, side, seq)))
        assert isinstance(error, KeyboardInterrupt), f"surfaced as {type(error).__name__}: {error}"
        assert again is None, f"the sequence is lost: {type(again).__name__}: {again}"
        assert_nothing_open(device)
        seq = error = again = None
        assert_nothing_left(device, besides=before)
    except AssertionError as problem:
        wrong = re.sub("0x[0-9a-f]+", "", str(problem).partition("\n")[0])
        traceback.clear_frames(problem.__traceback__)
    seq = error = None
    mend()
    return (interrupter.where, wrong) if wrong else None


def mend() -> None:
    """Put back by force what an interrupt has left behind, so that the next one is judged alone."""
    from torch.overrides import _get_current_function_mode, _pop_mode
    from torch.utils import _python_dispatch

    for block in open_blocks.open_blocks:
        open_blocks.remove(block)
    release._open.clear()
    tensors._current.handle = 0
    while _python_dispatch._get_current_dispatch_mode() is not None:
        _python_dispatch._pop_mode()
    while _get_current_function_mode() is not None:
        _pop_mode()
    bindings.current().cuThreadExchangeStreamCaptureMode(bindings.types.CUstreamCaptureMode(0))
    settle()


def interruptible(x: Any, side: Any) -> Any:
    """A program with a bit of everything, as short as can be: each of its lines is a run."""
    y = parts(x + 1)["double"]
    force_no_graph()
    return y * 2


def problems_in(files: frozenset[str], stride: int = 1) -> tuple[list[tuple[str, str]], int]:
    """What is wrong after an interrupt at each line (or some) of these files; and how many those are."""
    with simulated_device(seed=1) as device, a_stream() as side:
        lines = lines_of(lambda: run(interruptible, side), files)
        settle()
    found = []
    for place in range(1, lines + 1, stride):
        with simulated_device(seed=2) as device, a_stream() as side:
            problem = interrupted(device, side, place, files)
        if problem is not None:
            found.append(problem)
    return found, len(range(1, lines + 1, stride))


#: Files at whose lines is interrupted: at each of them, or at one of so many.
FILES = {
    "capture.py": 1,
    "sequence.py": 1,
    "plan.py": 1,
    "results.py": 2,
    "liveness.py": 1,
    "segments.py": 1,
    "breaks.py": 1,
    "blocks.py": 1,
    "journals.py": 1,
    "raw.py": 1,
    "simulated.py": 1,
    "release.py": 1,
    "bindings.py": 3,
    "handles.py": 2,
    "capturing.py": 1,
    "ordering.py": 1,
    "reading.py": 3,
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", FILES)
def test_an_interrupt_at_any_line_leaves_nothing(quick_collector, name):
    found, lines = problems_in(frozenset([name]), stride=FILES[name])
    print(f"{name}: {lines} lines, {len(found)} leave something")
    assert lines > 2
    assert not found, f"{len(found)} of {lines} lines:\n" + "\n".join(map(": ".join, found))
