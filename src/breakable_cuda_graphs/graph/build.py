"""What a new node is to do, worked out from what people pass to `Graph`.

The hard problem: a node that is built wrongly reads or writes memory that is nobody's, at a launch that
may come much later. So everything is checked here, before there is a node: arrays have to be as large
as what is done with them, values have to have a size, addresses must not be null.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .._driver import bindings, conditionals, enums, kernel_params, node_params, release, set_params
from .._driver.bindings import Driver, types
from ..errors import bad_type, not_callable
from . import arguments, checks, errors, kernels
from .checks import Edited, Owned

Shape = int | Sequence[int]


# ---------------------------------------------------------------- kernels


def kernel(
    driver: Driver, function: kernels.Function, grid: Any, block: Any, args: Any,
    shared_bytes: Any = 0,
) -> tuple[node_params.Kernel, Owned]:  # fmt: skip
    """The launch of a kernel by its handle, checked; and what its arguments belong to."""
    by_kernel = isinstance(function.handle, types.CUkernel)
    params = types.CUDA_KERNEL_NODE_PARAMS()
    setattr(params, "kern" if by_kernel else "func", function.handle)
    layout = kernel_params.KernelReader(driver).layout(params)
    if block is None:
        if function.block is None:
            raise bad_type("block", block, "one to three ints")
        block = function.block
    shared = checks.as_size(shared_bytes, "shared_bytes") or function.shared_bytes
    shape = kernels.as_dim(grid, "grid"), kernels.as_dim(block, "block")
    kernels.check_launch(driver, function.handle, layout.name, *shape, shared)
    if function.spelled is not None:
        args = function.spelled(args, len(layout.parameters))
    data, owners = arguments.pack(driver, list(args), layout.name, layout.parameters)
    number = int(function.handle)
    work = node_params.Kernel(
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
        raise bad_type("nbytes", nbytes, "one to three ints")
    width, height, depth = (*(checks.as_size(n, "nbytes") for n in shape), 1, 1)[:3]
    if not width * height * depth:
        raise errors.nothing_to_copy("nbytes")
    ends: dict[str, node_params.End] = {}
    memories: dict[str, arguments.MemoryRange] = {}
    for side, value in (("src", src), ("dst", dst)):
        memory = memories[side] = arguments.as_memory(value, side)
        pitch = _step(pitches[side], width, f"{side}_pitch")
        ends[side] = _end(driver, memory, pitch, _step(rows[side], height, f"{side}_rows"), side)
    work = node_params.Copy(ends["src"], ends["dst"], width, height, depth, context)
    for side, memory in memories.items():
        checks.require_room(memory, work.span(ends[side]), side)
    return Edited(work, {side: memory.owner for side, memory in memories.items()})


def _end(
    driver: Driver, memory: arguments.MemoryRange, pitch: int, rows: int, side: str
) -> node_params.End:
    if not memory.address:
        raise errors.null_address(side)
    is_known = checks.is_known_to_driver(driver, memory.address)
    kind = enums.UNIFIED_MEMORY if is_known else enums.HOST_MEMORY
    return node_params.End(kind, memory.address, pitch=pitch, height=rows)


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
        raise bad_type("nbytes", nbytes, "one or two ints")
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
    work = node_params.Fill(memory.address, bits, size, count, rows, step, context)
    checks.require_room(memory, work.span, "ptr")
    return Edited(work, {"dst": memory.owner})


# ---------------------------------------------------------------- words of memory


def batch(context: int, operations: Iterable[Any]) -> Edited:
    """Waits for, and writes of, single words of memory."""
    made, owners = memory_operations(operations)
    return Edited(node_params.Batch(made, context), owners)


def memory_operations(
    given: Iterable[Any],
) -> tuple[tuple[node_params.MemoryOperation, ...], Owned]:
    """Operations from `(what, ptr, value)`, or as they were read of another node; and their owners."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise bad_type("operations", given, "a list of (what, ptr, value)")
    made: list[node_params.MemoryOperation] = []
    owners: Owned = {}
    for place, each in enumerate(given):
        if isinstance(each, node_params.MemoryOperation):
            made.append(each)
            continue
        if not isinstance(each, Sequence) or isinstance(each, str) or len(each) != 3:
            raise bad_type(f"operations[{place}]", each, "(what, ptr, value)")
        operation, owner = _operation(each, f"operations[{place}]")
        made.append(operation)
        owners["operation", place] = owner
    if not made:
        raise errors.no_operations()
    return tuple(made), owners


def _operation(given: Sequence[Any], field: str) -> tuple[node_params.MemoryOperation, object]:
    what, ptr, value = given
    if what != "write" and what not in node_params.WAITS:
        raise errors.no_such_operation(field, what, ("write", *node_params.WAITS))
    data = arguments.number_bytes(value)
    if data is None:
        raise bad_type(f"the value of {field}", value, "a number of ctypes or numpy")
    if len(data) not in (4, 8):
        raise errors.word_size(field, len(data))
    memory = arguments.as_memory(ptr, field)
    if not memory.address:
        raise errors.null_address(field)
    if memory.address % len(data):
        raise errors.word_alignment(field, memory.address, len(data))
    checks.require_room(memory, len(data), field)
    is_wait = what != "write"
    kinds = (enums.WAIT_32, enums.WAIT_64) if is_wait else (enums.WRITE_32, enums.WRITE_64)
    flags = node_params.WAITS.index(what) if is_wait else 0
    kind = kinds[len(data) == 8]
    number = int.from_bytes(data, "little")
    return node_params.MemoryOperation(kind, memory.address, number, flags), memory.owner


# ---------------------------------------------------------------- calls on the host


def host_call(fn: Callable[[], object]) -> node_params.HostCall:
    """A call of a Python function, on a thread of the driver's."""
    if not callable(fn):
        raise not_callable("fn", fn)
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: fn())
    address = ctypes.cast(callback, ctypes.c_void_p).value or 0
    # The graph may be closed while a launch is still to call it: a callback is never given back.
    release.leak(callback)
    return node_params.HostCall(address, 0)


# ---------------------------------------------------------------- launch attributes


def set_attributes(
    driver: Driver, node: Any, cluster: Any, cooperative: bool, priority: int | None
) -> None:
    """Give a new kernel node the launch attributes that were asked for."""
    if cluster is not None:
        size = kernels.as_dim(cluster, "cluster")
        set_params.set_attribute(driver, node, enums.CLUSTER, size)
    if cooperative:
        set_params.set_attribute(driver, node, enums.COOPERATIVE, True)
    if priority is not None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise bad_type("priority", priority, "an int")
        set_params.set_attribute(driver, node, enums.PRIORITY, priority)


# ---------------------------------------------------------------- conditionals

_TORCH_KINDS = {"bool": "b", "uint": "u", "int": "i", "float": "f", "bfloat": "f"}


class Condition(NamedTuple):
    """The handles of one conditional, and the number that they are set from.

    `Graph` adds it to a graph and `capture_if` to a capture: kernels that read the number, and the nodes.
    """

    driver: Driver
    context: int
    parts: conditionals.Parts
    scalar: conditionals.Scalar

    @classmethod
    def of_graph(
        cls, driver: Driver, root: Any, context: int, choice: int, size: int,
        scalar: conditionals.Scalar,
    ) -> Condition:  # fmt: skip
        """A new one, with `size` bodies; `root` is the outermost graph."""
        parts = conditionals.new_handles(driver, root, context, choice, size)
        return cls(driver, context, parts, scalar)

    def add_setter(self, graph: Any, after: Sequence[Any]) -> Any:
        """The kernel that reads the number."""
        work = conditionals.setter(self.driver, self.parts, self.scalar, self.context)
        return set_params.add(self.driver, graph, after, work)

    def add_nodes(self, graph: Any, setter: Any) -> conditionals.Made:
        """The conditional itself, behind the kernel that reads the number."""
        return conditionals.add_nodes(self.driver, graph, [setter], self.parts, self.context)


def leaves(driver: Driver, graph: Any, setter: Any = None) -> list[Any]:
    """The nodes that nothing waits for but the kernel that reads the number, if that is there."""
    own = None if setter is None else int(setter)
    inner = {own, *(int(a) for a, b, _ in driver.graph_edges(graph) if int(b) != own)}
    return [node for node in driver.graph_nodes(graph) if int(node) not in inner]


def as_scalar(flag: Any, choice: int) -> tuple[conditionals.Scalar, object]:
    """The number behind a flag, and the array that owns it. Raises `TypeError` for anything else."""
    memory = arguments.array_memory(flag)
    if memory is None or memory.kind is None:
        raise errors.not_a_flag(flag, "is no array")
    if memory.nbytes != memory.itemsize:
        raise errors.not_a_flag(flag, "has not just one element")
    if memory.is_host and not bindings.current().simulated:
        raise errors.not_a_flag(flag, "is in host memory")
    kind = _kind(str(memory.kind[0]))
    allowed = "iu" if choice == enums.SWITCH else "biuf"
    if kind not in allowed or memory.itemsize > 8:
        raise errors.not_a_flag(flag, f"has numbers of type {memory.kind[0]}")
    return conditionals.Scalar(memory.address, memory.itemsize, kind), flag


def _kind(dtype: str) -> str:
    """ "torch.float32" and "<f4" are both "f"."""
    if dtype.startswith("torch."):
        return _TORCH_KINDS.get(dtype.removeprefix("torch.").rstrip("0123456789"), "?")
    return dtype[1:2]
