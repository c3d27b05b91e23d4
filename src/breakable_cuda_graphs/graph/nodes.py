"""Nodes of a graph as typed values.

The hard problem: what was read must stay what it was, whatever is edited or released later. A node is
therefore a value: it holds copies, compares by which node it is (not by what it shows), and is asked
again with `graph.nodes`.

    for node in graph.nodes:
        match node:
            case KernelNode():
                print(node.name, node.grid, node.block, [arg.data for arg in node.args])
            case MemcpyNode(src=src, dst=dst, nbytes=nbytes):
                print(hex(src), hex(dst), nbytes)
"""

from __future__ import annotations

from typing import Any

from .._driver import enums, node_params
from .._driver.demangle import demangled
from .abbreviate import IN_A_BOX, address_of, launch_of, shortened, size_of
from .arguments import Address, Arg
from .node import Field, Look, Node, NodeState, OwningGraph, Resolve

Dim = tuple[int, int, int]


class KernelNode(Node):
    """A kernel launch."""

    __slots__ = ()
    kind = "kernel"
    _work: node_params.Kernel

    @property
    def name(self) -> str:
        """The kernel's name, demangled."""
        return demangled(self._work.name)

    @property
    def label(self) -> str:
        """The kernel's name, demangled."""
        return self.name

    @property
    def function(self) -> int:
        """The CUfunction (or CUkernel) that is launched, as a number."""
        return int(self._work.function)

    mangled_name = Field[str]("name", "The kernel's name as the driver has it.")
    grid = Field[Dim]("grid", "Blocks in x, y, z.")
    block = Field[Dim]("block", "Threads a block in x, y, z.")
    shared_bytes = Field[int]("shared_bytes", "Dynamic shared memory a block, in bytes.")
    attrs = Field[node_params.Attributes](
        "attributes", "Launch attributes: `.cluster`, `.cooperative`, `.priority`."
    )

    @property
    def args(self) -> tuple[Arg, ...]:
        """The arguments, in order."""
        pairs = zip(self._work.parameters, self._work.args, strict=True)
        return tuple(
            Arg(index, offset, size, data) for index, ((offset, size), data) in enumerate(pairs)
        )

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Every address of known memory at any 8-byte step of any argument."""
        resolve = self._template.resolve
        found = ((i, at, value, resolve(value)) for i, at, value in self._work.words())
        return tuple(Address(i, at, value, what) for i, at, value, what in found if what)

    def _describe(self) -> str:
        shape = f"grid={self.grid} block={self.block}"
        shared = f" shared_bytes={self.shared_bytes}" if self.shared_bytes else ""
        name = self.name if len(self.name) <= 60 else self.name[:57] + "..."
        return f" {name} {shape}{shared}"

    def _names(self) -> tuple[str, ...]:
        return self.name, self.mangled_name

    def _fields(self) -> list[tuple[str, Any]]:
        return [
            ("fn", self.mangled_name),
            ("grid", self.grid),
            ("block", self.block),
            ("shared_bytes", self.shared_bytes),
            ("attrs.cluster", self.attrs.cluster),
            ("attrs.cooperative", self.attrs.cooperative),
            ("attrs.priority", self.attrs.priority),
            *((f"args[{index}]", data) for index, data in enumerate(self._work.args)),
        ]

    def _line(self, addresses: bool = True) -> str:
        return f"{shortened(self.name)}  {launch_of(self._work)}, {len(self._work.args)} args"

    def _picture(self) -> list[str]:
        return [shortened(self.name, IN_A_BOX), launch_of(self._work)]

    def _facts(self, resolve: Resolve) -> list[list[str]]:
        return [["launch", launch_of(self._work)]]


_MEMORY = {0: "unset", 1: "host", 2: "device", 3: "array", 4: "unified"}


class MemcpyNode(Node):
    """A copy. `src` and `dst` are addresses (for an array, its handle)."""

    __slots__ = ()
    kind = "memcpy"
    _work: node_params.Copy
    __match_args__ = ("src", "dst", "nbytes")

    @property
    def src(self) -> int:
        """The address of the first byte that is read; of an array, its handle."""
        return _place(self._work.src)

    @property
    def dst(self) -> int:
        """The address of the first byte that is written; of an array, its handle."""
        return _place(self._work.dst)

    @property
    def nbytes(self) -> int:
        """All bytes that are copied."""
        return self._work.width * max(self._work.height, 1) * max(self._work.depth, 1)

    @property
    def shape(self) -> Dim:
        """Bytes a row, rows, slices."""
        return self._work.width, self._work.height, self._work.depth

    src_pitch = Field[int]("src.pitch", "Bytes from row to row of the source.")
    dst_pitch = Field[int]("dst.pitch", "Bytes from row to row of the target.")

    @property
    def src_memory(self) -> str:
        """ "host", "device", "array", or "unified": an address that tells by itself."""
        return _MEMORY.get(self._work.src.memory_type, "unknown")

    @property
    def dst_memory(self) -> str:
        """See `src_memory`."""
        return _MEMORY.get(self._work.dst.memory_type, "unknown")

    def _describe(self) -> str:
        return f" {self.nbytes} bytes {self.src:#x} -> {self.dst:#x}"

    def _fields(self) -> list[tuple[str, Any]]:
        return [("src", self.src), ("dst", self.dst), ("nbytes", self.shape)] + [
            (name, getattr(self, name))
            for name in ("src_pitch", "dst_pitch", "src_memory", "dst_memory")
        ]

    def _line(self, addresses: bool = True) -> str:
        ends = f" from {self.src:#x} to {self.dst:#x}" if addresses else ""
        return f"copy {size_of(self.nbytes)}{ends}"

    def _facts(self, resolve: Resolve) -> list[list[str]]:
        return [
            ["copies", size_of(self.nbytes)],
            ["from", address_of(self.src, resolve)],
            ["to", address_of(self.dst, resolve)],
        ]


def _place(end: node_params.End) -> int:
    return end.address if end.memory_type == enums.ARRAY_MEMORY else end.start


class MemsetNode(Node):
    """A fill of memory with one value of 1, 2 or 4 bytes."""

    __slots__ = ()
    kind = "memset"
    _work: node_params.Fill
    __match_args__ = ("dst", "value", "nbytes")

    dst = Field[int]("dst", "The address of the first byte that is written.")
    value = Field[int]("value", "The bits of one element.")
    element_size = Field[int]("element_size", "Bytes of one element: 1, 2 or 4.")
    pitch = Field[int]("pitch", "Bytes from row to row.")

    @property
    def nbytes(self) -> int:
        """All bytes that are written."""
        return self._work.width * self._work.element_size * max(self._work.height, 1)

    @property
    def shape(self) -> tuple[int, int]:
        """Elements a row, rows."""
        return self._work.width, self._work.height

    def _describe(self) -> str:
        return f" {self.nbytes} bytes at {self.dst:#x} with {self.value:#x}"

    def _fields(self) -> list[tuple[str, Any]]:
        return [
            ("dst", self.dst),
            ("value", self.value),
            ("element_size", self.element_size),
            ("nbytes", self.shape),
            ("pitch", self.pitch),
        ]

    def _line(self, addresses: bool = True) -> str:
        at = f" at {self.dst:#x}" if addresses else ""
        return f"fill {size_of(self.nbytes)}{at} with {self.value:#x}"

    def _facts(self, resolve: Resolve) -> list[list[str]]:
        return [
            ["fills", f"{size_of(self.nbytes)} with {self.value:#x}"],
            ["at", address_of(self.dst, resolve)],
        ]


class EmptyNode(Node):
    """A node that does nothing but wait for others."""

    __slots__ = ()
    kind = "empty"


class EventRecordNode(Node):
    """Records an event."""

    __slots__ = ()
    kind = "event record"

    event = Field[int]("event", "The CUevent, as a number.")


class EventWaitNode(Node):
    """Waits for an event that is recorded outside of the graph."""

    __slots__ = ()
    kind = "event wait"

    event = Field[int]("event", "The CUevent, as a number.")


class HostNode(Node):
    """Calls a C function on the host."""

    __slots__ = ()
    kind = "host"

    function = Field[int]("function", "The address of the function.")
    user_data = Field[int]("user_data", "What it is called with.")


class MemAllocNode(Node):
    """Allocates memory at one fixed address, at each launch anew."""

    __slots__ = ()
    kind = "mem alloc"
    __match_args__ = ("address", "nbytes")

    address = Field[int]("address", "Where the memory is, at every launch.")
    nbytes = Field[int]("nbytes", "How large the memory is.")

    def _describe(self) -> str:
        return f" {self.nbytes} bytes at {self.address:#x}"

    def _line(self, addresses: bool = True) -> str:
        at = f" at {self.address:#x}" if addresses else ""
        return f"allocate {size_of(self.nbytes)}{at}"

    def _facts(self, resolve: Resolve) -> list[list[str]]:
        return [["allocates", size_of(self.nbytes)], ["at", f"{self.address:#x}"]]


class MemFreeNode(Node):
    """Frees what a MemAllocNode allocated."""

    __slots__ = ()
    kind = "mem free"

    address = Field[int]("address", "Where the memory is.")

    def _line(self, addresses: bool = True) -> str:
        return f"free {self.address:#x}" if addresses else self.label


class BatchMemOpNode(Node):
    """Waits for, and writes of, words of memory."""

    __slots__ = ()
    kind = "batch mem op"

    operations = Field[tuple[node_params.MemoryOperation, ...]](
        "operations",
        'Each with `.name` ("write", "wait_geq", "wait_eq", "wait_and", "wait_nor"), `.address`, '
        "`.value`, `.nbytes`, and as the driver has it `.operation` and `.flags`.",
    )

    def _describe(self) -> str:
        return " " + ", ".join(f"{each.name} {each.address:#x}" for each in self.operations)

    def _fields(self) -> list[tuple[str, Any]]:
        return [("count", len(self.operations))] + [
            (f"operations[{place}].{name}", getattr(each, name))
            for place, each in enumerate(self.operations)
            for name in ("name", "nbytes", "value", "address")
        ]

    def _line(self, addresses: bool = True) -> str:
        return ", ".join(
            f"{each.name} {each.value:#x} at {each.address:#x}" if addresses else each.name
            for each in self.operations
        )


class UnknownNode(Node):
    """A node of a kind that these bindings, or this library, cannot read."""

    __slots__ = ()
    kind = "unknown"

    type_id = Field[int]("type_id", "CUgraphNodeType.")

    @property
    def label(self) -> str:
        """The number of the driver's kind."""
        return f"unknown kind {self.type_id}"

    def _describe(self) -> str:
        return f" of kind {self.type_id}"


#: The kind of node for a kind of work. Those that hold graphs join it where `Graph` is.
NODES: dict[type[node_params.Work], type[Node]] = {
    node_params.Kernel: KernelNode,
    node_params.Copy: MemcpyNode,
    node_params.Fill: MemsetNode,
    node_params.Empty: EmptyNode,
    node_params.EventRecord: EventRecordNode,
    node_params.EventWait: EventWaitNode,
    node_params.HostCall: HostNode,
    node_params.Allocation: MemAllocNode,
    node_params.Release: MemFreeNode,
    node_params.Batch: BatchMemOpNode,
    node_params.Unknown: UnknownNode,
}


def as_node(template: OwningGraph, state: NodeState, look: Look | None) -> Node:
    """A node of the kind for what it does."""
    return NODES[type(state.work)](template, state, look)
