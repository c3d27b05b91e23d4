"""Kernel arguments and addresses from the values that people pass.

The hard problem: the driver takes untyped bytes, so a value of the wrong size is read past its end
or cut, without a word. Only values whose size is known are taken: typed numbers (ctypes, numpy),
ctypes structures, bytes, and arrays, which stand for their address. A bare Python number is refused.

Arrays are told by `data_ptr()` (torch) or `__cuda_array_interface__`
(https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html); plain host memory, by
`__array_interface__`, is for copies only.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from .._driver.bindings import Driver, types
from ..errors import bad_type
from . import errors

_SIMPLE = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)
_BARE = (bool, int, float, complex)


class MemoryRange(NamedTuple):
    """A piece of memory that somebody named. `owner` is the object; None for a bare address.

    `nbytes` runs from the first to the last byte that an array reaches; None: not known. `kind`
    compares equal for two arrays of one type, shape, layout and device.
    """

    address: int
    nbytes: int | None = None
    owner: Any = None
    is_host: bool = False
    itemsize: int = 1
    kind: tuple[Any, ...] | None = None


# ---------------------------------------------------------------- arrays


def array_memory(value: Any) -> MemoryRange | None:
    """The memory of an array of any library, or None for anything else."""
    if callable(getattr(value, "data_ptr", None)) and hasattr(value, "element_size"):
        try:
            return _torch_memory(value)
        except RuntimeError:  # a sparse one, or one that stands for others: no memory of its own
            return None
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:
        return _interface_memory(value, interface, is_host=False)
    interface = getattr(value, "__array_interface__", None)
    if interface is not None and not isinstance(value, numpy.generic):
        return _interface_memory(value, interface, is_host=True)
    return None


def _torch_memory(value: Any) -> MemoryRange:
    shape, strides, size = tuple(value.shape), tuple(value.stride()), int(value.element_size())
    device, count = value.device, value.numel()
    kind = (value.dtype, shape, strides, device)
    reach = count - 1 if value.is_contiguous() else _reach(shape, strides)
    nbytes = (reach + 1) * size if count else 0
    return MemoryRange(int(value.data_ptr()), nbytes, value, device.type == "cpu", size, kind)


def _interface_memory(value: Any, interface: dict[str, Any], *, is_host: bool) -> MemoryRange:
    shape = tuple(interface["shape"])
    item = numpy.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides") or _dense(shape, item)
    kind = (interface["typestr"], shape, tuple(strides), "host" if is_host else "cuda")
    nbytes = 0 if 0 in shape else _reach(shape, strides) + item
    return MemoryRange(int(interface["data"][0]), nbytes, value, is_host, item, kind)


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """From the first to the last element of an array that is not empty, in units of its strides."""
    return sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def _dense(shape: Sequence[int], item: int) -> tuple[int, ...]:
    return tuple(item * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def as_memory(value: Any, what: str) -> MemoryRange:
    """The memory that a `src`, `dst` or `ptr` names: an array, an address, or a CUdeviceptr."""
    if isinstance(value, int) and not isinstance(value, bool):
        return MemoryRange(value)
    memory = array_memory(value)
    if memory is not None:
        return memory
    if isinstance(value, types.CUdeviceptr):
        return MemoryRange(int(value))
    if isinstance(value, ctypes.c_void_p):
        return MemoryRange(value.value or 0)
    if isinstance(value, numpy.integer):
        return MemoryRange(int(value))
    raise bad_type(what, value, "an array, or an address as an int")


# ---------------------------------------------------------------- kernel arguments


def packed(driver: Driver, value: Any, kernel: str, index: int) -> tuple[bytes, object]:
    """The bytes of one argument, and the object that its memory belongs to (or None)."""
    if isinstance(value, Arg):
        return value.data, None
    if isinstance(value, numpy.generic):
        return value.tobytes(), None
    if isinstance(value, _SIMPLE):
        return bytes(value), value if isinstance(value, ctypes.c_void_p) else None
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value), None
    if isinstance(value, _BARE):
        raise errors.argument_without_size(kernel, index, value)
    memory = array_memory(value)
    if memory is not None:
        if memory.is_host and not driver.simulated:
            raise errors.argument_on_the_host(kernel, index, value)
        return struct.pack("<Q", memory.address), value
    if isinstance(value, (types.CUdeviceptr, types.CUgraphConditionalHandle)):
        return struct.pack("<Q", int(value)), None
    raise errors.argument_of_unknown_type(kernel, index, value)


def number_bytes(value: Any) -> bytes | None:
    """The bytes of a typed number of numpy or ctypes; None for anything else."""
    if isinstance(value, numpy.generic):
        return value.tobytes()
    return bytes(value) if isinstance(value, ctypes._SimpleCData) else None


def pack(
    driver: Driver, values: Sequence[Any], kernel: str, parameters: Sequence[tuple[int, int]]
) -> tuple[tuple[bytes, ...], dict[object, object]]:
    """The bytes of all arguments, checked against a kernel's parameters, and their owners.

    `parameters` are ((offset, size in bytes), ...). Raises `TypeError` for a value whose size is
    not known and `ValueError` for one of another size, or too many or too few of them.
    """
    if len(values) != len(parameters):
        raise errors.argument_count(kernel, len(values), len(parameters))
    made: list[bytes] = []
    owners: dict[object, object] = {}
    for index, (value, (_, size)) in enumerate(zip(values, parameters, strict=True)):
        data, owner = packed(driver, value, kernel, index)
        if len(data) != size:
            raise errors.argument_size(kernel, index, value, len(data), size)
        made.append(data)
        if owner is not None:
            owners["arg", index] = owner
    return tuple(made), owners


@dataclass(frozen=True)
class Arg:
    """One argument of a kernel: its place, its size in bytes, and a copy of its bytes.

    The driver knows no types. The `as_` methods read the bytes as a type of your choice; without
    `at` the argument must be just that large, with `at` they begin that many bytes into it. What does
    not fit is a `ValueError`.
    """

    index: int
    offset: int
    size: int
    data: bytes

    def as_(self, format: str, at: int | None = None) -> Any:
        """A value of one of `struct`'s formats: "e" for a half, "d" for a double, "?" for a bool."""
        size = struct.calcsize("<" + format)
        start = at or 0
        if (at is None and size != self.size) or start < 0 or start + size > self.size:
            raise errors.argument_read_wrongly(self.index, self.size, size, at)
        return struct.unpack_from("<" + format, self.data, start)[0]

    def as_pointer(self, at: int | None = None) -> int:
        """An address."""
        return int(self.as_("Q", at))

    def as_int8(self, at: int | None = None) -> int:
        """A signed number of one byte."""
        return int(self.as_("b", at))

    def as_int16(self, at: int | None = None) -> int:
        """A signed number of 2 bytes."""
        return int(self.as_("h", at))

    def as_int32(self, at: int | None = None) -> int:
        """A signed number of 4 bytes."""
        return int(self.as_("i", at))

    def as_int64(self, at: int | None = None) -> int:
        """A signed number of 8 bytes."""
        return int(self.as_("q", at))

    def as_uint16(self, at: int | None = None) -> int:
        """An unsigned number of 2 bytes."""
        return int(self.as_("H", at))

    def as_uint32(self, at: int | None = None) -> int:
        """An unsigned number of 4 bytes."""
        return int(self.as_("I", at))

    def as_float32(self, at: int | None = None) -> float:
        """A float of 4 bytes."""
        return float(self.as_("f", at))

    def as_struct(self, kind: Any) -> Any:
        """An instance of a `ctypes` structure of the argument's size."""
        try:
            size = ctypes.sizeof(kind)
        except TypeError:
            raise bad_type("kind", kind, "a ctypes.Structure") from None
        if size != self.size:
            raise errors.argument_read_wrongly(self.index, self.size, size, None)
        return kind.from_buffer_copy(self.data)

    def __repr__(self) -> str:
        shown = self.data[:16].hex(" ") + (" ..." if self.size > 16 else "")
        return f"Arg({self.index}, offset={self.offset}, size={self.size}, {shown})"


class Address(NamedTuple):
    """A word inside an argument that is the address of known memory.

    `offset` is the word's place in the argument, in bytes; `what` says whose memory it is: an
    argument of a break, an input, a block of the pool, or other memory of the device.
    """

    argument: int
    offset: int
    value: int
    what: str
