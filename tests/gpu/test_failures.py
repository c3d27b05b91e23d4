"""What fails, how it is told, and that nothing needs repair afterwards.

The fixture of this folder captures, replays and draws after every test: each failure here is
followed by a right capture without any repair.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from breakable_cuda_graphs import CaptureError, CUDAGraphSequence, breakable_graph, no_graph

from .helpers import (
    MODES,
    Boom,
    bump,
    check,
    check_replays,
    close,
    dev,
    is_capturing,
    kinds,
    same,
    spoil,
    still_usable,
    text_of,
    torch,
)

pytestmark = pytest.mark.gpu

PLACES = (
    "first line",
    "first segment",
    "in a break",
    "after a break",
    "in the second break",
    "last line",
)


def run_body(x: Any, place: str | None, boom: Callable[[], Any]) -> Any:
    """Three segments and breaks between them; boom() is called at one place."""

    def here(name: str) -> None:
        if name == place:
            boom()

    here("first line")
    y = x * 2
    here("first segment")
    no_graph(here)("in a break")
    bump(y)
    y = y + 1
    here("after a break")
    no_graph(here)("in the second break")
    y = y * 2
    here("last line")
    return y


def check_aftermath(seq: Any, repair: str = "reset") -> None:
    """The half-made sequence does not replay, and can be used again."""
    still_usable()
    with pytest.raises(RuntimeError, match=r"(?is)fail|incomplete"):
        seq.replay()
    if repair == "reset":
        seq.reset()
        seq.replay()
    x = dev(1)
    with breakable_graph(seq):
        y = run_body(x, None, lambda: None)
    check_replays(seq, x, y, lambda t: (t * 2 + 2) * 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_the_users_exception_surfaces_as_the_same_object(place: str, mode: str) -> None:
    mine, seq, x = Boom("mine"), CUDAGraphSequence(), dev(1)
    stream = torch.cuda.current_stream()

    def boom() -> None:
        raise mine

    with pytest.raises(Boom) as info, breakable_graph(seq, capture_error_mode=mode):
        run_body(x, place, boom)
    assert info.value is mine
    assert info.value.__cause__ is None
    assert "boom" in [frame.name for frame in traceback.extract_tb(info.value.__traceback__)]
    assert torch.cuda.current_stream() == stream
    assert not is_capturing(seq.stream)
    check_aftermath(seq)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit, GeneratorExit])
@pytest.mark.parametrize("place", ["first segment", "in a break", "after a break"])
def test_exceptions_of_every_kind_surface(place: str, error: type[BaseException]) -> None:
    mine, seq, x = error("mine"), CUDAGraphSequence(), dev(1)

    def boom() -> None:
        raise mine

    with pytest.raises(error) as info, breakable_graph(seq):
        run_body(x, place, boom)
    assert info.value is mine
    assert info.value.__cause__ is None
    check_aftermath(seq)


def test_an_exception_with_a_cause_keeps_it() -> None:
    cause = KeyError("the cause")
    with pytest.raises(Boom) as info, breakable_graph(CUDAGraphSequence()):
        raise Boom from cause
    assert info.value.__cause__ is cause


def test_an_exception_that_the_body_handles_harms_nothing() -> None:
    def body(x: Any) -> Any:
        y = x * 2
        try:
            raise Boom
        except Boom:
            y = y + 1
        bump(y)
        return y * 2

    assert kinds(check(body)) == "geg"


@pytest.mark.parametrize("place", ["first segment", "after a break", "in a break"])
def test_out_of_memory_surfaces_and_leaves_nothing_behind(place: str) -> None:
    seq, x = CUDAGraphSequence(), dev(1)
    torch.cuda.set_per_process_memory_fraction(0.05)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError), breakable_graph(seq):
            run_body(x, place, lambda: torch.empty(1 << 36, dtype=torch.uint8, device="cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    check_aftermath(seq)


@pytest.mark.parametrize("which", ["barrier_fn", "capture_stub"])
def test_an_exception_of_a_callback_surfaces(which: str) -> None:
    mine, seq, x = Boom("mine"), CUDAGraphSequence(), dev(1)

    def boom(*args: Any) -> None:
        raise mine

    options = {"barrier_fn": boom} if which == "barrier_fn" else {}
    step = bump if which == "barrier_fn" else no_graph(capture_stub=boom)(lambda t: None)
    with pytest.raises(Boom) as info, breakable_graph(seq, **options):
        y = x * 2
        step(y)
        y + 1
    assert info.value is mine
    assert info.value.__cause__ is None
    check_aftermath(seq)


def test_a_generator_closed_inside_the_block_leaves_nothing_open() -> None:
    seq, x = CUDAGraphSequence(), dev(1)

    def steps() -> Iterator[Any]:
        with breakable_graph(seq):
            y = x * 2
            bump(y)
            yield y
            y + 1

    running = steps()
    next(running)
    running.close()
    check_aftermath(seq)


@pytest.mark.parametrize("repair", ["reset", "capture again"])
def test_a_failed_sequence_refuses_replay_until_repaired(repair: str) -> None:
    seq, x = CUDAGraphSequence(), dev(1)
    with pytest.raises(Boom), breakable_graph(seq):
        x + 1
        raise Boom
    check_aftermath(seq, repair)


def test_a_failed_block_takes_its_own_segments_back_and_leaves_earlier_ones() -> None:
    seq, x, first, second = CUDAGraphSequence(), dev(1), dev(0), dev(0)
    with breakable_graph(seq):
        first.copy_(x * 2)
        bump(first)
    assert len(seq) == 3
    with pytest.raises(Boom), breakable_graph(seq):
        second.copy_(x * 100)
        bump(second)
        raise Boom
    assert len(seq) == 3
    with pytest.raises(RuntimeError):
        seq.replay()
    with breakable_graph(seq):
        second.copy_(x * 5)
    assert len(seq) == 4
    for k in range(3):
        x.fill_(k)
        second.zero_()
        seq.replay()
        same(first, 2.0 * k + 1, "the block before the failure")
        same(second, 5.0 * k, "the block after the failure")


def test_ten_failures_in_a_row_then_a_right_capture() -> None:
    seq, x = CUDAGraphSequence(), dev(1)
    for place in PLACES * 2:
        with pytest.raises(ZeroDivisionError), breakable_graph(seq):
            run_body(x, place, lambda: 1 / 0)
    check_aftermath(seq)


# ---------------------------------------------------------------- hidden syncs

SYNCS = {
    "item": lambda t: t.sum().item(),
    "cpu": lambda t: t.cpu(),
    "nonzero": lambda t: t.nonzero(),
    "boolean index": lambda t: t[t > 0],
    "truth of a tensor": lambda t: bool(t.sum() > 0),
    "print": lambda t: repr(t),
    "stream sync": lambda t: torch.cuda.current_stream().synchronize(),
    "device sync": lambda t: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("place", ["first segment", "second segment"])
@pytest.mark.parametrize("sync", SYNCS.values(), ids=SYNCS.keys())
def test_a_hidden_sync_shows_its_own_error_with_the_advice_to_break(sync: Any, place: str) -> None:
    x = dev(1)
    sync(x)
    with pytest.raises(RuntimeError) as info, breakable_graph(CUDAGraphSequence()):
        y = x + 1
        if place == "second segment":
            bump(y)
            y = y * 2
        sync(y)
    assert not isinstance(info.value, CaptureError), "the first error is the one shown"
    assert info.value.__cause__ is None
    assert any("no_graph" in note for note in info.value.__notes__), info.value.__notes__


@pytest.mark.parametrize("sync", SYNCS.values(), ids=SYNCS.keys())
def test_inside_a_break_a_sync_works(sync: Any) -> None:
    def body(x: Any) -> Any:
        y = x + 1
        no_graph(lambda t: (sync(t), None)[1])(y)
        return y * 2

    check(body)


@pytest.mark.parametrize("mode", MODES)
def test_a_swallowed_invalidation_raises_at_the_end_with_the_advice(mode: str) -> None:
    seq, x = CUDAGraphSequence(), dev(1)
    with pytest.raises(CaptureError) as info, breakable_graph(seq, capture_error_mode=mode):
        x + 1
        spoil()
    assert "segment" in text_of(info.value)
    assert "no_graph" in text_of(info.value)
    check_aftermath(seq)


def test_an_invalidated_capture_says_which_segment() -> None:
    texts = []
    for breaks in range(3):
        x = dev(1)
        with pytest.raises(CaptureError, match=r"segment") as info:
            with breakable_graph(CUDAGraphSequence()):
                y = x + 1
                for _ in range(breaks):
                    bump(y)
                y = y * 2
                spoil()
        texts.append(text_of(info.value))
    assert len(set(texts)) == 3, texts


@pytest.mark.parametrize("mode", MODES)
def test_a_break_finds_a_dead_capture_and_does_not_run(mode: str) -> None:
    ran: list[int] = []
    look = no_graph(lambda: ran.append(1))
    seq, x = CUDAGraphSequence(), dev(1)
    with pytest.raises(CaptureError, match="segment"):
        with breakable_graph(seq, capture_error_mode=mode):
            x + 1
            spoil()
            look()
    assert not ran
    check_aftermath(seq)


def test_a_block_whose_errors_are_swallowed_is_poisoned_to_its_end() -> None:
    ran: list[int] = []
    look = no_graph(lambda: ran.append(1))
    seq, x = CUDAGraphSequence(), dev(1)
    with pytest.raises(CaptureError) as info, breakable_graph(seq):
        x + 1
        spoil()
        for _ in range(3):
            with pytest.raises(CaptureError):
                look()
    assert "no_graph" in text_of(info.value)
    assert not ran
    check_aftermath(seq)


def test_the_users_exception_wins_over_a_swallowed_invalidation() -> None:
    mine, seq, x = Boom("mine"), CUDAGraphSequence(), dev(1)
    with pytest.raises(Boom) as info, breakable_graph(seq):
        x + 1
        spoil()
        raise mine
    assert info.value is mine
    assert info.value.__cause__ is None
    check_aftermath(seq)


def test_a_capture_killed_by_another_thread_in_global_mode_is_told_the_option() -> None:
    go, done, leave = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        go.wait(20)
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
        done.set()
        leave.wait(20)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    seq, x = CUDAGraphSequence(), dev(1)
    try:
        with pytest.raises(CaptureError) as info, breakable_graph(seq):
            x + 1
            go.set()
            assert done.wait(20)
    finally:
        leave.set()
        thread.join(20)
    assert "thread_local" in text_of(info.value)
    check_aftermath(seq)


# ---------------------------------------------------------------- entering the block


@pytest.mark.parametrize("mode", MODES)
def test_every_capture_error_mode_captures(mode: str) -> None:
    assert kinds(check(lambda x: run_body(x, None, lambda: None), capture_error_mode=mode)) == (
        "gegegeg"
    )


def enter(**options: Any) -> None:
    with breakable_graph(CUDAGraphSequence(), **options):
        pytest.fail("the block was entered")


@pytest.mark.parametrize("mode", ["", "Global", "strict"])
def test_an_unknown_capture_error_mode_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match="thread_local"):
        enter(capture_error_mode=mode)


def test_an_unknown_choice_for_host_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="refuse"):
        enter(host_nodes="perhaps")


@pytest.mark.parametrize("stream", ["text", object()])
def test_what_is_no_stream_is_refused(stream: object) -> None:
    with pytest.raises((TypeError, ValueError), match="stream"):
        enter(stream=stream)


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("when", ["before it began", "after it began"])
def test_a_capture_that_cannot_begin_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, when: str, call: int
) -> None:
    mine, calls = Boom("mine"), []
    begin = torch.cuda.CUDAGraph.capture_begin

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call and when == "before it began":
            raise mine
        result = begin(self, *args, **kwargs)
        if len(calls) == call:
            raise mine
        return result

    seq, x = CUDAGraphSequence(), dev(1)
    check(
        lambda t: t @ t.view(64, 1), compare=close
    )  # so that what is made once in a process is made
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "capture_begin", failing)
        with pytest.raises(Boom) as info, breakable_graph(seq):
            run_body(x, None, lambda: None)
    assert info.value is mine
    check_aftermath(seq)


def test_a_failure_right_at_entry_leaves_the_sequence_as_it_was() -> None:
    seq, x = CUDAGraphSequence(), dev(1)
    with breakable_graph(seq):
        y = x * 2
        bump(y)
        z = y + 0
    with pytest.raises(ValueError, match="thread_local"):
        with breakable_graph(seq, capture_error_mode="nonsense"):
            pytest.fail("the block was entered")
    assert len(seq) == 3
    check_replays(seq, x, z, lambda t: t * 2 + 1)


# ---------------------------------------------------------------- random numbers after a failure


def fail_by_interrupt(x: Any) -> None:
    raise KeyboardInterrupt


def fail_by_sync(x: Any) -> None:
    torch.cuda.current_stream().synchronize()


def fail_by_unjoined_stream(x: Any) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)


@pytest.mark.parametrize(
    "fail", [fail_by_interrupt, fail_by_sync, fail_by_unjoined_stream], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("breaks", [0, 2])
def test_after_a_failure_the_generator_draws_what_its_seed_says(fail: Any, breaks: int) -> None:
    torch.cuda.manual_seed(11)
    want = [torch.rand(8, device="cuda") for _ in range(3)]
    x = dev(1)
    with pytest.raises((RuntimeError, KeyboardInterrupt)), breakable_graph(CUDAGraphSequence()):
        y = torch.rand_like(x)
        for _ in range(breaks):
            bump(y)
            y = y + torch.rand_like(y)
        fail(x)
    torch.rand(3, device="cuda")
    torch.cuda.manual_seed(11)
    assert torch.cuda.initial_seed() == 11
    for k in range(3):
        same(torch.rand(8, device="cuda"), want[k], f"draw {k}")


@pytest.mark.parametrize("mode", MODES)
def test_a_torch_graph_that_the_collector_finds_in_a_segment_harms_no_capture(mode: str) -> None:
    x, t, seq = dev(1), dev(1), CUDAGraphSequence()

    def lose() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            t.add_(1)
        graph.replay()
        graph.me = graph

    lose()
    with breakable_graph(seq, capture_error_mode=mode):
        y = x * 2
        found = gc.collect()
        z = y + 1
        bump(z)
        out = z * 3
    assert found > 0
    check_replays(seq, x, out, lambda v: (v * 2 + 2) * 3)
