"""Whatever of the user's fails, and wherever: it surfaces, nothing is open or kept, the next one works.

What of the driver's fails, and interrupts at each line, are in faults/.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import breakable_cuda_graphs  # noqa: E402
from breakable_cuda_graphs import (  # noqa: E402
    CaptureError,
    CUDAError,
    CUDAGraphSequence,
    Graph,
    ReplayError,
    breakable_graph,
    force_no_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import (  # noqa: E402
    bindings,
    release,
)
from breakable_cuda_graphs.frameworks import simulated  # noqa: E402
from helping import (  # noqa: E402
    MODES,
    Boom,
    assert_nothing_open,
    capture,
    settle,
    text_of,
)

SOURCE = str(Path(breakable_cuda_graphs.__file__).parent)


@no_graph
def bump(t: Any) -> None:
    t.add_(1)


@no_graph
def fail(t: Any) -> None:
    raise Boom(f"in a break at {t.shape}")


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


class Unprintable(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_without_a_text_does_no_harm(device):
    x, mine = torch.ones(3), Unprintable()

    @no_graph
    def fails(t: Any) -> None:
        raise mine

    with pytest.raises(Unprintable), breakable_graph(CUDAGraphSequence()):
        raise mine
    with pytest.raises(CaptureError, match="Unprintable, without a text"):
        with breakable_graph(CUDAGraphSequence()):
            with contextlib.suppress(Unprintable):
                fails(x)
    assert_nothing_open(device)


@pytest.mark.parametrize("what", ["launched", "profiled"])
def test_an_error_of_ours_in_a_segment_gets_no_advice_on_others(device, what):
    """It says itself what to do; that the host may have read something is beside the point."""
    x = torch.ones(2)
    ready, _ = capture(lambda: bump(x))
    executable = Graph().instantiate()
    call = {"launched": executable.launch, "profiled": ready.profile}[what]
    with pytest.raises(ReplayError) as caught, breakable_graph(CUDAGraphSequence()):
        call()
    assert getattr(caught.value, "__notes__", []) == []


def test_an_error_that_is_raised_again_is_noted_once(device):
    mine = RuntimeError("something about a capture")
    counts = set()
    for _ in range(3):
        with pytest.raises(RuntimeError), breakable_graph(CUDAGraphSequence()):
            raise mine
        counts.add(len(mine.__notes__))
    assert len(counts) == 1


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


@pytest.mark.parametrize("looks", [{}, {"record_stacks": True}], ids=["", "record_stacks"])
@pytest.mark.parametrize("place", [*PLACES, "barrier"])
def test_the_graphs_of_a_failed_block_go_at_once_though_its_exception_stays(device, place, looks):
    """In a cycle, or with the user: NCCL ends no communicator while a graph has its work."""
    barriers = []

    def barrier() -> None:
        barriers.append(None)
        if place == "barrier" and len(barriers) == 2:
            raise Boom

    def boom() -> None:
        raise Boom

    gc.disable()
    try:
        with pytest.raises(Boom) as held:
            with breakable_graph(CUDAGraphSequence(), barrier_fn=barrier, **looks):
                body_with_places(torch.ones(3), place, boom)
        release.drain()
        assert [line for line in device.leaks() if "graph" in line or "exec" in line] == []
        del held
    finally:
        gc.enable()


@pytest.mark.parametrize("call", ["cuGraphInstantiate", "cuGraphAddChildGraphNode"])
def test_what_was_made_for_a_replay_goes_at_once_where_the_rest_cannot_be_made(
    device, monkeypatch, call
):
    module, made = bindings.current().module, []
    usual = getattr(module, call)

    def second_fails(*args: Any) -> Any:
        made.append(call)
        return (2, None) if len(made) == 2 else usual(*args)

    x = torch.ones(3)
    gc.disable()
    try:
        with pytest.raises(CUDAError, match=call) as held:
            with breakable_graph(CUDAGraphSequence()):
                y = x * 2
                bump(y)
                z = y * 3
                force_no_graph()
                z.add_(1)
                monkeypatch.setattr(module, call, second_fails, raising=False)
        monkeypatch.undo()
        release.drain()
        assert made == [call] * 2
        assert [line for line in device.leaks() if "graph" in line or "exec" in line] == []
        del held
    finally:
        gc.enable()


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


class Stranger:
    """An object of another library: a graph in a cycle, which its finalizer gives back."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.me = driver, self
        self.graph = driver.cuGraphCreate(0)[1]
        self.executable = driver.cuGraphInstantiate(self.graph, 0)[1]

    def __del__(self) -> None:
        self.driver.cuGraphExecDestroy(self.executable)
        self.driver.cuGraphDestroy(self.graph)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_asked", [True, False], ids=["gc.collect()", "by itself"])
@pytest.mark.parametrize("where", ["block", "part"])
def test_what_the_collector_finds_in_a_segment_harms_no_capture(
    device: Any, mode: str, is_asked: bool, where: str
) -> None:
    """`torch.cuda.CUDAGraph` and others call the driver in their finalizers."""
    x, seq, graph = torch.ones(2), CUDAGraphSequence(), Graph()
    gc.collect()
    before = gc.get_threshold()
    Stranger(device.driver)
    held = []

    def body() -> Any:
        if is_asked:
            gc.collect()
        else:
            gc.set_threshold(1, 1, 1)
            held.extend([] for _ in range(50))
            gc.set_threshold(*before)
        return x * 2

    strangers = sum(isinstance(each, Stranger) for each in gc.get_objects())
    try:
        if where == "block":
            with breakable_graph(seq, capture_error_mode=mode):
                y = body()
        else:
            with graph.capture(mode=mode):
                body()
    finally:
        gc.set_threshold(*before)
    assert strangers == 1
    assert not any(isinstance(each, Stranger) for each in gc.get_objects())
    assert_nothing_open(device)
    if where == "block":
        x.fill_(4)
        seq.replay()
        assert y.tolist() == [8, 8]
    graph.close()


def test_a_collection_goes_on_where_the_thread_cannot_be_relaxed(
    device: Any, monkeypatch: Any
) -> None:
    """Nobody could be told: what is raised in the collector is only printed."""

    def enter(self: Any) -> None:
        raise Boom

    x, seq = torch.ones(2), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        with monkeypatch.context() as patch:
            patch.setattr(release.relaxed_thread, "__enter__", enter)
            gc.collect()
    x.fill_(3)
    seq.replay()
    assert y.tolist() == [6, 6]


def test_a_capture_that_another_thread_kills_as_it_begins_names_the_mode(
    device: Any, monkeypatch: Any
) -> None:
    """`torch.cuda.CUDAGraph.capture_begin` then fails with an internal assertion."""

    def begin(*_: Any) -> None:
        raise RuntimeError("status == cudaStreamCaptureStatus::cudaStreamCaptureStatusActive")

    monkeypatch.setattr(simulated.SimulatedSession, "begin", begin)
    with (
        pytest.raises(RuntimeError, match="Active") as caught,
        breakable_graph(CUDAGraphSequence()),
    ):
        pass
    assert "thread_local" in "".join(caught.value.__notes__)
    assert "segment 0" in "".join(caught.value.__notes__)
    assert_nothing_open(device)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("begin", [breakable_graph, lambda _: Graph().capture()])
def test_what_a_break_has_begun_and_not_ended_is_ended_with_it(device, begin, fails):
    """Left open, it would be put back after the block around it, and leave a wrong stream current."""
    x, inner, begun = torch.ones(2), CUDAGraphSequence(), []

    @no_graph
    def careless(t: Any) -> None:
        begun.append(begin(inner))
        begun[0].__enter__()
        if fails:
            raise Boom

    def body() -> None:
        careless(x * 2)

    with pytest.raises(
        Boom if fails else CaptureError, match=None if fails else "without ending it"
    ):
        capture(body)
    assert_nothing_open(device)
    if fails:
        begun[0].__exit__(Boom, Boom(), None)  # the error is the one to see
    else:
        with pytest.raises(CaptureError, match="not open"):
            begun[0].__exit__(None, None, None)
    assert_nothing_open(device)
    _, y = capture(lambda: x * 3, inner)
    inner.replay()
    assert y.tolist() == [3, 3]
