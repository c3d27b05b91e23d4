"""One look at the graph of an open capture: kinds, addresses, copies, and what nobody waits for.

The hard problem: a failed end takes the graph along, so what an error or the memory's book-keeping will
need has to be read just before, at every segment, and must therefore be quick.
"""

from __future__ import annotations

from typing import Any

from . import kernel_params
from .bindings import Driver
from .enums import (
    ARRAY_MEMORY,
    BATCH_MEM_OP,
    CHILD,
    CONDITIONAL,
    HOST_MEMORY,
    KERNEL,
    MEM_ALLOC,
    MEM_FREE,
    MEMCPY,
    MEMSET,
)
from .kernel_params import SMALL, KernelReader, node_type, steps_of
from .node_params import batch_operations

#: What is missed if nobody waits for it. Records and host nodes are left loose on purpose (NCCL).
_WORK = frozenset({KERNEL, MEMCPY, MEMSET, CHILD, CONDITIONAL})


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
                self._pointers |= {each.address for each in batch_operations(params)} - {0}
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
                    if len(data) <= SMALL:
                        sure.update(steps_of(data))
        return sure

    def names(self, nodes: list[Any]) -> list[str]:
        """Names of nodes, for messages."""
        return [self._reader.describe(node) for node in nodes]


def pageable_copy(driver: Driver, survey: Survey) -> tuple[int, int, bool] | None:
    """(address, bytes, whether it is read) of a captured copy from or to ordinary host memory."""
    for source, target, nbytes in survey.copies:
        for address in (source, target):
            if _is_pageable(driver, survey, address):
                return address, nbytes, address == source
    return None


def _is_pageable(driver: Driver, survey: Survey, address: int) -> bool:
    """Whether an address lies in host memory of which the driver does not know."""
    if not address or kernel_params.is_memory(driver, address):
        return False
    return not any(  # the driver need not know memory that a node is to allocate
        start <= address < start + nbytes for start, nbytes in survey.allocated.items()
    )


def copy_pointers(params: Any) -> set[int]:
    """The addresses that a copy reads and writes; unused ones are zero and left out."""
    pointers = (params.srcDevice, params.dstDevice, params.srcHost, params.dstHost)
    return {int(pointer or 0) for pointer in pointers} - {0}


def _end_of_copy(memory_type: Any, host: Any, device: Any) -> int:
    """Where a copy reads or writes; 0 for a CUDA array. Captured copies have unified addresses."""
    if int(memory_type) == ARRAY_MEMORY:
        return 0
    return int((host if int(memory_type) == HOST_MEMORY else device) or 0)


def _loose(
    driver: Driver, graph: Any, nodes: list[Any], frontier: list[Any]
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
