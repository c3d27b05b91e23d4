"""A sequence: what it holds, what a replay checks, whose stream it runs on, and how it is let go."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import (  # noqa: E402
    BreakableCUDAGraph,
    CaptureError,
    CUDAGraphSequence,
    EagerSegment,
    GraphSegment,
    ReplayError,
    annotate,
    breakable_graph,
    force_no_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import (  # noqa: E402
    bindings,
    contexts,
    release,
)
from breakable_cuda_graphs.simulator import tensors  # noqa: E402
from helping import (  # noqa: E402
    Boom,
    a_stream,
    asked_collector,
    assert_nothing_open,
    capture,
    kinds,
    settle,
    watched_driver,
)


@no_graph
def bump(t: Any) -> None:
    t.add_(1)


# ---------------------------------------------------------------- what it holds


def test_both_names_are_one_class():
    assert BreakableCUDAGraph is CUDAGraphSequence


def test_n_breaks_make_2n_plus_1_segments_in_order(device):
    x = torch.ones(2)

    def body() -> None:
        bump(x)
        y = x * 2
        bump(y)
        bump(y)

    seq, _ = capture(body)
    assert kinds(seq) == "-ege-e-"
    assert len(seq) == len(seq.segments) == 7
    assert [segment.index for segment in seq.segments] == list(range(7))
    assert isinstance(seq.segments, tuple)
    assert isinstance(seq.segments[0], GraphSegment)
    assert isinstance(seq.segments[1], EagerSegment)
    assert seq.segments[1].name == "bump"


def test_parts_of_later_blocks_are_numbered_on(device):
    """The number is the place in `segments`: in names, in what is watched, and in errors."""
    x, seq, other = torch.ones(2), CUDAGraphSequence(), torch.ones(2)
    for t in (x, other):
        with breakable_graph(seq):
            with annotate("scope"):
                t.mul_(2)
                bump(t)
                t.add_(1)
    assert [segment.index for segment in seq.segments] == list(range(6))
    assert [repr(segment).split()[1] for segment in seq.segments] == [f"{n}:" for n in range(6)]
    assert [part.graph.nodes[0].scope for part in seq.segments[::3]] == ["scope"] * 2
    assert seq.segments[4].scopes == ("scope",)
    assert any("read or written in segment 3," in line for line in seq.watched)
    with pytest.raises(RuntimeError) as caught, breakable_graph(seq):
        x.sum().item()
    assert "segment 6 " in caught.value.__notes__[0]


def test_a_break_segment_shows_what_is_called(device):
    def body_of_break(t: Any, scale: float, *, key: str) -> None:
        t.mul_(scale)

    x = torch.ones(2)
    seq, _ = capture(lambda: no_graph(body_of_break)(x, 3.0, key="k"))
    segment = seq.segments[1]
    assert segment.fn is body_of_break
    assert segment.args[1:] == (3.0,)
    assert segment.kwargs == {"key": "k"}
    assert segment.args[0] is not x
    assert segment.args[0].data_ptr() == x.data_ptr()
    assert segment.name.endswith("body_of_break")
    assert segment.name in repr(segment)


def test_force_no_graph_leaves_an_eager_segment(device):
    x = torch.ones(2)

    def body() -> Any:
        y = x + 1
        force_no_graph()
        return y * 2

    seq, y = capture(body)
    assert kinds(seq) == "geg"
    assert seq.segments[1].name == "force_no_graph"
    assert seq.segments[1].fn() is None
    x.fill_(4)
    seq.replay()
    assert y.tolist() == [10, 10]


def test_captures_append(device):
    x = torch.ones(2)
    seq, y = capture(lambda: x + 1)
    _, z = capture(lambda: y * 2, seq)
    capture(lambda: bump(z), seq)
    assert kinds(seq) == "gg-e-"
    x.fill_(3)
    seq.replay()
    assert z.tolist() == [9, 9]
    seq.replay()
    assert z.tolist() == [9, 9]


def test_the_repr_tells_the_state(device):
    x, seq = torch.ones(2), CUDAGraphSequence()
    assert repr(seq) == "<CUDAGraphSequence 0 graph segments, 0 breaks>"
    with breakable_graph(seq):
        bump(x)
        assert "capturing" in repr(seq)
    assert "2 graph segments, 1 breaks" in repr(seq)
    del x
    settle()
    assert "stale" in repr(seq)
    assert [repr(segment) for segment in seq.segments] == [
        "<GraphSegment 0: empty>",
        "<EagerSegment 1: bump>",
        "<GraphSegment 2: empty>",
    ]


# ---------------------------------------------------------------- replay


def test_replaying_an_empty_sequence_does_nothing(device):
    seq = CUDAGraphSequence()
    seq.replay()
    with breakable_graph(seq):
        pass
    seq.replay()
    assert kinds(seq) == "-"


def test_a_replay_runs_everything_in_order_with_new_values(device):
    x, log = torch.ones(2), []

    @no_graph
    def look(t: Any, name: str) -> None:
        log.append((name, t.tolist()))

    def body() -> Any:
        y = x * 2
        look(y, "first")
        y = y + 1
        look(y, "second")
        return y

    seq, _ = capture(body)
    log.clear()
    for value in (1, 5):
        x.fill_(value)
        seq.replay()
    assert log == [
        ("first", [2, 2]), ("second", [3, 3]), ("first", [10, 10]), ("second", [11, 11]),
    ]  # fmt: skip


def test_a_replay_inside_its_own_block_is_refused_and_the_block_goes_on(device):
    x = torch.ones(2)
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        y = x + 1
        with pytest.raises(ReplayError, match="being captured"):
            seq.replay()
        with pytest.raises(CaptureError, match="cannot be reset"):
            seq.reset()
        y = y * 2
    x.fill_(3)
    seq.replay()
    assert y.tolist() == [8, 8]


@pytest.mark.parametrize("what", ["replayed", "reset", "captured"])
def test_a_break_cannot_use_its_own_sequence(device, what):
    x, out, do = torch.ones(2), torch.zeros(2), []
    acts = {
        "replayed": lambda: seq.replay(),
        "reset": lambda: seq.reset(),
        "captured": lambda: capture(lambda: x + 1, seq),
    }

    @no_graph
    def selfish() -> None:
        if do:
            acts[what]()

    def body() -> None:
        selfish()
        out.copy_(x * 2)

    seq, _ = capture(body)
    do.append(True)
    with pytest.raises(ReplayError, match=what):
        seq.replay()
    assert out.tolist() == [0, 0]
    assert_nothing_open(device)
    do.clear()
    seq.replay()
    assert out.tolist() == [2, 2]


def test_a_break_may_replay_and_capture_other_sequences(device):
    x = torch.ones(2)
    other, y = capture(lambda: x * 10)

    @no_graph
    def replay_other(t: Any) -> None:
        other.replay()
        third, z = capture(lambda: y + 1)
        third.replay()
        t.copy_(z)

    def body() -> Any:
        z = torch.zeros(2)
        replay_other(z)
        return z * 2

    seq, z = capture(body)
    x.fill_(3)
    seq.replay()
    assert z.tolist() == [62, 62]


def test_a_reset_empties_and_the_sequence_captures_again(device):
    x = torch.ones(2)
    seq, _ = capture(lambda: bump(x))
    pool = seq.pool()
    seq.reset()
    assert len(seq) == 0
    assert seq.pool() is pool
    seq.replay()
    _, y = capture(lambda: x * 4, seq)
    x.fill_(2)
    seq.replay()
    assert y.tolist() == [8, 8]


def test_a_reset_gives_graphs_and_executables_back_at_once(device):
    x = torch.ones(2)

    def body() -> None:
        y = x * 2
        bump(y)
        y.mul_(3)

    seq, _ = capture(body)
    assert [line for line in device.leaks() if "exec" in line]
    seq.reset()
    assert [line for line in device.leaks() if "graph" in line or "exec" in line] == []


@pytest.mark.parametrize("looked", [False, True])
def test_a_reset_gives_graphs_back_that_nobody_looked_into_whoever_keeps_the_segments(
    device, looked
):
    """One that somebody has looked into may be being read in another thread."""
    x = torch.ones(2)
    seq, _ = capture(lambda: x * 2)
    kept = seq.segments
    if looked:
        assert len(kept[0].graph) == 1
    seq.reset()
    assert any("graph" in line for line in device.leaks()) is looked
    with pytest.raises(RuntimeError, match="closed"):
        kept[0].graph.nodes  # noqa: B018
    del kept
    assert [line for line in device.leaks() if "exec" in line] == []


def test_sequences_share_a_pool_and_its_stream(device):
    x = torch.ones(2)
    first, y = capture(lambda: x + 1)
    second = CUDAGraphSequence(pool=first.pool())
    _, z = capture(lambda: y * 2, second)
    assert second.stream is first.stream
    assert second.pool() is first.pool()
    x.fill_(6)
    first.replay()
    second.replay()
    assert z.tolist() == [14, 14]
    first.reset()
    second.replay()


# ---------------------------------------------------------------- streams


def test_breaks_see_the_stream_of_the_replay_and_it_is_put_back(device):
    seen = []

    @no_graph
    def look() -> None:
        seen.append(tensors.current_stream())

    seq, _ = capture(look)
    with a_stream() as one, a_stream() as two:
        seen.clear()
        seq.replay(one)
        seq.replay(int(two))
        with tensors.stream(one):
            seq.replay()
            seq.replay(two)
            assert tensors.current_stream() == int(one)
        seq.replay()
        seq.reset()
        assert seen == [int(one), int(two), int(one), int(two), 0]


def test_a_replay_on_another_stream_waits_for_the_last_one(device):
    x = torch.ones(2)
    with a_stream() as one, watched_driver(device) as driver:
        seq, _ = capture(lambda: x + 1)
        seq.replay()
        driver.calls.clear()
        seq.replay()
        assert "cuStreamWaitEvent" not in driver.calls
        driver.calls.clear()
        seq.replay(one)
        calls = driver.calls
        assert calls.index("cuStreamWaitEvent") < calls.index("cuGraphLaunch")
        assert calls.index("cuGraphLaunch") < calls.index("cuEventRecord")
        seq.reset()
        del seq
        settle()


def a_failing_sequence() -> tuple[Any, list[int]]:
    """A segment, and a break that raises once its list has something in it."""
    fail: list[int] = []
    x = torch.ones(2)

    @no_graph
    def maybe(t: Any) -> None:
        if fail:
            raise Boom

    seq, _ = capture(lambda: maybe(x * 2), keep_inputs=True)
    fail.append(1)
    return seq, fail


def test_a_replay_waits_for_one_that_failed_on_another_stream(device):
    with a_stream() as one, watched_driver(device) as driver:
        seq, fail = a_failing_sequence()
        fail.clear()
        seq.replay()
        fail.append(1)
        with pytest.raises(Boom):
            seq.replay(one)
        fail.clear()
        driver.calls.clear()
        seq.replay()
        assert "cuStreamWaitEvent" in driver.calls
        seq.reset()
        del seq
        settle()


def test_the_error_of_a_break_is_seen_though_the_device_fails_too(device):
    with watched_driver(device) as driver:
        seq, _ = a_failing_sequence()
        driver.answer = lambda place, name, go: (
            (bindings.types.CUresult(700),) if name == "cuEventRecord" else go()
        )
        with pytest.raises(Boom):
            seq.replay()
        driver.answer = None
        seq.reset()
        del seq
        settle()


def test_a_stream_of_another_context_is_refused(device):
    driver = bindings.current()
    x = torch.ones(2)
    seq, _ = capture(lambda: bump(x))
    home = driver.cuCtxGetCurrent()
    other = driver.cuCtxCreate(None, 0, 0)
    stream = driver.cuStreamCreate(1)
    driver.cuCtxSetCurrent(home)
    with pytest.raises(ReplayError, match="another CUDA context"):
        seq.replay(stream)
    driver.cuStreamDestroy(stream)
    driver.cuCtxDestroy(other)


def test_a_replay_works_where_another_context_is_current_and_leaves_it(device):
    driver = bindings.current()
    x = torch.ones(2)
    seq, _ = capture(lambda: bump(x))
    home = driver.cuCtxGetCurrent()
    other = driver.cuCtxCreate(None, 0, 0)
    assert int(driver.cuCtxGetCurrent()) == int(other) != int(home)
    x.fill_(1)
    seq.replay()
    assert x.tolist() == [2, 2]
    assert int(driver.cuCtxGetCurrent()) == int(other)
    driver.cuCtxSetCurrent(home)
    driver.cuCtxDestroy(other)


# ---------------------------------------------------------------- modes


def test_a_break_replays_under_the_modes_of_its_capture(device):
    seen = []

    @no_graph
    def look() -> None:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    def body() -> None:
        look()
        with torch.no_grad():
            look()
        with torch.autocast("cpu"):
            look()

    seq, _ = capture(body)
    wanted = [(True, False), (False, False), (True, True)]
    assert seen == wanted
    for outside in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        seen.clear()
        with outside():
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            seq.replay()
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
        assert seen == wanted


# ---------------------------------------------------------------- letting go


def test_a_dropped_sequence_gives_everything_back(device):
    x = torch.ones(2)
    seq, _ = capture(lambda: bump(x * 2))
    seq.replay()
    gone = weakref.ref(seq)
    del seq
    assert gone() is None
    settle()
    assert device.leaks() == []


def test_a_sequence_in_a_cycle_collected_inside_a_capture_harms_nothing(device):
    x = torch.ones(2)
    old, _ = capture(lambda: bump(x * 2))
    old.myself = old
    del old
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        y = x + 1
        gc.collect()
        bump(y)
        gc.collect()
        y = y * 2
    x.fill_(2)
    seq.replay()
    assert y.tolist() == [8, 8]


def test_copies_and_pickles_say_why_not(device):
    seq, _ = capture(lambda: torch.ones(2) + 1)
    _, _ = capture(lambda: bump(torch.ones(2)), seq)
    for owner in (seq, *seq.segments, breakable_graph(seq)):
        for act in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"a {type(owner).__name__} .* owns CUDA graphs"):
                act(owner)


def test_a_failed_capture_does_not_replay_until_one_succeeds(device):
    x = torch.ones(2)
    seq, y = capture(lambda: x + 1)
    with pytest.raises(Boom), breakable_graph(seq):
        raise Boom
    with pytest.raises(ReplayError, match="reset"):
        seq.replay()
    capture(lambda: y.mul_(2), seq)
    seq.replay()
    assert y.tolist() == [4, 4]


def test_the_context_is_made_current_in_a_thread_without_one(device):
    from helping import in_thread

    x = torch.ones(2)
    seq, _ = capture(lambda: bump(x))
    x.fill_(1)

    def work() -> int:
        seq.replay()
        return contexts.current(bindings.current())

    assert in_thread(work) == int(bindings.current().cuCtxGetCurrent())
    assert x.tolist() == [2, 2]


@pytest.mark.parametrize("end", ["reset", "drop"])
def test_the_last_replay_is_waited_for_before_anything_is_given_back(device, end):
    x = torch.ones(2)
    with watched_driver(device) as driver:
        seq, _ = capture(lambda: x + 1)
        seq.replay()
        driver.calls.clear()
        if end == "reset":
            seq.reset()
        del seq
        settle()
        calls = list(driver.calls)
    assert calls.index("cuEventSynchronize") < calls.index("cuGraphExecDestroy")


@pytest.mark.parametrize("how", ["reset", "dropped", "failed"])
def test_a_pool_goes_with_its_sequence_and_does_not_wait_for_the_collector(
    device: Any, how: str
) -> None:
    seq, x = CUDAGraphSequence(), torch.ones(2)
    gc.collect()
    with asked_collector():
        with contextlib.suppress(Boom), breakable_graph(seq):
            bump(x * 2)
            pool = weakref.ref(seq._pool)
            if how == "failed":
                raise Boom
        if how == "reset":
            seq.reset()
        else:
            del seq
        release.drain()
        assert pool() is None


# ---------------------------------------------------------------- is the stream in a capture?


@pytest.mark.parametrize("answer", ["no", "yes", "an error"])
def test_where_a_library_tells_of_captures_itself_the_driver_is_asked_if_it_does_not_deny(
    device, monkeypatch, answer
):
    """`torch.cuda.is_current_stream_capturing` raises for the default stream beside a capture."""
    asked = []

    def is_capturing() -> bool:
        asked.append(answer)
        if answer == "an error":
            raise RuntimeError("operation would make the legacy stream depend on a capturing one")
        return answer == "yes"

    x, seq = torch.ones(2), CUDAGraphSequence()
    with watched_driver(device) as watched:
        monkeypatch.setattr(seq._ensure_framework(), "is_capturing", is_capturing)
        seq, y = capture(lambda: x * 2, seq)
        x.fill_(3)
        watched.calls.clear()
        seq.replay()
        asked_driver = "cuStreamIsCapturing" in watched.calls
    assert y.tolist() == [6, 6]
    assert asked == [answer]
    assert asked_driver is (answer != "no")
