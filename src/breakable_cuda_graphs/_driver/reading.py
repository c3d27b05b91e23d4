"""What is in a graph: kinds of nodes, names of kernels, the bytes of their arguments.

The hard problem: the driver hands out kernel arguments as raw addresses in one of two forms
(`kernelParams`, an array of pointers, or `extra`, one packed buffer: cuBLAS's Hopper kernels use
it), with sizes but no types. Reading the wrong form crashes the process, so both are told apart
here, and every byte is copied out at once: the memory belongs to the node.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from . import bindings

KERNEL, MEMCPY, MEMSET, HOST, CHILD, EMPTY = range(6)
MEM_ALLOC, MEM_FREE, BATCH_MEM_OP, CONDITIONAL = 10, 11, 12, 13

#: Graphs with these nodes, or with nodes we do not know, cannot be cloned, so they cannot be children
#: (driver API, cuGraphClone and cuGraphAddChildGraphNode).
NO_CHILDREN = frozenset({MEM_ALLOC, MEM_FREE, CONDITIONAL, -1})

#: What is missed if nobody waits for it. Records and host nodes are left loose on purpose (NCCL).
_WORK = frozenset({KERNEL, MEMCPY, MEMSET, CHILD, CONDITIONAL})

_HOST, _ARRAY = 1, 3  # CUmemorytype

#: Bytes of an argument that is filled as a whole: pointers and numbers, or an array of a few of them.
_SMALL = 64

_PACKED_END, _PACKED_POINTER, _PACKED_SIZE = 0, 1, 2
_POINTER = ctypes.sizeof(ctypes.c_void_p)


class Layout:
    """Name and parameter layout of a kernel: `parameters` is ((offset, size), ...)."""

    def __init__(self, name: str, parameters: tuple[tuple[int, int], ...]) -> None:
        self.name, self.parameters = name, parameters
        self._read_pointers = _words_at(len(parameters))
        self._wide = [
            (n, _words_at(size // 8)) for n, (_, size) in enumerate(parameters) if size >= 8
        ]

    def words(self, table: int) -> list[int]:
        """Every 8-byte step of the arguments that an array of pointers at `table` leads to."""
        addresses = self._read_pointers(_MEMORY, table)
        words: list[int] = []
        for number, read in self._wide:
            address = addresses[number]
            if address:
                words += read(_MEMORY, address)
        return words


#: All addresses of this process, to read from: an object of ctypes for each piece would take twice as long.
_MEMORY = (ctypes.c_char * (1 << 62)).from_address(0)


def _words_at(count: int) -> Callable[[Any, int], tuple[int, ...]]:
    """What reads so many words of `_MEMORY` from an address on."""
    return struct.Struct(f"={count}Q").unpack_from


def node_type(driver: bindings.Driver, node: Any) -> int:
    """`CUgraphNodeType` as a number; -1 for a kind that these bindings do not know."""
    try:
        code, kind = driver.module.cuGraphNodeGetType(node)
        if code:
            raise driver.error("cuGraphNodeGetType", code)
        return int(kind)
    except ValueError:
        return -1


class KernelReader:
    """Reads kernel nodes; remembers the layout of each function.

    A reader lives as long as one look at a graph or one capture, not longer: function handles are
    used again by the driver once a module has been unloaded.
    """

    def __init__(self, driver: bindings.Driver) -> None:
        self.driver = driver
        self._layouts: dict[int, Layout] = {}
        self._get_params = driver.module.cuGraphKernelNodeGetParams  # raw: once for each kernel

    def params(self, node: Any) -> Any:
        """The driver's struct for a kernel node. Never print it: its repr may crash the process."""
        code, params = self._get_params(node)
        if code:
            raise self.driver.error("cuGraphKernelNodeGetParams", code)
        return params

    def layout(self, params: Any) -> Layout:
        """Name and parameters of the kernel that a struct launches."""
        handle = int(params.func or 0) or int(params.kern or 0)
        known = self._layouts.get(handle)
        if known is None:
            function = params.func if int(params.func or 0) else params.kern
            known = self._layouts[handle] = _read_layout(self.driver, function)
        return known

    def name(self, node: Any) -> str:
        """The mangled name of a kernel node's kernel."""
        return self.layout(self.params(node)).name

    def arguments(self, params: Any) -> list[bytes]:
        """A copy of each argument of a kernel node, in order."""
        parameters = self.layout(params).parameters
        if not parameters:
            return []
        table = int(params.kernelParams or 0)
        if table:
            addresses = (ctypes.c_void_p * len(parameters)).from_address(table)
            return [
                ctypes.string_at(address, size) if address else bytes(size)
                for address, (_, size) in zip(addresses, parameters, strict=True)
            ]
        packed = _packed_buffer(int(params.extra or 0))
        return [packed[offset : offset + size] for offset, size in parameters]

    def words_of(self, node: Any) -> list[int] | None:
        """Every 8-byte step of a kernel node's arguments; None for a node of another kind.

        The driver does not read those as kernels; so a kernel need not be asked for its kind first.
        """
        code, params = self._get_params(node)
        if code:
            if node_type(self.driver, node) == KERNEL:
                raise self.driver.error("cuGraphKernelNodeGetParams", code)
            return None
        table = int(params.kernelParams or 0)
        if table:
            known = self._layouts.get(int(params.func or 0))
            return (known or self.layout(params)).words(table)
        words: list[int] = []
        for data in self.arguments(params):
            words += steps_of(data)
        return words

    def describe(self, node: Any) -> str:
        """One word or name for a node, for messages."""
        kind = node_type(self.driver, node)
        if kind == KERNEL:
            return self.name(node)
        try:
            name = str(bindings.types.CUgraphNodeType(kind).name)
        except ValueError:
            return f"node of kind {kind}"
        return name.removeprefix("CU_GRAPH_NODE_TYPE_").lower().replace("_", " ")


def steps_of(data: bytes) -> memoryview:
    """Every whole 8-byte step of an argument, as an unsigned number."""
    return memoryview(data[: len(data) & ~7]).cast("Q")


def _read_layout(driver: bindings.Driver, function: Any) -> Layout:
    is_kernel = isinstance(function, bindings.types.CUkernel)
    name = (driver.cuKernelGetName if is_kernel else driver.cuFuncGetName)(function)
    call = "cuKernelGetParamInfo" if is_kernel else "cuFuncGetParamInfo"
    info, parameters = driver.raw(call), list[tuple[int, int]]()
    while True:
        code, offset, size = info(function, len(parameters))
        if int(code) == bindings.INVALID_VALUE:  # there are no more
            break
        if code:
            raise driver.error(call, code)
        parameters.append((int(offset), int(size)))
    return Layout(name.decode() if isinstance(name, bytes) else str(name), tuple(parameters))


def _packed_buffer(extra: int) -> bytes:
    """The buffer of CU_LAUNCH_PARAM_BUFFER_POINTER / _SIZE pairs, or nothing."""
    buffer, size, at = 0, 0, extra
    while at:
        key = ctypes.c_size_t.from_address(at).value
        if key == _PACKED_END:
            break
        value = ctypes.c_size_t.from_address(at + _POINTER).value
        if key == _PACKED_POINTER:
            buffer = value
        elif key == _PACKED_SIZE:
            size = ctypes.c_size_t.from_address(value).value
        at += 2 * _POINTER
    return ctypes.string_at(buffer, size) if buffer and size else b""


def is_memory(driver: bindings.Driver, word: int) -> bool:
    """Whether a word is the address of device or pinned memory, or only looks like a number.

    The driver knows no address of ordinary host memory (cuPointerGetAttribute: INVALID_VALUE).
    """
    if not 1 << 20 < word < 1 << 57:
        return False
    attribute = bindings.types.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    return driver.ask("cuPointerGetAttribute", attribute, word) is not None


class Survey:
    """One look at the graph of an open capture, before its end: a failed end takes the graph along.

    `kinds` are the kinds of its nodes, those of child graphs included; `dangling` the leaves that
    the capture stream, whose next work waits for `frontier`, would miss; `missed` the work that it
    would not wait for, of which the leaves if they are work. `allocated` are the allocation nodes
    as {address: bytes}, `freed` the addresses of free nodes, `copies` the ends of the copies as
    (source, target, bytes).
    """

    def __init__(self, reader: KernelReader, graph: Any, frontier: list[Any]) -> None:
        self._reader = reader
        #: the argument words of each kernel
        self.kernel_words: list[list[int]] = []
        self._pointers: set[int] = set()  # of copies and fills
        self.kinds: set[int] = set()
        self.allocated: dict[int, int] = {}
        self.freed: set[int] = set()
        self.copies: list[tuple[int, int, int]] = []
        nodes = self._nodes = reader.driver.graph_nodes(graph)
        self._note(nodes)
        if self.kernel_words:
            self.kinds.add(KERNEL)
        self.dangling: list[Any] = []
        self.missed: list[Any] = []
        if not len(nodes) == len(frontier) == 1:  # else the only node is the one of the frontier
            self.dangling, self.missed = _loose(reader.driver, graph, nodes, frontier)

    def _note(self, nodes: list[Any]) -> None:
        reader, driver = self._reader, self._reader.driver
        for node in nodes:
            words = reader.words_of(node)
            if words is not None:
                self.kernel_words.append(words)
                continue
            kind = node_type(driver, node)
            self.kinds.add(kind)
            if kind == MEMCPY:
                self._note_copy(driver.cuGraphMemcpyNodeGetParams(node))
            elif kind == MEMSET:
                self._pointers.add(int(driver.cuGraphMemsetNodeGetParams(node).dst))
            elif kind == BATCH_MEM_OP:
                params = driver.cuGraphBatchMemOpNodeGetParams(node)
                self._pointers |= {address for _, address, _, _ in batch_operations(params)} - {0}
            elif kind == CHILD:
                self._note(driver.graph_nodes(driver.cuGraphChildGraphNodeGetGraph(node)))
            elif kind == MEM_ALLOC:
                params = driver.cuGraphMemAllocNodeGetParams(node)
                self.allocated[int(params.dptr)] = int(params.bytesize)
            elif kind == MEM_FREE:
                self.freed.add(int(driver.cuGraphMemFreeNodeGetParams(node)))

    def _note_copy(self, params: Any) -> None:
        self._pointers |= copy_pointers(params)
        source = _end_of_copy(params.srcMemoryType, params.srcHost, params.srcDevice)
        target = _end_of_copy(params.dstMemoryType, params.dstHost, params.dstDevice)
        rows = max(int(params.Height), 1) * max(int(params.Depth), 1)
        self.copies.append((source, target, int(params.WidthInBytes) * rows))

    def addresses(self) -> set[int]:
        """Every word that may be an address: of kernels' arguments, copies and fills."""
        return self._pointers.union(*self.kernel_words)

    def sure_addresses(self) -> set[int]:
        """Those that are no leftovers of the stack: a large argument need not have been filled.

        Reads the kernels once more.
        """
        reader, sure = self._reader, set(self._pointers)
        for node in self._nodes:
            if node_type(reader.driver, node) == KERNEL:
                for data in reader.arguments(reader.params(node)):
                    if len(data) <= _SMALL:
                        sure.update(steps_of(data))
        return sure

    def names(self, nodes: list[Any]) -> list[str]:
        """Names of nodes, for messages."""
        return [self._reader.describe(node) for node in nodes]


def copy_pointers(params: Any) -> set[int]:
    """The addresses that a copy reads and writes; unused ones are zero and left out."""
    pointers = (params.srcDevice, params.dstDevice, params.srcHost, params.dstHost)
    return {int(pointer or 0) for pointer in pointers} - {0}


def _end_of_copy(memory_type: Any, host: Any, device: Any) -> int:
    """Where a copy reads or writes; 0 for a CUDA array. Captured copies have unified addresses."""
    if int(memory_type) == _ARRAY:
        return 0
    return int((host if int(memory_type) == _HOST else device) or 0)


_OPERATION_BYTES = 48  # CUstreamBatchMemOpParams
_OPERATIONS_AT, _COUNT_AT = 16, 8  # in CUDA_BATCH_MEM_OP_NODE_PARAMS

#: CUstreamBatchMemOpType with an address: waits and writes of 32 and of 64 bits
_ADDRESSED = {1, 2, 4, 5}


def batch_operations(params: Any) -> list[tuple[int, int, int, int]]:
    """(CUstreamBatchMemOpType, address, value, flags) of each operation of a batch node.

    The bindings' `paramArray` shows only what was set through it, so the struct is read itself.
    """
    start = params.getPtr()
    count = ctypes.c_uint.from_address(start + _COUNT_AT).value
    at = ctypes.c_void_p.from_address(start + _OPERATIONS_AT).value or 0
    return [_operation(at + number * _OPERATION_BYTES) for number in range(count if at else 0)]


def _operation(at: int) -> tuple[int, int, int, int]:
    operation = ctypes.c_uint.from_address(at).value
    if operation not in _ADDRESSED:
        return operation, 0, 0, 0
    address, value = (ctypes.c_uint64.from_address(at + place).value for place in (8, 16))
    if operation in (1, 2):
        value &= 0xFFFFFFFF  # the other half of the union is nobody's
    return operation, address, value, ctypes.c_uint.from_address(at + 24).value


def _loose(
    driver: bindings.Driver, graph: Any, nodes: list[Any], frontier: list[Any]
) -> tuple[list[Any], list[Any]]:
    """The leaves outside of the frontier, and the work that the frontier does not wait for."""
    edges = driver.graph_edges(graph) if len(nodes) > 1 else []
    inner = {int(source) for source, _, _ in edges}.union(int(node) for node in frontier)
    leaves = [node for node in nodes if int(node) not in inner]
    if not leaves:
        return [], []
    joined = _all_before(frontier, edges)
    left = [node for node in nodes if int(node) not in joined]
    work = [node for node in left if node_type(driver, node) in _WORK]
    return leaves, [node for node in work if int(node) not in inner] or work


def _all_before(frontier: list[Any], edges: list[tuple[Any, Any, Any]]) -> set[int]:
    """The nodes of the frontier, and all that they wait for."""
    before: dict[int, list[int]] = {}
    for source, target, _ in edges:
        before.setdefault(int(target), []).append(int(source))
    found: set[int] = set()
    left = [int(node) for node in frontier]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += before.get(node, ())
    return found
