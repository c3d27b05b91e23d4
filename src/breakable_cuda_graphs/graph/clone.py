"""Copies that the driver makes of graphs: which node is which, and a copy with edits in it.

The hard problem: a copy tells nothing of the nodes that it was made from but their order, so that
order, and the kinds, are all there is to pair them by. What does not pair is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._driver import enums, kernel_params, node_params, set_params
from .._driver.bindings import Driver
from .._driver.handles import GraphHandle
from . import errors

if TYPE_CHECKING:
    from .state import Shadow, Template


def twins(driver: Driver, template: Template, graph: Any) -> dict[int, Any]:
    """Which node of a copy of a graph is which, by the address of the original.

    Copies (clones, child nodes) keep the order in which nodes were added; the kinds are compared to
    be sure.
    """
    found: dict[int, Any] = {}
    _pair(driver, driver.graph_nodes(template.value), driver.graph_nodes(graph), found)
    return found


def _pair(driver: Driver, mine: list[Any], theirs: list[Any], found: dict[int, Any]) -> None:
    if len(mine) != len(theirs):
        raise errors.copy_differs()
    for one, other in zip(mine, theirs, strict=True):
        kind = kernel_params.node_type(driver, one)
        if kind != kernel_params.node_type(driver, other):
            raise errors.copy_differs()
        found[int(one)] = other
        if kind == enums.CHILD:
            inside, copy = (
                driver.graph_nodes(driver.cuGraphChildGraphNodeGetGraph(node))
                for node in (one, other)
            )
            _pair(driver, inside, copy, found)


def edited_clone(template: Template, shadow: Shadow) -> GraphHandle:
    """A copy of a graph with an executable's edits in it; what is disabled is taken out."""
    driver = template.driver
    clone = GraphHandle.make(driver, "cuGraphClone", template.value)
    copies = twins(driver, template, clone.value)
    for _, handle in template.walk():
        work = shadow.works.get(int(handle))
        if work is not None and int(handle) not in shadow.disabled:
            set_params.set_in_graph(driver, copies[int(handle)], work)
    for handle_number in shadow.disabled:
        node = copies.get(handle_number)
        if node is not None:
            _become_empty(driver, clone.value, node)
    return clone


def _become_empty(driver: Driver, graph: Any, node: Any) -> None:
    """An empty node takes a node's place: what waited for it waits for what it waited for."""
    before, behind = driver.node_dependencies(node), driver.node_dependents(node)
    empty = set_params.add(driver, graph, before, node_params.Empty())
    if behind:
        driver.add_dependencies(graph, [empty] * len(behind), behind)
    driver.cuGraphDestroyNode(node)
