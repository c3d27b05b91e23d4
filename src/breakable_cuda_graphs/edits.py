"""What a node does after an edit: checked, and without the driver's having seen it yet.

The hard problem: the driver checks little and late (a copy of too many bytes, an argument of the
wrong size and an impossible launch are found at a launch, or never), and what it refuses it refuses
without a word about the field. So an edit is first worked out here as a new value, field by field;
whatever is wrong with it is a `ValueError` that knows its field, or a `TypeError`.

What may change in an executable: CUDA driver API, the cuGraphExec*NodeSetParams functions.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy

from . import errors, functions
from ._driver import reading, works
from ._driver.bindings import Driver, types
from .arguments import Memory, as_memory, pack, packed

Owned = dict[object, object]

#: What can be given for each kind of node.
FIELDS: dict[int, tuple[str, ...]] = {
    works.KERNEL: ("fn", "grid", "block", "shared_bytes", "args"),
    works.MEMCPY: ("src", "dst", "nbytes"),
    works.MEMSET: ("dst", "value", "nbytes"),
    works.EVENT_RECORD: ("event",),
    works.EVENT_WAIT: ("event",),
}


class Edited(NamedTuple):
    """The new work, and what owns the memory that it names, by place; None: nothing of ours."""

    work: works.Work
    owners: Owned


def edited(
    driver: Driver, label: str, kind: str, work: works.Work, changes: Mapping[str, Any]
) -> Edited:
    """The work of a node with some of its fields changed."""
    allowed = FIELDS.get(work.kind, ())
    for name in changes:
        if name not in allowed:
            raise errors.not_a_field(kind, label, name, allowed)
    if not changes:
        raise errors.nothing_to_change(label)
    if isinstance(work, works.Kernel):
        return _kernel(driver, work, label, changes)
    if isinstance(work, works.Copy):
        return _copy(driver, work, changes)
    if isinstance(work, works.Fill):
        return _fill(driver, work, changes)
    event, owner = as_event(changes["event"])
    return Edited(dataclasses.replace(work, event=event), {"event": owner})  # type: ignore[call-arg]


# ---------------------------------------------------------------- kernels


def _kernel(driver: Driver, work: works.Kernel, label: str, changes: Mapping[str, Any]) -> Edited:
    owners: Owned = {}
    if "fn" in changes:
        function = functions.as_function(changes["fn"])
        work = _with_function(driver, work, function, changes)
        owners["fn"] = function.keep
    shape = {
        name: functions.as_dim(changes[name], name) for name in ("grid", "block") if name in changes
    }
    shared = as_size(changes.get("shared_bytes", work.shared_bytes), "shared_bytes")
    work = dataclasses.replace(work, **shape, shared_bytes=shared)  # type: ignore[arg-type]
    if set(changes) & {"fn", "grid", "block", "shared_bytes"}:
        functions.check_launch(
            driver, work.function, label, work.grid, work.block, work.shared_bytes
        )
    if "args" in changes and "fn" not in changes:
        args, named = _some_arguments(driver, work, label, changes["args"])
        work = dataclasses.replace(work, args=args)
        owners |= named
    return Edited(work, owners)


def _with_function(
    driver: Driver, work: works.Kernel, function: functions.Function, changes: Mapping[str, Any]
) -> works.Kernel:
    """Another kernel in a node: its arguments have to be given whole."""
    args = changes.get("args", ())
    made, _ = kernel(driver, function, work.grid, work.block, args, work.shared_bytes)
    return dataclasses.replace(made, attributes=work.attributes)


def _some_arguments(
    driver: Driver, work: works.Kernel, label: str, given: Any
) -> tuple[tuple[bytes, ...], Owned]:
    """A kernel's arguments with those of some indices changed (or all, from a sequence)."""
    if not isinstance(given, Mapping):
        if isinstance(given, (str, bytes)) or not hasattr(given, "__len__"):
            raise errors.bad_type("args", given, "a mapping from indices to values, or all values")
        return pack(driver, given, label, work.parameters)
    args, owners = list(work.args), {}
    for index, value in given.items():
        if not isinstance(index, int) or isinstance(index, bool):
            raise errors.bad_type("an index in args", index, "an int")
        if not 0 <= index < len(args):
            raise errors.no_such_argument(label, index, len(args))
        data, owner = packed(driver, value, label, index)
        if len(data) != len(args[index]):
            raise errors.argument_size(label, index, value, len(data), len(args[index]))
        args[index] = data
        owners["arg", index] = owner
    return tuple(args), owners  # type: ignore[return-value]


def kernel(
    driver: Driver, function: functions.Function, grid: Any, block: Any, args: Any,
    shared_bytes: Any = 0,
) -> tuple[works.Kernel, Owned]:  # fmt: skip
    """The launch of a kernel by its handle, checked; and what its arguments belong to."""
    by_kernel = isinstance(function.handle, types.CUkernel)
    params = types.CUDA_KERNEL_NODE_PARAMS()
    setattr(params, "kern" if by_kernel else "func", function.handle)
    layout = reading.KernelReader(driver).layout(params)
    if block is None:
        if function.block is None:
            raise errors.bad_type("block", block, "one to three ints")
        block = function.block
    shared = as_size(shared_bytes, "shared_bytes") or function.shared_bytes
    shape = functions.as_dim(grid, "grid"), functions.as_dim(block, "block")
    functions.check_launch(driver, function.handle, layout.name, *shape, shared)
    if function.spelled is not None:
        args = function.spelled(args, len(layout.parameters))
    data, owners = pack(driver, list(args), layout.name, layout.parameters)
    number = int(function.handle)
    work = works.Kernel(
        layout.name,
        0 if by_kernel else number,
        number if by_kernel else 0,
        int(driver.cuCtxGetCurrent()) if by_kernel else 0,
        *shape,
        shared,
        data,
        layout.parameters,
    )
    return work, {**owners, "fn": function.keep}


# ---------------------------------------------------------------- copies


def _copy(driver: Driver, work: works.Copy, changes: Mapping[str, Any]) -> Edited:
    if not work.is_flat:
        raise errors.only_flat_copies()
    owners: Owned = {}
    if "nbytes" in changes:
        nbytes = as_size(changes["nbytes"], "nbytes")
        if nbytes == 0:
            raise errors.nothing_to_copy("nbytes")
        work = dataclasses.replace(work, width=nbytes)
    for side in ("src", "dst"):
        if side in changes:
            memory = as_memory(changes[side], side)
            end = _moved(driver, getattr(work, side), memory, side)
            work = dataclasses.replace(work, **{side: end})  # type: ignore[arg-type]
            owners[side] = memory.owner
            require_room(memory, work.width, side)
    return Edited(work, owners)


def _moved(driver: Driver, end: works.End, memory: Memory, side: str) -> works.End:
    if end.memory_type == works.ARRAY_MEMORY:
        raise errors.memory_kind_changes(side, "an array", "an address")
    if not memory.address:
        raise errors.null_address(side)
    require_same_home(driver, end.start, memory.address, side)
    return works.End(end.memory_type, memory.address, pitch=end.pitch, height=end.height)


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
        code, value = driver.module.cuPointerGetAttribute(
            types.CUpointer_attribute(attribute), types.CUdeviceptr(address)
        )
        if int(code):
            return None
        found.append(int(value))
    return found[0], found[1]


def _home_name(home: tuple[int, int] | None) -> str:
    if home is None:
        return "pageable host memory"
    kind, device = home
    return "pinned host memory" if kind == works.HOST_MEMORY else f"memory of device {device}"


def require_room(memory: Memory, nbytes: int, field: str) -> None:
    """An array has to be as large as what is copied."""
    if memory.nbytes is not None and memory.nbytes < nbytes:
        raise errors.too_small(field, memory.nbytes, nbytes)


def as_size(value: Any, field: str) -> int:
    """A number of bytes: an int that is not negative."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise errors.bad_type(field, value, "an int")
    number = int(value.__index__())
    if number < 0:
        raise errors.negative_size(field, number)
    return number


# ---------------------------------------------------------------- fills

_ELEMENTS = (1, 2, 4)


def _fill(driver: Driver, work: works.Fill, changes: Mapping[str, Any]) -> Edited:
    owners: Owned = {}
    if "value" in changes:
        value, size = fill_value(changes["value"], work.element_size)
        if size != work.element_size:
            work = _with_element(work, size)
        work = dataclasses.replace(work, value=value)
    if "nbytes" in changes:
        if work.height > 1:
            raise errors.only_flat_fills("nbytes")
        width = elements(as_size(changes["nbytes"], "nbytes"), work.element_size)
        work = dataclasses.replace(work, width=width)
    if "dst" in changes:
        memory = as_memory(changes["dst"], "dst")
        require_same_home(driver, work.dst, memory.address, "dst")
        require_room(memory, work.span, "dst")
        work = dataclasses.replace(work, dst=memory.address)
        owners["dst"] = memory.owner
    require_aligned(work.dst, work.element_size)
    return Edited(work, owners)


def _with_element(work: works.Fill, size: int) -> works.Fill:
    if work.height > 1:
        raise errors.only_flat_fills("value")
    return dataclasses.replace(
        work, element_size=size, width=elements(work.width * work.element_size, size)
    )


def fill_value(value: Any, element_size: int) -> tuple[int, int]:
    """The bits of one element and its size: a typed number brings its own, an int has to fit."""
    if isinstance(value, (numpy.generic, ctypes._SimpleCData)):
        data = value.tobytes() if isinstance(value, numpy.generic) else bytes(value)
        if len(data) not in _ELEMENTS:
            raise errors.fill_element(len(data))
        return int.from_bytes(data, "little"), len(data)
    if isinstance(value, bool) or not isinstance(value, int):
        raise errors.bad_type("value", value, "an int, or a number of ctypes or numpy")
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
    raise errors.bad_type("event", value, "an event of torch, CuPy, Numba or the bindings")


def is_known_to_driver(driver: Driver, address: int) -> bool:
    """Whether an address is of the device, managed, or pinned; plain host memory is not."""
    return _home(driver, address) is not None
