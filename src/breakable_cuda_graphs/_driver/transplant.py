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
from .node_params import Child, Conditional, Reader

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
    planted = Planted()
    if not kinds <= MOVABLE:
        _plant_child(ground, source, after, kinds, planted)
    else:
        _plant(ground, source.value, after, known, planted)
    return planted


def _plant_child(
    ground: Ground, source: GraphHandle, after: Sequence[Any], kinds: set[int], planted: Planted
) -> None:
    driver = ground.driver
    if kinds & _OWNED:
        node = set_params.add_moved_child(driver, ground.graph, after, source.value)
        source.detach()  # it is the node's now
    else:
        node = set_params.add(driver, ground.graph, after, Child(int(source.value)))
    planted.nodes[int(node)] = node
    planted.is_child = True


def _plant(
    ground: Ground, source: Any, after: Sequence[Any], known: Mapping[int, Conditional],
    planted: Planted,
) -> None:  # fmt: skip
    planted.nodes, roots = _plant_nodes(ground, source, known, {}, planted)
    pairs = [(earlier, root) for root in roots for earlier in after]
    if pairs:
        ground.driver.add_dependencies(ground.graph, [a for a, _ in pairs], [b for _, b in pairs])


def _plant_nodes(
    ground: Ground, source: Any, known: Mapping[int, Conditional], outer: dict[int, int],
    planted: Planted,
) -> tuple[dict[int, Any], list[Any]]:  # fmt: skip
    """All nodes and edges of a graph: old address -> new node, and the new roots.

    `outer` are the handles that kernels in here may set although their nodes are outside.
    """
    driver = ground.driver
    nodes, edges = driver.graph_nodes(source), driver.graph_edges(source)
    reader = Reader(driver, known, ground.context)
    handles = outer | _new_handles(ground, reader, nodes)
    new = {int(node): _plant_node(ground, reader, node, known, handles, planted) for node in nodes}
    if edges:
        driver.add_dependencies(
            ground.graph,
            [new[int(one)] for one, _, _ in edges],
            [new[int(other)] for _, other, _ in edges],
            [data for _, _, data in edges],
        )
    targets = {int(target) for _, target, _ in edges}
    return new, [new[int(node)] for node in nodes if int(node) not in targets]


def _new_handles(ground: Ground, reader: Reader, nodes: Sequence[Any]) -> dict[int, int]:
    """A handle of the target for each conditional node, by the handle that it has now."""
    handles: dict[int, int] = {}
    for node in nodes:
        if kernel_params.node_type(ground.driver, node) == enums.CONDITIONAL:
            work = reader.conditional(node)
            assert isinstance(work, Conditional)
            parts = conditionals.new_handles(
                ground.driver, ground.root, ground.context, work.choice, 1
            )
            handles[work.handle] = parts.handles[0]
    return handles


def _plant_node(
    ground: Ground, reader: Reader, node: Any, known: Mapping[int, Conditional],
    handles: dict[int, int], planted: Planted,
) -> Any:  # fmt: skip
    driver = ground.driver
    work = reader.read(node)
    if work.kind == enums.KERNEL:
        launch = conditionals.with_handles(work, handles)  # type: ignore[arg-type]
        new = set_params.add(driver, ground.graph, (), launch)
        driver.cuGraphKernelNodeCopyAttributes(new, node)
        return new
    if isinstance(work, Conditional):
        return _plant_conditional(ground, work, known, handles, planted)
    return set_params.add(driver, ground.graph, (), work)


def _plant_conditional(
    ground: Ground, work: Conditional, known: Mapping[int, Conditional], handles: dict[int, int],
    planted: Planted,
) -> Any:  # fmt: skip
    parts = conditionals.Parts(work.choice, (handles[work.handle],), (len(work.bodies),))
    made = conditionals.add_nodes(ground.driver, ground.graph, (), parts, ground.context)
    (node,), (new,) = made.nodes, made.works
    planted.conditionals[int(node)] = new
    for body, inside in zip(work.bodies, made.bodies, strict=True):
        inner = Ground(ground.driver, inside, ground.root, ground.context)
        _plant_nodes(inner, types.CUgraph(body), known, handles, planted)
    return node
