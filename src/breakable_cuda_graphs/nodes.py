"""The kinds of nodes, and what they are made of: for `isinstance`, `graph.find(kind=...)` and annotations.

The hard problem: where the classes stand follows what they need of each other, which is nobody's business
who only wants their names. So the public names are handed on here.
"""

from __future__ import annotations

from .graph.arguments import Address, Arg
from .graph.graph import ChildNode, ConditionalNode
from .graph.node import Edge, Node
from .graph.nodes import (
    BatchMemOpNode,
    EmptyNode,
    EventRecordNode,
    EventWaitNode,
    HostNode,
    KernelNode,
    MemAllocNode,
    MemcpyNode,
    MemFreeNode,
    MemsetNode,
    UnknownNode,
)

__all__ = [
    "Address",
    "Arg",
    "BatchMemOpNode",
    "ChildNode",
    "ConditionalNode",
    "Edge",
    "EmptyNode",
    "EventRecordNode",
    "EventWaitNode",
    "HostNode",
    "KernelNode",
    "MemAllocNode",
    "MemFreeNode",
    "MemcpyNode",
    "MemsetNode",
    "Node",
    "UnknownNode",
]
