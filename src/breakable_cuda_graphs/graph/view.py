"""GraphReader: what can be seen of a graph, whoever it belongs to.

The hard problem: a graph may be edited, replayed or closed between two looks, and nodes that were found in
one must agree with each other. So each call here takes one look at the template, a `Snapshot`, and
answers from that alone.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any, NoReturn

from ..errors import bad_type, not_copyable
from . import diff, svg, text
from .node import Edge, Look, Node
from .snapshot import Snapshot
from .state import Template


class GraphReader:
    """The looking half of a `Graph`."""

    __slots__ = ("__weakref__", "_template")

    _template: Template

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes in topological order; where there is a choice, in the order of adding."""
        return self._template.snapshot().nodes

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All edges as (source, target, kind, from_port, to_port)."""
        return self._template.snapshot().edges

    def find(self, pattern: str, kind: type[Node] = Node) -> tuple[Node, ...]:
        """The nodes whose name matches a shell pattern: the kernel's name, mangled or not, or the
        kind of a node that is none; in graphs inside this one too.
        """
        if not isinstance(pattern, str):
            raise bad_type("pattern", pattern, "a shell pattern, such as '*gemm*'")
        _require_kind(kind)
        found = (
            node
            for node in everywhere(self._template.snapshot())
            if isinstance(node, kind)
            and any(fnmatch.fnmatchcase(name, pattern) for name in node._names())
        )
        return tuple(dict.fromkeys(found))

    def count(self, kind: type[Node] = Node) -> int:
        """How many nodes there are, or how many of a kind."""
        _require_kind(kind)
        return sum(isinstance(node, kind) for node in self.nodes)

    def __len__(self) -> int:
        return len(self._template.driver.graph_nodes(self._template.value))

    def diff(self, other: GraphReader) -> tuple[diff.Change, ...]:
        """What differs from the graph `other`: `Change`s with `.node`, `.field`, `.old` and `.new`.

        Nodes are paired in the order in which they were added, as the driver pairs them.
        """
        theirs = template_of("other", other)
        return tuple(diff.differences(self._template.snapshot(), theirs.snapshot()))

    def fingerprint(self, addresses: bool = False) -> str:
        """A short text that is equal for two captures of the same work.

        It covers topology, kernels, launch shapes, sizes of arguments, copies and fills. With
        `addresses`, the bytes of all arguments and the addresses of copies and fills too.
        """
        return diff.fingerprint(self._template.snapshot(), addresses)

    def to_dot(self, verbose: bool = False) -> str:
        """The graph in Graphviz's language; `verbose`: as the driver draws it, with all fields."""
        template = self._template
        if verbose:
            return text.from_driver(template.driver, template.value)
        return text.to_dot(template.snapshot())

    def to_networkx(self) -> Any:
        """A `networkx.DiGraph` whose nodes are this graph's, with the fields as attributes."""
        return text.to_networkx(self._template.snapshot())

    def to_svg(self) -> str:
        """A picture. Addresses are left out: the same work gives the same picture."""
        return svg.page(repr(self), None if self.closed else self._template.snapshot())

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self), "image/svg+xml": self.to_svg()}

    def __str__(self) -> str:
        return repr(self) if self.closed else text.page(repr(self), self._template.snapshot())

    def __repr__(self) -> str:
        if self.closed:
            return "<Graph closed>"
        counts: dict[str, int] = {}
        for node in self.nodes:
            counts[node.kind] = counts.get(node.kind, 0) + 1
        total = sum(counts.values())
        parts = ", ".join(f"{number} {kind}" for kind, number in counts.items())
        noun = "node" if total == 1 else "nodes"
        return f"<Graph {total} {noun}{': ' + parts if parts else ''}>"

    @property
    def closed(self) -> bool:
        """Whether the graph is gone."""
        return self._template.closed

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copyable("Graph")


def look_at(graph: GraphReader) -> Snapshot:
    """All of a graph as it is now."""
    return graph._template.snapshot()


def everywhere(look: Look) -> Iterator[Node]:
    """All nodes, those of graphs inside a node behind it."""
    for node in look.nodes:
        yield node
        for _, inner in node._inside():
            yield from everywhere(inner.snapshot())


def template_of(name: str, given: object) -> Template:
    """The template behind a graph that was given as `name`."""
    if not isinstance(given, GraphReader):
        raise bad_type(name, given, "a Graph")
    return given._template


def _require_kind(given: object) -> None:
    """Kinds are classes here; the words are in `node.kind`."""
    if not (isinstance(given, type) and issubclass(given, Node)):
        raise bad_type("kind", given, "a class of breakable_cuda_graphs.nodes")
