"""Graphs as data: nodes, edges, copies.

The hard problem: a graph is a tree (children and conditional bodies are graphs inside nodes) whose
handles dangle together: destroying the root, ending a failed capture or removing a node must make
every handle below it invalid, and a copy must know which node came from which.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from .._driver.enums import (
    CHILD,
    CONDITIONAL,
    IF,
    INVALID_VALUE,
    MEM_ALLOC,
    MEM_FREE,
    NOT_SUPPORTED,
    SUCCESS,
    SWITCH,
)
from .._driver.node_params import Work
from .memory import SimulatedMemory
from .users import UserObjects
from .world import Code, DriverObject, Handle, Refusal, Registry, World, new_identity, types


@dataclass
class Run:
    """One execution: where values of conditional handles live, and what went wrong."""

    world: World
    memory: SimulatedMemory
    conditionals: dict[int, int] = field(default_factory=dict)
    code: Code = SUCCESS

    def fail(self, code: Code) -> None:
        """Note an error; the rest still runs, as later nodes of a device would have begun."""
        self.code = self.code or code


@dataclass(frozen=True)
class Op(Work):
    """A description of what one node, or one eager call, does: a value that can be run."""

    def run(self, run: Run) -> None:
        """Do it now."""

    def child_graphs(self) -> tuple[GraphData, ...]:
        """Graphs inside this one."""
        return ()

    def copy(self, copy_graph: Callable[[GraphData], GraphData]) -> Op:
        """The same for another graph."""
        return self

    def title(self) -> str:
        """A word or name for messages and DOT files."""
        return type(self).__name__.removesuffix("Op").lower()


class EdgeData(NamedTuple):
    """Edge data: (0, 0, 0) is an ordinary full dependency."""

    type: int = 0
    from_port: int = 0
    to_port: int = 0

    @classmethod
    def read(cls, data: Any) -> EdgeData:
        """From the bindings' struct; None is the default edge."""
        if data is None:
            return PLAIN
        return cls(int(data.type), int(data.from_port), int(data.to_port))

    def struct(self) -> Any:
        """As the bindings' struct."""
        data = types.CUgraphEdgeData()
        data.type, data.from_port, data.to_port = bytes(self)
        return data


PLAIN = EdgeData()


@dataclass(eq=False)
class NodeData(DriverObject):
    """One node of a template; `work` is swapped when its parameters change."""

    handle_type = types.CUgraphNode
    counts_as_leak = False

    graph: GraphData
    work: Op
    local_id: int
    dependencies: dict[NodeData, EdgeData] = field(default_factory=dict)
    dependents: dict[NodeData, EdgeData] = field(default_factory=dict)
    #: memory that a getter has shown; dropped when the parameters change
    shown: Any = None

    def replace(self, work: Op) -> None:
        """Give the node other parameters."""
        self.work = work
        self.shown = None


@dataclass(eq=False)
class GraphData(DriverObject):
    """A template. `owner` is the node that it lives in; a root graph belongs to the user."""

    handle_type = types.CUgraph
    owner: NodeData | None = None
    identity: int = field(default_factory=new_identity)
    nodes: dict[NodeData, None] = field(default_factory=dict)
    #: nodes that nothing waits for, in the order in which they came to be so
    exits: dict[NodeData, None] = field(default_factory=dict)
    #: how many captures are open into it
    captures: int = 0
    #: the driver's own until the capture that makes it has ended well
    lent: bool = False
    #: conditional handles: value -> (default, assign default at each launch)
    conditionals: dict[int, tuple[int, bool]] = field(default_factory=dict)
    user_objects: dict[int, int] = field(default_factory=dict)
    #: nodes of the graph that this one was cloned from, by their address
    cloned_from: dict[int, NodeData] = field(default_factory=dict)
    next_local_id: int = 0
    execs: int = 0

    @property
    def counts_as_leak(self) -> bool:
        return self.owner is None and not self.lent

    def root(self) -> GraphData:
        """The graph of the user that this one is in."""
        graph = self
        while graph.owner is not None:
            graph = graph.owner.graph
        return graph

    def is_body(self) -> bool:
        """Whether it is, or is inside, a conditional's body."""
        owner = self.owner
        if owner is None:
            return False
        return isinstance(owner.work, ConditionalOp) or owner.graph.is_body()

    def edges(self) -> Iterator[tuple[NodeData, NodeData, EdgeData]]:
        """All edges, by target."""
        for node in self.nodes:
            for source, edge in node.dependencies.items():
                yield source, node, edge

    def roots(self) -> list[NodeData]:
        return [node for node in self.nodes if not node.dependencies]

    def leaves(self) -> list[NodeData]:
        return [node for node in self.nodes if not node.dependents]

    def holds(self, kinds: Container[int]) -> bool:
        """Whether a node of such a kind is anywhere inside."""
        return any(node.work.kind in kinds for node in self.walk())

    def walk(self) -> Iterator[NodeData]:
        """The nodes, behind each of them those of the graphs inside it."""
        for node in self.nodes:
            yield node
            for child in node.work.child_graphs():
                yield from child.walk()

    def conditional_works(self) -> list[ConditionalOp]:
        """What the conditional nodes do, those of the graphs inside too."""
        return [node.work for node in self.walk() if isinstance(node.work, ConditionalOp)]

    def node_in_cycle(self) -> NodeData | None:
        """One node of a cycle, here or in a graph inside."""
        inside = [child for node in self.walk() for child in node.work.child_graphs()]
        for graph in (self, *inside):
            try:
                TopologicalSorter({node: node.dependencies for node in graph.nodes}).prepare()
            except CycleError:
                return next(node for node in graph.nodes if node in ancestors(node.dependencies))
        return None


def ancestors(nodes: Iterable[NodeData]) -> set[NodeData]:
    """The nodes and all that they wait for."""
    seen: set[NodeData] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.dependencies)
    return seen


class Graphs:
    """All templates of one driver."""

    def __init__(self, world: World, users: UserObjects) -> None:
        self.world = world
        self.users = users
        self.live: Registry[GraphData] = Registry(world, "graph")
        self.nodes: Registry[NodeData] = Registry(world, "node")

    # ---- making

    def create(self, owner: NodeData | None = None, *, lent: bool = False) -> GraphData:
        """An empty graph."""
        return self.live.add(GraphData(owner, lent=lent))

    def add(self, graph: GraphData, work: Op, dependencies: dict[NodeData, EdgeData]) -> NodeData:
        """A new node behind the given ones."""
        if graph.owner is not None and not graph.is_body() and work.kind in (MEM_ALLOC, MEM_FREE):
            raise Refusal(NOT_SUPPORTED)
        node = self.nodes.add(NodeData(graph, work, graph.next_local_id))
        graph.next_local_id += 1
        graph.nodes[node] = graph.exits[node] = None
        for source, edge in dependencies.items():
            link(source, node, edge)
        for child in work.child_graphs():
            child.owner = node
        return node

    # ---- copying

    def clone(self, graph: GraphData) -> GraphData:
        """`cuGraphClone`: graphs with allocation or conditional nodes are refused."""
        if graph.holds({MEM_ALLOC, MEM_FREE, CONDITIONAL}) or graph.is_body():
            raise Refusal(NOT_SUPPORTED)
        return self.copy(graph)

    def copy(self, graph: GraphData) -> GraphData:
        """A copy of the whole tree; it holds its own references to user objects."""
        copy = self.create()
        for node in graph.nodes:
            twin = self.add(copy, node.work.copy(self.copy), {})
            copy.cloned_from[node.address] = twin
        for source, target, edge in graph.edges():
            link(copy.cloned_from[source.address], copy.cloned_from[target.address], edge)
        copy.exits = {copy.cloned_from[node.address]: None for node in graph.exits}
        copy.conditionals = dict(graph.conditionals)
        copy.user_objects = self.users.retained(graph.user_objects)
        return copy

    # ---- taking apart

    def destroy(self, graph: GraphData) -> None:
        """The graph and everything in it are gone."""
        self.live.forget(graph.address)
        for node in list(graph.nodes):
            self._forget_node(node)
        self.users.release_all(graph.user_objects)
        graph.user_objects = {}

    def remove(self, node: NodeData) -> None:
        """`cuGraphDestroyNode`: the node and its edges."""
        for source in list(node.dependencies):
            unlink(source, node)
        for target in list(node.dependents):
            unlink(node, target)
        del node.graph.nodes[node], node.graph.exits[node]
        self._forget_node(node)

    def _forget_node(self, node: NodeData) -> None:
        self.nodes.forget(node.address)
        for child in node.work.child_graphs():
            self.destroy(child)

    # ---- arguments

    def dependencies(
        self, graph: GraphData, nodes: Any, data: Any, count: int, *, once: bool = True
    ) -> dict[NodeData, EdgeData]:
        """The dependency list of a call, checked: nodes of this graph, for most calls each one once."""
        chosen = list(nodes or ())[:count]
        edges = list(data or ())[:count] or [None] * len(chosen)
        if len(chosen) < count or len(edges) < count:
            raise RuntimeError("List is too short for the number of dependencies given")
        found: dict[NodeData, EdgeData] = {}
        for handle, edge in zip(chosen, edges, strict=True):
            node = self.node_of(graph, handle)
            if once and node in found:
                raise Refusal(INVALID_VALUE)
            found[node] = EdgeData.read(edge)
        return found

    def node_of(self, graph: GraphData, handle: Handle) -> NodeData:
        """A node that has to be directly in this graph."""
        node = self.nodes.get(handle)
        if node.graph is not graph:
            raise Refusal(INVALID_VALUE)
        return node


def link(source: NodeData, target: NodeData, edge: EdgeData) -> None:
    """Add one edge."""
    source.graph.exits.pop(source, None)
    source.dependents[target] = edge
    target.dependencies[source] = edge


def unlink(source: NodeData, target: NodeData) -> None:
    """Remove one edge."""
    del source.dependents[target]
    del target.dependencies[source]
    if not source.dependents:
        source.graph.exits[source] = None


@dataclass(frozen=True)
class ChildOp(Op):
    kind = CHILD
    graph: GraphData

    def child_graphs(self) -> tuple[GraphData, ...]:
        return (self.graph,)

    def copy(self, copy_graph: Callable[[GraphData], GraphData]) -> ChildOp:
        return ChildOp(copy_graph(self.graph))


@dataclass(frozen=True)
class ConditionalOp(Op):
    kind = CONDITIONAL
    handle: int
    choice: int
    bodies: tuple[GraphData, ...]
    context: int = 0

    def child_graphs(self) -> tuple[GraphData, ...]:
        return self.bodies

    def copy(self, copy_graph: Callable[[GraphData], GraphData]) -> ConditionalOp:
        bodies = tuple(copy_graph(body) for body in self.bodies)
        return ConditionalOp(self.handle, self.choice, bodies, self.context)

    def chosen(self, value: int) -> int | None:
        """Index of the body to run for a value of the handle, or none."""
        if self.choice == SWITCH:
            return value if value < len(self.bodies) else None
        if value:
            return 0
        return 1 if self.choice == IF and len(self.bodies) > 1 else None
