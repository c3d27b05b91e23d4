"""A small CuPy on the simulated driver: allocators, pools, streams and one-dimensional arrays.

The hard problem: the adapter is right only if it uses CuPy as CuPy is (14.2): the allocator in force is
thread-local inside `using_allocator`, a pool frees the memory of living arrays when it goes itself,
its blocks belong to the stream that was current, and its memory objects take no weak references.
All of that is so here too; what is not here is everything else of CuPy.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import types as python_types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy

from breakable_cuda_graphs._driver import bindings
from breakable_cuda_graphs.simulator import SimulatedKernel

UNIT = 512


def _apply(target: int, source: int, factor: int, offset: int, count: int) -> None:
    read, write = ((ctypes.c_int32 * count).from_address(a) for a in (source, target))
    for i in range(count):
        write[i] = read[i] * factor + offset


_KERNEL = SimulatedKernel(
    _apply,
    (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32),
    name="cupy_apply",
)


class BaseMemory:
    __slots__ = ("device_id", "ptr", "size")


class Memory(BaseMemory):
    """`cudaMalloc` and `cudaFree`."""

    __slots__ = ()

    def __init__(self, size: int) -> None:
        self.size, self.device_id = size, 0
        self.ptr = int(bindings.current().cuMemAlloc(size)) if size else 0

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):
            bindings.current().cuMemFree(self.ptr)


class UnownedMemory(BaseMemory):
    __slots__ = ("_owner",)

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id


class PooledMemory(BaseMemory):
    """Gives its block back to its pool, if that is still there; does not keep the pool."""

    __slots__ = ("pool",)

    def __init__(self, ptr: int, size: int, pool: Any) -> None:
        self.ptr, self.size, self.pool, self.device_id = ptr, size, pool.weakref, 0

    def __del__(self) -> None:
        pool = self.pool()
        if pool is not None:
            pool.give_back(self.ptr)


class MemoryPointer:
    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


class MemoryPool:
    """Whole chunks by size and stream; enough to see who gets which."""

    def __init__(self, allocator: Callable[[int], MemoryPointer] | None = None) -> None:
        self._allocator = allocator or _malloc
        self._in_use: dict[int, tuple[BaseMemory, int]] = {}
        self._free: list[tuple[BaseMemory, int]] = []
        self.weakref = weakref.ref(self)  # one for all: the collector clears those of garbage

    def malloc(self, size: int) -> MemoryPointer:
        size = -(-size // UNIT) * UNIT
        stream = get_current_stream().ptr
        for place, (chunk, owner) in enumerate(self._free):
            if chunk.size == size and owner == stream:
                del self._free[place]
                break
        else:
            chunk = self._allocator(size).mem
        self._in_use[chunk.ptr] = chunk, stream
        return MemoryPointer(PooledMemory(chunk.ptr, size, self), 0)

    def give_back(self, ptr: int) -> None:
        self._free.append(self._in_use.pop(ptr))

    def free_all_blocks(self) -> None:
        self._free.clear()

    def used_bytes(self) -> int:
        return sum(chunk.size for chunk, _ in self._in_use.values())

    def total_bytes(self) -> int:
        return self.used_bytes() + sum(chunk.size for chunk, _ in self._free)


def _malloc(size: int) -> MemoryPointer:
    return MemoryPointer(Memory(size), 0)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.allocator: Any = None
        self.streams: list[Any] = [Stream.null]


class Stream:
    null: Any

    def __init__(self, ptr: int | None = None) -> None:
        self.ptr = int(bindings.current().cuStreamCreate(1)) if ptr is None else ptr
        self._graph_host_funcargs: list[Any] | None = None

    @classmethod
    def from_external(cls, stream: Any) -> Stream:
        version, handle = stream.__cuda_stream__()
        assert version == 0
        return cls(handle)

    def __enter__(self) -> Stream:
        _thread.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _thread.streams.pop()

    def use(self) -> Stream:
        _thread.streams[-1] = self
        return self

    def launch_host_func(self, callback: Any, arg: Any) -> None:
        """As in CuPy 14.2: in a capture it relies on a list that its own begin_capture makes."""
        driver = bindings.current()
        kept = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: callback(arg))
        params = bindings.types.CUDA_HOST_NODE_PARAMS()
        params.fn = bindings.types.CUhostFn(ctypes.cast(kept, ctypes.c_void_p).value)
        stream = bindings.types.CUstream(self.ptr)
        info = driver.capture_info(stream)
        after = info.dependencies
        node = driver.cuGraphAddHostNode(info.graph, after or None, len(after), params)
        driver.update_capture_dependencies(stream, [node])
        self._graph_host_funcargs.append(kept)  # type: ignore[union-attr]


Stream.null = Stream(0)
_thread = _Thread()
_default = MemoryPool()
_global: list[Any] = [_default.malloc]


def get_current_stream() -> Stream:
    current: Stream = _thread.streams[-1]
    return current


def get_allocator() -> Any:
    return _thread.allocator or _global[0]


def set_allocator(allocator: Any) -> None:
    if _thread.allocator is not None:
        raise ValueError("Can't change the global allocator inside `using_allocator`")
    _global[0] = allocator


@contextlib.contextmanager
def using_allocator(allocator: Any) -> Iterator[None]:
    previous, _thread.allocator = _thread.allocator, allocator
    try:
        yield
    finally:
        _thread.allocator = previous


class ndarray:
    """One dimension of int32, in steps."""

    def __init__(
        self, shape: tuple[int, ...], dtype: Any = "int32", memptr: Any = None, strides: Any = None
    ) -> None:
        self.shape, self.dtype = tuple(shape), numpy.dtype(dtype)
        self.nbytes = 4 * shape[0]
        self.data = get_allocator()(self.nbytes) if memptr is None else memptr
        self.strides = (4,) if strides is None else tuple(strides)
        self.base: Any = None
        self.device = python_types.SimpleNamespace(id=0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "strides": self.strides, "typestr": self.dtype.str,
            "data": (self.data.ptr, False), "version": 3, "stream": 1,
        }  # fmt: skip

    def __getitem__(self, part: slice) -> ndarray:
        start, stop, step = part.indices(self.shape[0])
        pointer = MemoryPointer(self.data.mem, self.data.ptr - self.data.mem.ptr + 4 * start)
        count = len(range(start, stop, step))
        made = ndarray((count,), self.dtype, pointer, (4 * step,))
        made.base = self if self.base is None else self.base
        return made

    def __setitem__(self, part: Any, value: Any) -> None:
        assert part is Ellipsis
        _launch(self, value, 1, 0) if isinstance(value, ndarray) else _launch(self, self, 0, value)

    def __mul__(self, factor: int) -> ndarray:
        return _made(self, factor, 0)

    def __add__(self, offset: int) -> ndarray:
        return _made(self, 1, offset)

    def __iadd__(self, offset: int) -> ndarray:
        _launch(self, self, 1, offset)
        return self

    def fill(self, value: int) -> None:
        self[...] = value

    def get(self) -> list[int]:
        bindings.current().cuStreamSynchronize(bindings.types.CUstream(get_current_stream().ptr))
        return [
            ctypes.c_int32.from_address(self.data.ptr + i * self.strides[0]).value
            for i in range(self.shape[0])
        ]


def _made(source: ndarray, factor: int, offset: int) -> ndarray:
    made = ndarray(source.shape)
    _launch(made, source, factor, offset)
    return made


def _launch(target: ndarray, source: ndarray, factor: int, offset: int) -> None:
    assert target.strides == source.strides == (4,), "the only kernel here takes dense arrays"
    values = (target.data.ptr, source.data.ptr, factor, offset, target.shape[0])
    stream = bindings.types.CUstream(get_current_stream().ptr)
    bindings.current().cuLaunchKernel(
        _KERNEL.handle, 1, 1, 1, 1, 1, 1, 0, stream, (values, _KERNEL.parameters), 0
    )


def full(count: int, value: int) -> ndarray:
    made = ndarray((count,))
    made.fill(value)
    return made


def empty_like(value: ndarray) -> ndarray:
    return ndarray(value.shape, value.dtype)


def module() -> Any:
    """What stands for the module `cupy`; allocators and streams as at the start."""
    _thread.allocator, _thread.streams[:] = None, [Stream.null]
    pool = MemoryPool()
    _global[0] = pool.malloc
    cuda = python_types.SimpleNamespace(
        Memory=Memory, MemoryPointer=MemoryPointer,
        MemoryPool=MemoryPool, Stream=Stream, UnownedMemory=UnownedMemory,
        get_allocator=get_allocator, get_current_stream=get_current_stream,
        set_allocator=set_allocator, using_allocator=using_allocator,
    )  # fmt: skip
    made = python_types.ModuleType("fake_cupy")
    made.cuda, made.ndarray, made.full = cuda, ndarray, full  # type: ignore[attr-defined]
    made.empty_like, made.pool = empty_like, pool  # type: ignore[attr-defined]
    return made
