"""What the nodes of a graph do, as plain values that are copied out of the driver.

The hard problem: what a getter hands out points into the node's own memory, which an edit or the end
of the graph takes away, and some of its structs crash the process when they are printed. So a node
is read once, whole, into a frozen value of plain numbers and bytes; nothing of the driver's stays.

Getters and field rules: CUDA Driver API, "Graph Management" (cuGraphKernelNodeGetParams and its
kin). Conditional nodes have no getter before 13.2 (`cuGraphNodeGetParams`): what is known of them is
what was noted when they were made, and comes in as `known`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from . import bindings, kernel_params
from .demangle import demangled
from .enums import (
    ARRAY_MEMORY,
    BATCH_MEM_OP,
    CHILD,
    CLUSTER,
    CONDITIONAL,
    COOPERATIVE,
    EMPTY,
    EVENT_RECORD,
    EVENT_WAIT,
    HOST,
    HOST_MEMORY,
    KERNEL,
    MEM_ALLOC,
    MEM_FREE,
    MEMCPY,
    MEMSET,
    PRIORITY,
    WAIT_32,
    WAIT_64,
    WRITE_32,
    WRITE_64,
)

types = bindings.types

Dim = tuple[int, int, int]

#: CUstreamWaitValue_flags: how a wait compares, by number; the rest of the flags is above
WAITS = ("wait_geq", "wait_eq", "wait_and", "wait_nor")
_COMPARISON = 3

#: `cuGraphNodeGetParams`, which reads conditional nodes too, came with this driver.
_GENERIC_GETTER = 13020

_WORD = 8


@dataclass(frozen=True)
class Attributes:
    """The launch attributes of a kernel node that parameters alone lose."""

    cluster: Dim = (1, 1, 1)
    cooperative: bool = False
    priority: int = 0


@dataclass(frozen=True)
class Work:
    """What one node does."""

    kind: ClassVar[int] = -1


@dataclass(frozen=True)
class Kernel(Work):
    """A kernel launch. `parameters` are ((offset, size), ...), `args` the bytes of each of them.

    `packed` tells that the node holds its arguments in one buffer (`extra`). `table` is the address
    of a node's own arguments; it is used only where the driver tells no sizes.
    """

    kind = KERNEL
    name: str
    func: int
    kern: int
    context: int
    grid: Dim
    block: Dim
    shared_bytes: int
    args: tuple[bytes, ...]
    parameters: tuple[tuple[int, int], ...]
    packed: bool = False
    attributes: Attributes = field(default_factory=Attributes)
    table: int = 0

    @property
    def function(self) -> Any:
        """The handle that the node launches: a CUfunction, or a CUkernel where there is none."""
        return types.CUfunction(self.func) if self.func else types.CUkernel(self.kern)

    def with_args(self, args: tuple[bytes, ...]) -> Kernel:
        """The same launch with other arguments; a tenth of what `dataclasses.replace` costs."""
        made = object.__new__(Kernel)
        made.__dict__.update(self.__dict__, args=args)
        return made

    def words(self) -> Iterator[tuple[int, int, int]]:
        """Every 8-byte step of every argument: (argument, offset in it, unsigned value)."""
        for index, data in enumerate(self.args):
            for step, value in enumerate(kernel_params.steps_of(data)):
                yield index, step * _WORD, value


#: What CUDA_MEMCPY3D says of an end besides its memory, in the order of `End`.
PLACE = ("XInBytes", "Y", "Z", "Pitch", "Height")


@dataclass(frozen=True)
class End:
    """One end of a copy: the fields of CUDA_MEMCPY3D for it; `address` is an array's handle."""

    memory_type: int
    address: int
    x: int = 0
    y: int = 0
    z: int = 0
    pitch: int = 0
    height: int = 0

    @classmethod
    def read(cls, params: Any, side: str) -> End:
        """From CUDA_MEMCPY3D; the memory type is 0 where it was never set, or is newer than the bindings."""
        try:
            memory_type = int(getattr(params, f"{side}MemoryType"))
        except ValueError:
            memory_type = 0
        where = {HOST_MEMORY: "Host", ARRAY_MEMORY: "Array"}.get(memory_type, "Device")
        address = int(getattr(params, side + where) or 0)
        return cls(memory_type, address, *(int(getattr(params, side + name)) for name in PLACE))

    def row(self, y: int = 0, z: int = 0) -> int:
        """The address of a row's first byte."""
        return self.address + self.x + (self.y + y + (self.z + z) * self.height) * self.pitch

    @property
    def start(self) -> int:
        """The address of the first byte."""
        return self.row()


@dataclass(frozen=True)
class Copy(Work):
    """A copy of `depth` slices of `height` rows of `width` bytes."""

    kind = MEMCPY
    src: End
    dst: End
    width: int
    height: int = 1
    depth: int = 1
    context: int = 0

    @classmethod
    def read(cls, params: Any, context: int) -> Self:
        """From CUDA_MEMCPY3D."""
        ends = End.read(params, "src"), End.read(params, "dst")
        return cls(*ends, params.WidthInBytes, params.Height, params.Depth, context)

    @property
    def is_flat(self) -> bool:
        """Whether it is one run of bytes: the only kind that an executable lets change."""
        return self.height <= 1 and self.depth <= 1

    def span(self, end: End) -> int:
        """Bytes from the first to the last that the copy touches at one end."""
        rows = (self.depth - 1) * end.height + self.height - 1
        return rows * end.pitch + self.width


@dataclass(frozen=True)
class Fill(Work):
    """A fill of `height` rows of `width` elements."""

    kind = MEMSET
    dst: int
    value: int
    element_size: int
    width: int
    height: int = 1
    pitch: int = 0
    context: int = 0

    @classmethod
    def read(cls, params: Any, context: int) -> Self:
        """From CUDA_MEMSET_NODE_PARAMS, any version."""
        size = params.elementSize, params.width, params.height, params.pitch
        return cls(int(params.dst), params.value, *size, context)

    @property
    def span(self) -> int:
        """Bytes from the first to the last that the fill touches."""
        return (self.height - 1) * self.pitch + self.width * self.element_size


@dataclass(frozen=True)
class HostCall(Work):
    """A call of a C function on the host."""

    kind = HOST
    function: int
    user_data: int


@dataclass(frozen=True)
class Child(Work):
    """A graph inside the graph."""

    kind = CHILD
    graph: int


@dataclass(frozen=True)
class Empty(Work):
    """Nothing; it only joins."""

    kind = EMPTY


@dataclass(frozen=True)
class EventWait(Work):
    """Wait for an event of somebody else."""

    kind = EVENT_WAIT
    event: int


@dataclass(frozen=True)
class EventRecord(Work):
    """Record an event."""

    kind = EVENT_RECORD
    event: int


@dataclass(frozen=True)
class Allocation(Work):
    """An allocation at a fixed address, for each launch anew."""

    kind = MEM_ALLOC
    address: int
    nbytes: int
    device: int = 0


@dataclass(frozen=True)
class Release(Work):
    """The end of an allocation."""

    kind = MEM_FREE
    address: int


@dataclass(frozen=True)
class MemoryOperation:
    """One operation of a batch: `operation` is a CUstreamBatchMemOpType, `flags` are the driver's."""

    operation: int
    address: int
    value: int
    flags: int = 0

    @property
    def is_wait(self) -> bool:
        return self.operation in (WAIT_32, WAIT_64)

    @property
    def nbytes(self) -> int:
        """The size of the word: 4 or 8 bytes; 0 for an operation on no word."""
        return {WAIT_32: 4, WRITE_32: 4, WAIT_64: 8, WRITE_64: 8}.get(self.operation, 0)

    @property
    def name(self) -> str:
        """ "write", "wait_geq", "wait_eq", "wait_and" or "wait_nor"; "other" for the rest."""
        if self.is_wait:
            return WAITS[self.flags & _COMPARISON]
        return "write" if self.nbytes else "other"


@dataclass(frozen=True)
class Batch(Work):
    """Waits for, and writes of, single words of memory."""

    kind = BATCH_MEM_OP
    operations: tuple[MemoryOperation, ...]
    context: int = 0


@dataclass(frozen=True)
class Conditional(Work):
    """Bodies of which the value of a handle chooses one; `bodies` are graphs inside the node."""

    kind = CONDITIONAL
    handle: int = 0
    choice: int = -1
    bodies: tuple[int, ...] = ()
    context: int = 0


@dataclass(frozen=True)
class Unknown(Work):
    """A kind of node that these bindings, or this library, cannot read."""

    type_id: int = -1


# ---------------------------------------------------------------- reading


class Reader:
    """Reads nodes. Lives as long as one look: function handles are used again by the driver."""

    def __init__(
        self, driver: bindings.Driver, known: Mapping[int, Conditional] | None = None,
        context: int = 0,
    ) -> None:  # fmt: skip
        self.driver = driver
        self._kernels = kernel_params.KernelReader(driver)
        self._known = known if known is not None else {}
        self._context = context  # of the copies and fills: no getter tells it

    def read(self, node: Any) -> Work:
        """What a node does."""
        kind = kernel_params.node_type(self.driver, node)
        read = _READERS.get(kind)
        return Unknown(kind) if read is None else read(self, node)

    def kernel(self, node: Any) -> Kernel:
        params = self._kernels.params(node)
        layout = self._kernels.layout(params)
        plain, packed = int(params.kernelParams or 0), int(params.extra or 0)
        return Kernel(
            layout.name,
            int(params.func or 0),
            int(params.kern or 0),
            int(params.ctx or 0),
            (params.gridDimX, params.gridDimY, params.gridDimZ),
            (params.blockDimX, params.blockDimY, params.blockDimZ),
            params.sharedMemBytes,
            tuple(self._kernels.arguments(params)),
            layout.parameters,
            packed=not plain and packed != 0,
            attributes=self.attributes(node),
            table=0 if layout.parameters else plain or packed,
        )

    def attributes(self, node: Any) -> Attributes:
        """The launch attributes; those that a driver does not know have their defaults."""
        cluster = self._attribute(node, CLUSTER)
        cooperative = self._attribute(node, COOPERATIVE)
        priority = self._attribute(node, PRIORITY)
        size = cluster.clusterDim if cluster is not None else None
        return Attributes(
            (1, 1, 1) if size is None else (size.x or 1, size.y or 1, size.z or 1),
            cooperative is not None and bool(cooperative.cooperative),
            0 if priority is None else int(priority.priority),
        )

    def _attribute(self, node: Any, identity: int) -> Any:
        found = self.driver.ask(
            "cuGraphKernelNodeGetAttribute", node, types.CUkernelNodeAttrID(identity)
        )
        return None if found is None else found[0]

    def copy(self, node: Any) -> Copy:
        return Copy.read(self.driver.cuGraphMemcpyNodeGetParams(node), self._context)

    def fill(self, node: Any) -> Fill:
        return Fill.read(self.driver.cuGraphMemsetNodeGetParams(node), self._context)

    def host(self, node: Any) -> HostCall:
        params = self.driver.cuGraphHostNodeGetParams(node)
        return HostCall(int(params.fn or 0), int(params.userData or 0))

    def child(self, node: Any) -> Child:
        return Child(int(self.driver.cuGraphChildGraphNodeGetGraph(node)))

    def empty(self, node: Any) -> Empty:
        return Empty()

    def wait(self, node: Any) -> EventWait:
        return EventWait(int(self.driver.cuGraphEventWaitNodeGetEvent(node)))

    def record(self, node: Any) -> EventRecord:
        return EventRecord(int(self.driver.cuGraphEventRecordNodeGetEvent(node)))

    def allocation(self, node: Any) -> Allocation:
        params = self.driver.cuGraphMemAllocNodeGetParams(node)
        return Allocation(int(params.dptr), int(params.bytesize), int(params.poolProps.location.id))

    def release(self, node: Any) -> Release:
        return Release(int(self.driver.cuGraphMemFreeNodeGetParams(node)))

    def batch(self, node: Any) -> Batch:
        params = self.driver.cuGraphBatchMemOpNodeGetParams(node)
        return Batch(tuple(batch_operations(params)), int(params.ctx))

    def conditional(self, node: Any) -> Conditional:
        noted = self._known.get(int(node))
        if noted is not None:
            return noted
        driver = self.driver
        if driver.version < _GENERIC_GETTER or not driver.has("cuGraphNodeGetParams"):
            return Conditional()
        params = driver.cuGraphNodeGetParams(node).conditional
        # `phGraph_out` shows the driver's own array: the numbers are copied at once.
        bodies = tuple(int(body) for body in params.phGraph_out[: params.size])
        return Conditional(int(params.handle), int(params.type), bodies, int(params.ctx))


_READERS: dict[int, Any] = {
    KERNEL: Reader.kernel,
    MEMCPY: Reader.copy,
    MEMSET: Reader.fill,
    HOST: Reader.host,
    CHILD: Reader.child,
    EMPTY: Reader.empty,
    EVENT_WAIT: Reader.wait,
    EVENT_RECORD: Reader.record,
    MEM_ALLOC: Reader.allocation,
    MEM_FREE: Reader.release,
    BATCH_MEM_OP: Reader.batch,
    CONDITIONAL: Reader.conditional,
}


OPERATION_BYTES = 48  # CUstreamBatchMemOpParams
OPERATIONS_AT, COUNT_AT = 16, 8  # in CUDA_BATCH_MEM_OP_NODE_PARAMS


def batch_operations(params: Any) -> list[MemoryOperation]:
    """The operations of a CUDA_BATCH_MEM_OP_NODE_PARAMS.

    The bindings' `paramArray` shows only what was set through it, so the struct is read itself.
    """
    start = params.getPtr()
    count = ctypes.c_uint.from_address(start + COUNT_AT).value
    at = ctypes.c_void_p.from_address(start + OPERATIONS_AT).value or 0
    return [_operation(at + number * OPERATION_BYTES) for number in range(count if at else 0)]


def _operation(at: int) -> MemoryOperation:
    operation = ctypes.c_uint.from_address(at).value
    if operation not in (WAIT_32, WRITE_32, WAIT_64, WRITE_64):  # the others have no address
        return MemoryOperation(operation, 0, 0)
    address, value = (ctypes.c_uint64.from_address(at + place).value for place in (8, 16))
    if operation in (WAIT_32, WRITE_32):
        value &= 0xFFFFFFFF  # the other half of the union is nobody's
    return MemoryOperation(operation, address, value, ctypes.c_uint.from_address(at + 24).value)


def label_of(work: Work) -> str:
    """What a node is called in messages."""
    if isinstance(work, Kernel):
        return f"the kernel {demangled(work.name)}"
    names = {MEMCPY: "a copy", MEMSET: "a fill", BATCH_MEM_OP: "a batch of words"}
    return names.get(work.kind, "a node")
