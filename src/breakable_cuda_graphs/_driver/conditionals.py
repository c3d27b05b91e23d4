"""Conditional nodes, and the kernels that give them their values.

The hard problem: a conditional's value can only be set by device code, for a handle that belongs to
one graph, and every handle must be used by exactly one node, so nothing may fail between making a
handle and making its node. Drivers before 13.0 build two-body IF nodes wrongly (seen by Warp, see
its `warp.cu`): there a second IF node with the opposite value stands in for the other body.

The setter kernels are compiled at run time from the source below; `cudaGraphSetConditional` is a
built-in of the device runtime that needs no linking when it is only declared (CUDA C++ Programming
Guide, "Conditional Graph Nodes").
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import bindings, nvrtc
from .enums import ASSIGN_DEFAULT, IF, SWITCH
from .kernel_params import layout_of
from .node_params import Conditional, Kernel

types = bindings.types

#: Two bodies in one IF node are right from this driver on.
_TWO_BODIES = 13000

_SOURCE = """
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);

__device__ unsigned long long read_bytes(const unsigned char* at, int size)
{
    unsigned long long value = 0;
    for (int i = 0; i < size; ++i) value |= (unsigned long long)at[i] << (8 * i);
    return value;
}

extern "C" __global__ void breakable_set_condition(
    unsigned long long handle, unsigned long long opposite, const unsigned char* flag,
    unsigned long long mask, int size, int has_opposite)
{
    unsigned int yes = (read_bytes(flag, size) & mask) != 0;
    cudaGraphSetConditional(handle, yes);
    if (has_opposite) cudaGraphSetConditional(opposite, !yes);
}

extern "C" __global__ void breakable_set_choice(
    unsigned long long handle, const unsigned char* index, unsigned long long sign, int size)
{
    unsigned long long value = read_bytes(index, size);
    int outside = (value & sign) != 0 || value > 0xFFFFFFFEull;
    cudaGraphSetConditional(handle, outside ? 0xFFFFFFFFu : (unsigned int)value);
}
"""

CONDITION, CHOICE = "breakable_set_condition", "breakable_set_choice"

_LAYOUTS: dict[str, tuple[Any, ...]] = {
    CONDITION: (
        ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32,
        ctypes.c_int32,
    ),
    CHOICE: (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32),
}  # fmt: skip


class Scalar(NamedTuple):
    """One number in device memory. `kind` is "b", "i", "u" or "f", as numpy spells it."""

    address: int
    size: int
    kind: str

    @property
    def truth_mask(self) -> int:
        """The bits of which one must be set for the number to count as true (not -0.0)."""
        every = (1 << 8 * self.size) - 1
        return every >> 1 if self.kind == "f" else every

    @property
    def sign_mask(self) -> int:
        """The bit that makes the number negative, or none."""
        return 1 << 8 * self.size - 1 if self.kind == "i" else 0


# ---------------------------------------------------------------- setters


def prepare(driver: bindings.Driver) -> None:
    """Compile and load the setters for the current context, if that has not been done."""
    _function(driver, CONDITION)


def _function(driver: bindings.Driver, name: str) -> Any:
    if driver.simulated:
        return driver.module.setter_kernel(name, _LAYOUTS[name]).handle
    return nvrtc.function(driver, _SOURCE, name)


def setter(driver: bindings.Driver, parts: Parts, scalar: Scalar, context: int) -> Kernel:
    """The kernel launch that gives a conditional its value from a number in device memory."""
    first, *others = parts.handles
    if parts.choice == SWITCH:
        values = struct.pack("<QQQi", first, scalar.address, scalar.sign_mask, scalar.size)
        return _launch(driver, CHOICE, values, context)
    opposite = others[0] if others else 0
    values = struct.pack(
        "<QQQQii", first, opposite, scalar.address, scalar.truth_mask, scalar.size, bool(others)
    )
    return _launch(driver, CONDITION, values, context)


def _launch(driver: bindings.Driver, name: str, packed: bytes, context: int) -> Kernel:
    parameters = layout_of(_LAYOUTS[name])
    args = tuple(packed[at : at + size] for at, size in parameters)
    function = int(_function(driver, name))
    return Kernel(name, function, 0, context, (1, 1, 1), (1, 1, 1), 0, args, parameters)


def with_handles(work: Kernel, handles: dict[int, int]) -> Kernel:
    """A setter's launch with other handles; any other kernel's as it is."""
    if work.name not in _LAYOUTS:
        return work
    places = (0, 1) if work.name == CONDITION else (0,)
    args = list(work.args)
    for place in places:
        (old,) = struct.unpack("<Q", args[place])
        args[place] = struct.pack("<Q", handles.get(old, old))
    return work.with_args(tuple(args))


# ---------------------------------------------------------------- nodes


class Parts(NamedTuple):
    """The handles of a conditional that is to be made, and how many bodies each of them has."""

    choice: int
    handles: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """A conditional: one node, or two with opposite values. `bodies` are graphs, in order."""

    nodes: tuple[Any, ...]
    works: tuple[Conditional, ...]
    bodies: tuple[Any, ...]

    @property
    def known(self) -> dict[int, Conditional]:
        """What the nodes do, by their numbers."""
        return {int(node): work for node, work in zip(self.nodes, self.works, strict=True)}

    @property
    def together(self) -> dict[int, tuple[int, ...]]:
        """All bodies, by the first node, where it took two nodes; else nothing."""
        if len(self.nodes) == 1:
            return {}
        return {int(self.nodes[0]): tuple(int(body) for body in self.bodies)}


def new_handles(driver: bindings.Driver, graph: Any, context: int, choice: int, size: int) -> Parts:
    """The handles for a conditional with `size` bodies in a graph (its root, if it is a body)."""
    split = choice == IF and size == 2 and driver.version < _TWO_BODIES
    sizes = (1, 1) if split else (size,)
    create, where = driver.cuGraphConditionalHandleCreate, (graph, types.CUcontext(context))
    handles = tuple(int(create(*where, 0, ASSIGN_DEFAULT)) for _ in sizes)
    return Parts(choice, handles, sizes)


def add_nodes(
    driver: bindings.Driver, graph: Any, after: Sequence[Any], parts: Parts, context: int
) -> Made:
    """The node or nodes for handles, one after the other."""
    nodes: list[Any] = []
    works: list[Conditional] = []
    bodies: list[Any] = []
    for handle, size in zip(parts.handles, parts.sizes, strict=True):
        before = nodes[-1:] or after
        node, inside = _add_node(driver, graph, before, parts.choice, handle, size, context)
        nodes = [*nodes, node]
        bodies += inside
        works.append(
            Conditional(handle, parts.choice, tuple(int(body) for body in inside), context)
        )
    return Made(tuple(nodes), tuple(works), tuple(bodies))


def _add_node(
    driver: bindings.Driver, graph: Any, after: Sequence[Any], choice: int, handle: int, size: int,
    context: int,
) -> tuple[Any, list[Any]]:  # fmt: skip
    params = types.CUgraphNodeParams()
    params.type = types.CUgraphNodeType(Conditional.kind)
    conditional = params.conditional
    conditional.handle = types.CUgraphConditionalHandle(handle)
    conditional.type = types.CUgraphConditionalNodeType(choice)
    conditional.size = size
    conditional.ctx = types.CUcontext(context)
    node = driver.add_node(graph, list(after), params)
    # `phGraph_out` shows the driver's own array: the handles are copied at once.
    return node, [types.CUgraph(int(body)) for body in params.conditional.phGraph_out[:size]]
