"""What a new node is to do, worked out from what people pass to `Graph`.

The hard problem: a node that is built wrongly reads or writes memory that is nobody's, at a launch that
may come much later. So everything is checked here, before there is a node: arrays have to be as large
as what is done with them, values have to have a size, addresses must not be null.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy

from . import arguments, checks, errors, functions
from ._driver import editing, reading, release, works
from ._driver.bindings import Driver, types
from .checks import Edited, Owned

Shape = int | Sequence[int]


# ---------------------------------------------------------------- kernels


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
    shared = checks.as_size(shared_bytes, "shared_bytes") or function.shared_bytes
    shape = functions.as_dim(grid, "grid"), functions.as_dim(block, "block")
    functions.check_launch(driver, function.handle, layout.name, *shape, shared)
    if function.spelled is not None:
        args = function.spelled(args, len(layout.parameters))
    data, owners = arguments.pack(driver, list(args), layout.name, layout.parameters)
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


# ---------------------------------------------------------------- copies and fills


def copy(
    driver: Driver, context: int, dst: Any, src: Any, nbytes: Shape,
    pitches: dict[str, int | None], rows: dict[str, int | None],
) -> Edited:  # fmt: skip
    """A copy in one to three dimensions; `pitches` and `rows` are by side, None without gaps."""
    shape = (nbytes,) if not isinstance(nbytes, Sequence) else tuple(nbytes)
    if not 1 <= len(shape) <= 3:
        raise errors.bad_type("nbytes", nbytes, "one to three ints")
    width, height, depth = (*(checks.as_size(n, "nbytes") for n in shape), 1, 1)[:3]
    if not width * height * depth:
        raise errors.nothing_to_copy("nbytes")
    ends: dict[str, works.End] = {}
    memories: dict[str, arguments.Memory] = {}
    for side, value in (("src", src), ("dst", dst)):
        memory = memories[side] = arguments.as_memory(value, side)
        pitch = _step(pitches[side], width, f"{side}_pitch")
        ends[side] = _end(driver, memory, pitch, _step(rows[side], height, f"{side}_rows"), side)
    work = works.Copy(ends["src"], ends["dst"], width, height, depth, context)
    for side, memory in memories.items():
        checks.require_room(memory, work.span(ends[side]), side)
    return Edited(work, {side: memory.owner for side, memory in memories.items()})


def _end(driver: Driver, memory: arguments.Memory, pitch: int, rows: int, side: str) -> works.End:
    if not memory.address:
        raise errors.null_address(side)
    is_known = checks.is_known_to_driver(driver, memory.address)
    kind = works.UNIFIED_MEMORY if is_known else works.HOST_MEMORY
    return works.End(kind, memory.address, pitch=pitch, height=rows)


def _step(given: int | None, least: int, field: str) -> int:
    """A distance from row to row or from slice to slice: no less than what lies between."""
    if given is None:
        return least
    step = checks.as_size(given, field)
    if step < least:
        raise errors.rows_overlap(field, step, least)
    return step


def fill(
    context: int, ptr: Any, value: Any, nbytes: Shape, element_size: int, pitch: int | None
) -> Edited:
    """A fill in one or two dimensions."""
    shape = (nbytes,) if not isinstance(nbytes, Sequence) else tuple(nbytes)
    if not 1 <= len(shape) <= 2:
        raise errors.bad_type("nbytes", nbytes, "one or two ints")
    width, rows = (*(checks.as_size(n, "nbytes") for n in shape), 1)[:2]
    if element_size not in (1, 2, 4):
        raise errors.fill_element(element_size)
    bits, size = checks.fill_value(value, element_size)
    memory = arguments.as_memory(ptr, "ptr")
    checks.require_aligned(memory.address, size)
    count = checks.elements(width, size)
    if not rows:
        raise errors.nothing_to_copy("nbytes")
    step = _step(pitch, width, "pitch") if rows > 1 else 0
    work = works.Fill(memory.address, bits, size, count, rows, step, context)
    checks.require_room(memory, work.span, "ptr")
    return Edited(work, {"dst": memory.owner})


# ---------------------------------------------------------------- words of memory


def batch(context: int, operations: Iterable[Any]) -> Edited:
    """Waits for, and writes of, single words of memory."""
    made, owners = memory_operations(operations)
    return Edited(works.Batch(made, context), owners)


def memory_operations(given: Iterable[Any]) -> tuple[tuple[works.MemoryOperation, ...], Owned]:
    """Operations from `(what, ptr, value)`, or as they were read of another node; and their owners."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise errors.bad_type("operations", given, "a list of (what, ptr, value)")
    made: list[works.MemoryOperation] = []
    owners: Owned = {}
    for place, each in enumerate(given):
        if isinstance(each, works.MemoryOperation):
            made.append(each)
            continue
        if not isinstance(each, Sequence) or isinstance(each, str) or len(each) != 3:
            raise errors.bad_type(f"operations[{place}]", each, "(what, ptr, value)")
        operation, owner = _operation(each, f"operations[{place}]")
        made.append(operation)
        owners["operation", place] = owner
    if not made:
        raise errors.no_operations()
    return tuple(made), owners


def _operation(given: Sequence[Any], field: str) -> tuple[works.MemoryOperation, object]:
    what, ptr, value = given
    if what != "write" and what not in works.WAITS:
        raise errors.no_such_operation(field, what, ("write", *works.WAITS))
    if not isinstance(value, (numpy.generic, ctypes._SimpleCData)):
        raise errors.bad_type(f"the value of {field}", value, "a number of ctypes or numpy")
    data = value.tobytes() if isinstance(value, numpy.generic) else bytes(value)
    if len(data) not in (4, 8):
        raise errors.word_size(field, len(data))
    memory = arguments.as_memory(ptr, field)
    if not memory.address:
        raise errors.null_address(field)
    if memory.address % len(data):
        raise errors.word_alignment(field, memory.address, len(data))
    checks.require_room(memory, len(data), field)
    is_wait = what != "write"
    kinds = (works.WAIT_32, works.WAIT_64) if is_wait else (works.WRITE_32, works.WRITE_64)
    flags = works.WAITS.index(what) if is_wait else 0
    kind = kinds[len(data) == 8]
    number = int.from_bytes(data, "little")
    return works.MemoryOperation(kind, memory.address, number, flags), memory.owner


# ---------------------------------------------------------------- calls on the host


def host_call(fn: Callable[[], object]) -> works.HostCall:
    """A call of a Python function, on a thread of the driver's."""
    if not callable(fn):
        raise errors.not_callable("fn", fn)
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: fn())
    address = ctypes.cast(callback, ctypes.c_void_p).value or 0
    # The graph may be closed while a launch is still to call it: a callback is never given back.
    release.leak(callback)
    return works.HostCall(address, 0)


# ---------------------------------------------------------------- launch attributes


def set_attributes(
    driver: Driver, node: Any, cluster: Any, cooperative: bool, priority: int | None
) -> None:
    """Give a new kernel node the launch attributes that were asked for."""
    if cluster is not None:
        size = functions.as_dim(cluster, "cluster")
        editing.set_attribute(driver, node, works.CLUSTER, size)
    if cooperative:
        editing.set_attribute(driver, node, works.COOPERATIVE, True)
    if priority is not None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise errors.bad_type("priority", priority, "an int")
        editing.set_attribute(driver, node, works.PRIORITY, priority)
