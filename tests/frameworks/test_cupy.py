"""CuPy in a block: private memory, its current stream, its arrays as arguments and results of breaks.

On a stand-in for CuPy (`fake_cupy`) over the simulated driver; the real one is in `tests/gpu`.
"""

from __future__ import annotations

import gc
import threading
import types as python_types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import helping
from breakable_cuda_graphs import (
    CaptureError,
    CUDAGraphSequence,
    EscapedWorkWarning,
    StaleInputError,
    breakable_graph,
    is_in_breakable_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import bindings, contexts, release
from breakable_cuda_graphs._driver.bindings import types
from breakable_cuda_graphs.frameworks import choose, raw
from breakable_cuda_graphs.frameworks import cupy as adapter
from breakable_cuda_graphs.frameworks import loaded as libraries
from helping import Boom, capture, in_thread, text_of

from . import fake_cupy

N = 8


@pytest.fixture
def loaded(bare_device: Any, monkeypatch: Any) -> Iterator[dict[str, Any]]:
    """Which libraries count as loaded, by name; the raw framework, whether torch is there or not."""
    driver = bindings.current()
    driver.cuCtxSetCurrent(types.CUcontext(contexts.primary(driver, 0)))
    framework = raw.RawFramework(driver, contexts.primary(driver, 0))
    monkeypatch.setattr(choose, "framework_for", lambda driver, stream: framework)
    modules: dict[str, Any] = {}
    monkeypatch.setattr(libraries, "loaded", lambda driver, name: modules.get(name))
    monkeypatch.setattr(libraries, "sys", python_types.SimpleNamespace(modules=modules))
    yield modules
    modules.clear()
    gc.collect()
    release.drain()
    adapter._sweep()
    gc.collect()
    release.drain()
    assert adapter._lingering == []
    assert bare_device.leaks() == []


@pytest.fixture
def cupy(loaded: dict[str, Any]) -> Iterator[Any]:
    """The stand-in, loaded; afterwards its allocator and its current stream are as before."""
    module = loaded["cupy"] = fake_cupy.module()
    yield module
    assert module.cuda.get_allocator() == module.pool.malloc, "another allocator was left in force"
    assert module.cuda.get_current_stream() is fake_cupy.Stream.null, "another stream was left"
    helping.settle()  # arrays in frames of exceptions
    module.pool.free_all_blocks()


@pytest.fixture
def mine(cupy: Any) -> Iterator[Any]:
    """A stream of the user's."""
    made = cupy.cuda.Stream()
    yield made
    gc.collect()
    release.drain()
    bindings.current().cuStreamDestroy(types.CUstream(made.ptr))


def values(array: Any) -> set[int]:
    return set(array.get())


@no_graph
def add_one(t: Any) -> None:
    t += 1


# ---------------------------------------------------------------- private memory


def test_what_captured_work_allocates_is_nobody_elses_until_reset(cupy):
    x, others = cupy.full(N, 0), []
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        t = x * 2
        add_one(t)
        out = t * 3 + 1
        del t
    used = cupy.pool.used_bytes()
    for k in range(5):
        others += [cupy.full(N, -7) for _ in range(8)]
        x.fill(k)
        seq.replay()
        assert values(out) == {(2 * k + 1) * 3 + 1}
        assert all(values(other) == {-7} for other in others)
    assert cupy.pool.used_bytes() == used + 40 * fake_cupy.UNIT
    seq.reset()


def test_blocks_that_are_free_again_are_used_again_inside_the_capture(cupy):
    x, seen = cupy.full(N, 1), []
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        for _ in range(10):
            y = x * 2
            seen.append(y.data.ptr)
            del y
    assert len(set(seen)) == 1


def test_sequences_of_one_pool_share_its_memory_and_others_do_not(cupy):
    x = cupy.full(N, 1)
    first = CUDAGraphSequence()
    second, third = CUDAGraphSequence(pool=first.pool()), CUDAGraphSequence()
    places = []
    for seq in (first, second, third):
        with breakable_graph(seq):
            y = x * 2
            places.append(y.data.ptr)
            del y
    assert places[0] == places[1] != places[2]


def test_memory_of_a_living_result_outlives_its_sequence(cupy):
    x = cupy.full(N, 4)
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        out = x * 2
    seq.replay()
    del seq
    gc.collect()
    release.drain()
    assert len(adapter._lingering) == 1
    others = [cupy.full(N, -7) for _ in range(8)]
    assert values(out) == {8}
    del out, others
    gc.collect()
    with breakable_graph(CUDAGraphSequence()):
        x * 2
    assert adapter._lingering == []


def test_breaks_allocate_where_the_user_says(cupy):
    mine, made = cupy.cuda.MemoryPool(), []

    @no_graph
    def make() -> None:
        made.append(cupy.full(N, 3))

    seq = CUDAGraphSequence()
    with cupy.cuda.using_allocator(mine.malloc):
        with breakable_graph(seq):
            make()
            made[0] + 1
        assert cupy.cuda.get_allocator() == mine.malloc
    assert mine.used_bytes() == fake_cupy.UNIT
    assert cupy.pool.used_bytes() == 0
    made.clear()
    assert mine.used_bytes() == fake_cupy.UNIT, "memory of a break is the sequence's"
    seq.reset()


@pytest.mark.parametrize("where", ["segment", "break", "end"])
def test_whatever_fails_the_allocator_and_the_stream_are_put_back(cupy, where):
    x = cupy.full(N, 1)

    @no_graph
    def fail() -> None:
        raise Boom

    kind = RuntimeError if where == "end" else Boom
    with pytest.raises(kind), breakable_graph(CUDAGraphSequence()):
        x * 2
        if where == "break":
            fail()
        if where == "segment":
            raise Boom
        bindings.current().module.cuStreamSynchronize(
            types.CUstream(cupy.cuda.get_current_stream().ptr)
        )
    assert cupy.cuda.get_allocator() == cupy.pool.malloc


def test_other_threads_allocate_as_before(cupy):
    x = cupy.full(N, 1)
    with breakable_graph(CUDAGraphSequence(), capture_error_mode="thread_local"):
        x * 2
        assert in_thread(cupy.cuda.get_allocator) == cupy.pool.malloc
        assert cupy.cuda.get_allocator() != cupy.pool.malloc


def test_a_block_left_by_another_thread_lets_this_one_allocate_as_before(cupy):
    x, block = cupy.full(N, 1), breakable_graph(CUDAGraphSequence(), capture_error_mode="relaxed")
    entered, left = threading.Event(), threading.Event()
    places: list[Any] = []

    def enter() -> None:
        block.__enter__()
        x * 2
        entered.set()
        left.wait(10)
        places.append(cupy.full(N, 5).data.mem.pool())
        is_in_breakable_graph()  # any use of the library on the thread that entered it

    thread = threading.Thread(target=enter)
    thread.start()
    entered.wait(10)
    with pytest.raises(CaptureError, match="another thread"):
        block.__exit__(None, None, None)
    left.set()
    thread.join(10)
    assert places == [cupy.pool]


# ---------------------------------------------------------------- streams


def test_the_capture_stream_is_cupys_current_one_without_a_stream_given(cupy, mine):
    x, out, streams = cupy.full(N, 1), cupy.full(N, 0), []

    @no_graph
    def look() -> None:
        streams.append(cupy.cuda.get_current_stream().ptr)

    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        out[...] = x
        look()
    assert streams == [seq.stream.handle]
    with mine:
        seq.replay()
    seq.replay(mine)
    seq.replay()
    assert streams[1:] == [mine.ptr, mine.ptr, 0]


def test_work_that_the_capture_misses_is_told_once(cupy, mine):
    x = cupy.full(N, 1)

    def body() -> None:
        x * 2
        with mine:
            x * 3
            x * 4

    with pytest.warns(EscapedWorkWarning, match="work of CuPy") as caught:
        capture(body)
    assert len(caught) == 1
    assert caught[0].filename == fake_cupy.__file__  # the first line that is not this library's


def test_a_stream_of_the_users_is_current_as_the_object_that_it_is(cupy, mine):
    with breakable_graph(CUDAGraphSequence(), stream=mine):
        cupy.full(N, 1)
        assert cupy.cuda.get_current_stream() is mine


def test_host_functions_are_refused_by_name_or_kept_and_run_at_every_replay(cupy, mine):
    calls: list[str] = []

    def body() -> None:
        cupy.full(N, 1)
        mine.launch_host_func(calls.append, "argument")

    with pytest.raises(CaptureError, match="host callback"):
        with breakable_graph(CUDAGraphSequence(), stream=mine):
            body()
    seq = CUDAGraphSequence()
    with breakable_graph(seq, stream=mine, host_nodes="allow"):
        body()
    assert mine._graph_host_funcargs is None
    gc.collect()
    for _ in range(3):
        seq.replay(mine)
    bindings.current().cuStreamSynchronize(types.CUstream(mine.ptr))
    assert calls == ["argument"] * 3
    seq.reset()


def test_a_host_function_that_cupy_itself_refuses_comes_with_the_reason(cupy, mine):
    same = cupy.cuda.Stream(mine.ptr)  # another object for the stream, unknown to the block
    with pytest.raises(AttributeError) as caught:
        with breakable_graph(CUDAGraphSequence(), stream=mine):
            same.launch_host_func(print, "")
    assert "host callback" in text_of(caught.value)


# ---------------------------------------------------------------- arguments and results


def test_an_older_array_is_watched_and_its_views_keep_it(cupy):
    x = cupy.full(N, 1)
    view = x[2:]
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        add_one(x)
    assert "int32 [8] on cuda:0, argument 0 of the break add_one" in seq.watched[0]
    del x
    gc.collect()
    seq.replay()
    assert values(view) == {3}
    del view
    gc.collect()
    with pytest.raises(StaleInputError, match="int32"):
        seq.replay()


def test_with_keep_inputs_an_older_array_is_the_sequences(cupy):
    x, seen = cupy.full(N, 1), []
    look = no_graph(lambda t: seen.append(values(t)))
    seq = CUDAGraphSequence()
    with breakable_graph(seq, keep_inputs=True):
        look(x)
    del x
    others = [cupy.full(N, -7) for _ in range(4)]
    seq.replay()
    assert seen == [{1}, {1}]
    del others
    seq.reset()


def test_an_array_that_a_segment_reads_is_watched_too(cupy):
    x, out = cupy.full(N, 1), cupy.full(N, 0)
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        out[...] = x
    assert len(seq.watched) == 2
    assert seq.unwatched == ()
    del x
    gc.collect()
    with pytest.raises(StaleInputError, match="read or written in segment 0"):
        seq.replay()


def test_an_array_made_in_a_break_is_the_sequences(cupy):
    made: list[Any] = []
    out = cupy.full(N, 0)

    @no_graph
    def make() -> None:
        if not made:
            made.append(cupy.full(N, 5))

    @no_graph
    def use(t: Any) -> None:
        out[...] = t

    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        make()
        use(made[0])
    made[0] = None
    others = [cupy.full(N, -7) for _ in range(4)]
    seq.replay()
    assert values(out) == {5}
    del others
    seq.reset()


def test_an_argument_keeps_its_view_and_owns_nothing(cupy):
    x = cupy.full(N, 1)
    seen: list[Any] = []
    look = no_graph(seen.append)
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        look(x[1::2])
    seq.replay()
    given, again = seen
    assert (again.data.ptr, again.shape, again.strides) == (given.data.ptr, (4,), (8,))
    assert again.data.mem._owner is None
    assert again.base is None


def test_static_results_come_to_their_places_at_each_replay(cupy):
    x, k = cupy.full(N, 0), [0]

    @no_graph(outputs="static")
    def pick(t: Any) -> Any:
        return t + k[0], t

    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        fresh, same = pick(x * 2)
        out, more = fresh * 10, same + 1
    for k[0] in range(4):
        x.fill(k[0])
        others = [cupy.full(N, -7) for _ in range(4)]
        seq.replay()
        assert values(out) == {30 * k[0]}
        assert values(more) == {2 * k[0] + 1}
        del others
    seq.reset()


def test_results_without_a_place_are_refused(cupy):
    with pytest.raises(CaptureError, match="static"):
        with breakable_graph(CUDAGraphSequence()):
            no_graph(lambda: cupy.full(N, 1))()


def test_a_window_onto_memory_of_others_is_kept(cupy):
    class Capsule:
        """Tells nobody of its end, as DLPack's do."""

    x = cupy.full(N, 1)
    memory = cupy.cuda.UnownedMemory(x.data.ptr, x.nbytes, Capsule(), 0)
    window = cupy.ndarray((N,), "int32", cupy.cuda.MemoryPointer(memory, 0))
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        add_one(window)
    del window, memory
    gc.collect()
    seq.replay()
    assert values(x) == {3}
    assert seq.watched == ()
    seq.reset()


def test_a_window_onto_memory_of_cupys_own_is_watched_where_it_comes_from(cupy):
    x = cupy.full(N, 1)
    memory = cupy.cuda.UnownedMemory(x.data.ptr, x.nbytes, x, 0)
    window = cupy.ndarray((N,), "int32", cupy.cuda.MemoryPointer(memory, 0))
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        add_one(window)
    del window, memory
    gc.collect()
    seq.replay()
    assert values(x) == {3}
    del x
    gc.collect()
    with pytest.raises(StaleInputError):
        seq.replay()


def test_rebind_moves_kernels_arguments_of_breaks_and_watching(cupy):
    x, z, out = cupy.full(N, 1), cupy.full(N, 5), cupy.full(N, 0)
    seen: list[Any] = []
    look = no_graph(lambda t: seen.append(values(t)))
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        out[...] = x
        look(x)
    report = seq.rebind([(x, z)])
    assert (report.words, report.arguments) == (1, 1)
    seq.replay()
    assert values(out) == {5}
    assert seen == [{1}, {5}]
    del x
    gc.collect()
    seq.replay()
    del z
    gc.collect()
    with pytest.raises(StaleInputError):
        seq.replay()


# ---------------------------------------------------------------- when CuPy comes


def test_a_library_loaded_in_a_break_takes_part_from_then_on(loaded):
    out: list[Any] = []

    @no_graph
    def load() -> None:
        loaded["cupy"] = fake_cupy.module()
        out.append(loaded["cupy"].full(N, 3))

    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        load()
        y = out[0] * 2
    cupy = loaded["cupy"]
    assert y.data.mem.pool() is not cupy.pool
    out[0].fill(5)
    load = None  # type: ignore[assignment]
    seq.segments[1].fn = lambda: None
    assert cupy.cuda.get_allocator() == cupy.pool.malloc
    seq.reset()
    out.clear()
    del y
    cupy.pool.free_all_blocks()


def test_a_library_loaded_inside_a_segment_comes_too_late(loaded):
    with pytest.raises(CaptureError, match="cupy was loaded inside a segment"):
        with breakable_graph(CUDAGraphSequence()):
            loaded["cupy"] = fake_cupy.module()


def test_the_memory_of_a_block_whose_thread_has_ended_goes(cupy):
    memories: list[Any] = []

    def lose() -> None:
        seq = CUDAGraphSequence()
        breakable_graph(seq).__enter__()
        cupy.full(N, 2) * 3
        memories.append(weakref.ref(adapter._memories[seq._pool]))
        fake_cupy._thread.allocator = cupy.pool.malloc  # the storage of the thread goes with it

    in_thread(lose)
    assert not is_in_breakable_graph()
    helping.settle()
    assert memories[0]() is None
