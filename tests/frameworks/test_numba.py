"""Numba in a block: allocations refused, frees deferred, launches past the capture told; its arrays.

On a stand-in for Numba's classes over the simulated driver; the real one is in `tests/gpu`.
"""

from __future__ import annotations

import gc
import threading
import types as python_types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from breakable_cuda_graphs import (
    CaptureError,
    CUDAGraphSequence,
    EscapedWorkWarning,
    StaleInputError,
    breakable_graph,
    is_in_breakable_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import bindings, contexts
from breakable_cuda_graphs._driver.bindings import types
from breakable_cuda_graphs.frameworks import choose, loaded, raw
from helping import (
    Boom,
    a_stream,
    capture,
    in_raw_thread,
    in_thread,
    in_thread_of_number,
    settle,
)

N = 16


class Allocation:
    """Numba's MemoryPointer: counts its users, and is freed with the last one."""

    is_managed = True

    def __init__(self, size: int) -> None:
        self.size, self.device_pointer = size, int(bindings.current().cuMemAlloc(size))
        self.users = 0

    owner = property(lambda self: self)

    def deref(self) -> None:
        self.users -= 1
        if not self.users:
            Context.allocations.remove(self)
            PendingDeallocs.items.append(self.device_pointer)


class Owned:
    """Numba's OwnedPointer: one user of an allocation."""

    def __init__(self, owner: Any) -> None:
        owner.users += 1
        self.owner, self.device_pointer, self.size = owner, owner.device_pointer, owner.size
        weakref.finalize(self, owner.deref).atexit = False


class Context:
    allocations: list[Allocation] = []  # noqa: RUF012

    def memalloc(self, size: int) -> Owned:
        Context.allocations.append(Allocation(size))
        return Owned(Context.allocations[-1])

    def memhostalloc(self, size: int) -> None:
        raise AssertionError


class PendingDeallocs:
    items: list[int] = []  # noqa: RUF012

    def clear(self) -> None:
        while self.items:
            bindings.current().cuMemFree(self.items.pop())


class DeviceNDArray:
    def __init__(self, shape: tuple[int, ...], strides: Any, dtype: Any, gpu_data: Any) -> None:
        self.shape, self.dtype, self.gpu_data = shape, numpy.dtype(dtype), gpu_data
        self.strides = strides or (self.dtype.itemsize,)
        self.size = shape[0]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "strides": None, "typestr": self.dtype.str, "version": 3,
            "data": (self.gpu_data.device_pointer, False), "stream": 1,
        }  # fmt: skip

    def is_c_contiguous(self) -> bool:
        return self.strides == (self.dtype.itemsize,)

    is_f_contiguous = is_c_contiguous


class Kernel:
    """Numba's compiled kernel: fills an array with a number."""

    def __init__(self) -> None:
        self.py_func = python_types.SimpleNamespace(__name__="known")

    def launch(
        self, args: Any, griddim: Any, blockdim: Any, stream: Any = 0, sharedmem: Any = 0
    ) -> None:
        array, value = args
        bindings.current().cuMemsetD8Async(
            array.gpu_data.device_pointer, value, array.size, types.CUstream(int(stream))
        )


def device_array(shape: Any, dtype: Any = "u1", strides: Any = None) -> DeviceNDArray:
    shape = shape if isinstance(shape, tuple) else (shape,)
    return DeviceNDArray(shape, strides, dtype, Context().memalloc(shape[0]))


def from_cuda_array_interface(interface: dict[str, Any], owner: Any, sync: bool) -> DeviceNDArray:
    assert (owner, sync, interface["stream"]) == (None, False, None)
    pointer = python_types.SimpleNamespace(device_pointer=interface["data"][0], size=N, owner=None)
    return DeviceNDArray(interface["shape"], None, interface["typestr"], pointer)


METHODS = (
    (Context, "memalloc"),
    (Context, "memhostalloc"),
    (PendingDeallocs, "clear"),
    (Kernel, "launch"),
)


@pytest.fixture
def numba(bare_device: Any, monkeypatch: Any) -> Iterator[Any]:
    """The stand-in, loaded; afterwards its methods are its own, and its memory has gone."""
    driver = bindings.current()
    driver.cuCtxSetCurrent(types.CUcontext(contexts.primary(driver, 0)))
    framework = raw.RawFramework(driver, contexts.primary(driver, 0))
    monkeypatch.setattr(choose, "framework_for", lambda driver, stream: framework)
    driver_module = python_types.SimpleNamespace(Context=Context, _PendingDeallocs=PendingDeallocs)
    cuda = python_types.SimpleNamespace(
        cudadrv=python_types.SimpleNamespace(
            driver=driver_module,
            devicearray=python_types.SimpleNamespace(DeviceNDArray=DeviceNDArray),
        ),
        dispatcher=python_types.SimpleNamespace(_Kernel=Kernel),
        device_array=device_array,
        from_cuda_array_interface=from_cuda_array_interface,
    )
    module = Hashable(cuda)
    modules = {"numba.cuda": module}
    monkeypatch.setattr(loaded, "loaded", lambda driver, name: modules.get(name))
    monkeypatch.setattr(loaded, "sys", python_types.SimpleNamespace(modules=modules))
    before = [getattr(*method) for method in METHODS]
    yield module
    assert [getattr(*method) for method in METHODS] == before, "a method was left replaced"
    settle()
    PendingDeallocs().clear()
    assert Context.allocations == []
    assert bare_device.leaks() == []


class Hashable(python_types.ModuleType):
    def __init__(self, parts: Any) -> None:
        super().__init__("fake_numba_cuda")
        self.__dict__.update(vars(parts))


@pytest.fixture
def stream(numba: Any) -> Iterator[Any]:
    with a_stream() as made:
        yield int(made)
        settle()


def read(array: Any) -> set[int]:
    import ctypes

    return set(ctypes.string_at(array.gpu_data.device_pointer, array.size))


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_an_allocation_inside_a_segment_is_refused_before_the_driver_hears_of_it(numba, mode):
    with pytest.raises(CaptureError, match="Numba allocates"):
        with breakable_graph(CUDAGraphSequence(), capture_error_mode=mode):
            device_array(N)
    assert device_array(N).size == N


def test_a_break_and_another_thread_may_allocate(numba, stream):
    x, made = device_array(N), []
    seq = CUDAGraphSequence()
    with breakable_graph(seq, stream=stream, capture_error_mode="thread_local"):
        Kernel().launch((x, 3), 1, N, stream)
        made.append(in_thread(lambda: device_array(N)))
        no_graph(lambda: made.append(device_array(N)))()
    assert len(made) == 2
    seq.replay(stream)
    assert read(x) == {3}


def test_memory_that_is_let_go_in_a_segment_is_freed_after_it(numba, stream):
    x, y = device_array(N), device_array(N)
    with breakable_graph(CUDAGraphSequence(), stream=stream):
        Kernel().launch((x, 3), 1, N, stream)
        del y
        PendingDeallocs().clear()
        assert len(PendingDeallocs.items) == 1
    PendingDeallocs().clear()
    assert PendingDeallocs.items == []


def test_a_launch_that_the_capture_misses_is_told_once_and_by_name(numba, stream):
    x = device_array(N)

    def body() -> None:
        Kernel().launch((x, 3), 1, N, stream)
        Kernel().launch((x, 4), 1, N)
        Kernel().launch((x, 5), 1, N)

    with pytest.warns(EscapedWorkWarning, match="Numba's kernel known") as caught:
        capture(body, stream=stream)
    assert len(caught) == 1
    assert read(x) == {5}


def test_after_any_failure_and_several_blocks_the_methods_are_numbas_own(numba, stream):
    with pytest.raises(Boom), breakable_graph(CUDAGraphSequence(), stream=stream):
        raise Boom
    assert Context.memalloc.__qualname__ == "Context.memalloc"
    held, go = threading.Event(), threading.Event()

    def other() -> None:
        with breakable_graph(CUDAGraphSequence(), capture_error_mode="thread_local"):
            no_graph(lambda: None)()
            held.set()
            go.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    held.wait(10)
    with breakable_graph(CUDAGraphSequence(), capture_error_mode="thread_local"):
        no_graph(lambda: None)()
    assert hasattr(Context.memalloc, "__wrapped__"), "the other block is still open"
    go.set()
    thread.join(10)


def test_an_older_array_is_watched_through_its_views(numba, stream):
    x = device_array(N)
    view = DeviceNDArray((N,), None, "u1", Owned(x.gpu_data.owner))
    seen: list[Any] = []
    look = no_graph(seen.append)
    seq = CUDAGraphSequence()
    with breakable_graph(seq, stream=stream):
        look(x)
    seen.clear()
    del x
    gc.collect()
    seq.replay(stream)
    assert seen[0].gpu_data.owner is None
    assert seen[0].gpu_data.device_pointer == view.gpu_data.device_pointer
    del view
    gc.collect()
    with pytest.raises(StaleInputError, match="uint8"):
        seq.replay(stream)


def test_an_array_made_in_a_break_is_the_sequences(numba, stream):
    made, out = [], device_array(N)

    @no_graph
    def make() -> None:
        if not made:
            made.append(device_array(N))
            Kernel().launch((made[0], 6), 1, N, stream)

    @no_graph
    def use(t: Any) -> None:
        bindings.current().cuMemcpyDtoDAsync(
            out.gpu_data.device_pointer, t.gpu_data.device_pointer, N, types.CUstream(stream)
        )

    seq = CUDAGraphSequence()
    with breakable_graph(seq, stream=stream):
        make()
        use(made[0])
    made[0] = None
    gc.collect()
    PendingDeallocs().clear()
    Kernel().launch((out, 0), 1, N, stream)
    seq.replay(stream)
    assert read(out) == {6}
    seq.reset()


def test_with_keep_inputs_the_memory_is_the_sequences(numba, stream):
    x, seen = device_array(N), []
    look = no_graph(lambda t: seen.append(read(t)))
    Kernel().launch((x, 9), 1, N)
    seq = CUDAGraphSequence()
    with breakable_graph(seq, stream=stream, keep_inputs=True):
        look(x)
    del x
    gc.collect()
    PendingDeallocs().clear()
    seq.replay(stream)
    assert seen == [{9}, {9}]
    seq.reset()


def test_static_results_are_copied_on_the_replays_stream(numba, stream):
    out, k = device_array(N), [1]

    @no_graph(outputs="static")
    def make() -> Any:
        made = device_array(N)
        Kernel().launch((made, k[0]), 1, N, stream)
        return made

    seq = CUDAGraphSequence()
    with breakable_graph(seq, stream=stream):
        fixed = make()
        bindings.current().cuMemcpyDtoDAsync(
            out.gpu_data.device_pointer, fixed.gpu_data.device_pointer, N, types.CUstream(stream)
        )
    for k[0] in (2, 3):
        seq.replay(stream)
        assert read(out) == {k[0]}

    @no_graph(outputs="static")
    def strided() -> Any:
        made = device_array(N)
        made.strides = (2,)
        return made

    with pytest.raises(ValueError, match="contiguous"):
        with breakable_graph(CUDAGraphSequence(), stream=stream):
            strided()
    seq.reset()


def test_a_thread_of_the_number_of_one_that_ended_in_a_segment_may_allocate(numba):
    def begin() -> None:
        context = contexts.primary(bindings.current(), 0)
        bindings.current().cuCtxSetCurrent(types.CUcontext(context))

    def lose() -> None:
        begin()
        breakable_graph(CUDAGraphSequence(), capture_error_mode="thread_local").__enter__()

    def allocate() -> None:
        begin()
        made.append(numba.device_array(N))

    made: list[Any] = []
    in_thread_of_number(in_raw_thread(lose), allocate)
    assert len(made) == 1
    assert not is_in_breakable_graph()
