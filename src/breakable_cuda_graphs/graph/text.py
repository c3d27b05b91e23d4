"""Graphs as pages of text, and for the tools of others.

The hard problem: a captured model has thousands of nodes with names of hundreds of letters, and a
page has to stay a page. Long lists are cut with a count of what is left out, and names are shortened in
the middle of their templates.

DOT language: https://graphviz.org/doc/info/lang.html
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from .._driver.bindings import Driver
from .node import Look, Node

_LINES = 60  # of one graph on a page

COLOURS = {
    "kernel": "#dcebff",
    "memcpy": "#ffe9c9",
    "memset": "#fff6c9",
    "child": "#e6e0ff",
    "conditional": "#ffdfe6",
    "host": "#ffd2d2",
}
PLAIN = "#f2f2f2"  # of all other kinds

_VERBOSE = 1  # CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE


# ---------------------------------------------------------------- text


def page(title: str, look: Look) -> str:
    """One readable page: a line a node, with what it waits for."""
    return "\n".join([title, *node_lines(look, "")])


def node_lines(look: Look, indent: str) -> Iterator[str]:
    nodes = look.nodes
    number = {node.handle: place for place, node in enumerate(nodes)}
    width = len(str(max(len(nodes) - 1, 0)))
    scope = ""
    for place, node in enumerate(nodes[:_LINES]):
        if node.scope != scope:
            scope = node.scope
            yield f"{indent}  [{scope or 'no scope'}]"
        waits = _waits(place, [number[before.handle] for before in node.predecessors])
        state = "" if node.enabled else "  (disabled)"
        yield f"{indent}  {place:>{width}}  {node._line()}{waits}{state}"
        if node.stack:
            yield f"{indent}  {'':>{width}}    {node.stack[-1]}"
        for name, inner in node._inside():
            yield f"{indent}  {'':>{width}}    {name}:"
            yield from node_lines(inner.snapshot(), indent + "      ")
    if len(nodes) > _LINES:
        yield f"{indent}  ... and {len(nodes) - _LINES} more nodes"


def _waits(place: int, before: list[int]) -> str:
    """Said only where it is not just the node on the line above."""
    if before == [place - 1] or (not before and place == 0):
        return ""
    return f"  <- {', '.join(map(str, before))}" if before else "  <- nothing"


# ---------------------------------------------------------------- for other tools


def to_dot(look: Look) -> str:
    """The graph in the DOT language."""
    lines = ["digraph graph_ {", '  node [shape=box style="filled,rounded" fontname="Helvetica"];']
    lines += _dot(look, "n", "  ")
    return "\n".join([*lines, "}", ""])


def _dot(look: Look, prefix: str, indent: str) -> Iterator[str]:
    nodes = look.nodes
    name = {node.handle: f"{prefix}{place}" for place, node in enumerate(nodes)}
    for node in nodes:
        own = name[node.handle]
        style = "" if node.enabled else ' style="dashed"'
        colour = COLOURS.get(node.kind, PLAIN)
        yield f'{indent}{own} [label="{_label(node)}" fillcolor="{colour}"{style}];'
        for place, (title, graph) in enumerate(node._inside()):
            part, inner = f"{own}_{place}_", graph.snapshot()
            yield f"{indent}subgraph cluster_{part} {{"
            yield f'{indent}  label="{title}";'
            yield from _dot(inner, part, indent + "  ")
            yield f"{indent}}}"
            if inner.nodes:
                yield f"{indent}{own} -> {part}0 [style=dotted arrowhead=none];"
    for edge in look.edges:
        style = "" if edge.kind == "full" else f' [style=dashed label="{edge.kind}"]'
        yield f"{indent}{name[edge.source.handle]} -> {name[edge.target.handle]}{style};"


def _label(node: Node) -> str:
    text = node._line()
    lines = [text] if not node.scopes else [node.scope, text]
    return "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)


def from_driver(driver: Driver, graph: Any) -> str:
    """The driver's own drawing, with all fields (`cuGraphDebugDotPrint`)."""
    handle, path = tempfile.mkstemp(suffix=".dot")
    os.close(handle)
    try:
        driver.cuGraphDebugDotPrint(graph, path.encode(), _VERBOSE)
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    finally:
        os.unlink(path)


def to_networkx(look: Look) -> Any:
    """A `networkx.DiGraph` over the nodes."""
    networkx = importlib.import_module("networkx")  # wanted only here
    drawn = networkx.DiGraph()
    for node in look.nodes:
        fields = {name: value for name, value in node._fields() if name not in ("label", "kind")}
        drawn.add_node(
            node, label=node.label, kind=node.kind, scope=node.scope, enabled=node.enabled, **fields
        )
    for edge in look.edges:
        drawn.add_edge(
            edge.source, edge.target, kind=edge.kind, from_port=edge.from_port, to_port=edge.to_port
        )
    return drawn
