"""What differs between two graphs, and a text that is equal for equal work.

The hard problem: nodes of two graphs share no names. The driver pairs them by the order in which
they were added (cuGraphExecUpdate), so that is how they are paired here, and what is compared of a
pair is what its kind has, field by field.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from .graph import ChildNode, ConditionalNode
from .nodes import BatchMemOpNode, KernelNode, MemcpyNode, MemsetNode, Node
from .snapshot import Snapshot

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["Change", "Described", "described", "differences", "fingerprint"]


class Change(NamedTuple):
    """One difference: `before` and `after` are the paired nodes; None where there is no partner."""

    before: Node | None
    after: Node | None
    field: str
    old: Any
    new: Any

    @property
    def node(self) -> Node | None:
        """The node that it is about."""
        return self.before if self.before is not None else self.after

    def __str__(self) -> str:
        name = self.node.label if self.node is not None else "graph"
        return f"{name}: {self.field} {shown(self.old)} -> {shown(self.new)}"


def differences(before: Snapshot, after: Snapshot) -> list[Change]:
    """All differences of two graphs and of the graphs inside them."""
    mine, theirs = before.by_insertion, after.by_insertion
    changes: list[Change] = []
    for one, other in zip(mine, theirs, strict=False):
        changes += _node_changes(one, other)
    changes += [Change(node, None, "topology", node.label, None) for node in mine[len(theirs) :]]
    changes += [Change(None, node, "topology", None, node.label) for node in theirs[len(mine) :]]
    changes += _edge_changes(before, after, mine, theirs)
    return changes


def _node_changes(one: Node, other: Node) -> Iterator[Change]:
    if one.type_id != other.type_id:
        yield Change(one, other, "kind", one.kind, other.kind)
        return
    old, new = dict(fields_of(one)), dict(fields_of(other))
    for field in dict.fromkeys([*old, *new]):
        if old.get(field) != new.get(field):
            yield Change(one, other, field, old.get(field), new.get(field))
    for mine, theirs in zip(one._graphs(), other._graphs(), strict=False):
        yield from differences(mine._template.snapshot(), theirs._template.snapshot())


def fields_of(node: Node) -> Iterator[tuple[str, Any]]:
    """The fields of a node, addresses and argument bytes included."""
    if isinstance(node, KernelNode):
        yield "fn", node.mangled_name
        yield "grid", node.grid
        yield "block", node.block
        yield "shared_bytes", node.shared_bytes
        yield "attrs.cluster", node.attrs.cluster
        yield "attrs.cooperative", node.attrs.cooperative
        yield "attrs.priority", node.attrs.priority
        yield from ((f"args[{arg.index}]", arg.data) for arg in node.args)
    elif isinstance(node, MemcpyNode):
        yield from (("src", node.src), ("dst", node.dst), ("nbytes", node.shape))
        yield from (("src_pitch", node.src_pitch), ("dst_pitch", node.dst_pitch))
        yield from (("src_memory", node.src_memory), ("dst_memory", node.dst_memory))
    elif isinstance(node, MemsetNode):
        yield from (("dst", node.dst), ("value", node.value), ("element_size", node.element_size))
        yield from (("nbytes", node.shape), ("pitch", node.pitch))
    elif isinstance(node, BatchMemOpNode):
        yield "count", len(node.operations)
        for place, each in enumerate(node.operations):
            yield f"operations[{place}].name", each.name
            yield f"operations[{place}].nbytes", each.nbytes
            yield f"operations[{place}].value", each.value
            yield f"operations[{place}].address", each.address
    elif isinstance(node, ConditionalNode):
        yield "type", node.type
        yield "bodies", len(node._work.bodies)
    elif isinstance(node, ChildNode):
        yield "nodes", len(node.graph)
    else:
        yield from ((name, value) for name, value in vars(node._work).items() if name != "context")


def _edge_changes(
    before: Snapshot, after: Snapshot, mine: tuple[Node, ...], theirs: tuple[Node, ...]
) -> Iterator[Change]:
    old, new = _incoming(before, mine), _incoming(after, theirs)
    for number, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if old.get(number) != new.get(number):
            yield Change(one, other, "edges", old.get(number, []), new.get(number, []))


def _incoming(snapshot: Snapshot, nodes: tuple[Node, ...]) -> dict[int, list[tuple[Any, ...]]]:
    """What each node waits for, by number: (number of the source, kind and ports of the edge)."""
    place = {node.handle: number for number, node in enumerate(nodes)}
    found: dict[int, list[tuple[Any, ...]]] = {}
    for edge in snapshot.edges:
        entry = (place[edge.source.handle], edge.kind, edge.from_port, edge.to_port)
        found.setdefault(place[edge.target.handle], []).append(entry)
    return {number: sorted(entries) for number, entries in found.items()}


# ---------------------------------------------------------------- fingerprints

#: Fields that are addresses, or that cannot be told from them.
_ADDRESSES = ("src", "dst", "address", "function", "user_data", "event")


class Described(NamedTuple):
    """A node in words that another process understands: its label, and (field, value) pairs."""

    label: str
    fields: tuple[tuple[str, str], ...]


def fingerprint(graph: Graph, addresses: bool) -> str:
    """See `Graph.fingerprint`."""
    digest = hashlib.sha256()
    for node in described(graph, addresses):
        for field, value in node.fields:
            digest.update(f"{field} {value}\n".encode())
    return digest.hexdigest()[:32]


def described(graph: Graph, addresses: bool = False) -> list[Described]:
    """The nodes of a graph in topological order, those of graphs inside it behind their node."""
    return list(_described(graph._template.snapshot(), addresses))


def _described(snapshot: Snapshot, addresses: bool) -> Iterator[Described]:
    nodes = snapshot.nodes
    incoming = _incoming(snapshot, nodes)
    for number, node in enumerate(nodes):
        fields: list[tuple[str, Any]] = [("kind", node.kind), ("edges", incoming.get(number, []))]
        if isinstance(node, KernelNode):
            fields.append(("args", [(arg.offset, arg.size) for arg in node.args]))
        for name, value in fields_of(node):
            is_address = name in _ADDRESSES or name.startswith("args[") or name.endswith(".address")
            if addresses or not is_address:
                fields.append((name, value))
        inner = node._graphs()
        fields.append(("graphs", [len(graph) for graph in inner]))
        yield Described(node.label, tuple((name, str(value)) for name, value in fields))
        for graph in inner:
            yield from _described(graph._template.snapshot(), addresses)


def shown(value: Any) -> str:
    if isinstance(value, bytes):
        return value[:16].hex(" ") + (" ..." if len(value) > 16 else "")
    if isinstance(value, int) and not isinstance(value, bool) and value > 1 << 20:
        return hex(value)
    return str(value)
