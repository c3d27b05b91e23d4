"""What may change in an executable, and which node of one graph is which of another.

The hard problem: an executable has fixed resources, so each kind of node has its own list of what
may change, and a whole-graph update must pair nodes of two graphs that share nothing but the order
in which they were built. Either everything is changed or nothing: `plan` finds all changes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .graphs import Graph, Node
from .memory import Memory
from .nodes import (
    COOPERATIVE,
    PRIORITY,
    BatchMemOp,
    Child,
    Conditional,
    Kernel,
    Memcpy,
    Memset,
    Place,
    Work,
)

# CUgraphExecUpdateResult
DONE = 0
TOPOLOGY_CHANGED = 2
NODE_TYPE_CHANGED = 3
PARAMETERS_CHANGED = 5
UNSUPPORTED_FUNCTION_CHANGE = 7
ATTRIBUTES_CHANGED = 8

USE_NODE_PRIORITY = 8  # CUgraphInstantiate_flags


class UpdateRefused(Exception):
    """A change that the executable cannot take; the nodes are those of the new graph."""

    def __init__(self, why: int, node: Node | None, from_node: Node | None = None) -> None:
        super().__init__(why)
        self.why, self.node, self.from_node = why, node, from_node


class Change(NamedTuple):
    """One node of an executable and its new work."""

    node: Node
    work: Work


@dataclass(frozen=True)
class Rules:
    """The rules for one executable."""

    memory: Memory
    flags: int

    # ---- one node

    def refusal(self, old: Work, new: Work) -> int:
        """Why an executable's node cannot change so, as CUgraphExecUpdateResult; 0 if it can."""
        if isinstance(old, Kernel) and isinstance(new, Kernel):
            return self._kernel(old, new)
        if isinstance(old, Memcpy) and isinstance(new, Memcpy):
            return self._memcpy(old, new)
        if isinstance(old, Memset) and isinstance(new, Memset):
            return self._memset(old, new)
        if isinstance(old, BatchMemOp) and isinstance(new, BatchMemOp):
            return DONE if _operations(old) == _operations(new) else PARAMETERS_CHANGED
        return DONE if old.kind == new.kind else NODE_TYPE_CHANGED

    def _kernel(self, old: Kernel, new: Kernel) -> int:
        if new.context != old.context:
            return UNSUPPORTED_FUNCTION_CHANGE
        if _flag(old, COOPERATIVE) != _flag(new, COOPERATIVE):
            return ATTRIBUTES_CHANGED
        if self.flags & USE_NODE_PRIORITY and _flag(old, PRIORITY) != _flag(new, PRIORITY):
            return ATTRIBUTES_CHANGED
        return DONE

    def _memcpy(self, old: Memcpy, new: Memcpy) -> int:
        if old.one_dimensional != new.one_dimensional or not (new.width and new.height):
            return PARAMETERS_CHANGED
        if not old.one_dimensional and _size(old) != _size(new):
            return PARAMETERS_CHANGED
        ends = ((old.source, new.source), (old.destination, new.destination))
        if any(self._home(before) != self._home(after) for before, after in ends):
            return PARAMETERS_CHANGED
        return DONE

    def _memset(self, old: Memset, new: Memset) -> int:
        if old.height != new.height:
            return PARAMETERS_CHANGED
        if old.height > 1 and (old.width, old.element_size, old.pitch) != (
            new.width,
            new.element_size,
            new.pitch,
        ):
            return PARAMETERS_CHANGED
        home = self._address_home(old.destination), self._address_home(new.destination)
        return DONE if home[0] == home[1] else PARAMETERS_CHANGED

    def _home(self, place: Place) -> tuple[object, ...]:
        return (place.memory_type, *self._address_home(place.address))

    def _address_home(self, address: int) -> tuple[object, ...]:
        block = self.memory.block_at(address)
        return (block.memory_type, block.context) if block is not None else (None, None)

    # ---- whole graphs

    def plan(self, old: Graph, new: Graph) -> list[Change]:
        """All changes that make the one graph the other; raises UpdateRefused."""
        if len(old.nodes) != len(new.nodes):
            raise UpdateRefused(TOPOLOGY_CHANGED, None)
        pairs = dict(zip(new.nodes, old.nodes, strict=True))
        changes: list[Change] = []
        for after, before in pairs.items():
            _same_edges(before, after, pairs)
            changes += self._node(before, after)
        return changes

    def _node(self, before: Node, after: Node) -> list[Change]:
        old, new = before.work, after.work
        if old.kind != new.kind:
            raise UpdateRefused(NODE_TYPE_CHANGED, after)
        if isinstance(old, Conditional) and isinstance(new, Conditional):
            if (old.choice, len(old.bodies)) != (new.choice, len(new.bodies)):
                raise UpdateRefused(PARAMETERS_CHANGED, after)
        elif not isinstance(old, Child):
            why = self.refusal(old, new)
            if why != DONE:
                raise UpdateRefused(why, after)
            return [Change(before, keep_attributes(old, new))]
        inner: list[Change] = []
        for mine, theirs in zip(old.child_graphs(), new.child_graphs(), strict=True):
            inner += self.plan(mine, theirs)
        return inner


def keep_attributes(old: Work, new: Work) -> Work:
    """An executable's launch attributes (cluster dimensions among them) never change."""
    if isinstance(old, Kernel) and isinstance(new, Kernel):
        return new.with_attributes(old.attributes)
    return new


def _same_edges(before: Node, after: Node, pairs: dict[Node, Node]) -> None:
    if len(before.dependencies) != len(after.dependencies):
        raise UpdateRefused(TOPOLOGY_CHANGED, after)
    for source, edge in after.dependencies.items():
        if before.dependencies.get(pairs[source]) != edge:
            raise UpdateRefused(TOPOLOGY_CHANGED, after, source)


def _flag(work: Kernel, attribute: int) -> bytes:
    return (work.attribute(attribute) or b"\0" * 4)[:4]


def _size(work: Memcpy) -> tuple[int, int, int]:
    return work.width, work.height, work.depth


_FLUSH = 1 << 30  # CU_STREAM_WAIT_VALUE_FLUSH


def _operations(work: BatchMemOp) -> tuple[object, ...]:
    """What of a batch may not change: its context, and the types of its operations."""
    return (work.context, *((each.operation, each.flags & _FLUSH) for each in work.operations))
