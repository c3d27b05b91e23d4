"""Several threads: captures at once, replays of one sequence, breaks on the wrong thread."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import (  # noqa: E402
    CaptureError,
    CUDAGraphSequence,
    breakable_graph,
    is_in_breakable_graph,
    no_graph,
)
from breakable_cuda_graphs.simulator import (  # noqa: E402
    simulated_device,
    tensors,
)
from helping import Boom, a_stream, assert_nothing_open, capture, in_thread, together  # noqa: E402


@no_graph
def bump(t: Any) -> None:
    t.add_(1)


def test_a_capture_leaves_the_tuples_of_other_threads_alone():
    """A thread switch at every chance; the block of this thread looks for the owners of memory."""
    stop, broken = threading.Event(), []

    def build() -> None:
        while not stop.is_set() and not broken:
            try:
                tuple(number + 1 for number in range(40))
            except SystemError as error:
                broken.append(error)

    x, interval = torch.ones(2), sys.getswitchinterval()
    builder = threading.Thread(target=build)
    with simulated_device() as device:
        seq = CUDAGraphSequence()
        sys.setswitchinterval(1e-6)
        builder.start()
        try:
            for _ in range(60):
                capture(lambda: bump(x) or x.mul_(2), seq, capture_error_mode="relaxed")
                seq.reset()
                if broken:
                    break
        finally:
            stop.set()
            builder.join(20)
            sys.setswitchinterval(interval)
        assert device.findings == []
    if broken:
        raise broken[0]


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_threads_capture_and_replay_at_once(device, mode):
    meet = threading.Barrier(4, timeout=5)

    def work(number: int) -> list[float]:
        x, seq = torch.zeros(3), CUDAGraphSequence()
        with breakable_graph(seq, capture_error_mode=mode):
            meet.wait()
            y = x * number
            bump(y)
            meet.wait()
            y = y * 2
        got = []
        for value in range(5):
            x.fill_(value)
            seq.replay()
            got.append(y[0].item())
        seq.reset()
        return got

    results = together([lambda n=n: work(n) for n in range(4)])
    assert results == [[(value * n + 1) * 2 for value in range(5)] for n in range(4)]
    assert_nothing_open(device)


def test_a_thread_beside_a_capture_is_not_part_of_it(device):
    x, answers = torch.ones(2), []

    def beside() -> None:
        t = torch.zeros(2)
        answers.append(is_in_breakable_graph())
        bump(t)
        answers.append(t.tolist())

    def body() -> Any:
        y = x * 2
        in_thread(beside)
        return y

    seq, y = capture(body, capture_error_mode="thread_local")
    assert answers == [False, [1, 1]]
    assert len(seq) == 1
    seq.replay()
    assert y.tolist() == [2, 2]


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_break_on_another_thread_is_refused_and_names_the_mode(device, mode):
    x, seq, caught = torch.ones(2), CUDAGraphSequence(), []

    def other(handle: int) -> None:
        with tensors.stream(handle):
            try:
                bump(x)
            except CaptureError as error:
                caught.append(error.with_traceback(None))

    with breakable_graph(seq, capture_error_mode=mode):
        y = x * 2
        in_thread(lambda: other(seq.stream.handle))
        y = y * 3
    assert "relaxed" in str(caught[0])
    assert caught[0].segment == 0
    seq.replay()
    assert y.tolist() == [6, 6]
    assert x.tolist() == [1, 1]


def test_a_break_on_another_thread_works_in_relaxed_mode(device):
    x = torch.ones(2)
    seq = CUDAGraphSequence()
    ran_on = []

    @no_graph
    def step(t: Any) -> None:
        ran_on.append(threading.get_ident())
        t.add_(1)

    with breakable_graph(seq, capture_error_mode="relaxed"):

        def other(handle: int) -> int:
            with tensors.stream(handle):
                step(x)
            return threading.get_ident()

        thread = in_thread(lambda: other(seq.stream.handle))
    assert ran_on == [thread]
    assert len(seq) == 3
    seq.replay()
    assert x.tolist() == [3, 3]


def test_replays_of_one_sequence_come_one_after_the_other(device):
    x, inside, worst = torch.zeros(1), [], []

    @no_graph
    def alone(t: Any) -> None:
        inside.append(1)
        worst.append(len(inside))
        t.add_(1)
        inside.pop()

    seq, _ = capture(lambda: alone(x))
    x.zero_()
    together([lambda: [seq.replay() for _ in range(50)] for _ in range(4)])
    assert x.item() == 200
    assert max(worst) == 1


def test_a_reset_waits_for_a_replay_in_another_thread(device):
    entered, leave = threading.Event(), threading.Event()
    x, out, do_wait = torch.ones(1), torch.zeros(1), []

    @no_graph
    def slow(t: Any) -> None:
        if do_wait:
            entered.set()
            assert leave.wait(20)

    def body() -> None:
        slow(x)
        out.copy_(x * 2)

    seq, _ = capture(body)
    do_wait.append(True)
    replaying = threading.Thread(target=seq.replay)
    replaying.start()
    assert entered.wait(20)
    resetting = threading.Thread(target=seq.reset)
    resetting.start()
    resetting.join(0.05)
    assert resetting.is_alive()
    leave.set()
    replaying.join(20)
    resetting.join(20)
    assert out.tolist() == [2]
    assert len(seq) == 0


def test_a_failing_break_in_one_thread_lets_the_next_replay(device):
    x, fail = torch.zeros(1), [True]

    @no_graph
    def maybe(t: Any) -> None:
        t.add_(1)
        if fail[0] and threading.current_thread() is not threading.main_thread():
            raise Boom

    fail[0] = False
    seq, _ = capture(lambda: maybe(x))
    fail[0] = True
    with pytest.raises(Boom):
        in_thread(seq.replay)
    seq.replay()
    assert x.item() == 3


def test_a_sequence_is_dropped_in_another_thread_during_a_capture(device):
    x = torch.ones(2)
    held = [capture(lambda: bump(x * 2))[0]]
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        y = x + 1
        in_thread(held.clear)
        bump(y)
    seq.replay()
    assert y.tolist() == [3, 3]


def test_a_global_capture_and_an_unsafe_call_elsewhere_give_the_hint(device):
    from breakable_cuda_graphs._driver import bindings

    x, seq = torch.ones(2), CUDAGraphSequence()

    def unsafe() -> None:
        bindings.current().module.cuMemAlloc(16)

    with pytest.raises(CaptureError, match="thread_local") as info, breakable_graph(seq):
        x.mul(2)
        in_thread(unsafe)
    assert info.value.segment == 0
    assert_nothing_open(device)
    with a_stream() as stream:
        capture(lambda: x.mul(2), seq, stream=stream)
        seq.reset()
