"""Numba in a block: what it must not do inside a segment, and its arrays.

The hard problem: Numba has no pool that could be made private: it asks the driver for each array, and
gives memory back whenever enough has gathered, both of which no capture survives. And a launch
without a stream goes to the default one, past the capture, without a word. Numba tells nobody of
these, so while blocks are open the methods that do them are replaced by ones that look first.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

from .._driver import stream_capture
from .._driver.bindings import Driver, types
from .._driver.stream_capture import Status
from .._driver.threads import Home
from ..errors import EscapedWorkWarning
from . import errors, protocols
from .arrays import ArraysWithAliases
from .streams import as_handle


class NumbaArrays(ArraysWithAliases):
    """`numba.cuda`'s device arrays as arguments and results of breaks."""

    def __init__(self, cuda: Any, framework: protocols.Framework) -> None:
        self._cuda, self._framework = cuda, framework
        self._type = cuda.cudadrv.devicearray.DeviceNDArray

    def owns(self, value: Any) -> bool:
        return isinstance(value, self._type)

    def can_alias(self, value: Any) -> bool:
        """Mapped and managed arrays are host memory too: only the object itself is enough."""
        return type(value) is self._type

    def moved(self, value: Any, start: int, end: int, shift: int) -> Any:
        interface = dict(value.__cuda_array_interface__)
        address, read_only = interface["data"]
        interface.update(data=(address + shift, read_only), stream=None)
        return self._cuda.from_cuda_array_interface(interface, owner=None, sync=False)

    def place(self, value: Any) -> tuple[Any, ...]:
        return _address(value), tuple(value.shape), tuple(value.strides)

    def kind(self, value: Any) -> protocols.ArrayKind:
        return str(value.dtype), tuple(value.shape), "cuda"

    def new_buffer(self, value: Any) -> Any:
        _require_dense(value)
        return self._cuda.device_array(value.shape, value.dtype, value.strides)

    def copy(self, target: Any, source: Any) -> None:
        _require_dense(source)
        if tuple(source.strides) != tuple(target.strides):
            raise errors.result_not_dense(str(source.dtype), tuple(source.shape))
        nbytes = int(source.size * source.dtype.itemsize)
        if nbytes:
            stream = types.CUstream(self._framework.current_stream())
            driver = self._framework.driver
            driver.cuMemcpyDtoDAsync(_address(target), _address(source), nbytes, stream)


def _address(value: Any) -> int:
    return int(value.__cuda_array_interface__["data"][0])


def _require_dense(value: Any) -> None:
    if not (value.is_c_contiguous() or value.is_f_contiguous()):
        raise errors.result_not_dense(str(value.dtype), tuple(value.shape))


# ---------------------------------------------------------------- one block


class NumbaCompanion:
    """Numba's part in one block."""

    def __init__(self, cuda: Any, framework: protocols.Framework, handle: int) -> None:
        self._watch = _watch_of(cuda)
        self._driver, self._handle = framework.driver, handle
        self._segment: _Segment | None = None
        self._is_in = False
        self.home = Home()
        self._made_in_breaks: dict[int, int] = {}  # start -> end

    def enter(self) -> None:
        self._watch.start(self)
        self._is_in = True

    def note_allocation(self, memory: Any) -> None:
        """The block's thread has allocated while no segment was open: in a break."""
        start = int(memory.device_pointer)
        self._made_in_breaks[start] = start + int(memory.size)

    def begin(self) -> None:
        self._segment = _Segment(self._driver, self._handle)
        self._watch.open(self._segment)

    def end(self) -> object:
        if self._segment is not None:
            self._watch.close(self._segment)
            self._segment = None
        return None

    def birth(self, address: int) -> protocols.Birth | None:
        if any(start <= address < end for start, end in self._made_in_breaks.items()):
            return protocols.Birth.BREAK
        return None

    def leave(self, failed: bool) -> None:
        self.end()
        if self._is_in:
            self._is_in = False
            self._watch.stop(self)


class _Segment:
    """One open segment, for the methods of Numba that look first."""

    def __init__(self, driver: Driver, handle: int) -> None:
        self.home = Home()
        self._driver, self._handle = driver, handle
        self._has_warned = False

    def note_launch(self, stream: Any, kernel: str) -> None:
        """A kernel is launched: warn, once a segment, if the capture will miss it."""
        handle = as_handle(stream)
        if self._has_warned or handle == self._handle:
            return
        status = stream_capture.status(self._driver, types.CUstream(handle))
        if status is Status.NONE:
            self._has_warned = True
            text = errors.escaped_launch(f"Numba's kernel {kernel}")
            warnings.warn(text, EscapedWorkWarning, stacklevel=4)


class _Watch:
    """The replaced methods of one Numba: there while a block is open, gone afterwards."""

    def __init__(self, cuda: Any) -> None:
        driver = cuda.cudadrv.driver
        self._targets: list[tuple[type, str, Callable[[Any], Any]]] = [
            (driver.Context, "memalloc", self._allocating),
            (driver.Context, "memallocmanaged", self._allocating),
            (driver.Context, "memhostalloc", self._allocating),
            (driver._PendingDeallocs, "clear", self._deferring),
            (cuda.dispatcher._Kernel, "launch", self._noting),
        ]
        self._originals: list[tuple[type, str, Any]] = []
        self._blocks: list[NumbaCompanion] = []
        self._open: list[_Segment] = []  # of all threads
        self._lock = threading.RLock()  # a finalizer may end another block in the middle

    def start(self, block: NumbaCompanion) -> None:
        with self._lock:
            self._blocks.append(block)
            if len(self._blocks) == 1:
                for kind, name, wrap in self._targets:
                    original = getattr(kind, name, None)
                    if original is not None:
                        self._originals.append((kind, name, original))
                        setattr(kind, name, wrap(original))

    def stop(self, block: NumbaCompanion) -> None:
        with self._lock:
            self._blocks.remove(block)
            if not self._blocks:
                while self._originals:
                    kind, name, original = self._originals.pop()
                    setattr(kind, name, original)

    def open(self, segment: _Segment) -> None:
        self._open.append(segment)

    def close(self, segment: _Segment) -> None:
        with contextlib.suppress(ValueError):  # it is closed already
            self._open.remove(segment)

    def _here(self) -> _Segment | None:
        for segment in reversed(list(self._open)):
            if segment.home.is_here():
                return segment
        return None

    def _allocating(self, original: Any) -> Any:
        """An allocation: in a segment refused before the driver is asked, which would end the capture."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._here() is not None:
                raise errors.numba_allocates()
            memory = original(*args, **kwargs)
            for block in list(self._blocks):
                if block.home.is_here() and hasattr(memory, "device_pointer"):
                    block.note_allocation(memory)
            return memory

        return call

    def _deferring(self, original: Any) -> Any:
        """A flush of memory that was let go: later, when no segment is open in any thread."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return None if self._open else original(*args, **kwargs)

        return call

    def _noting(self, original: Any) -> Any:
        """A launch: noted with its stream, then done."""

        @functools.wraps(original)
        def call(kernel: Any, args: Any, griddim: Any, blockdim: Any, stream: Any = 0,
                 sharedmem: Any = 0) -> Any:  # fmt: skip
            segment = self._here()
            if segment is not None:
                name = getattr(getattr(kernel, "py_func", None), "__name__", "of unknown name")
                segment.note_launch(stream, name)
            return original(kernel, args, griddim, blockdim, stream, sharedmem)

        return call


@functools.cache
def _watch_of(cuda: Any) -> _Watch:
    return _Watch(cuda)
