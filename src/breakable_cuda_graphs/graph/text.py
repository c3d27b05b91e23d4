"""Graphs and sequences as pages of text, and for the tools of others.

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
from typing import TYPE_CHECKING, Any

from .graph import ChildNode, ConditionalNode
from .nodes import (
    BatchMemOpNode,
    KernelNode,
    MemAllocNode,
    MemcpyNode,
    MemFreeNode,
    MemsetNode,
    Node,
)

if TYPE_CHECKING:
    from .graph import Graph


_LINES = 60  # of one graph on a page

_NAME = 72

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


def page(graph: Graph) -> str:
    """One readable page: a line a node, with what it waits for."""
    if graph.closed:
        return repr(graph)
    return "\n".join([repr(graph), *node_lines(graph, "")])


def node_lines(graph: Graph, indent: str) -> Iterator[str]:
    nodes = graph.nodes
    number = {node.handle: place for place, node in enumerate(nodes)}
    width = len(str(max(len(nodes) - 1, 0)))
    scope = ""
    for place, node in enumerate(nodes[:_LINES]):
        if node.scope != scope:
            scope = node.scope
            yield f"{indent}  [{scope or 'no scope'}]"
        waits = _waits(place, [number[before.handle] for before in node.predecessors])
        state = "" if node.enabled else "  (disabled)"
        yield f"{indent}  {place:>{width}}  {describe(node)}{waits}{state}"
        if node.stack:
            yield f"{indent}  {'':>{width}}    {node.stack[-1]}"
        for name, inner in inside(node):
            yield f"{indent}  {'':>{width}}    {name}:"
            yield from node_lines(inner, indent + "      ")
    if len(nodes) > _LINES:
        yield f"{indent}  ... and {len(nodes) - _LINES} more nodes"


def _waits(place: int, before: list[int]) -> str:
    """Said only where it is not just the node on the line above."""
    if before == [place - 1] or (not before and place == 0):
        return ""
    return f"  <- {', '.join(map(str, before))}" if before else "  <- nothing"


def describe(node: Node) -> str:
    """A node in one line."""
    if isinstance(node, KernelNode):
        return f"{shortened(node.name)}  {launch_of(node)}, {len(node.args)} args"
    if isinstance(node, MemcpyNode):
        return f"copy {size_of(node.nbytes)} from {node.src:#x} to {node.dst:#x}"
    if isinstance(node, MemsetNode):
        return f"fill {size_of(node.nbytes)} at {node.dst:#x} with {node.value:#x}"
    if isinstance(node, MemAllocNode):
        return f"allocate {size_of(node.nbytes)} at {node.address:#x}"
    if isinstance(node, ConditionalNode):
        return f"{node.type} node"
    if isinstance(node, MemFreeNode):
        return f"free {node.address:#x}"
    if isinstance(node, BatchMemOpNode):
        return ", ".join(
            f"{each.name} {each.value:#x} at {each.address:#x}" for each in node.operations
        )
    return node.label


def launch_of(node: KernelNode) -> str:
    """The shape of a launch, and what of its attributes is not as usual."""
    grid, block = ("x".join(map(str, _trimmed(dim))) for dim in (node.grid, node.block))
    shared = f" +{node.shared_bytes} B shared" if node.shared_bytes else ""
    attrs = node.attrs
    cluster = (
        f", cluster {'x'.join(map(str, _trimmed(attrs.cluster)))}" if max(attrs.cluster) > 1 else ""
    )
    cooperative = ", cooperative" if attrs.cooperative else ""
    priority = f", priority {attrs.priority}" if attrs.priority else ""
    noun = "block" if grid == "1" else "blocks"
    return f"{grid} {noun} of {block}{shared}{cluster}{cooperative}{priority}"


def _trimmed(dim: tuple[int, int, int]) -> tuple[int, ...]:
    x, y, z = dim
    return (x, y, z) if z > 1 else (x, y) if y > 1 else (x,)


def size_of(number: int) -> str:
    """A number of bytes in the largest unit that divides it."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024 or number % 1024:
            return f"{number} {unit}"
        number //= 1024
    return f"{number} GiB"


def shortened(name: str, limit: int = _NAME) -> str:
    """A name that fits on a line: its start and its end."""
    if len(name) <= limit:
        return name
    half = (limit - 3) // 2
    return f"{name[:half]}...{name[-half:]}"


def inside(node: Node) -> list[tuple[str, Graph]]:
    """The graphs inside a node, with what they are called."""
    names: tuple[str, ...] = ()
    if isinstance(node, ChildNode):
        names = ("graph",)
    elif isinstance(node, ConditionalNode) and node.type in ("if", "while"):
        names = ("body", "orelse")
    return [
        (names[place] if place < len(names) else f"body {place}", inner)
        for place, inner in enumerate(node._graphs())
    ]


# ---------------------------------------------------------------- for other tools


def to_dot(graph: Graph) -> str:
    """The graph in the DOT language."""
    lines = ["digraph graph_ {", '  node [shape=box style="filled,rounded" fontname="Helvetica"];']
    lines += _dot(graph, "n", "  ")
    return "\n".join([*lines, "}", ""])


def _dot(graph: Graph, prefix: str, indent: str) -> Iterator[str]:
    nodes = graph.nodes
    name = {node.handle: f"{prefix}{place}" for place, node in enumerate(nodes)}
    for node in nodes:
        own = name[node.handle]
        style = "" if node.enabled else ' style="dashed"'
        colour = COLOURS.get(node.kind, PLAIN)
        yield f'{indent}{own} [label="{_label(node)}" fillcolor="{colour}"{style}];'
        for place, (title, inner) in enumerate(inside(node)):
            part = f"{own}_{place}_"
            yield f"{indent}subgraph cluster_{part} {{"
            yield f'{indent}  label="{title}";'
            yield from _dot(inner, part, indent + "  ")
            yield f"{indent}}}"
            if len(inner):
                yield f"{indent}{own} -> {part}0 [style=dotted arrowhead=none];"
    for edge in graph.edges:
        style = "" if edge.kind == "full" else f' [style=dashed label="{edge.kind}"]'
        yield f"{indent}{name[edge.source.handle]} -> {name[edge.target.handle]}{style};"


def _label(node: Node) -> str:
    text = describe(node)
    lines = [text] if not node.scopes else [node.scope, text]
    return "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)


def from_driver(graph: Graph) -> str:
    """The driver's own drawing, with all fields (`cuGraphDebugDotPrint`)."""
    template = graph._template
    handle, path = tempfile.mkstemp(suffix=".dot")
    os.close(handle)
    try:
        template.driver.cuGraphDebugDotPrint(template.value, path.encode(), _VERBOSE)
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    finally:
        os.unlink(path)


def to_networkx(graph: Graph) -> Any:
    """A `networkx.DiGraph` over the nodes."""
    networkx = importlib.import_module("networkx")  # wanted only here

    from .diff import fields_of

    drawn = networkx.DiGraph()
    for node in graph.nodes:
        fields = dict(fields_of(node))
        drawn.add_node(
            node, label=node.label, kind=node.kind, scope=node.scope, enabled=node.enabled, **{
                name: value for name, value in fields.items() if name not in ("label", "kind")
            },
        )  # fmt: skip
    for edge in graph.edges:
        drawn.add_edge(
            edge.source, edge.target, kind=edge.kind, from_port=edge.from_port, to_port=edge.to_port
        )
    return drawn
