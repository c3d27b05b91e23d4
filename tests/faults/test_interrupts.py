"""An interrupt, or an allocation that fails, at any line: nothing is left, the next run is right.

By default some lines of the longer files are left out, the same ones each time;
`BREAKABLE_CUDA_GRAPHS_FAULTS=all` takes them all. What the interpreter only reports (errors in a
finalizer) is in `test_finalizers.py`.
"""

from __future__ import annotations

import contextlib
import dis
import os
import re
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import breakable_cuda_graphs  # noqa: E402
from breakable_cuda_graphs import CUDAGraphSequence  # noqa: E402
from breakable_cuda_graphs.simulator import simulated_device  # noqa: E402
from faults.injecting import attempt  # noqa: E402
from faults.mending import mend  # noqa: E402
from faults.programs import (  # noqa: E402
    PROGRAMS,
    Program,
    Stage,
    bit_of_everything,
    plain,
    replayed,
)
from helping import a_stream, assert_nothing_left, assert_nothing_open, settle  # noqa: E402

SOURCE = str(Path(breakable_cuda_graphs.__file__).parent)
ENOUGH = 8  # problems to see what is wrong; one that leaves a lock taken costs seconds
EVERYTHING = os.environ.get("BREAKABLE_CUDA_GRAPHS_FAULTS", "") == "all"


def at_the_end_of_a_with(frame: Any) -> bool:
    """Where `__exit__` is about to be called: the interpreter looks for signals after calls only."""
    code, at = frame.f_code.co_code, frame.f_lasti
    names = [dis.opname[code[place]] for place in range(at, min(at + 6, len(code)), 2)]
    same = code[at : at + 2] == code[at + 2 : at + 4] == code[at + 4 : at + 6]
    return names == ["LOAD_CONST"] * 3 and same


def in_a_finalizer(frame: Any) -> bool:
    while frame is not None:
        if frame.f_code.co_name in ("died", "__del__"):
            return True
        frame = frame.f_back
    return False


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
    """Raises at the k-th line of some of the library's files that a thread runs.

    A line counts the first few times only: how often a loop over the tensors of the process runs
    depends on what else is alive, and would make the k-th line another one each time.
    """

    VISITS = 4

    def __init__(
        self, place: int, files: frozenset[str], kind: type[BaseException] = KeyboardInterrupt
    ) -> None:
        self.place, self.files, self.kind, self.seen, self.where = place, files, kind, 0, ""
        self.visits: Counter[tuple[str, int]] = Counter()

    def _counts(self, frame: Any) -> bool:
        line = frame.f_code.co_filename, frame.f_lineno
        self.visits[line] += 1
        return self.visits[line] <= self.VISITS and not at_the_end_of_a_with(frame)

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "call":
            path = frame.f_code.co_filename
            is_ours = path.startswith(SOURCE) and "/simulator/" not in path
            if in_a_finalizer(frame):
                return None  # the interpreter only reports what is raised there
            return (
                self
                if is_ours and path.rpartition("breakable_cuda_graphs/")[2] in self.files
                else None
            )
        if event == "line" and self._counts(frame):
            self.seen += 1
            if self.seen == self.place:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise self.kind(self.where)
        return self

    def run(self, work: Callable[[], Any]) -> BaseException | None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return attempt(work)
        finally:
            sys.settrace(before)


def interrupted(
    program: Program, place: int, files: frozenset[str], kind: type[BaseException]
) -> tuple[str, str] | None:
    """Interrupt a program at one line: where that was, and in words what was wrong afterwards."""
    with simulated_device(seed=2, check=False) as device, a_stream() as side:
        settle()
        interrupter, before = Interrupter(place, files, kind), device.leaks()
        seq: Any = CUDAGraphSequence()
        error = interrupter.run(lambda: program(Stage(device, side), seq))
        if not interrupter.where:
            return None  # the program was shorter this time
        wrong = ""
        try:
            with no_longer_than(5):
                again = attempt(lambda: replayed(plain)(Stage(device, side), CUDAGraphSequence()))
                assert again is None, f"the next capture failed: {type(again).__name__}: {again}"
                again = attempt(lambda: (seq.reset(), program(Stage(device, side), seq)))
            surfaced = isinstance(error, kind) or (error is None and kind is MemoryError)
            assert surfaced, f"surfaced as {type(error).__name__}: {error}"
            assert again is None, f"the sequence is lost: {type(again).__name__}: {again}"
            assert_nothing_open(device)
            seq = error = again = None
            assert_nothing_left(device, besides=before)
        except AssertionError as problem:
            wrong = re.sub("0x[0-9a-f]+", "", str(problem).partition("\n")[0])
            traceback.clear_frames(problem.__traceback__)
        seq = error = again = None
        mend()
    return (interrupter.where, wrong) if wrong else None


def problems_of(
    program: Program, files: frozenset[str], stride: int, kind: type[BaseException]
) -> tuple[list[tuple[str, str]], int]:
    """What is wrong after an interrupt at each line (or some) of these files; and how many those are."""
    with simulated_device(seed=1, check=False) as device, a_stream() as side:
        settle()
        counter = Interrupter(-1, files)
        error = counter.run(lambda: program(Stage(device, side), CUDAGraphSequence()))
        assert error is None, f"{type(error).__name__}: {error}"
        settle()
    places = range(1, counter.seen + 1, 1 if EVERYTHING else stride)
    found = []
    for place in places:
        problem = interrupted(program, place, files, kind)
        if problem is not None:
            found.append(problem)
        if len(found) == ENOUGH:
            break
    return found, len(places)


#: Files at whose lines is interrupted: at each of them, or at one of so many.
CAPTURE_AND_REPLAY = {
    "capture/breakable_graph.py": 1,
    "capture/block.py": 1,
    "capture/break_call.py": 1,
    "capture/breaks.py": 1,
    "capture/open_blocks.py": 1,
    "replay/sequence.py": 1,
    "sequence/state.py": 1,
    "sequence/plan.py": 2,
    "sequence/static_results.py": 2,
    "sequence/memory.py": 2,
    "sequence/segments.py": 2,
    "frameworks/raw.py": 1,
    "frameworks/simulated.py": 3,
    "_driver/unfinished.py": 1,
    "_driver/release.py": 1,
    "_driver/bindings.py": 3,
    "_driver/handles.py": 2,
    "_driver/stream_capture.py": 1,
    "_driver/stream_order.py": 1,
    "_driver/kernel_params.py": 3,
    "_driver/survey.py": 3,
}

#: What else takes part when other programs run.
BESIDE = {
    "nested": ("replay/embed.py", 2),
    "foreign capture": (
        "replay/embed.py graph/recording.py graph/part.py _driver/user_objects.py",
        6,
    ),
    "edit, joined": (
        "sequence/append.py sequence/plan.py sequence/segments.py graph/target.py sequence/state.py "
        "replay/sequence.py",
        6,
    ),
    "annotated": ("capture/annotate.py capture/stacks.py graph/capture_notes.py", 8),
    "two streams": ("replay/sequence.py sequence/state.py _driver/stream_order.py", 6),
    "shared pool": ("replay/sequence.py sequence/state.py capture/block.py", 12),
    "lost thread": (
        "capture/open_blocks.py _driver/unfinished.py _driver/threads.py _driver/contexts.py",
        1,
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", CAPTURE_AND_REPLAY)
def test_an_interrupt_at_any_line_leaves_nothing(asked_collector: Any, name: str) -> None:
    program, files = replayed(bit_of_everything), frozenset([name])
    check(name, *problems_of(program, files, CAPTURE_AND_REPLAY[name], KeyboardInterrupt))


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", BESIDE)
def test_so_it_is_in_other_programs(asked_collector: Any, name: str) -> None:
    files, stride = BESIDE[name]
    found = problems_of(PROGRAMS[name], frozenset(files.split()), stride, KeyboardInterrupt)
    check(name, *found)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_memory_that_runs_out_at_any_line_leaves_nothing(asked_collector: Any) -> None:
    files = frozenset(CAPTURE_AND_REPLAY)
    check("memory", *problems_of(replayed(bit_of_everything), files, 11, MemoryError))


_counts: Counter[str] = Counter()


def check(name: str, found: list[tuple[str, str]], lines: int) -> None:
    _counts.update(runs=1, lines=lines, findings=len(found))
    assert lines > 2
    assert not found, f"{name}, {len(found)} of {lines} lines:\n" + "\n".join(map(": ".join, found))


def test_the_counts(capsys: Any) -> None:
    """What this run has tried."""
    if _counts["runs"] != len(CAPTURE_AND_REPLAY) + len(BESIDE) + 1:
        pytest.skip("only a part was run")
    with capsys.disabled():
        print(f"\ninterrupts: {_counts['lines']} lines, {_counts['findings']} findings")
    assert _counts["findings"] == 0
