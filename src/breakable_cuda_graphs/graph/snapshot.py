"""One look at a graph: its nodes in topological order, and its edges.

The hard problem: nodes hold the look that they came from, to know their neighbours, so a look must not
hold nodes: the two would keep each other, and the graph, until a collection. It holds states, and makes
nodes of them when asked.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

from .node import Edge, Node, NodeState, OwningGraph
from .nodes import as_node

_EDGE_KINDS = {0: "full", 1: "programmatic"}


class Snapshot:
    """The nodes of one graph in topological order, ties by insertion, and its edges."""

    def __init__(
        self,
        template: OwningGraph,
        states: Sequence[NodeState],
        edges: Iterable[tuple[Any, Any, Any]],
    ) -> None:
        self._template, self._states = template, states
        place = {int(state.handle): number for number, state in enumerate(states)}
        self._pairs = sorted(
            ((place[int(a)], place[int(b)], data) for a, b, data in edges), key=_by_target
        )
        self._place = place
        self._before: dict[int, list[int]] = {}
        self._behind: dict[int, list[int]] = {}
        for source, target, _ in self._pairs:
            self._before.setdefault(target, []).append(source)
            self._behind.setdefault(source, []).append(target)

    def _node(self, number: int) -> Node:
        return as_node(self._template, self._states[number], self)

    @property
    def nodes(self) -> tuple[Node, ...]:
        order = in_order(len(self._states), [(a, b) for a, b, _ in self._pairs])
        return tuple(self._node(number) for number in order)

    @property
    def by_insertion(self) -> tuple[Node, ...]:
        """The same nodes as they were added: what the driver pairs two graphs by."""
        return tuple(self._node(number) for number in range(len(self._states)))

    @property
    def edges(self) -> tuple[Edge, ...]:
        """By target, then by source."""
        return tuple(_edge(self._node(a), self._node(b), data) for a, b, data in self._pairs)

    def neighbours(self, handle: int) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """What a node waits for, and what waits for it."""
        me = self._place.get(handle, -1)
        before = tuple(self._node(number) for number in self._before.get(me, ()))
        return before, tuple(self._node(number) for number in self._behind.get(me, ()))


def _by_target(pair: tuple[int, int, Any]) -> tuple[int, int]:
    return pair[1], pair[0]


def _edge(source: Node, target: Node, data: Any) -> Edge:
    try:
        kind = _EDGE_KINDS.get(int(data.type), "unknown")
    except ValueError:  # newer than the bindings
        kind = "unknown"
    return Edge(source, target, kind, int(data.from_port), int(data.to_port))


def in_order(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """The numbers below `count` in topological order, the smallest first where there is a choice.

    What is in a cycle comes last, by number: such a graph can be looked at, too.
    """
    waits = [0] * count
    behind: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        behind[source].append(target)
        waits[target] += 1
    ready = [number for number in range(count) if not waits[number]]
    order: list[int] = []
    while ready:
        number = heapq.heappop(ready)
        order.append(number)
        for follower in behind[number]:
            waits[follower] -= 1
            if not waits[follower]:
                heapq.heappush(ready, follower)
    if len(order) < count:
        done = set(order)
        order += [number for number in range(count) if number not in done]
    return order
