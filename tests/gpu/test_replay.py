"""Where and in which order replays run, and what a sequence is between captures."""

from __future__ import annotations

import copy
import ctypes
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from breakable_cuda_graphs import (
    CaptureError,
    CUDAGraphSequence,
    breakable_graph,
    force_no_graph,
    no_graph,
)

from .helpers import (
    Boom,
    bump,
    busy,
    check,
    check_replays,
    dev,
    kinds,
    same,
    set_input,
    sync,
    torch,
)

pytestmark = pytest.mark.gpu


# ---------------------------------------------------------------- the stream of a replay


class Scene:
    """result = (2 x + 1) * 3, with a break that notes which stream is current."""

    def __init__(self) -> None:
        self.seen: list[int] = []

        @no_graph
        def look(t: Any) -> None:
            self.seen.append(torch.cuda.current_stream().cuda_stream)
            t.add_(1)

        self.x, self.seq = dev(0), CUDAGraphSequence()
        with breakable_graph(self.seq):
            y = self.x * 2
            look(y)
            self.result = y * 3
        self.seen.clear()
        sync()


class Protocol:
    def __init__(self, handle: int) -> None:
        self.kept = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.kept


def test_a_replay_runs_on_the_callers_current_stream_and_breaks_see_it() -> None:
    scene, results = Scene(), []
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(6))]
    for k, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            busy(2)
            scene.x.fill_(k)
            scene.seq.replay()
            assert torch.cuda.current_stream() == stream
            results.append(scene.result.clone())
            stream.synchronize()
        assert scene.seen.pop() == stream.cuda_stream
    for k, got in enumerate(results):
        same(got, (2.0 * k + 1) * 3, f"replay {k}")


GIVEN: dict[str, Callable[[Any], Any]] = {
    "a torch stream": lambda stream: stream,
    "a raw handle": lambda stream: stream.cuda_stream,
    "the stream protocol": lambda stream: Protocol(stream.cuda_stream),
}


@pytest.mark.parametrize("make", GIVEN.values(), ids=GIVEN.keys())
def test_a_replay_runs_on_the_stream_it_is_given_and_breaks_see_it(make: Any) -> None:
    scene, stream = Scene(), torch.cuda.Stream()
    for k in range(5):
        with torch.cuda.stream(stream):
            busy(2)
            scene.x.fill_(k)
        before = torch.cuda.current_stream()
        scene.seq.replay(stream=make(stream))
        assert torch.cuda.current_stream() == before
        with torch.cuda.stream(stream):
            got = scene.result.clone()
        stream.synchronize()
        same(got, (2.0 * k + 1) * 3, f"replay {k}")
    assert scene.seen == [stream.cuda_stream] * 5


def test_the_stream_may_be_given_by_position_and_be_the_default_one() -> None:
    scene, side = Scene(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        scene.seq.replay(torch.cuda.default_stream())
        assert torch.cuda.current_stream() == side
    same(scene.result, 3.0)
    assert scene.seen == [0]


@pytest.mark.parametrize("stream", ["text", object()])
def test_what_is_no_stream_is_refused_at_replay(stream: object) -> None:
    scene = Scene()
    with pytest.raises((TypeError, ValueError), match="stream"):
        scene.seq.replay(stream=stream)
    check_replays(scene.seq, scene.x, scene.result, lambda t: (t * 2 + 1) * 3)


def test_a_break_that_raises_leaves_the_callers_stream() -> None:
    fail, x, seq, stream = False, dev(1), CUDAGraphSequence(), torch.cuda.Stream()

    @no_graph
    def touchy() -> None:
        if fail:
            raise Boom

    with breakable_graph(seq):
        x + 1
        touchy()
    fail = True
    before = torch.cuda.current_stream()
    with pytest.raises(Boom):
        seq.replay(stream=stream)
    assert torch.cuda.current_stream() == before


class Chain:
    """Three steps that only come out right if each replay ends before the next.

    Segment: a += 1. Break: b = a. Segment: c += b. So n replays give c = n (n + 1) / 2.
    """

    def __init__(self) -> None:
        self.a, self.b, self.c = dev(0), dev(0), dev(0)
        self.seq = CUDAGraphSequence()

        @no_graph
        def hand_over(a: Any, b: Any) -> None:
            busy(0.5)
            b.copy_(a)

        with breakable_graph(self.seq):
            self.a.add_(1)
            busy(2)
            hand_over(self.a, self.b)
            busy(2)
            self.c.add_(self.b)
        for tensor in (self.a, self.b, self.c):
            tensor.zero_()
        sync()

    def check(self, replays: int) -> None:
        same(self.a, float(replays), "the first step")
        same(self.c, replays * (replays + 1) / 2, "the last step")


@pytest.mark.parametrize("default", [False, True], ids=["two streams", "default and a stream"])
def test_a_replay_waits_for_the_one_before_it_on_another_stream(default: bool) -> None:
    chain = Chain()
    streams = (torch.cuda.default_stream() if default else torch.cuda.Stream(), torch.cuda.Stream())
    for k in range(8):
        with torch.cuda.stream(streams[k % 2]):
            chain.seq.replay()
    chain.check(8)


def test_given_streams_are_ordered_too() -> None:
    chain, streams = Chain(), (torch.cuda.Stream(), torch.cuda.Stream())
    for k in range(6):
        chain.seq.replay(stream=streams[k % 2].cuda_stream)
    chain.check(6)


def test_many_replays_without_a_sync_keep_their_values() -> None:
    scene, results = Scene(), []
    for k in range(50):
        busy(0.1)
        scene.x.fill_(k)
        scene.seq.replay()
        results.append(scene.result.clone())
    for k, got in enumerate(results):
        same(got, (2.0 * k + 1) * 3, f"replay {k}")


def test_a_break_may_replay_another_sequence() -> None:
    inner = Scene()

    def body(x: Any) -> Any:
        inner.x.copy_(x)
        no_graph(inner.seq.replay)()
        return inner.result + 1

    check(body)


@pytest.mark.parametrize("what", ["replay", "reset", "capture"])
def test_a_sequence_used_by_its_own_break_is_refused(what: str) -> None:
    seq, x, use = CUDAGraphSequence(), dev(1), True

    def capture() -> None:
        with breakable_graph(seq):
            pytest.fail("the block was entered")

    @no_graph(capture_stub=lambda: None)
    def again() -> None:
        if use:
            {"replay": seq.replay, "reset": seq.reset, "capture": capture}[what]()

    with breakable_graph(seq):
        y = x * 2
        again()
        z = y + 1
    with pytest.raises(RuntimeError):
        seq.replay()
    use = False
    check_replays(seq, x, z, lambda t: t * 2 + 1)


# ---------------------------------------------------------------- a sequence and its captures


def test_an_empty_sequence_replays_to_nothing() -> None:
    seq = CUDAGraphSequence()
    assert seq.segments == ()
    assert len(seq) == 0
    seq.replay()
    seq.replay(stream=torch.cuda.Stream())
    seq.reset()
    seq.replay()
    assert "CUDAGraphSequence" in repr(seq)


def test_a_block_without_work_replays_to_nothing() -> None:
    seq, x = CUDAGraphSequence(), dev(1)
    with breakable_graph(seq):
        pass
    assert kinds(seq) == "g"
    seq.replay()
    same(x, 1.0)


def test_captures_append_and_replay_in_their_order() -> None:
    x, seq, total = dev(1), CUDAGraphSequence(), dev(0)
    for k in (2.0, 3.0, 4.0):
        with breakable_graph(seq):
            total.mul_(k)
            bump(total)
            total.add_(x)
    assert len(seq) == 9
    assert kinds(seq) == "geg" * 3

    def expected(t: Any) -> Any:
        want = torch.zeros_like(t)
        for k in (2.0, 3.0, 4.0):
            want = want * k + 1 + t
        return want

    for value in (1.0, -2.0):
        set_input(x, value)
        total.zero_()
        seq.replay()
        same(total, expected(x), f"the replay for {value}")


def test_replays_between_appended_captures_run_what_is_there() -> None:
    x, seq, total = dev(1), CUDAGraphSequence(), dev(0)
    for k in range(1, 4):
        with breakable_graph(seq):
            total.add_(x)
        total.zero_()
        seq.replay()
        same(total, float(k))


def test_reset_empties_the_sequence_and_it_can_be_captured_again() -> None:
    x, seq = dev(1), CUDAGraphSequence()
    for factor in (2, 3, 4):
        with breakable_graph(seq):
            y = x * factor
            bump(y)
            z = y + 0
        check_replays(seq, x, z, lambda t, factor=factor: t * factor + 1)
        seq.reset()
        assert len(seq) == 0
        z.fill_(-1)
        seq.replay()
        same(z, -1.0, "a replay after the reset")
        seq.reset()


def test_reset_is_refused_while_the_block_is_open() -> None:
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        with pytest.raises(RuntimeError):
            seq.reset()
        bump(y)
        z = y + 1
    check_replays(seq, x, z, lambda t: t * 2 + 2)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": pickle.dumps,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("copying", COPIES.values(), ids=COPIES.keys())
def test_a_sequence_cannot_be_copied_and_says_why(copying: Callable[[Any], Any]) -> None:
    scene = Scene()
    with pytest.raises(TypeError, match=r"(?is)CUDAGraphSequence.*(graph|captur|memory|handle)"):
        copying(scene.seq)
    check_replays(scene.seq, scene.x, scene.result, lambda t: (t * 2 + 1) * 3)


@no_graph
def module_level_break(t: Any) -> None:
    t.add_(4)


def through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("copying", [through_pickle, copy.copy, copy.deepcopy])
def test_a_decorated_function_can_be_pickled_and_copied(copying: Callable[[Any], Any]) -> None:
    twin = copying(module_level_break)

    def body(x: Any) -> Any:
        y = x * 2
        twin(y)
        return y + 0

    assert kinds(check(body)) == "geg"


# ---------------------------------------------------------------- copies and host nodes


def test_pinned_memory_is_read_and_written_anew_at_every_replay() -> None:
    source, target = torch.ones(64).pin_memory(), torch.zeros(64).pin_memory()
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        staged = torch.empty(64, device="cuda")
        staged.copy_(source, non_blocking=True)
        y = x * staged
        bump(y)
        target.copy_(y + 1, non_blocking=True)
    for k in range(4):
        source.copy_(torch.arange(64) + k)
        x.fill_(k)
        seq.replay()
        sync()
        assert torch.equal(target, (torch.arange(64) + k) * float(k) + 2)


def test_pinned_memory_made_and_dropped_inside_a_segment_stays_valid() -> None:
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        host = torch.empty(64, pin_memory=True)
        host.copy_(y, non_blocking=True)
        z = host.to("cuda", non_blocking=True) + 1
        del host
    others = [torch.full((64,), -7.0).pin_memory() for _ in range(32)]
    check_replays(seq, x, z, lambda t: t * 2 + 1)
    assert all(bool((other == -7).all()) for other in others)


class HostFunction:
    """A callback without Python: it posts a semaphore of the C library, which counts it."""

    def __init__(self) -> None:
        self.libc, self.cuda = ctypes.CDLL(None), ctypes.CDLL("libcuda.so.1")
        self.semaphore = ctypes.create_string_buffer(64)
        self.libc.sem_init(self.semaphore, 0, 0)

    def launch(self) -> None:
        code = self.cuda.cuLaunchHostFunc(
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            ctypes.cast(self.libc.sem_post, ctypes.c_void_p),
            ctypes.cast(self.semaphore, ctypes.c_void_p),
        )
        assert code == 0, f"cuLaunchHostFunc gave {code}"

    def count(self) -> int:
        value = ctypes.c_int()
        self.libc.sem_getvalue(self.semaphore, ctypes.byref(value))
        return value.value


@pytest.mark.parametrize("segment", ["first", "second"])
def test_a_host_node_is_refused_with_the_advice_to_use_a_break(segment: str) -> None:
    call, x = HostFunction(), dev(1)
    with pytest.raises(CaptureError, match=r"(?is)host.*(break|no_graph)"):
        with breakable_graph(CUDAGraphSequence()):
            y = x + 1
            if segment == "second":
                bump(y)
            call.launch()
            y + 1
    assert call.count() == 0


def test_a_host_node_is_refused_at_a_break_too() -> None:
    call, x, ran = HostFunction(), dev(1), []
    look = no_graph(lambda: ran.append(1))
    with pytest.raises(CaptureError, match=r"(?i)host"), breakable_graph(CUDAGraphSequence()):
        x + 1
        call.launch()
        look()
    assert not ran
    assert call.count() == 0


def test_host_nodes_that_are_allowed_run_at_every_replay() -> None:
    call, x, seq = HostFunction(), dev(1), CUDAGraphSequence()
    with breakable_graph(seq, host_nodes="allow"):
        y = x * 2
        call.launch()
        bump(y)
        call.launch()
        z = y + 1
    assert call.count() == 0
    check_replays(seq, x, z, lambda t: t * 2 + 2)
    assert call.count() == 8


def test_host_functions_in_a_break_run_at_every_replay() -> None:
    call, x, seq = HostFunction(), dev(1), CUDAGraphSequence()
    launch = no_graph(call.launch)
    with breakable_graph(seq):
        y = x * 2
        launch()
        z = y + 1
    check_replays(seq, x, z, lambda t: t * 2 + 1)
    assert call.count() == 5


def test_forced_splits_and_breaks_may_be_mixed_at_will() -> None:
    def body(x: Any) -> Any:
        y = x * 2
        force_no_graph()
        bump(y)
        force_no_graph()
        y = y + 1
        force_no_graph()
        bump(y)
        return y * 2

    assert kinds(check(body)) == "gegegegegeg"
