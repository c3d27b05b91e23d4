"""Graphs as DOT files, as `cuGraphDebugDotPrint` writes them.

The hard problem: node names have to be unique over all graphs in the file, children included, so
each carries the number of its graph, as the driver's do.
"""

from __future__ import annotations

from .graphs import Graph
from .nodes import KERNEL


def dot_text(graph: Graph) -> str:
    """A graph, with the graphs inside it, in Graphviz's language."""
    lines = ["digraph dot {"]
    _dot_graph(graph, lines)
    return "\n".join([*lines, "}", ""])


def _dot_graph(graph: Graph, lines: list[str]) -> None:
    prefix = f"graph_{graph.identity}_node_"
    lines.append(f"subgraph cluster_{graph.identity} {{")
    lines.append(f'label="graph_{graph.identity}" graph[style="dashed"];')
    for node in graph.nodes:
        shape = "octagon" if node.work.kind == KERNEL else "rectangle"
        title = node.work.title().replace('"', "'")
        lines.append(
            f'"{prefix}{node.local_id}"[style="bold" shape="{shape}" '
            f'label="{node.local_id}\n{title}"];'
        )
        for child in node.work.child_graphs():
            _dot_graph(child, lines)
    for source, target, _ in graph.edges():
        lines.append(f'"{prefix}{source.local_id}" -> "{prefix}{target.local_id}";')
    lines.append("}")
