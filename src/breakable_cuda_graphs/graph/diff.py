"""What differs between two graphs, and a text that is equal for equal work.

The hard problem: nodes of two graphs share no names. The driver pairs them by the order in which
they were added (cuGraphExecUpdate), so that is how they are paired here, and what is compared of a
pair is what its kind has, field by field.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from .abbreviate import shown
from .node import Look, Node
from .nodes import KernelNode


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


def differences(before: Look, after: Look) -> list[Change]:
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
    old, new = dict(one._fields()), dict(other._fields())
    for field in dict.fromkeys([*old, *new]):
        if old.get(field) != new.get(field):
            yield Change(one, other, field, old.get(field), new.get(field))
    for (_, mine), (_, theirs) in zip(one._inside(), other._inside(), strict=False):
        yield from differences(mine.snapshot(), theirs.snapshot())


def _edge_changes(
    before: Look, after: Look, mine: tuple[Node, ...], theirs: tuple[Node, ...]
) -> Iterator[Change]:
    old, new = _incoming(before, mine), _incoming(after, theirs)
    for number, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if old.get(number) != new.get(number):
            yield Change(one, other, "edges", old.get(number, []), new.get(number, []))


def _incoming(look: Look, nodes: tuple[Node, ...]) -> dict[int, list[tuple[Any, ...]]]:
    """What each node waits for, by number: (number of the source, kind and ports of the edge)."""
    place = {node.handle: number for number, node in enumerate(nodes)}
    found: dict[int, list[tuple[Any, ...]]] = {}
    for edge in look.edges:
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


def fingerprint(look: Look, addresses: bool) -> str:
    """See `Graph.fingerprint`."""
    digest = hashlib.sha256()
    for node in described(look, addresses):
        for field, value in node.fields:
            digest.update(f"{field} {value}\n".encode())
    return digest.hexdigest()[:32]


def described(look: Look, addresses: bool = False) -> Iterator[Described]:
    """The nodes of a graph in topological order, those of graphs inside it behind their node."""
    nodes = look.nodes
    incoming = _incoming(look, nodes)
    for number, node in enumerate(nodes):
        fields: list[tuple[str, Any]] = [("kind", node.kind), ("edges", incoming.get(number, []))]
        if isinstance(node, KernelNode):
            fields.append(("args", [(arg.offset, arg.size) for arg in node.args]))
        for name, value in node._fields():
            is_address = name in _ADDRESSES or name.startswith("args[") or name.endswith(".address")
            if addresses or not is_address:
                fields.append((name, value))
        inner = [graph.snapshot() for _, graph in node._inside()]
        fields.append(("graphs", [len(each.nodes) for each in inner]))
        yield Described(node.label, tuple((name, str(value)) for name, value in fields))
        for each in inner:
            yield from described(each, addresses)
