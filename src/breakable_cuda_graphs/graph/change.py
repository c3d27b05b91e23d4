"""GraphEditor: what can be changed about the nodes and edges that a graph has.

The hard problem: executables that were made before keep the nodes as they were, and a node that was looked
at before keeps what it showed. So a change goes to the template alone, is checked whole before the driver
hears of it, and a changed node is handed back anew.
"""

from __future__ import annotations

from typing import Any

from .._driver import set_params
from .._driver.bindings import types
from ..errors import CUDAError, bad_choice
from . import errors, exec
from .node import Node
from .view import GraphReader

#: CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC, and the kernel port that it starts from
_PROGRAMMATIC, _PROGRAMMATIC_PORT = 1, 1


class GraphEditor(GraphReader):
    """The changing half of a `Graph`."""

    __slots__ = ()

    def update(self, node: Node, *, from_node: Node | None = None, **changes: Any) -> Node:
        """Change a node of the template; returns it anew.

        The changes are the keyword arguments of `GraphExec.update`, or `from_node=` alone: a node of
        any graph, from which everything is taken.

        Executables that exist are not affected. Raises `UpdateError`, with `.node` and `.field`, or
        `TypeError`; then nothing has changed.
        """
        template = self._template
        template.require_open()
        template.check(node)
        driver, root = template.driver, template.root
        work = template.current(node._handle, template.reader(), None)
        given = {name: value for name, value in changes.items() if value is not None}
        made = exec.worked_out(driver, node, work, given, from_node)
        try:
            set_params.set_in_graph(driver, node._handle, made.work)
        except CUDAError as error:
            raise errors.edit_failed(node, "/".join(given) or "from_node", error) from error
        root.owners.put(node.handle, made.owners)
        return node._template.node(node._handle)

    def link(self, source: Node, target: Node, kind: str = "full") -> None:
        """Make the node `target` wait for `source`.

        `kind="programmatic"`, between kernels: only for the point at which the source allows it
        (programmatic dependent launch).
        """
        if kind not in ("full", "programmatic"):
            raise bad_choice("kind", kind, ("full", "programmatic"))
        self._template.require_open()
        one, other = self._pair(source, target)
        data = None
        if kind == "programmatic":
            edge = types.CUgraphEdgeData()
            edge.type, edge.from_port = _PROGRAMMATIC, _PROGRAMMATIC_PORT
            data = [edge]
        self._template.driver.add_dependencies(self._template.value, [one], [other], data)

    def unlink(self, source: Node, target: Node) -> None:
        """Let `target` wait for `source` no more. Raises `ValueError` if there is no such edge."""
        self._template.require_open()
        one, other = self._pair(source, target)
        driver, graph = self._template.driver, self._template.value
        data = [d for a, b, d in driver.graph_edges(graph) if (a, b) == (one, other)]
        if not data:
            raise errors.no_such_edge(source, target)
        driver.remove_dependencies(graph, [one], [other], data)

    def _pair(self, source: Node, target: Node) -> tuple[Any, Any]:
        (one,), (other,) = self._template.handles([source]), self._template.handles([target])
        return one, other

    def remove(self, node: Node) -> None:
        """Take a node and its edges out of the template. Executables that exist keep theirs, which
        can be launched and no longer edited. Raises `CUDAError` in a graph with allocations.
        """
        self._template.require_open()
        self._template.handles([node])
        self._template.driver.cuGraphDestroyNode(node._handle)
        self._template.forget(node)

    def keep_alive(self, *things: object) -> None:
        """Keep objects for as long as this graph and its executables live."""
        self._template.root.owners.keep(things)
