"""What fits into what: sizes, alignment, kinds of memory, and values for fills and events.

The hard problem: the driver checks little and late (a copy of too many bytes is found at a launch, or
never), and what it refuses it refuses without a word about the field. So whatever is wrong is found here,
and is a `ValueError` that knows its field, or a `TypeError`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .._driver import enums, node_params
from .._driver.bindings import Driver, types
from ..errors import bad_type
from . import errors
from .arguments import MemoryRange, number_bytes

#: What owns memory that a node names, by the place in the node.
Owned = dict[object, object]


class Edited(NamedTuple):
    """The new work, and what owns the memory that it names, by place; None: nothing of ours."""

    work: node_params.Work
    owners: Owned


# ---------------------------------------------------------------- sizes and kinds of memory

_MEMORY_TYPE, _DEVICE_ORDINAL = 2, 9  # CUpointer_attribute


def require_same_home(driver: Driver, before: int, after: int, field: str) -> None:
    """A copy or a fill in an executable stays with its kind of memory, and on its device.

    The driver does not always notice (CUDA driver API, cuGraphExecMemcpyNodeSetParams: "the memory
    types may not change"). Where the old address is no longer known, the driver decides.
    """
    old, new = _home(driver, before), _home(driver, after)
    if old is not None and old != new:
        raise errors.memory_kind_changes(field, _home_name(old), _home_name(new))


def _home(driver: Driver, address: int) -> tuple[int, int] | None:
    """(CUmemorytype, device) of an address; None for plain host memory and for freed memory."""
    found = []
    for attribute in (_MEMORY_TYPE, _DEVICE_ORDINAL):
        value = driver.ask(
            "cuPointerGetAttribute",
            types.CUpointer_attribute(attribute),
            types.CUdeviceptr(address),
        )
        if value is None:
            return None
        found.append(int(value[0]))
    return found[0], found[1]


def _home_name(home: tuple[int, int] | None) -> str:
    if home is None:
        return "pageable host memory"
    kind, device = home
    return "pinned host memory" if kind == enums.HOST_MEMORY else f"memory of device {device}"


def require_room(memory: MemoryRange, nbytes: int, field: str) -> None:
    """An array has to be as large as what is copied."""
    if memory.nbytes is not None and memory.nbytes < nbytes:
        raise errors.too_small(field, memory.nbytes, nbytes)


def as_size(value: Any, field: str) -> int:
    """A number of bytes: an int that is not negative."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise bad_type(field, value, "an int")
    number = int(value.__index__())
    if number < 0:
        raise errors.negative_size(field, number)
    return number


# ---------------------------------------------------------------- fills

_ELEMENTS = (1, 2, 4)


def fill_value(value: Any, element_size: int) -> tuple[int, int]:
    """The bits of one element and its size: a typed number brings its own, an int has to fit."""
    data = number_bytes(value)
    if data is not None:
        if len(data) not in _ELEMENTS:
            raise errors.fill_element(len(data))
        return int.from_bytes(data, "little"), len(data)
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_type("value", value, "an int, or a number of ctypes or numpy")
    if not 0 <= value < 1 << 8 * element_size:
        raise errors.fill_value(value, element_size)
    return value, element_size


def elements(nbytes: int, size: int) -> int:
    """How many elements a number of bytes is."""
    if nbytes == 0:
        raise errors.nothing_to_copy("nbytes")
    if nbytes % size:
        raise errors.fill_size(nbytes, size)
    return nbytes // size


def require_aligned(address: int, size: int) -> None:
    if not address:
        raise errors.null_address("dst")
    if address % size:
        raise errors.fill_alignment(address, size)


# ---------------------------------------------------------------- events


def as_event(value: Any) -> tuple[int, object]:
    """The driver's event behind a torch (`.cuda_event`), CuPy (`.ptr`) or other event (`.handle`)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value, None
    if isinstance(value, types.CUevent):
        return int(value), value
    for name in ("cuda_event", "ptr", "handle"):
        handle = getattr(value, name, None)
        handle = getattr(handle, "value", handle)
        if handle is not None:
            return int(handle), value
    raise bad_type("event", value, "an event of torch, CuPy, Numba or the bindings")


def is_known_to_driver(driver: Driver, address: int) -> bool:
    """Whether an address is of the device, managed, or pinned; plain host memory is not."""
    return _home(driver, address) is not None
