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
from typing import Any, NamedTuple

import numpy

from . import errors
from ._driver.bindings import Driver, types
from .words import Arg

__all__ = ["Memory", "array_memory", "as_memory", "pack", "packed"]

_SIMPLE = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)
_BARE = (bool, int, float, complex)


class Memory(NamedTuple):
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


def array_memory(value: Any) -> Memory | None:
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


def _torch_memory(value: Any) -> Memory:
    shape, strides, size = tuple(value.shape), tuple(value.stride()), int(value.element_size())
    device, count = value.device, value.numel()
    kind = (value.dtype, shape, strides, device)
    reach = count - 1 if value.is_contiguous() else _reach(shape, strides)
    nbytes = (reach + 1) * size if count else 0
    return Memory(int(value.data_ptr()), nbytes, value, device.type == "cpu", size, kind)


def _interface_memory(value: Any, interface: dict[str, Any], *, is_host: bool) -> Memory:
    shape = tuple(interface["shape"])
    item = numpy.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides") or _dense(shape, item)
    kind = (interface["typestr"], shape, tuple(strides), "host" if is_host else "cuda")
    nbytes = 0 if 0 in shape else _reach(shape, strides) + item
    return Memory(int(interface["data"][0]), nbytes, value, is_host, item, kind)


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """From the first to the last element of an array that is not empty, in units of its strides."""
    return sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def _dense(shape: Sequence[int], item: int) -> tuple[int, ...]:
    return tuple(item * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def as_memory(value: Any, what: str) -> Memory:
    """The memory that a `src`, `dst` or `ptr` names: an array, an address, or a CUdeviceptr."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Memory(value)
    memory = array_memory(value)
    if memory is not None:
        return memory
    if isinstance(value, types.CUdeviceptr):
        return Memory(int(value))
    if isinstance(value, ctypes.c_void_p):
        return Memory(value.value or 0)
    if isinstance(value, numpy.integer):
        return Memory(int(value))
    raise errors.bad_type(what, value, "an array, or an address as an int")


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
