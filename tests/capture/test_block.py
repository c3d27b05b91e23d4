"""breakable_graph: its arguments, its streams, what it refuses, and what it costs the driver."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import (  # noqa: E402
    CaptureError,
    CUDAGraphSequence,
    UnjoinedStreamError,
    breakable_graph,
    is_in_breakable_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import (  # noqa: E402
    bindings,
    release,
)
from breakable_cuda_graphs.simulator import tensors  # noqa: E402
from helping import (  # noqa: E402
    MODES,
    a_stream,
    as_nccl_captures,
    assert_nothing_open,
    capture,
    forked,
    kinds,
    settle,
    watched_driver,
)


@no_graph
def bump(t: Any) -> None:
    t.add_(1)


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"cuda_graph": 3}, TypeError, "cuda_graph must be a CUDAGraphSequence, not int"),
        ({"capture_error_mode": "loose"}, ValueError, "'global', 'thread_local', 'relaxed'"),
        ({"barrier_fn": 3}, TypeError, "`barrier_fn` must be callable"),
        ({"generators": 3}, TypeError, "generators must be generators in a list"),
        ({"host_nodes": "maybe"}, ValueError, "'refuse', 'allow'"),
        ({"capture_error_mode": ["global"]}, ValueError, "'relaxed', not list"),
        ({"host_nodes": torch.ones(2)}, ValueError, "'allow', not Tensor"),  # and is not printed
    ],
)
def test_bad_arguments_are_refused_at_once_by_name(device, arguments, error, words):
    with pytest.raises(error, match=words):
        breakable_graph(**({"cuda_graph": CUDAGraphSequence()} | arguments))


def test_the_first_parameter_has_torchs_name_and_order(device):
    x, seq = torch.ones(2), CUDAGraphSequence()
    with breakable_graph(cuda_graph=seq) as nothing:
        assert nothing is None
        bump(x)
    with a_stream() as stream:
        with breakable_graph(seq, stream, "relaxed", None):
            bump(x)
        seq.reset()


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_is_given_to_the_driver(device, mode):
    modes = []
    with watched_driver(device) as driver:
        begin = device.driver.cuStreamBeginCapture

        def cuStreamBeginCapture(stream: Any, given: Any) -> Any:
            modes.append(int(given))
            return begin(stream, given)

        driver.cuStreamBeginCapture = cuStreamBeginCapture
        x = torch.ones(2)
        seq, y = capture(lambda: bump(x) or x * 2, capture_error_mode=mode)
        seq.replay()
        seq.reset()
        del seq
        settle()
    assert modes == [MODES.index(mode)] * 2


# ---------------------------------------------------------------- streams


def test_the_capture_stream_is_the_sequences_and_current_inside(device):
    seq, x, seen = CUDAGraphSequence(), torch.ones(2), []

    @no_graph
    def look() -> None:
        seen.append(tensors.current_stream())

    with breakable_graph(seq):
        seen.append(tensors.current_stream())
        look()
        x.add_(1)
        seen.append(tensors.current_stream())
    assert seen == [seq.stream.handle] * 3
    assert tensors.current_stream() == 0


def spellings(stream: Any) -> list[Any]:
    handle = int(stream)
    return [
        stream,
        handle,
        SimpleNamespace(cuda_stream=handle),
        SimpleNamespace(ptr=handle),
        SimpleNamespace(handle=ctypes.c_void_p(handle)),
    ]


@pytest.mark.parametrize("which", range(5))
def test_a_stream_of_the_users_in_each_spelling(device, which):
    x = torch.ones(2)
    with a_stream() as stream:
        spelled = spellings(stream)[which]
        seen = []

        def body() -> Any:
            seen.append(tensors.current_stream())
            y = x * 2
            bump(y)
            return y * 3

        seq, y = capture(body, stream=spelled)
        assert seen == [int(stream)]
        x.fill_(2)
        seq.replay()
        seq.replay(spelled)
        assert y.tolist() == [15, 15]
        seq.reset()


@pytest.mark.parametrize(("stream", "name"), [(0, "legacy"), (1, "legacy"), (2, "per-thread")])
def test_the_default_streams_are_refused_with_the_reason(device, stream, name):
    seq = CUDAGraphSequence()
    with pytest.raises(CaptureError, match=name):
        capture(lambda: None, seq, stream=stream)
    assert_nothing_open(device)
    x = torch.ones(2)
    capture(lambda: bump(x), seq)


def test_what_is_no_stream_is_refused_and_nothing_has_begun(device):
    seq = CUDAGraphSequence()
    with pytest.raises(TypeError, match="not a stream"):
        capture(lambda: None, seq, stream="main")
    assert_nothing_open(device)
    seq.replay()


def test_a_block_joins_the_ambient_stream_at_both_ends(device):
    x = torch.ones(2)
    with a_stream() as ambient, watched_driver(device) as driver, tensors.stream(ambient):
        seq = CUDAGraphSequence()
        seq.pool()
        waits = []
        wait = device.driver.cuStreamWaitEvent

        def cuStreamWaitEvent(stream: Any, event: Any, flags: int) -> Any:
            waits.append((int(stream), len(driver.calls)))
            return wait(stream, event, flags)

        driver.cuStreamWaitEvent = cuStreamWaitEvent
        with breakable_graph(seq):
            begun = driver.calls.index("cuStreamBeginCapture")
            bump(x)
        own = seq.stream.handle
        assert [stream for stream, _ in waits] == [own, int(ambient)]
        assert waits[0][1] <= begun < waits[1][1]
        assert tensors.current_stream() == int(ambient)
        seq.reset()
        del seq
        settle()


# ---------------------------------------------------------------- nesting


def test_a_block_inside_a_block_is_refused_and_the_outer_goes_on(device):
    x, outer, inner = torch.ones(2), CUDAGraphSequence(), CUDAGraphSequence()
    with breakable_graph(outer):
        y = x * 2
        with pytest.raises(CaptureError, match="nested"):
            inner_block = breakable_graph(inner)
            inner_block.__enter__()
        assert is_in_breakable_graph()
        y = y + 1
    x.fill_(3)
    outer.replay()
    assert y.tolist() == [7, 7]
    _, z = capture(lambda: x * 5, inner)
    inner.replay()
    assert z.tolist() == [15, 15]


def test_the_same_sequence_in_a_break_of_its_capture_is_refused(device):
    x, seq = torch.ones(2), CUDAGraphSequence()

    def try_it() -> None:
        with a_stream() as stream, pytest.raises(CaptureError, match="captured already"):
            capture(lambda: x * 2, seq, stream=stream)

    nest = no_graph(lambda: None, capture_stub=try_it)

    with breakable_graph(seq):
        y = x * 2
        nest()
    seq.replay()
    assert y.tolist() == [2, 2]


def test_a_capture_of_somebody_else_on_the_stream_is_refused_unharmed(device):
    driver = bindings.current()
    with a_stream() as stream:
        driver.cuStreamBeginCapture(stream, bindings.types.CUstreamCaptureMode(2))
        with pytest.raises(CaptureError, match="somebody else"):
            capture(lambda: None, stream=stream)
        with tensors.stream(stream), pytest.raises(CaptureError, match="somebody else"):
            capture(lambda: None)
        graph = driver.cuStreamEndCapture(stream)
        driver.cuGraphDestroy(graph)
    assert_nothing_open(device)


def test_a_break_may_capture_another_sequence_on_another_stream(device):
    x = torch.ones(2)
    inner = CUDAGraphSequence()

    @no_graph
    def nest(t: Any) -> None:
        if not len(inner):
            capture(lambda: t.mul_(10), inner)
        inner.replay()

    def body() -> Any:
        y = x + 1
        nest(y)
        return y + 5

    seq, y = capture(body)
    x.fill_(2)
    seq.replay()
    assert y.tolist() == [35, 35]


# ---------------------------------------------------------------- side streams


@pytest.mark.parametrize("debug", ["", "0", "1"])
def test_unjoined_work_at_the_end_names_the_kernels(device, monkeypatch, debug):
    monkeypatch.setenv("BREAKABLE_CUDA_GRAPHS_DEBUG", debug)
    x, seq = torch.ones(2), CUDAGraphSequence()
    with a_stream() as side:

        def body() -> None:
            y = x * 2
            with forked(side, join=False):
                y.sqrt()
                y.exp()
            x.add(1)

        with pytest.raises(UnjoinedStreamError, match="aten::exp") as info:
            capture(body, seq)
        assert info.value.kernels == ("aten::exp",)
        assert "wait_stream" in str(info.value)
        assert_nothing_open(device)
    _, y = capture(lambda: x * 3, seq)
    seq.replay()
    assert y.tolist() == [3, 3]


def test_a_fork_without_work_needs_no_join(device):
    x = torch.ones(2)
    with a_stream() as side:

        def body() -> Any:
            y = x * 2
            with forked(side, join=False):
                pass
            return y

        seq, y = capture(body)
        seq.replay()
        assert y.tolist() == [2, 2]
        seq.reset()


def test_a_node_that_a_library_added_by_hand_needs_no_join(device):
    """NCCL leaves one behind in every capture; the driver lets it, and so do we."""
    x = torch.ones(2)
    driver = bindings.current()
    event = driver.cuEventCreate(2)
    with a_stream() as own:

        def body() -> Any:
            y = x * 2
            with as_nccl_captures(bindings.types.CUstream(tensors.current_stream()), own, event):
                y = y + 1
            bump(y)
            return y * 2

        seq, y = capture(body)
        for value in (2.0, 5.0):
            x.fill_(value)
            seq.replay()
            assert y.tolist() == [2 * (2 * value + 2)] * 2
        seq.reset()
    driver.cuEventDestroy(event)


def test_work_that_was_let_go_is_unjoined_whatever_the_driver_says(device):
    """So is what NCCL begins with async_op=True: a leaf of another kind lies behind it."""
    x, other = torch.ones(2), torch.ones(2)
    driver = bindings.current()
    event = driver.cuEventCreate(2)
    with a_stream() as side:

        def body() -> Any:
            y = x * 2
            with forked(side, join=False):
                other.mul_(2)
                stream = bindings.types.CUstream(tensors.current_stream())
                info = driver.capture_info(stream)
                driver.cuGraphAddEventRecordNode(info.graph, info.dependencies, 1, event)
                driver.update_capture_dependencies(stream, [])
            return y

        with pytest.raises(UnjoinedStreamError, match="mul_"):
            capture(body)
        seq, y = capture(lambda: x * 3)
        seq.replay()
        assert y.tolist() == [3, 3]
        seq.reset()
    driver.cuEventDestroy(event)


# ---------------------------------------------------------------- host callbacks


def a_callback() -> Any:
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    return kind(lambda _: None)


@pytest.mark.parametrize("host_nodes", ["refuse", "allow"])
def test_host_callbacks_are_refused_unless_allowed(device, host_nodes):
    callback = a_callback()
    address = ctypes.cast(callback, ctypes.c_void_p).value
    seq = CUDAGraphSequence()

    def body() -> None:
        stream = bindings.types.CUstream(tensors.current_stream())
        bindings.current().cuLaunchHostFunc(stream, bindings.types.CUhostFn(address), 0)

    if host_nodes == "allow":
        capture(body, seq, host_nodes="allow")
        seq.replay()
    else:
        with pytest.raises(CaptureError, match="host callback") as info:
            capture(body, seq)
        assert info.value.segment == 0
        assert_nothing_open(device)


# ---------------------------------------------------------------- what it costs


def test_no_segment_and_no_block_synchronises_or_collects(device, monkeypatch):
    x = torch.ones(2)
    monkeypatch.setattr(gc, "collect", lambda *_: pytest.fail("gc.collect() was called"))
    with watched_driver(device) as driver:
        seq, _ = capture(lambda: [bump(x) for _ in range(5)])
        seq.replay()
        calls = set(driver.calls)
        seq.reset()
        del seq
        monkeypatch.undo()
        settle()
    assert not {name for name in calls if "Synchronize" in name}


def test_segments_cost_a_fixed_number_of_driver_calls(device):
    def cost(breaks: int) -> int:
        x = torch.ones(2)
        settle()
        with watched_driver(device) as driver:
            seq, _ = capture(lambda: [bump(x.mul_(2)) for _ in range(breaks)])
            count = len(driver.calls)
            seq.reset()
            del seq
            settle()
        return count

    costs = [cost(breaks) for breaks in (2, 4, 8, 16)][1:]
    assert (costs[2] - costs[1]) == 2 * (costs[1] - costs[0])
    each = (costs[1] - costs[0]) / 4
    assert each <= 20, f"{each} driver calls a segment"


def test_neighbours_without_a_break_are_one_launch(device):
    from breakable_cuda_graphs import force_no_graph

    x = torch.ones(2)

    def body() -> Any:
        y = x
        for _ in range(6):
            y = y * 2
            force_no_graph()
        return y

    with watched_driver(device) as driver:
        seq, y = capture(body)
        driver.calls.clear()
        x.fill_(3)
        seq.replay()
        assert driver.calls.count("cuGraphLaunch") == 1
        assert y.tolist() == [192, 192]
        assert kinds(seq) == "ge" * 6 + "-"
        seq.reset()
        del seq
        settle()


def test_nothing_is_released_inside_an_open_capture(device):
    x = torch.ones(2)
    old, _ = capture(lambda: bump(x * 2))
    with watched_driver(device) as driver:
        seq = CUDAGraphSequence()
        seq.pool()
        with breakable_graph(seq):
            y = x + 1
            del old
            settle()
            bump(y)
            settle()
            inside = [name for name in driver.calls if "ExecDestroy" in name]
            assert inside == []
            assert release.pending() > 0
        assert release.pending() == 0
        seq.reset()
        del seq, y
        settle()
