"""What a node does after an edit: checked, and without the driver's having seen it yet.

The hard problem: an edit gives a part and leaves the rest, and whether the whole then fits the node
depends on both. So an edit is first worked out here as a new value, field by field; whatever is wrong
with it is a `ValueError` that knows its field, or a `TypeError`.

What may change in an executable: CUDA driver API, the cuGraphExec*NodeSetParams functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .._driver import enums, node_params
from .._driver.bindings import Driver
from ..errors import bad_type
from . import build, checks, errors, kernels
from .arguments import MemoryRange, as_memory, pack, packed
from .checks import Edited, Owned

Changes = Mapping[str, Any]


def edited(
    driver: Driver, label: str, kind: str, work: node_params.Work, changes: Changes
) -> Edited:
    """The work of a node with some of its fields changed."""
    allowed, work_out = EDITS.get(work.kind, ((), _event))
    for name in changes:
        if name not in allowed:
            raise errors.not_a_field(kind, label, name, allowed)
    if not changes:
        raise errors.nothing_to_change(label)
    return work_out(driver, work, label, changes)


# ---------------------------------------------------------------- kernels


def _kernel(driver: Driver, work: node_params.Kernel, label: str, changes: Changes) -> Edited:
    owners: Owned = {}
    if "fn" in changes:
        function = kernels.as_function(changes["fn"])
        work = _with_function(driver, work, function, changes)
        owners["fn"] = function.keep
    shape = {
        name: kernels.as_dim(changes[name], name) for name in ("grid", "block") if name in changes
    }
    shared = checks.as_size(changes.get("shared_bytes", work.shared_bytes), "shared_bytes")
    work = dataclasses.replace(work, **shape, shared_bytes=shared)  # type: ignore[arg-type]
    if set(changes) & {"fn", "grid", "block", "shared_bytes"}:
        kernels.check_launch(driver, work.function, label, work.grid, work.block, work.shared_bytes)
    if "args" in changes and "fn" not in changes:
        args, named = _some_arguments(driver, work, label, changes["args"])
        work = dataclasses.replace(work, args=args)
        owners |= named
    return Edited(work, owners)


def _with_function(
    driver: Driver, work: node_params.Kernel, function: kernels.Function, changes: Changes
) -> node_params.Kernel:
    """Another kernel in a node: its arguments have to be given whole."""
    args = changes.get("args", ())
    made, _ = build.kernel(driver, function, work.grid, work.block, args, work.shared_bytes)
    return dataclasses.replace(made, attributes=work.attributes)


def _some_arguments(
    driver: Driver, work: node_params.Kernel, label: str, given: Any
) -> tuple[tuple[bytes, ...], Owned]:
    """A kernel's arguments with those of some indices changed (or all, from a sequence)."""
    if not isinstance(given, Mapping):
        if isinstance(given, (str, bytes)) or not hasattr(given, "__len__"):
            raise bad_type("args", given, "a mapping from indices to values, or all values")
        return pack(driver, given, label, work.parameters)
    args, owners = list(work.args), {}
    for index, value in given.items():
        if not isinstance(index, int) or isinstance(index, bool):
            raise bad_type("an index in args", index, "an int")
        if not 0 <= index < len(args):
            raise errors.no_such_argument(label, index, len(args))
        data, owner = packed(driver, value, label, index)
        if len(data) != len(args[index]):
            raise errors.argument_size(label, index, value, len(data), len(args[index]))
        args[index] = data
        owners["arg", index] = owner
    return tuple(args), owners  # type: ignore[return-value]


# ---------------------------------------------------------------- copies


def _copy(driver: Driver, work: node_params.Copy, _: str, changes: Changes) -> Edited:
    if not work.is_flat:
        raise errors.only_flat_copies()
    owners: Owned = {}
    if "nbytes" in changes:
        nbytes = checks.as_size(changes["nbytes"], "nbytes")
        if nbytes == 0:
            raise errors.nothing_to_copy("nbytes")
        work = dataclasses.replace(work, width=nbytes)
    for side in ("src", "dst"):
        if side in changes:
            memory = as_memory(changes[side], side)
            end = _moved(driver, getattr(work, side), memory, side)
            work = dataclasses.replace(work, **{side: end})  # type: ignore[arg-type]
            owners[side] = memory.owner
            checks.require_room(memory, work.width, side)
    return Edited(work, owners)


def _moved(driver: Driver, end: node_params.End, memory: MemoryRange, side: str) -> node_params.End:
    if end.memory_type == enums.ARRAY_MEMORY:
        raise errors.memory_kind_changes(side, "an array", "an address")
    if not memory.address:
        raise errors.null_address(side)
    checks.require_same_home(driver, end.start, memory.address, side)
    return node_params.End(end.memory_type, memory.address, pitch=end.pitch, height=end.height)


# ---------------------------------------------------------------- fills


def _fill(driver: Driver, work: node_params.Fill, _: str, changes: Changes) -> Edited:
    owners: Owned = {}
    if "value" in changes:
        value, size = checks.fill_value(changes["value"], work.element_size)
        if size != work.element_size:
            work = _with_element(work, size)
        work = dataclasses.replace(work, value=value)
    if "nbytes" in changes:
        if work.height > 1:
            raise errors.only_flat_fills("nbytes")
        width = checks.elements(checks.as_size(changes["nbytes"], "nbytes"), work.element_size)
        work = dataclasses.replace(work, width=width)
    if "dst" in changes:
        memory = as_memory(changes["dst"], "dst")
        checks.require_same_home(driver, work.dst, memory.address, "dst")
        checks.require_room(memory, work.span, "dst")
        work = dataclasses.replace(work, dst=memory.address)
        owners["dst"] = memory.owner
    checks.require_aligned(work.dst, work.element_size)
    return Edited(work, owners)


def _with_element(work: node_params.Fill, size: int) -> node_params.Fill:
    if work.height > 1:
        raise errors.only_flat_fills("value")
    return dataclasses.replace(
        work, element_size=size, width=checks.elements(work.width * work.element_size, size)
    )


# ---------------------------------------------------------------- events, calls, words of memory


def _event(_: Driver, work: Any, label: str, changes: Changes) -> Edited:
    event, owner = checks.as_event(changes["event"])
    return Edited(dataclasses.replace(work, event=event), {"event": owner})


def _host_call(_: Driver, work: Any, label: str, changes: Changes) -> Edited:
    return Edited(build.host_call(changes["fn"]), {})


def _batch(_: Driver, work: node_params.Batch, label: str, changes: Changes) -> Edited:
    made = build.batch(work.context, changes["operations"])
    require_same_operations(work, made.work)
    return made


_FLUSH = 1 << 30  # CU_STREAM_WAIT_VALUE_FLUSH


def require_same_operations(before: node_params.Batch, after: node_params.Work) -> None:
    """Addresses, values and how a wait compares may change; count and types of operations may not.

    Source: CUDA driver API, cuGraphExecBatchMemOpNodeSetParams.
    """
    assert isinstance(after, node_params.Batch)
    old, new = (
        [(each.operation, each.flags & _FLUSH) for each in batch.operations]
        for batch in (before, after)
    )
    if old != new:
        raise errors.operations_change(len(old), len(new))


#: What can be given for each kind of node, and what works it out.
EDITS: dict[int, tuple[tuple[str, ...], Callable[[Driver, Any, str, Changes], Edited]]] = {
    enums.KERNEL: (("fn", "grid", "block", "shared_bytes", "args"), _kernel),
    enums.MEMCPY: (("src", "dst", "nbytes"), _copy),
    enums.MEMSET: (("dst", "value", "nbytes"), _fill),
    enums.HOST: (("fn",), _host_call),
    enums.EVENT_RECORD: (("event",), _event),
    enums.EVENT_WAIT: (("event",), _event),
    enums.BATCH_MEM_OP: (("operations",), _batch),
}
