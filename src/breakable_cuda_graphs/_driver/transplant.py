"""Put what was captured on its own into another graph, node by node.

The hard problem: a capture that goes straight into a graph and fails takes that graph along (a body
of a conditional node is then freed under its node, and the process crashes later: NVIDIA
cuda-python#2918). So captures always fill a graph of their own, and only what came out whole is put
where it belongs: parameters, launch attributes and edge data (programmatic edges too) unchanged, in
the same order. Conditional nodes cannot be cloned; they are made anew with handles of the target, and
the kernels that set the old handles are told the new ones.

Nodes that cannot be made again (allocations, foreign semaphores, kinds unknown to us) make the whole
a child graph instead, which takes the captured one over where it has to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import bindings, conditionals, enums, kernel_params, set_params
from .handles import GraphHandle
from .node_params import Child, Conditional, Kernel, Reader

types = bindings.types

#: Kinds that can be made again from what is read of them.
MOVABLE = enums.IN_BODIES | {enums.HOST, enums.EVENT_WAIT, enums.EVENT_RECORD, enums.BATCH_MEM_OP}

_OWNED = {enums.MEM_ALLOC, enums.MEM_FREE}


@dataclass
class Planted:
    """What became of the nodes: old address -> new node, in order; and the new conditionals."""

    nodes: dict[int, Any] = field(default_factory=dict)
    conditionals: dict[int, Conditional] = field(default_factory=dict)
    is_child: bool = False


@dataclass(frozen=True)
class Ground:
    """Where to plant: a graph, the root that handles belong to, nodes to come after, a context."""

    driver: bindings.Driver
    graph: Any
    root: Any
    context: int


def transplant(
    ground: Ground, source: GraphHandle, after: Sequence[Any], known: Mapping[int, Conditional]
) -> Planted:
    """Copy a graph's nodes behind `after` into another graph; `source` has to be kept alive.

    A graph that cannot be copied node by node becomes one child node.
    """
    driver = ground.driver
    kinds = {kernel_params.node_type(driver, node) for node in driver.graph_nodes(source.value)}
    if not kinds <= MOVABLE:
        return _plant_child(ground, source, after, kinds)
    planting = _Planting(ground, known)
    planting.planted.nodes, roots = planting.plant(ground.graph, source.value, {})
    pairs = [(earlier, root) for root in roots for earlier in after]
    if pairs:
        driver.add_dependencies(ground.graph, [a for a, _ in pairs], [b for _, b in pairs])
    return planting.planted


def _plant_child(
    ground: Ground, source: GraphHandle, after: Sequence[Any], kinds: set[int]
) -> Planted:
    driver = ground.driver
    if kinds & _OWNED:
        node = set_params.add_moved_child(driver, ground.graph, after, source.value)
        source.detach()  # it is the node's now
    else:
        node = set_params.add(driver, ground.graph, after, Child(int(source.value)))
    return Planted({int(node): node}, is_child=True)


class _Planting:
    """One transplant, node by node, and what has become of the nodes so far."""

    def __init__(self, ground: Ground, known: Mapping[int, Conditional]) -> None:
        self._driver, self._root, self._context = ground.driver, ground.root, ground.context
        self._reader = Reader(ground.driver, known, ground.context)
        self.planted = Planted()

    def plant(
        self, graph: Any, source: Any, outer: dict[int, int]
    ) -> tuple[dict[int, Any], list[Any]]:
        """All nodes and edges of a graph: old address -> new node, and the new roots.

        `outer` are the handles that kernels in here may set although their nodes are outside.
        """
        driver = self._driver
        nodes, edges = driver.graph_nodes(source), driver.graph_edges(source)
        handles = outer | self._new_handles(nodes)
        new = {int(node): self._node(graph, node, handles) for node in nodes}
        if edges:
            driver.add_dependencies(
                graph,
                [new[int(one)] for one, _, _ in edges],
                [new[int(other)] for _, other, _ in edges],
                [data for _, _, data in edges],
            )
        targets = {int(target) for _, target, _ in edges}
        return new, [new[int(node)] for node in nodes if int(node) not in targets]

    def _new_handles(self, nodes: Sequence[Any]) -> dict[int, int]:
        """A handle of the target for each conditional node, by the handle that it has now."""
        handles: dict[int, int] = {}
        for node in nodes:
            if kernel_params.node_type(self._driver, node) == enums.CONDITIONAL:
                work = self._reader.conditional(node)
                where = self._root, self._context
                parts = conditionals.new_handles(self._driver, *where, work.choice, 1)
                handles[work.handle] = parts.handles[0]
        return handles

    def _node(self, graph: Any, node: Any, handles: dict[int, int]) -> Any:
        work = self._reader.read(node)
        if isinstance(work, Kernel):
            launch = conditionals.with_handles(work, handles)
            new = set_params.add(self._driver, graph, (), launch)
            self._driver.cuGraphKernelNodeCopyAttributes(new, node)
            return new
        if isinstance(work, Conditional):
            return self._conditional(graph, work, handles)
        return set_params.add(self._driver, graph, (), work)

    def _conditional(self, graph: Any, work: Conditional, handles: dict[int, int]) -> Any:
        parts = conditionals.Parts(work.choice, (handles[work.handle],), (len(work.bodies),))
        made = conditionals.add_nodes(self._driver, graph, (), parts, self._context)
        (node,), (new,) = made.nodes, made.works
        self.planted.conditionals[int(node)] = new
        for body, inside in zip(work.bodies, made.bodies, strict=True):
            self.plant(inside, types.CUgraph(body), handles)
        return node
