"""What the device tests share.

The hard problem: a wrong replay must not pass because capture or eager work left the right value
behind. So inputs change before every replay, outputs are overwritten with NaN, and what is
expected comes from the same body run eagerly.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import helping
from breakable_cuda_graphs import (
    CUDAGraphSequence,
    breakable_graph,
    is_in_breakable_graph,
    no_graph,
)

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

N = 64
MODES = ("global", "thread_local", "relaxed")
VALUES = (0.0, 1.0, 5.0, -3.0)


class Boom(Exception):
    """An error that only the tests raise."""


def dev(value: float = 0.0, n: int = N) -> Any:
    """A new CUDA tensor of n floats, all equal to value."""
    return torch.full((n,), float(value), device="cuda")


def set_input(x: Any, value: float) -> None:
    """Fill x with numbers that differ from place to place and are exact in float32."""
    x.copy_(torch.arange(x.numel(), device=x.device).view(x.shape) / 4 - 3 + value)


def busy(milliseconds: float) -> None:
    """Keep the current stream busy for at least about this long."""
    torch.cuda._sleep(int(milliseconds * 2_000_000))


def sync() -> None:
    torch.cuda.synchronize()


def same(got: Any, want: Any, what: str = "the result") -> None:
    """got, a tensor, equals want, a tensor or a number, bit for bit."""
    sync()
    want = want if isinstance(want, torch.Tensor) else torch.full_like(got, want)
    torch.testing.assert_close(got, want, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def close(got: Any, want: Any, what: str = "the result", tolerance: float = 1e-3) -> None:
    """got equals want up to a small part of want's largest value."""
    sync()
    largest = max(float(want.detach().abs().max()), 1e-6)
    torch.testing.assert_close(
        got, want, rtol=0, atol=tolerance * largest, msg=lambda text: f"{what}: {text}"
    )


def add_one(t: Any) -> None:
    t.add_(1)


bump = no_graph(add_one)  # the ordinary break: it works in place and returns nothing


def check_replays(
    seq: Any,
    x: Any,
    out: Any,
    expected: Callable[[Any], Any],
    values: Sequence[float] = VALUES,
    compare: Callable[[Any, Any, str], None] = same,
) -> None:
    """Each replay gives what expected(x) gives eagerly, for several inputs."""
    for value in values:
        set_input(x, value)
        want = expected(x.clone())
        out.fill_(float("nan"))
        seq.replay()
        compare(out, want, f"the replay for {value}")


def check(body: Callable[[Any], Any], compare: Any = same, **options: Any) -> Any:
    """Capture out = body(x), compare replays with body run eagerly, and return the sequence."""
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq, **options):
        out = body(x)
    check_replays(seq, x, out, body, compare=compare)
    return seq


def warm_up(seq: Any, work: Callable[[], Any], rounds: int = 2) -> None:
    """Run work on the stream of the sequence's captures, joined with the current one."""
    current = torch.cuda.current_stream()
    seq.stream.wait_stream(current)
    with torch.cuda.stream(seq.stream):
        for _ in range(rounds):
            work()
    current.wait_stream(seq.stream)


def kinds(seq: Any) -> str:
    """The segments of a sequence as letters: g for a graph, e for an eager one."""
    from breakable_cuda_graphs import EagerSegment, GraphSegment

    letters = {GraphSegment: "g", EagerSegment: "e"}
    return "".join(letters[type(segment)] for segment in seq.segments)


def text_of(error: BaseException) -> str:
    """What a user reads of an error: its type, its text and its notes."""
    notes = getattr(error, "__notes__", ())
    return " ".join([type(error).__name__, str(error), *notes])


def is_capturing(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())


def spoil() -> None:
    """Do what no capture survives, and swallow the error."""
    with pytest.raises(RuntimeError):
        torch.cuda.current_stream().synchronize()


def canaries(count: int = 32, n: int = 1 << 16) -> list[Any]:
    """Take and fill memory, so that a replay into memory given back too early shows."""
    return [dev(-7, n) for _ in range(count)]


def check_canaries(birds: list[Any]) -> None:
    sync()
    hurt = sum(not bool((bird == -7).all()) for bird in birds)
    assert hurt == 0, f"a replay wrote into {hurt} tensors that belong to others"


def still_usable() -> None:
    """A fresh capture with a break, a replay, a random draw and a sync all work."""
    assert not torch.cuda.is_current_stream_capturing(), "the stream was left in capture mode"
    assert not is_in_breakable_graph()
    x, y, seq = dev(0, 8), dev(0, 8), CUDAGraphSequence()
    with breakable_graph(seq):
        y.copy_(x + 1)
        bump(y)
        y.mul_(2)
    x.fill_(4)
    seq.replay()
    same(y, 12.0, "a fresh capture")
    assert 0 <= torch.rand(4, device="cuda").sum().item() <= 4
    sync()


def in_thread(work: Callable[[], Any], timeout: float = 30) -> Any:
    """Run work() in a new thread and return or raise what it did."""
    return together([work], timeout)[0]


def together(works: Sequence[Callable[[], Any]], timeout: float = 30) -> list[Any]:
    """`helping.together` with the patience that a device needs."""
    return helping.together(list(works), timeout)


@contextlib.contextmanager
def background(work: Callable[[], Any]) -> Iterator[list[BaseException]]:
    """Call work() again and again in another thread while the block runs; collects its errors."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        while not stop.is_set():
            try:
                work()
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield errors
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive(), "the background thread hangs"
