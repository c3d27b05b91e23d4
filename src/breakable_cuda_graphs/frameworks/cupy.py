"""CuPy in a block: private memory for what captured work allocates, its current stream, its arrays.

The hard problem: a captured kernel holds addresses, and CuPy hands freed blocks to whoever asks next.
So while a segment is open, this thread's allocator is a pool of the sequence, which nobody else
takes from. A pool grows by `cudaMalloc`, which a capture forbids unless the thread's capture mode
is relaxed around it. CuPy's pools do not keep the memory of living arrays when they go, so a pool
is only let go once all its blocks have come back.
"""

from __future__ import annotations

import functools
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

from .._driver import contexts, process, release, stream_capture
from .._driver.bindings import Driver, types
from .._driver.stream_capture import Status
from .._driver.stream_order import CompletionMark
from .._driver.threads import Changes
from ..errors import EscapedWorkWarning
from . import errors, protocols
from .arrays import ArraysWithAliases


class CupyArrays(ArraysWithAliases):
    """`cupy.ndarray` as argument and result of breaks."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def owns(self, value: Any) -> bool:
        return isinstance(value, self._cupy.ndarray)

    def can_alias(self, value: Any) -> bool:
        """Of a subclass only the object itself is enough."""
        return type(value) is self._cupy.ndarray

    def moved(self, value: Any, start: int, end: int, shift: int) -> Any:
        cuda, address = self._cupy.cuda, value.data.ptr + shift
        memory = cuda.UnownedMemory(address, value.nbytes, None, value.device.id)
        pointer = cuda.MemoryPointer(memory, 0)
        return self._cupy.ndarray(value.shape, value.dtype, pointer, value.strides)

    def place(self, value: Any) -> tuple[Any, ...]:
        return int(value.data.ptr), tuple(value.shape), tuple(value.strides)

    def kind(self, value: Any) -> protocols.ArrayKind:
        return str(value.dtype), tuple(value.shape), f"cuda:{value.device.id}"

    def new_buffer(self, value: Any) -> Any:
        return self._cupy.empty_like(value)  # order "K": the strides too

    def copy(self, target: Any, source: Any) -> None:
        target[...] = source


# ---------------------------------------------------------------- private memory


class CupyMemory:
    """The private memory of one pool of sequences, for what CuPy allocates in captures."""

    def __init__(self, cupy: Any, driver: Driver, context: int, mark: CompletionMark) -> None:
        _sweep()
        self._cupy, self._driver, self._context, self._mark = cupy, driver, context, mark
        self._chunk = _chunk_type(cupy)
        self._chunks: dict[int, tuple[int, Any]] = {}  # start -> (end, weak reference)
        self._pool = cupy.cuda.MemoryPool(_Base(self))
        self._epoch = process.epoch

    def malloc(self, nbytes: int) -> Any:
        """A block for captured work; the pool may grow, and under pressure give memory back."""
        with release.relaxed_thread():
            return self._pool.malloc(nbytes)

    def grow(self, nbytes: int) -> Any:
        """New memory for the pool, which is noted for as long as it lives."""
        memory, chunks = self._chunk(nbytes), self._chunks
        start = int(memory.ptr)

        def gone(_: Any) -> None:
            chunks.pop(start, None)

        chunks[start] = (start + int(memory.size), weakref.ref(memory, gone))
        return self._cupy.cuda.MemoryPointer(memory, 0)

    def nbytes(self) -> int:
        """How much memory this is."""
        return sum(end - start for start, (end, _) in list(self._chunks.items()))

    def contains(self, address: int) -> bool:
        """Whether an address lies in this memory."""
        return any(start <= address < end for start, (end, _) in list(self._chunks.items()))

    def __del__(self, later: Any = release.later) -> None:
        pool = getattr(self, "_pool", None)
        # At the end of the interpreter nothing is released.
        if pool is not None and hasattr(self, "_epoch") and _EndedMemory is not None:
            remains = _EndedMemory(pool, self._driver, self._context, self._mark, self._epoch)
            later(self._epoch, remains)


class _Base:
    """The allocator below a private pool. It does not keep the memory's owner: no cycle."""

    def __init__(self, memory: CupyMemory) -> None:
        self._memory = weakref.ref(memory)

    def __call__(self, nbytes: int) -> Any:
        memory = self._memory()
        assert memory is not None, "the pool is used by its memory only"
        return memory.grow(nbytes)


@functools.cache
def _chunk_type(cupy: Any) -> Any:
    """CuPy's memory, of which there can be weak references."""
    return type("PrivateMemory", (cupy.cuda.Memory,), {"__slots__": ("__weakref__",)})


class _EndedMemory:
    """A private pool whose sequences are gone. It goes when the last array in it has gone too."""

    def __init__(
        self, pool: Any, driver: Driver, context: int, mark: CompletionMark, epoch: int
    ) -> None:
        self._pool, self._driver, self._context, self._mark = pool, driver, context, mark
        self.epoch = epoch

    def __call__(self) -> None:
        self._mark.wait()
        if not self.is_released():
            _lingering.append(self)

    def is_released(self) -> bool:
        """Give back what is free; whether that was all."""
        with contexts.made_current(self._driver, self._context):
            self._pool.free_all_blocks()
            return not self._pool.used_bytes()


_lingering: list[_EndedMemory] = []


def _sweep() -> None:
    """Let go of pools that only waited for arrays of the user's. Not while something is captured."""
    if not release.open_captures():
        for remains in list(_lingering):
            if process.can_release(remains.epoch) and remains.is_released():
                _lingering.remove(remains)


def nbytes_of(pool: protocols.Pool) -> int | None:
    """The private memory that goes with a pool, in bytes; None if there is none."""
    memory = _memories.get(pool)
    return None if memory is None else memory.nbytes()


_memories: weakref.WeakKeyDictionary[Any, CupyMemory] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def memory_of(cupy: Any, driver: Driver, context: int, pool: protocols.Pool) -> CupyMemory:
    """The private memory that goes with a pool; made at first use, and kept as long as the pool."""
    with _lock:
        memory = _memories.get(pool)
        if memory is None:
            memory = _memories[pool] = CupyMemory(cupy, driver, context, pool.mark)
        return memory


# ---------------------------------------------------------------- one block


class CupyCompanion:
    """CuPy's part in one block."""

    def __init__(
        self,
        cupy: Any,
        framework: protocols.Framework,
        pool: protocols.Pool,
        stream: Any,
        handle: int,
    ) -> None:
        self._cupy = cupy
        self._memory: Any = memory_of(cupy, framework.driver, framework.context, pool)
        self._stream, self._handle = stream, handle
        self._changes = Changes()
        self._driver = framework.driver
        self._is_open = self._has_left = self._has_warned = False
        self._made_in_breaks: dict[int, int] = {}  # start -> end
        self._listed: list[Any] = []  # stream objects that collect host functions for us

    def enter(self) -> None:
        cuda = self._cupy.cuda
        self._users = cuda.get_allocator()
        self._changes.enter(cuda.using_allocator(self.malloc))
        if int(cuda.get_current_stream().ptr) != self._handle:
            self._changes.enter(stream_of(self._cupy, self._stream, self._handle))

    def malloc(self, nbytes: int) -> Any:
        """This thread's allocator: private while a segment is open, else the user's own."""
        if self._is_open:
            self._note_stream()
            return self._memory.malloc(nbytes)
        pointer = self._users(nbytes)
        if not self._has_left:
            self._made_in_breaks[int(pointer.ptr)] = int(pointer.ptr) + int(nbytes)
        return pointer

    def _note_stream(self) -> None:
        """Work is about to run on CuPy's current stream: warn, once a block, if it is not captured."""
        handle = int(self._cupy.cuda.get_current_stream().ptr)
        if handle == self._handle or self._has_warned:
            return
        if stream_capture.status(self._driver, types.CUstream(handle)) is Status.NONE:
            self._has_warned = True
            text = errors.escaped_launch("work of CuPy")
            errors.warn(text, EscapedWorkWarning)

    def begin(self) -> None:
        self._is_open = True
        for stream in (self._stream, self._cupy.cuda.get_current_stream()):
            # CuPy keeps what a captured host function needs in a list that its own begin_capture makes.
            if getattr(stream, "_graph_host_funcargs", self) is None:
                stream._graph_host_funcargs = []
                self._listed.append(stream)

    def end(self) -> object:
        self._is_open = False
        kept: list[Any] = []
        while self._listed:
            stream = self._listed.pop()
            kept += stream._graph_host_funcargs or []
            stream._graph_host_funcargs = None
        return kept or None

    def birth(self, address: int) -> protocols.Birth | None:
        if self._memory.contains(address):
            return protocols.Birth.POOL
        if any(start <= address < end for start, end in self._made_in_breaks.items()):
            return protocols.Birth.BREAK
        return None

    def leave(self, failed: bool) -> None:
        self.end()
        self._has_left = True
        # What a thread that has ended cannot undo keeps this object, which must not keep those.
        self._memory = self._stream = None
        self._changes.undo()


def stream_of(cupy: Any, stream: Any, handle: int) -> Any:
    """A context manager that makes a stream CuPy's current one: the user's own object if it is one."""
    if hasattr(stream, "ptr") and hasattr(stream, "use") and hasattr(stream, "__enter__"):
        return stream
    return _external(cupy, handle)


class _Handle:
    """A stream by its handle, for `Stream.from_external`."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _external(cupy: Any, handle: int) -> Any:
    """CuPy's stream object for a handle. From 14.2 on `ExternalStream` warns that it is deprecated."""
    make = getattr(cupy.cuda.Stream, "from_external", None)
    return cupy.cuda.ExternalStream(handle) if make is None else make(_Handle(handle))


class CupyFollower:
    """CuPy's current stream beside that of a framework which has one of its own."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._get_current = cupy.cuda.get_current_stream  # on the hot path of replay

    def current_stream(self) -> int:
        """The handle of this thread's current stream."""
        return int(self._get_current().ptr)

    def stands_at(self, handle: int) -> bool:
        """Whether a stream is current in this thread."""
        return int(self._get_current().ptr) == handle

    def stream_current(self, handle: int) -> AbstractContextManager[Any]:
        """Make a stream current inside the block."""
        external: AbstractContextManager[Any] = _external(self._cupy, handle)
        return external
