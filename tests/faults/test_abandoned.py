"""Context managers that nobody leaves: the next use of the library ends what they had begun."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import (  # noqa: E402
    CaptureError,
    CUDAGraphSequence,
    Graph,
    ProcessError,
    ReplayError,
    breakable_graph,
    capture_if,
    is_in_breakable_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import (  # noqa: E402
    release,
    stream_capture,
    unfinished,
)
from breakable_cuda_graphs.capture import open_blocks  # noqa: E402
from breakable_cuda_graphs.simulator import tensors  # noqa: E402
from faults.injecting import attempt  # noqa: E402
from helping import (  # noqa: E402
    MODES,
    Boom,
    assert_nothing_open,
    capture,
    in_raw_thread,
    in_thread,
    in_thread_of_number,
)


@no_graph
def bump(t: Any) -> None:
    t.add_(1)


@contextlib.contextmanager
def captured(seq: Any, mode: str) -> Iterator[None]:
    with breakable_graph(seq, capture_error_mode=mode):
        yield


def lose_a_generator(seq: Any, mode: str) -> None:
    """Its end runs when the generator is collected."""
    manager = captured(seq, mode)
    manager.__enter__()
    bump(torch.ones(2) * 2)


def lose_a_block(seq: Any, mode: str) -> None:
    """Nothing runs for it: the context manager was entered by hand."""
    block = breakable_graph(seq, capture_error_mode=mode)
    block.__enter__()
    bump(torch.ones(2) * 2)


def lose_a_block_in_a_frame(seq: Any, mode: str) -> None:
    """An error between entering and leaving, as in `ExitStack`-less code."""
    block = breakable_graph(seq, capture_error_mode=mode)
    block.__enter__()
    raise Boom


LOSSES = [lose_a_generator, lose_a_block, lose_a_block_in_a_frame]

USES = {
    "capture": lambda seq: capture(lambda: torch.ones(2) + 1),
    "break": lambda seq: bump(torch.ones(2)),
    "replay": lambda seq: attempt(seq.replay),
    "reset": lambda seq: seq.reset(),
    "question": lambda seq: is_in_breakable_graph(),
    "graph": lambda seq: Graph().capture().__enter__().__exit__(None, None, None),
}


def check_next_capture(seq: Any, mode: str) -> None:
    """The sequence whose block was lost can be captured anew, in the same mode."""
    seq.reset()
    x = torch.ones(2)
    _, y = capture(lambda: x * 3, seq, capture_error_mode=mode)
    x.fill_(5)
    seq.replay()
    assert y.tolist() == [15, 15]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lose", LOSSES)
@pytest.mark.parametrize("use", USES)
def test_the_next_use_of_whatever_kind_ends_it(device: Any, lose: Any, mode: str, use: str) -> None:
    seq = CUDAGraphSequence()
    with contextlib.suppress(Boom):
        lose(seq, mode)
    gc.collect()
    USES[use](seq)
    assert_nothing_open(device)
    assert tensors.current_stream() == 0
    check_next_capture(seq, mode)


def test_a_sequence_whose_block_was_abandoned_replays_in_another_capture_no_more(
    device: Any,
) -> None:
    """The capture that the current stream was left in is none that a replay could go into."""
    x = torch.ones(2)
    good, y = capture(lambda: x * 2)
    lose_a_block(CUDAGraphSequence(), "relaxed")
    gc.collect()
    good.replay()
    assert y.tolist() == [2, 2]
    assert_nothing_open(device)


def test_a_part_that_was_abandoned_is_ended_by_the_next_use(device: Any) -> None:
    graph = Graph()

    def lose() -> None:
        graph.capture().__enter__()

    lose()
    gc.collect()
    with graph.capture() as part:
        torch.ones(2) + 1
    assert_nothing_open(device)
    assert len(part.nodes) == len(graph.nodes) > 0
    graph.close()


def test_another_thread_leaves_an_abandoned_block_alone(device: Any) -> None:
    """A capture ends on the thread that began it."""
    lose_a_block(CUDAGraphSequence(), "thread_local")
    gc.collect()
    in_thread(lambda: capture(lambda: torch.ones(2) + 1))
    assert device.open_captures() == 1
    capture(lambda: torch.ones(2) + 1)
    assert_nothing_open(device)


@pytest.mark.parametrize("mode", MODES)
def test_a_generator_that_another_thread_collects_is_ended_by_its_own(
    device: Any, mode: str
) -> None:
    seq = CUDAGraphSequence()
    holder = [captured(seq, mode)]
    holder[0].__enter__()
    in_thread(holder.clear)
    assert tensors.current_stream() != 0
    capture(lambda: torch.ones(2) + 1)
    assert_nothing_open(device)
    with pytest.raises(ReplayError, match="failed"):
        seq.replay()


@pytest.mark.parametrize("mode", MODES)
def test_a_generator_that_is_collected_in_the_capture_of_another_thread_does_it_no_harm(
    device: Any, mode: str
) -> None:
    x, holder = torch.ones(2), [captured(CUDAGraphSequence(), mode)]
    holder[0].__enter__()

    def work() -> None:
        def body() -> Any:
            y = x * 3
            holder.clear()
            return y + 1

        seq, y = capture(body, capture_error_mode="thread_local")
        x.fill_(5)
        seq.replay()
        assert y.tolist() == [16, 16]

    in_thread(work)  # and the device has seen no graph destroyed inside a capture
    assert not is_in_breakable_graph()


@pytest.mark.parametrize("mode", MODES)
def test_a_block_that_is_left_on_another_thread_says_so(device: Any, mode: str) -> None:
    seq = CUDAGraphSequence()
    block = breakable_graph(seq, capture_error_mode=mode)
    block.__enter__()
    with pytest.raises(CaptureError, match="another thread"):
        in_thread(lambda: block.__exit__(None, None, None))
    capture(lambda: torch.ones(2) + 1)
    assert_nothing_open(device)
    with pytest.raises(ReplayError, match="failed"):
        seq.replay()


LOSSES_OF_THREADS = {
    "entered by hand, and dropped": lambda seq, mode, kept: lose_a_block(seq, mode),
    "a generator, and dropped": lambda seq, mode, kept: lose_a_generator(seq, mode),
    "entered by hand, and kept": lambda seq, mode, kept: enter_and_keep(seq, mode, kept),
    "with lines recorded": lambda seq, mode, kept: enter_and_keep(
        seq, mode, kept, record_stacks=True
    ),
}


def enter_and_keep(seq: Any, mode: str, kept: list[Any], **options: Any) -> None:
    block = breakable_graph(seq, capture_error_mode=mode, **options)
    block.__enter__()
    kept.append(block)
    bump(torch.ones(2) * 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lose", LOSSES_OF_THREADS.values(), ids=LOSSES_OF_THREADS.keys())
@pytest.mark.parametrize("use", USES)
def test_a_block_whose_thread_has_ended_is_ended_by_any_other(
    device: Any, lose: Any, mode: str, use: str
) -> None:
    """Without changing the streams, the modes or the tracing of the thread that does it."""
    seq, kept = CUDAGraphSequence(), []
    in_thread(lambda: lose(seq, mode, kept))
    traced = sys.gettrace()
    USES[use](seq)
    assert_nothing_open(device)
    assert unfinished.pending == {}
    assert tensors.current_stream() == 0
    assert sys.gettrace() is traced
    for block in kept:
        with pytest.raises(CaptureError, match="another thread"):
            block.__exit__(None, None, None)
    check_next_capture(seq, mode)


@contextlib.contextmanager
def checked(lock: Any, calls: list[str]) -> Iterator[Any]:
    """A lock that writes down what is called while it is held."""

    class Checked:
        def __enter__(self) -> None:
            lock.acquire()
            sys.setprofile(self._note)

        def __exit__(self, *_: Any) -> None:
            sys.setprofile(None)
            lock.release()

        def _note(self, frame: Any, event: str, argument: Any) -> None:
            if event in ("call", "c_call") and frame.f_code.co_filename == open_blocks.__file__:
                calls.append(f"{frame.f_code.co_name}:{frame.f_lineno}")

    yield Checked()


def test_nothing_is_called_while_the_lock_of_the_blocks_is_held(
    device: Any, monkeypatch: Any
) -> None:
    """The collector, or a signal's handler, would run there, and may come for the same lock."""
    calls: list[str] = []
    with checked(unfinished._lock, calls) as lock:
        monkeypatch.setattr(open_blocks, "_lock", lock)
        in_thread(lambda: lose_a_block(CUDAGraphSequence(), "global"))
        capture(lambda: torch.ones(2) + 1)
    assert calls == []
    assert_nothing_open(device)


@pytest.mark.parametrize("mode", MODES)
def test_it_is_the_thread_that_counts_not_its_number_nor_who_started_it(
    device: Any, mode: str
) -> None:
    kept: list[Any] = []
    number = in_raw_thread(lambda: enter_and_keep(CUDAGraphSequence(), mode, kept))

    def work() -> None:
        traced, stream = sys.gettrace(), 0x55
        with tensors.stream(stream):
            assert not is_in_breakable_graph()
            assert unfinished.pending == {}
            assert tensors.current_stream() == stream
        assert sys.gettrace() is traced

    in_thread_of_number(number, work)
    assert_nothing_open(device)


@pytest.mark.parametrize("mode", MODES)
def test_a_part_of_a_thread_that_has_ended_takes_nothing_from_one_of_its_number(
    device: Any, mode: str
) -> None:
    graph, kept, flag, ran = Graph(), [], torch.tensor(True), []

    def lose() -> None:
        kept.append(graph.capture(mode=mode))
        kept[0].__enter__()
        torch.ones(2) + 1

    number = in_raw_thread(lose)
    in_thread_of_number(number, lambda: capture_if(flag, lambda: ran.append(1)))
    assert ran == [1]
    assert_nothing_open(device)
    graph.close()


def test_what_lies_inside_another_is_put_back_first(device: Any) -> None:
    def lose() -> None:
        entered = [breakable_graph(CUDAGraphSequence()), Graph().capture()]
        for each in entered:
            each.__enter__()

    for _ in range(8):  # a set had the right order half of the time
        lose()
        gc.collect()
        assert not is_in_breakable_graph()
        assert tensors.current_stream() == 0
        assert_nothing_open(device)


@pytest.mark.parametrize("mode", MODES)
def test_a_thread_may_end_the_block_of_another_inside_its_own_capture(
    device: Any, mode: str
) -> None:
    """The graphs that go with it are released without harm to that."""
    x, entered = torch.ones(2), threading.Event()

    def lose() -> None:
        assert entered.wait(20)
        lose_a_block(CUDAGraphSequence(), "thread_local")

    thread = threading.Thread(target=lose)
    thread.start()
    seq = CUDAGraphSequence()
    with breakable_graph(seq, capture_error_mode=mode):
        entered.set()
        thread.join()
        y = x * 3
        bump(y)
        assert len(unfinished.pending) == 1
        z = y + 1
    x.fill_(5)
    seq.replay()
    assert z.tolist() == [17, 17]


def test_a_block_that_cannot_be_ended_is_not_the_one_of_who_tries(
    device: Any, monkeypatch: Any
) -> None:
    from breakable_cuda_graphs.capture.block import Block

    def fail(block: Any) -> None:
        raise RuntimeError("the context is gone")

    in_thread(lambda: lose_a_block(CUDAGraphSequence(), "thread_local"))
    monkeypatch.setattr(Block, "put_back", fail)
    t = torch.ones(2)
    bump(t)
    assert t.tolist() == [2, 2]
    monkeypatch.undo()
    assert not is_in_breakable_graph()
    assert_nothing_open(device)


def test_a_forked_child_touches_nothing_of_a_block_that_is_open(device: Any) -> None:
    """Neither one of another thread nor its own, which it leaves with an error that says so."""
    entered, done = threading.Event(), threading.Event()

    def work() -> None:
        with breakable_graph(CUDAGraphSequence(), capture_error_mode="thread_local"):
            entered.set()
            assert done.wait(20)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(20)
    block = breakable_graph(CUDAGraphSequence(), capture_error_mode="relaxed")
    block.__enter__()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads and forks
        child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(ProcessError, match="forked"):
                block.__exit__(None, None, None)
            code = 2 if is_in_breakable_graph() or unfinished.pending else 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    block.__exit__(None, None, None)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0  # and the device fixture has no findings


def test_handles_are_released_again_once_a_thread_has_ended_in_a_block(device: Any) -> None:
    """An open capture holds up the release of everything else in the process."""
    kept: list[Any] = []
    in_thread(lambda: enter_and_keep(CUDAGraphSequence(), "global", kept))
    capture(lambda: torch.ones(2) + 1)
    gc.collect()
    capture(lambda: torch.ones(2) + 1)
    assert release.open_captures() == 0
    release.drain()
    assert release.pending() == 0


def test_what_could_not_be_ended_is_tried_again_by_a_mere_question(
    device: Any, monkeypatch: Any
) -> None:
    """The block has left the list of open ones by then, and its capture is open all the same."""
    kept: list[Any] = []
    in_thread(lambda: enter_and_keep(CUDAGraphSequence(), "global", kept))
    with monkeypatch.context() as patch:
        patch.setattr(stream_capture, "discard", lambda *_: attempt_boom())
        assert not is_in_breakable_graph()
    assert device.open_captures() == 1
    assert open_blocks.open_blocks == ()
    assert not is_in_breakable_graph()
    assert_nothing_open(device)
    assert not unfinished.pending


def attempt_boom() -> None:
    raise Boom


def test_a_part_whose_thread_has_ended_is_ended_by_any_other(device: Any) -> None:
    graph, kept = Graph(), []

    def lose() -> None:
        kept.append(graph.capture())
        kept[0].__enter__()
        torch.ones(2) + 1

    in_thread(lose)
    with graph.capture() as part:
        torch.ones(2) + 1
    assert_nothing_open(device)
    assert len(part.nodes) == len(graph.nodes) > 0
    with pytest.raises(CaptureError, match="another thread"):
        kept[0].__exit__(None, None, None)
    graph.close()


def test_a_block_of_a_living_thread_is_left_alone_by_all_others(device: Any) -> None:
    entered, done = threading.Event(), threading.Event()
    seq, x, results = CUDAGraphSequence(), torch.ones(2), []

    def work() -> None:
        with breakable_graph(seq, capture_error_mode="thread_local"):
            entered.set()
            assert done.wait(20)
            results.append(x * 2)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(20)
    assert not is_in_breakable_graph()
    assert len(unfinished.pending) == 1
    done.set()
    thread.join()
    x.fill_(4)
    seq.replay()
    assert results[0].tolist() == [8, 8]


def test_an_interrupt_in_the_end_of_a_block_is_made_good_at_once(
    device: Any, monkeypatch: Any
) -> None:
    """The rest of the end, and what was interrupted, is done before the interrupt surfaces."""
    real, calls = open_blocks.remove, []

    def remove(block: Any) -> None:
        calls.append(block)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(block)

    monkeypatch.setattr(open_blocks, "remove", remove)
    with pytest.raises(KeyboardInterrupt), breakable_graph(CUDAGraphSequence()):
        torch.ones(2) + 1
    assert len(calls) == 2
    assert open_blocks.open_blocks == ()
    assert unfinished.pending == {}
    assert tensors.current_stream() == 0


@pytest.mark.parametrize("error", [None, Boom()])
def test_a_recording_that_is_left_on_another_thread_says_so(device: Any, error: Any) -> None:
    recording = Graph().capture()
    recording.__enter__()
    leave = lambda: recording.__exit__(type(error) if error else None, error, None)  # noqa: E731
    if error is None:
        with pytest.raises(CaptureError, match="another thread"):
            in_thread(leave)
    else:
        in_thread(leave)  # the error that is on its way is the one to see
    capture(lambda: torch.ones(2) + 1)
    assert_nothing_open(device)


def test_the_bodys_error_stays_when_the_way_back_fails(device: Any, monkeypatch: Any) -> None:
    from breakable_cuda_graphs.capture.block import Block

    def fail(block: Any) -> None:
        raise RuntimeError("the context is gone")

    boom = Boom()
    with pytest.raises(Boom) as info, breakable_graph(CUDAGraphSequence()):
        monkeypatch.setattr(Block, "_come_home", fail)
        raise boom
    assert info.value is boom
    monkeypatch.undo()
    assert_nothing_open(device)


def test_a_recordings_error_stays_when_its_end_fails(device: Any, monkeypatch: Any) -> None:
    from breakable_cuda_graphs.graph.recording import Recording

    def fail(enclosed: Any) -> None:
        raise RuntimeError("the context is gone")

    boom = Boom()
    with pytest.raises(Boom) as info, Graph().capture():
        monkeypatch.setattr(Recording, "abandon", fail)
        raise boom
    assert info.value is boom
    assert "the context is gone" in info.value.__notes__[-1]
    CUDAGraphSequence().replay()  # what cannot be ended is not in the way
    monkeypatch.undo()
    capture(lambda: torch.ones(2) + 1)
    assert_nothing_open(device)


def test_who_may_replay_waits_for_what_the_captures_breaks_did(
    device: Any, monkeypatch: Any
) -> None:
    """The mark is there before the plan is: another thread may be waiting to replay."""
    seen: list[int] = []
    commit = CUDAGraphSequence._commit

    def look(sequence: Any, *rest: Any) -> None:
        seen.append(sequence._pool.mark._stream)
        commit(sequence, *rest)

    monkeypatch.setattr(CUDAGraphSequence, "_commit", look)
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        bump(torch.ones(2) * 2)
    assert seen != [-1]
    seq.reset()
