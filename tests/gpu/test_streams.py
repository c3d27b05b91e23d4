"""Forked work, given streams, and how the capture stream stands to the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from breakable_cuda_graphs import (
    CaptureError,
    CUDAGraphSequence,
    UnjoinedStreamError,
    breakable_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import bindings

from .helpers import (
    MODES,
    bump,
    busy,
    check,
    check_replays,
    dev,
    is_capturing,
    kinds,
    same,
    sync,
    torch,
)

pytestmark = pytest.mark.gpu


# ---------------------------------------------------------------- forks and joins


def by_streams(first: Any, second: Any) -> None:
    """The second stream waits for what the first has queued."""
    second.wait_stream(first)


def by_events(first: Any, second: Any) -> None:
    event = torch.cuda.Event()
    event.record(first)
    second.wait_event(event)


WAITS = {"wait_stream": by_streams, "events": by_events}


@pytest.mark.parametrize("join", WAITS.values(), ids=[f"joined by {name}" for name in WAITS])
@pytest.mark.parametrize("fork", WAITS.values(), ids=[f"forked by {name}" for name in WAITS])
def test_forked_and_joined_work_is_captured(fork: Any, join: Any) -> None:
    side = torch.cuda.Stream()

    def body(x: Any) -> Any:
        main = torch.cuda.current_stream()
        y = x * 2
        fork(main, side)
        with torch.cuda.stream(side):
            z = y + 100
            busy(0.2)
            z = z * 3
        y = y - 1
        join(side, main)
        return y + z

    assert kinds(check(body)) == "g"


def test_side_streams_may_fork_in_every_segment() -> None:
    side = torch.cuda.Stream()

    def body(x: Any) -> Any:
        y = x.clone()
        for k in range(4):
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                busy(0.2)
                z = y * k
            main.wait_stream(side)
            y = y + z
            bump(y)
        return y

    assert kinds(check(body)) == "gegegegeg"


def test_side_streams_may_fork_from_side_streams() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()

    def body(x: Any) -> Any:
        main = torch.cuda.current_stream()
        y = x * 2
        by_streams(main, first)
        with torch.cuda.stream(first):
            a = y + 1
            by_events(first, second)
            with torch.cuda.stream(second):
                busy(0.2)
                b = a * 2
            a = a + 5
            by_events(second, first)
            c = a * b
        by_streams(first, main)
        bump(c)
        return c + 0

    check(body)


def test_a_stream_forked_and_joined_inside_a_break_is_eager_work() -> None:
    side, buffer = torch.cuda.Stream(), dev(0)

    @no_graph
    def fetch(t: Any) -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            busy(2)
            buffer.copy_(t)
        main.wait_stream(side)

    def body(x: Any) -> Any:
        y = x * 2
        fetch(y)
        return buffer + y

    check(body)


def test_work_that_one_break_starts_on_a_side_stream_a_later_break_joins() -> None:
    side, buffer, source = torch.cuda.Stream(), dev(0), dev(3)

    @no_graph
    def start() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            busy(3)
            buffer.copy_(source)

    @no_graph
    def join() -> None:
        torch.cuda.current_stream().wait_stream(side)

    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x + 1
        start()
        z = y * 2
        join()
        out = z + buffer
    for k in range(5):
        source.fill_(100 + k)
        x.fill_(k)
        seq.replay()
        same(out, (k + 1.0) * 2 + 100 + k, f"replay {k}")


# ---------------------------------------------------------------- unjoined ones


def forget(side: Any, work: Callable[[], Any]) -> None:
    """Fork a side stream, work on it, and do not join it."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["at the end", "at a break", "at the end, after a break"])
def test_an_unjoined_stream_is_refused_and_its_kernels_named(where: str, mode: str) -> None:
    side, x, y = torch.cuda.Stream(), dev(1), dev(0)
    ran: list[int] = []
    look = no_graph(lambda: ran.append(1))
    with pytest.raises(UnjoinedStreamError, match="spin_kernel"):
        with breakable_graph(CUDAGraphSequence(), capture_error_mode=mode):
            y.copy_(x * 2)
            if where == "at the end, after a break":
                look()
            forget(side, lambda: busy(0.1))
            if where == "at a break":
                look()
                pytest.fail("the break was passed")
    assert len(ran) == (where == "at the end, after a break")
    assert not is_capturing(side)
    with torch.cuda.stream(side):
        y.fill_(5)
    side.synchronize()
    same(y, 5.0, "eager work on the side stream")


def test_only_what_dangles_is_named() -> None:
    joined, forgotten, x = torch.cuda.Stream(), torch.cuda.Stream(), dev(1)
    with pytest.raises(UnjoinedStreamError) as info, breakable_graph(CUDAGraphSequence()):
        main = torch.cuda.current_stream()
        forget(joined, lambda: busy(0.1))
        main.wait_stream(joined)
        forget(forgotten, lambda: x.add_(1))
    assert "elementwise_kernel" in str(info.value)
    assert "spin_kernel" not in str(info.value)


def test_an_unjoined_stream_is_a_capture_error_and_a_runtime_error() -> None:
    assert issubclass(UnjoinedStreamError, CaptureError)
    assert issubclass(CaptureError, RuntimeError)


def test_in_debug_mode_the_ids_of_unjoined_streams_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BREAKABLE_CUDA_GRAPHS_DEBUG", "1")
    joined, forgotten, x = torch.cuda.Stream(), torch.cuda.Stream(), dev(1)
    seq = CUDAGraphSequence()
    with pytest.raises(UnjoinedStreamError) as info, breakable_graph(seq):
        main = torch.cuda.current_stream()
        forget(joined, lambda: x.add_(1))
        forget(forgotten, lambda: busy(0.1))
        main.wait_stream(joined)
        bump(x)
    assert str(forgotten.cuda_stream) in str(info.value)
    assert str(joined.cuda_stream) not in str(info.value)


def test_in_debug_mode_a_right_capture_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAKABLE_CUDA_GRAPHS_DEBUG", "1")
    test_side_streams_may_fork_in_every_segment()


def test_a_forgotten_stream_does_not_trouble_the_next_capture_that_uses_it() -> None:
    side, x = torch.cuda.Stream(), dev(1)
    for _ in range(5):
        with pytest.raises(UnjoinedStreamError), breakable_graph(CUDAGraphSequence()):
            forget(side, lambda: x.add_(1))

    def body(t: Any) -> Any:
        main = torch.cuda.current_stream()
        y = t * 2
        side.wait_stream(main)
        with torch.cuda.stream(side):
            z = y + 1
        main.wait_stream(side)
        return z * 2

    check(body)


def test_the_users_exception_wins_over_an_unjoined_stream() -> None:
    side, x, mine = torch.cuda.Stream(), dev(1), KeyError("mine")
    with pytest.raises(KeyError) as info, breakable_graph(CUDAGraphSequence()):
        forget(side, lambda: x.add_(1))
        raise mine
    assert info.value is mine
    assert not is_capturing(side)


# ---------------------------------------------------------------- the stream of the capture


class Protocol:
    """An object of no library that only has the stream protocol."""

    def __init__(self, handle: int) -> None:
        self.kept = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.kept


class LikeTorch:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class LikeCuPy:
    def __init__(self, handle: int) -> None:
        self.ptr = handle


class LikeNumba:
    def __init__(self, handle: int) -> None:
        self.handle = handle


GIVEN: dict[str, Callable[[Any], Any]] = {
    "a torch stream": lambda stream: stream,
    "a raw handle": lambda stream: stream.cuda_stream,
    "the stream protocol": lambda stream: Protocol(stream.cuda_stream),
    "cuda_stream": lambda stream: LikeTorch(stream.cuda_stream),
    "ptr": lambda stream: LikeCuPy(stream.cuda_stream),
    "handle": lambda stream: LikeNumba(stream.cuda_stream),
}


@pytest.mark.parametrize("make", GIVEN.values(), ids=GIVEN.keys())
def test_a_capture_runs_on_the_stream_that_is_given(make: Callable[[Any], Any]) -> None:
    stream, seen = torch.cuda.Stream(), []
    look = no_graph(lambda: seen.append(torch.cuda.current_stream().cuda_stream))

    def body(x: Any) -> Any:
        seen.append(torch.cuda.current_stream().cuda_stream)
        y = x * 2
        look()
        bump(y)
        return y + 1

    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq, stream=make(stream)):
        out = body(x)
    assert seen == [stream.cuda_stream] * 2
    check_replays(seq, x, out, lambda t: t * 2 + 2)


def test_without_a_given_stream_captures_run_on_the_sequences_own() -> None:
    seq, x, seen = CUDAGraphSequence(), dev(1), []
    own = seq.stream.cuda_stream
    with torch.cuda.stream(seq.stream):
        x * 2  # a warm-up there
    for _ in range(2):
        with breakable_graph(seq):
            seen.append(torch.cuda.current_stream().cuda_stream)
            x + 1
    assert seen == [own, own]
    assert own not in (0, 1, 2)


DEFAULTS: dict[str, Callable[[], Any]] = {
    "torch's default stream": lambda: torch.cuda.default_stream(),
    "handle zero": lambda: 0,
    "the legacy handle": lambda: 1,
    "an object with handle zero": lambda: Protocol(0),
}


@pytest.mark.parametrize("make", DEFAULTS.values(), ids=DEFAULTS.keys())
def test_the_default_stream_is_refused_with_the_reason(make: Callable[[], Any]) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"(?is)default|legacy"):
        with breakable_graph(CUDAGraphSequence(), stream=make()):
            pytest.fail("the block was entered")


@pytest.mark.parametrize("given", [False, True], ids=["own stream", "given stream"])
@pytest.mark.parametrize("ambient", ["default", "side"])
def test_a_capture_leaves_the_current_stream(ambient: str, given: bool) -> None:
    stream = torch.cuda.default_stream() if ambient == "default" else torch.cuda.Stream()
    options = {"stream": torch.cuda.Stream()} if given else {}
    with torch.cuda.stream(stream):
        x = dev(1)
        with breakable_graph(CUDAGraphSequence(), **options):
            y = x + 1
            bump(y)
            y + 1
        assert torch.cuda.current_stream() == stream


def test_breaks_at_capture_wait_for_what_the_caller_had_queued() -> None:
    ambient, x, seen = torch.cuda.Stream(), dev(0), []
    look = no_graph(lambda t: seen.append(t[0].item()))
    sync()
    with torch.cuda.stream(ambient):
        busy(20)
        x.fill_(2)
        with breakable_graph(CUDAGraphSequence()):
            look(x)
    assert seen == [2.0]


def test_the_caller_waits_for_what_breaks_queued_at_capture() -> None:
    ambient, x = torch.cuda.Stream(), dev(0)

    @no_graph
    def slow(t: Any) -> None:
        busy(20)
        t.fill_(3)

    sync()
    with torch.cuda.stream(ambient):
        with breakable_graph(CUDAGraphSequence()):
            slow(x)
        got = x.clone()
    same(got, 3.0)


def test_the_caller_waits_for_breaks_of_a_capture_that_failed() -> None:
    ambient, x = torch.cuda.Stream(), dev(0)

    @no_graph
    def slow(t: Any) -> None:
        busy(20)
        t.fill_(3)

    sync()
    with torch.cuda.stream(ambient):
        with pytest.raises(KeyError), breakable_graph(CUDAGraphSequence()):
            slow(x)
            raise KeyError
        got = x.clone()
    same(got, 3.0)


def test_a_segment_reads_what_the_caller_queued_before_the_block_and_the_replay() -> None:
    ambient = torch.cuda.Stream()
    with torch.cuda.stream(ambient):
        x, seq = dev(1), CUDAGraphSequence()
        busy(5)
        x.fill_(2)
        with breakable_graph(seq):
            y = x * 2
            bump(y)
            out = y + 1
        results = []
        for k in range(5):
            busy(2)
            x.fill_(k)
            seq.replay()
            results.append(out.clone())
    for k in range(5):
        same(results[k], 2.0 * k + 2, f"replay {k}")


def test_a_stream_that_got_the_handle_of_a_destroyed_one_is_ordered() -> None:
    """Destroyed with its work still running: the next stream may have its handle, not its order."""
    driver, total, seq = bindings.current(), dev(0), CUDAGraphSequence()
    with breakable_graph(seq):
        total.add_(1)
    gone = driver.cuStreamCreate(1)
    with torch.cuda.stream(torch.cuda.ExternalStream(int(gone))):
        busy(100)
    seq.replay(int(gone))
    driver.cuStreamDestroy(gone)
    again = driver.cuStreamCreate(1)
    seq.replay(int(again))
    with torch.cuda.stream(torch.cuda.ExternalStream(int(again))):
        seen = total.cpu()
    same(seen, torch.full_like(seen, 2.0), "what the new stream saw")
    sync()
    seq.reset()
    driver.cuStreamDestroy(again)
