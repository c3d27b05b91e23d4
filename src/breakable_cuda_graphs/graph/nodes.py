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

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

from .._driver import enums, node_params
from .._driver.demangle import demangled
from ..errors import not_copyable
from .arguments import Address, Arg

if TYPE_CHECKING:
    from .graph import Graph
    from .snapshot import Snapshot
    from .state import Template

__all__ = [
    "BatchMemOpNode",
    "Edge",
    "EmptyNode",
    "EventRecordNode",
    "EventWaitNode",
    "HostNode",
    "KernelNode",
    "MemAllocNode",
    "MemFreeNode",
    "MemcpyNode",
    "MemsetNode",
    "Node",
    "UnknownNode",
]


Dim = tuple[int, int, int]


class Node:
    """One node of a graph, as it was when it was looked at."""

    __slots__ = ("_enabled", "_handle", "_notes", "_serial", "_snapshot", "_template", "_work")

    kind: ClassVar[str] = "node"

    def __init__(self, template: Template, state: State, snapshot: Snapshot | None) -> None:
        self._template, self._snapshot = template, snapshot
        self._handle, self._work, self._serial, self._notes, self._enabled = state

    @property
    def handle(self) -> int:
        """The driver's CUgraphNode, as a number. The graph owns it."""
        return int(self._handle)

    @property
    def type_id(self) -> int:
        """CUgraphNodeType."""
        work = self._work
        return work.type_id if isinstance(work, node_params.Unknown) else work.kind

    @property
    def label(self) -> str:
        """The name of a kernel, the kind of any other node."""
        return self.kind

    @property
    def enabled(self) -> bool:
        """False for a node that the executable which runs this graph skips."""
        return self._enabled

    @property
    def scopes(self) -> tuple[str, ...]:
        """The `annotate` blocks that the node was captured in, from the outermost in."""
        return self._notes.scopes

    @property
    def scope(self) -> str:
        """The same in one line: "model/layer 3"."""
        return "/".join(self._notes.scopes)

    @property
    def stack(self) -> tuple[str, ...]:
        """The Python lines that captured it ("file.py:12 in step"), the innermost last.

        Empty unless the capture was told to keep them (`record_stacks=True`).
        """
        return self._notes.stack

    @property
    def predecessors(self) -> tuple[Node, ...]:
        """The nodes that this one waits for."""
        return self._neighbours()[0]

    @property
    def successors(self) -> tuple[Node, ...]:
        """The nodes that wait for this one."""
        return self._neighbours()[1]

    def _neighbours(self) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        snapshot = self._snapshot
        if snapshot is None:
            self._template.check(self)
            snapshot = self._template.snapshot()
        return snapshot.neighbours(int(self._handle))

    def __eq__(self, other: object) -> bool:
        """Whether both are the same node of the same graph, whatever they show."""
        return (
            isinstance(other, Node)
            and self._template.root is other._template.root
            and self._serial == other._serial
        )

    def __hash__(self) -> int:
        return hash((id(self._template.root), self._serial))

    def __copy__(self) -> Node:
        return self  # it never changes

    def __deepcopy__(self, memo: Any) -> Node:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copyable(type(self).__name__)

    def __repr__(self) -> str:
        state = "" if self._enabled else " disabled"
        scope = f" in {self.scope}" if self.scopes else ""
        return f"<{type(self).__name__}{self._describe()}{scope}{state}>"

    def _describe(self) -> str:
        return ""

    def _graphs(self) -> tuple[Graph, ...]:
        """The graphs inside, as far as they are known."""
        return ()


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
    def mangled_name(self) -> str:
        """The kernel's name as the driver has it."""
        return self._work.name

    @property
    def label(self) -> str:
        """The kernel's name, demangled."""
        return self.name

    @property
    def function(self) -> int:
        """The CUfunction (or CUkernel) that is launched, as a number."""
        return int(self._work.function)

    @property
    def grid(self) -> Dim:
        """Blocks in x, y, z."""
        return self._work.grid

    @property
    def block(self) -> Dim:
        """Threads a block in x, y, z."""
        return self._work.block

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a block, in bytes."""
        return self._work.shared_bytes

    @property
    def attrs(self) -> node_params.Attributes:
        """Launch attributes: `.cluster`, `.cooperative`, `.priority`."""
        return self._work.attributes

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
        return f" {_short(self.name)} {shape}{shared}"


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
        work = self._work.src
        return work.address if work.memory_type == enums.ARRAY_MEMORY else work.start

    @property
    def dst(self) -> int:
        """The address of the first byte that is written; of an array, its handle."""
        work = self._work.dst
        return work.address if work.memory_type == enums.ARRAY_MEMORY else work.start

    @property
    def nbytes(self) -> int:
        """All bytes that are copied."""
        return self._work.width * max(self._work.height, 1) * max(self._work.depth, 1)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Bytes a row, rows, slices."""
        return self._work.width, self._work.height, self._work.depth

    @property
    def src_pitch(self) -> int:
        """Bytes from row to row of the source."""
        return self._work.src.pitch

    @property
    def dst_pitch(self) -> int:
        """Bytes from row to row of the target."""
        return self._work.dst.pitch

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


class MemsetNode(Node):
    """A fill of memory with one value of 1, 2 or 4 bytes."""

    __slots__ = ()
    kind = "memset"
    _work: node_params.Fill
    __match_args__ = ("dst", "value", "nbytes")

    @property
    def dst(self) -> int:
        """The address of the first byte that is written."""
        return self._work.dst

    @property
    def value(self) -> int:
        """The bits of one element."""
        return self._work.value

    @property
    def element_size(self) -> int:
        """Bytes of one element: 1, 2 or 4."""
        return self._work.element_size

    @property
    def nbytes(self) -> int:
        """All bytes that are written."""
        return self._work.width * self._work.element_size * max(self._work.height, 1)

    @property
    def shape(self) -> tuple[int, int]:
        """Elements a row, rows."""
        return self._work.width, self._work.height

    @property
    def pitch(self) -> int:
        """Bytes from row to row."""
        return self._work.pitch

    def _describe(self) -> str:
        return f" {self.nbytes} bytes at {self.dst:#x} with {self.value:#x}"


class EmptyNode(Node):
    """A node that does nothing but wait for others."""

    __slots__ = ()
    kind = "empty"


class EventRecordNode(Node):
    """Records an event."""

    __slots__ = ()
    kind = "event record"
    _work: node_params.EventRecord

    @property
    def event(self) -> int:
        """The CUevent, as a number."""
        return self._work.event


class EventWaitNode(Node):
    """Waits for an event that is recorded outside of the graph."""

    __slots__ = ()
    kind = "event wait"
    _work: node_params.EventWait

    @property
    def event(self) -> int:
        """The CUevent, as a number."""
        return self._work.event


class HostNode(Node):
    """Calls a C function on the host."""

    __slots__ = ()
    kind = "host"
    _work: node_params.HostCall

    @property
    def function(self) -> int:
        """The address of the function."""
        return self._work.function

    @property
    def user_data(self) -> int:
        """What it is called with."""
        return self._work.user_data


class MemAllocNode(Node):
    """Allocates memory at one fixed address, at each launch anew."""

    __slots__ = ()
    kind = "mem alloc"
    _work: node_params.Allocation
    __match_args__ = ("address", "nbytes")

    @property
    def address(self) -> int:
        """Where the memory is, at every launch."""
        return self._work.address

    @property
    def nbytes(self) -> int:
        """How large the memory is."""
        return self._work.nbytes

    def _describe(self) -> str:
        return f" {self.nbytes} bytes at {self.address:#x}"


class MemFreeNode(Node):
    """Frees what a MemAllocNode allocated."""

    __slots__ = ()
    kind = "mem free"
    _work: node_params.Release

    @property
    def address(self) -> int:
        """Where the memory is."""
        return self._work.address


class BatchMemOpNode(Node):
    """Waits for, and writes of, words of memory."""

    __slots__ = ()
    kind = "batch mem op"
    _work: node_params.Batch

    @property
    def operations(self) -> tuple[node_params.MemoryOperation, ...]:
        """Each with `.name` ("write", "wait_geq", "wait_eq", "wait_and", "wait_nor"), `.address`,
        `.value`, `.nbytes`, and as the driver has it `.operation` and `.flags`.
        """
        return self._work.operations

    def _describe(self) -> str:
        return " " + ", ".join(f"{each.name} {each.address:#x}" for each in self.operations)


class UnknownNode(Node):
    """A node of a kind that these bindings, or this library, cannot read."""

    __slots__ = ()
    kind = "unknown"
    _work: node_params.Unknown

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


class Edge(NamedTuple):
    """`target` waits for `source`: for all of it ("full"), or, "programmatic", for a trigger in it.

    The ports are the driver's: which event of the source kernel, which part of the target.
    """

    source: Node
    target: Node
    kind: str = "full"
    from_port: int = 0
    to_port: int = 0

    @property
    def src(self) -> Node:
        """The same as `source`."""
        return self.source

    @property
    def dst(self) -> Node:
        """The same as `target`."""
        return self.target


def _short(name: str, limit: int = 60) -> str:
    return name if len(name) <= limit else name[: limit - 3] + "..."


class Notes(NamedTuple):
    """What was noted of a node when it was captured."""

    scopes: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()


class State(NamedTuple):
    """One node at one moment."""

    handle: Any
    work: node_params.Work
    serial: int
    notes: Notes
    enabled: bool
