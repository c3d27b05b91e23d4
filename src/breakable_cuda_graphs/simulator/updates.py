"""What may change in an executable, and which node of one graph is which of another.

The hard problem: an executable has fixed resources, so each kind of node has its own list of what
may change, and a whole-graph update must pair nodes of two graphs that share nothing but their shape
and the order in which edges were made. Either everything is changed or nothing: `plan` finds all
changes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .._driver.enums import (
    COOPERATIVE,
    DEVICE_UPDATABLE,
    NOT_SUPPORTED,
    PRIORITY,
    USE_NODE_PRIORITY,
    UpdateResult,
)
from .graphs import ChildOp, ConditionalOp, GraphData, NodeData, Op
from .memory import SimulatedMemory
from .nodes import BatchMemOp, KernelOp, Memcpy, Memset
from .world import Refusal


class UpdateRefused(Exception):
    """A change that the executable cannot take; the nodes are those of the new graph."""

    def __init__(self, why: int, node: NodeData | None, from_node: NodeData | None = None) -> None:
        super().__init__(why)
        self.why, self.node, self.from_node = why, node, from_node


class NodeChange(NamedTuple):
    """One node of an executable and its new work."""

    node: NodeData
    work: Op


@dataclass(frozen=True)
class UpdateRules:
    """The rules for one executable."""

    memory: SimulatedMemory
    flags: int

    # ---- one node

    def refusal(self, old: Op, new: Op) -> int:
        """Why an executable's node cannot change so, as CUgraphExecUpdateResult; 0 if it can."""
        if isinstance(old, KernelOp) and isinstance(new, KernelOp):
            return self._kernel(old, new)
        if old.kind != new.kind:
            return UpdateResult.NODE_TYPE_CHANGED
        may = old == new or self._may_change(old, new)
        return UpdateResult.SUCCESS if may else UpdateResult.PARAMETERS_CHANGED

    def _may_change(self, old: Op, new: Op) -> bool:
        """Whether a node that is no kernel may have these parameters instead of those."""
        if isinstance(old, Memcpy) and isinstance(new, Memcpy):
            ends = ((old.src, new.src), (old.dst, new.dst))
            same = all(before.memory_type == after.memory_type for before, after in ends)
            return same and old.is_flat and new.is_flat and bool(new.width and new.height)
        if isinstance(old, Memset) and isinstance(new, Memset):
            same = self._context(old.dst) is self._context(new.dst)
            return same and _rows(old) == _rows(new)
        if isinstance(old, BatchMemOp) and isinstance(new, BatchMemOp):
            return _operations(old) == _operations(new)
        return True

    def _kernel(self, old: KernelOp, new: KernelOp) -> int:
        if any(_flag(work, DEVICE_UPDATABLE) != b"\0" * 4 for work in (old, new)):
            raise Refusal(NOT_SUPPORTED)
        if new.context != old.context:
            return UpdateResult.UNSUPPORTED_FUNCTION_CHANGE
        if _flag(old, COOPERATIVE) != _flag(new, COOPERATIVE):
            return UpdateResult.ATTRIBUTES_CHANGED
        if self.flags & USE_NODE_PRIORITY and _flag(old, PRIORITY) != _flag(new, PRIORITY):
            return UpdateResult.ATTRIBUTES_CHANGED
        return UpdateResult.SUCCESS

    def _context(self, address: int) -> object:
        block = self.memory.block_at(address)
        return block.context if block is not None else None

    # ---- whole graphs

    def plan(self, old: GraphData, new: GraphData) -> list[NodeChange]:
        """All changes that make the one graph the other; raises UpdateRefused."""
        changes: list[NodeChange] = []
        for after, before in _pairs(old, new).items():
            changes += self._node(before, after)
        return changes

    def _node(self, before: NodeData, after: NodeData) -> list[NodeChange]:
        old, new = before.work, after.work
        if old.kind != new.kind:
            raise UpdateRefused(UpdateResult.NODE_TYPE_CHANGED, after)
        if isinstance(old, ConditionalOp) and isinstance(new, ConditionalOp):
            if (old.choice, len(old.bodies)) != (new.choice, len(new.bodies)):
                raise UpdateRefused(UpdateResult.NOT_SUPPORTED, after)
        elif not isinstance(old, ChildOp):
            why = self.refusal(old, new)
            if why != UpdateResult.SUCCESS:
                raise UpdateRefused(why, after)
            return [NodeChange(before, keep_attributes(old, new))]
        inner: list[NodeChange] = []
        for mine, theirs in zip(old.child_graphs(), new.child_graphs(), strict=True):
            inner += self.plan(mine, theirs)
        return inner


def keep_attributes(old: Op, new: Op) -> Op:
    """An executable's launch attributes (cluster dimensions among them) never change."""
    if isinstance(old, KernelOp) and isinstance(new, KernelOp):
        return new.with_attributes(old.attributes)
    return new


def _pairs(old: GraphData, new: GraphData) -> dict[NodeData, NodeData]:
    """Which node of `old` each one of `new` is, as the documentation of `cuGraphExecUpdate` says.

    Exit nodes are paired in the order in which they came to be so, from the last one; then what each
    waits for, in the order in which the edges were made.
    """
    if len(old.nodes) != len(new.nodes):
        raise UpdateRefused(UpdateResult.TOPOLOGY_CHANGED, None)
    pairs: dict[NodeData, NodeData] = {}
    mine = list(old.exits)
    for theirs in reversed(new.exits):
        if not mine:
            raise UpdateRefused(UpdateResult.TOPOLOGY_CHANGED, theirs)
        pairs[theirs] = mine.pop()
    if mine:
        raise UpdateRefused(UpdateResult.TOPOLOGY_CHANGED, None)
    waiting = list(pairs)
    for after in waiting:
        waiting += _pair_dependencies(pairs[after], after, pairs)
    return pairs


def _pair_dependencies(
    before: NodeData, after: NodeData, pairs: dict[NodeData, NodeData]
) -> list[NodeData]:
    """Pair what two paired nodes wait for; returns what has not been seen yet."""
    if len(before.dependencies) != len(after.dependencies):
        raise UpdateRefused(UpdateResult.TOPOLOGY_CHANGED, after)
    found = []
    both = zip(before.dependencies.items(), after.dependencies.items(), strict=True)
    for (mine, edge), (theirs, wanted) in both:
        if theirs not in pairs and mine not in pairs.values():
            pairs[theirs] = mine
            found.append(theirs)
        if pairs.get(theirs) is not mine or edge != wanted:
            raise UpdateRefused(UpdateResult.TOPOLOGY_CHANGED, after, theirs)
    return found


def _flag(work: KernelOp, attribute: int) -> bytes:
    return (work.attribute(attribute) or b"\0" * 4)[:4]


def _rows(work: Memset) -> tuple[int, ...]:
    """What of a fill may not change: the number of its rows, and all else of several."""
    if work.height <= 1:
        return (work.height,)
    return work.height, work.width, work.element_size, work.pitch


_FLUSH = 1 << 30  # CU_STREAM_WAIT_VALUE_FLUSH


def _operations(work: BatchMemOp) -> tuple[object, ...]:
    """What of a batch may not change: its context, and the types of its operations."""
    return (work.context, *((each.operation, each.flags & _FLUSH) for each in work.operations))
