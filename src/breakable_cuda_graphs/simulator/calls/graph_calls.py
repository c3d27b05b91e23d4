"""The calls that build, read and change the structure of graphs.

The hard problem: many spellings of few operations. Every typed call is one line of reading its
struct and one of the few operations below: add a node, link two, list something in the driver's
"how many, then give me that many" manner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..._driver.enums import (
    ASSIGN_DEFAULT,
    CHILD,
    CONDITIONAL,
    ILLEGAL_STATE,
    INVALID_VALUE,
    KERNEL,
    MEM_ALLOC,
    MEM_FREE,
    MOVE,
    NOT_SUPPORTED,
    SWITCH,
    WHILE,
)
from ..contexts import Contexts
from ..graphs import (
    PLAIN,
    ChildOp,
    ConditionalOp,
    EdgeData,
    GraphData,
    Graphs,
    NodeData,
    Op,
    link,
    unlink,
)
from ..nodes import EmptyOp, MemAlloc, MemFree
from ..structs import Structs, publish_bodies
from ..world import DriverCalls, Handle, Refusal, as_int, call, new_identity, types

_PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


def _adds(name: str, read: Callable[..., Op]) -> Callable[..., tuple[Any, ...]]:
    """The call of a name that adds a node with the work which `read` takes from the rest."""

    def answer(
        self: TemplateCalls, hGraph: Handle, dependencies: Any, numDependencies: int,
        *given: Any, **named: Any,
    ) -> Any:  # fmt: skip
        return self._add(hGraph, dependencies, numDependencies, read(self.structs, *given, **named))

    return call(1, name=name)(answer)


class TemplateCalls(DriverCalls):
    """cuGraph*, but for executables."""

    graphs: Graphs
    structs: Structs
    contexts: Contexts
    captures: Any

    # ---- whole graphs

    @call(1)
    def cuGraphCreate(self, flags: int) -> Any:
        if flags != 0:
            raise Refusal(INVALID_VALUE)
        return self.graphs.create().handle

    @call(1)
    def cuGraphClone(self, originalGraph: Handle) -> Any:
        return self.graphs.clone(self.graphs.live.get(originalGraph)).handle

    @call()
    def cuGraphDestroy(self, hGraph: Handle) -> None:
        graph = self.graphs.live.find(hGraph)
        if graph is None:
            self.graphs.live.release(hGraph)
            return
        self.captures.guard_release(f"graph {graph.address:#x}", refuse=False)
        if graph.owner is not None or graph.captures or graph.lent:
            self.world.find(f"cuGraphDestroy: graph {graph.address:#x} is not the caller's to end")
            raise Refusal(INVALID_VALUE)
        self.graphs.destroy(graph)

    @call(1, since=13010)
    def cuGraphGetId(self, hGraph: Handle) -> int:
        return self.graphs.live.get(hGraph).identity

    @call(1)
    def cuGraphNodeFindInClone(self, hOriginalNode: Handle, hClonedGraph: Handle) -> Any:
        clone = self.graphs.live.get(hClonedGraph)
        twin = clone.cloned_from.get(as_int(hOriginalNode))
        if twin is None or twin not in clone.nodes:
            raise Refusal(INVALID_VALUE)
        return twin.handle

    @call()
    def cuGraphDebugDotPrint(self, hGraph: Handle, path: bytes, flags: int) -> None:
        if not isinstance(path, bytes):
            raise TypeError(f"expected bytes, {type(path).__name__} found")
        with open(path, "w", encoding="utf-8") as file:
            file.write(dot_text(self.graphs.live.get(hGraph)))

    # ---- adding nodes

    def _add(self, graph: Handle, dependencies: Any, count: int, work: Op) -> Any:
        target = self.graphs.live.get(graph)
        found = self.graphs.dependencies(target, dependencies, None, count)
        return self.graphs.add(target, work, found).handle

    cuGraphAddEmptyNode = _adds("cuGraphAddEmptyNode", lambda structs: EmptyOp())
    cuGraphAddKernelNode = _adds("cuGraphAddKernelNode", Structs.kernel)
    cuGraphAddMemcpyNode = _adds("cuGraphAddMemcpyNode", Structs.node_memcpy)
    cuGraphAddMemsetNode = _adds("cuGraphAddMemsetNode", Structs.memset)
    cuGraphAddHostNode = _adds("cuGraphAddHostNode", Structs.host)
    cuGraphAddEventRecordNode = _adds("cuGraphAddEventRecordNode", Structs.record)
    cuGraphAddEventWaitNode = _adds("cuGraphAddEventWaitNode", Structs.wait)
    cuGraphAddBatchMemOpNode = _adds("cuGraphAddBatchMemOpNode", Structs.batch)

    @call(1)
    def cuGraphAddChildGraphNode(
        self, hGraph: Handle, dependencies: Any, numDependencies: int, childGraph: Handle
    ) -> Any:
        target = self.graphs.live.get(hGraph)
        found = self.graphs.dependencies(target, dependencies, None, numDependencies)
        child = ChildOp(self.graphs.clone(self.graphs.live.get(childGraph)))
        return self.graphs.add(target, child, found).handle

    def _add_generic(
        self,
        hGraph: Handle,
        dependencies: Any,
        dependencyData: Any,
        numDependencies: int,
        nodeParams: Any,
    ) -> Any:
        graph = self.graphs.live.get(hGraph)
        found = self.graphs.dependencies(graph, dependencies, dependencyData, numDependencies)
        kind = _kind(nodeParams)
        if kind == CHILD:
            work: Op = self._child(nodeParams.graph)
        elif kind == CONDITIONAL:
            return self._add_conditional(graph, found, nodeParams.conditional)
        elif kind == MEM_ALLOC:
            return self._add_alloc(graph, found, nodeParams.alloc)
        elif kind == MEM_FREE:
            work = MemFree(as_int(nodeParams.free.dptr))
        else:
            work = self.structs.generic(nodeParams)
        return self.graphs.add(graph, work, found).handle

    cuGraphAddNode = call(1, name="cuGraphAddNode")(_add_generic)
    cuGraphAddNode_v3 = call(1, since=13020, name="cuGraphAddNode_v3")(_add_generic)

    def _child(self, params: Any) -> ChildOp:
        graph = self.graphs.live.get(params.graph)
        if int(getattr(params, "ownership", 0)) != MOVE:
            return ChildOp(self.graphs.clone(graph))
        if graph.owner is not None or graph.captures or graph.holds({CONDITIONAL}):
            raise Refusal(NOT_SUPPORTED)
        return ChildOp(graph)

    def _add_alloc(self, graph: GraphData, found: dict[NodeData, EdgeData], params: Any) -> Any:
        if graph.owner is not None and not graph.is_body():
            raise Refusal(NOT_SUPPORTED)
        block = self.structs.streams.memory.reserve_for_graph(
            params.bytesize, self.contexts.current()
        )
        params.dptr = types.CUdeviceptr(block.address)
        return self.graphs.add(graph, MemAlloc(block.address, block.size), found).handle

    # ---- conditional nodes

    @call(1)
    def cuGraphConditionalHandleCreate(
        self, hGraph: Handle, ctx: Handle, defaultLaunchValue: int, flags: int
    ) -> Any:
        graph = self.graphs.live.get(hGraph)
        self.contexts.live.get(ctx)  # this one is never the current one by default
        if int(flags) not in (0, ASSIGN_DEFAULT):
            raise Refusal(INVALID_VALUE)
        handle = new_identity()
        graph.root().conditionals[handle] = (defaultLaunchValue, bool(flags))
        return types.CUgraphConditionalHandle(handle)

    def _add_conditional(
        self, graph: GraphData, found: dict[NodeData, EdgeData], params: Any
    ) -> Any:
        handle, choice, size = int(params.handle), int(params.type), int(params.size)
        root = graph.root()
        used = (work.handle for work in root.conditional_works())
        if handle not in root.conditionals or handle in used:
            raise Refusal(INVALID_VALUE)
        limit = 1 if choice == WHILE else size if choice == SWITCH else 2
        if not 1 <= size <= limit:
            raise Refusal(INVALID_VALUE)
        context = self.contexts.live.get(params.ctx)
        bodies = tuple(self.graphs.create(lent=True) for _ in range(size))
        node = self.graphs.add(graph, ConditionalOp(handle, choice, bodies, context.address), found)
        node.shown = publish_bodies(params, [body.address for body in bodies], context.address)
        return node.handle

    # ---- looking

    @call(1)
    def cuGraphNodeGetType(self, hNode: Handle) -> Any:
        return types.CUgraphNodeType(self.graphs.nodes.get(hNode).work.kind)

    @call(2)
    def cuGraphGetNodes(self, hGraph: Handle, numNodes: int = 0) -> tuple[Any, int]:
        return _nodes(list(self.graphs.live.get(hGraph).nodes), numNodes)

    @call(2)
    def cuGraphGetRootNodes(self, hGraph: Handle, numRootNodes: int = 0) -> tuple[Any, int]:
        return _nodes(self.graphs.live.get(hGraph).roots(), numRootNodes)

    @call(4)
    def cuGraphGetEdges(self, hGraph: Handle, numEdges: int = 0) -> tuple[Any, ...]:
        edges = list(self.graphs.live.get(hGraph).edges())
        count = numEdges or len(edges)
        shown = edges[:numEdges]
        return (
            _padded([source.handle for source, _, _ in shown], numEdges),
            _padded([target.handle for _, target, _ in shown], numEdges),
            [edge.struct() for _, _, edge in shown],
            min(count, len(edges)),
        )

    @call(3)
    def cuGraphNodeGetDependencies(
        self, hNode: Handle, numDependencies: int = 0
    ) -> tuple[Any, ...]:
        return _neighbours(self.graphs.nodes.get(hNode).dependencies, numDependencies)

    @call(3)
    def cuGraphNodeGetDependentNodes(
        self, hNode: Handle, numDependentNodes: int = 0
    ) -> tuple[Any, ...]:
        return _neighbours(self.graphs.nodes.get(hNode).dependents, numDependentNodes)

    @call(1, since=13010)
    def cuGraphNodeGetLocalId(self, hNode: Handle) -> int:
        return self.graphs.nodes.get(hNode).local_id

    @call(1, since=13010)
    def cuGraphNodeGetToolsId(self, hNode: Handle) -> int:
        node = self.graphs.nodes.get(hNode)
        return node.graph.identity << 32 | node.local_id

    @call(1, since=13010)
    def cuGraphNodeGetContainingGraph(self, hNode: Handle) -> Any:
        return self.graphs.nodes.get(hNode).graph.handle

    # ---- changing the structure

    @call()
    def cuGraphDestroyNode(self, hNode: Handle) -> None:
        node = self.graphs.nodes.find(hNode)
        if node is None:
            self.graphs.nodes.release(hNode)
            return
        if node.graph.root().captures or node.graph.captures:
            raise Refusal(ILLEGAL_STATE)
        self._may_lose_parts(node.graph)
        self.graphs.remove(node)

    def _may_lose_parts(self, graph: GraphData) -> None:
        if graph.holds({MEM_ALLOC, MEM_FREE}):
            raise Refusal(NOT_SUPPORTED)

    @call()
    def cuGraphAddDependencies(
        self, hGraph: Handle, from_: Any, to: Any, edgeData: Any, numDependencies: int
    ) -> None:
        graph = self.graphs.live.get(hGraph)
        pairs = self._pairs(graph, from_, to, numDependencies)
        edges = [EdgeData.read(data) for data in edgeData or [None] * numDependencies]
        for (source, target), edge in zip(
            pairs, edges, strict=False
        ):  # those before a bad one stay
            if target in source.dependents or source is target or not _fits(source, target, edge):
                raise Refusal(INVALID_VALUE)
            link(source, target, edge)

    @call()
    def cuGraphRemoveDependencies(
        self, hGraph: Handle, from_: Any, to: Any, edgeData: Any, numDependencies: int
    ) -> None:
        graph = self.graphs.live.get(hGraph)
        self._may_lose_parts(graph)
        pairs = self._pairs(graph, from_, to, numDependencies)
        edges = [data and EdgeData.read(data) for data in edgeData or [None] * numDependencies]
        for (source, target), edge in zip(pairs, edges, strict=False):
            if target not in source.dependents or source.dependents[target] != (
                edge or source.dependents[target]
            ):
                raise Refusal(INVALID_VALUE)
        for source, target in pairs:
            unlink(source, target)

    def _pairs(self, graph: GraphData, sources: Any, targets: Any, count: int) -> list[Any]:
        if count and (len(sources or ()) < count or len(targets or ()) < count):
            raise RuntimeError("List is too short for the number of dependencies given")
        return [
            (self.graphs.node_of(graph, source), self.graphs.node_of(graph, target))
            for source, target in zip(
                list(sources or ())[:count], list(targets or ())[:count], strict=True
            )
        ]


# ---------------------------------------------------------------- helpers


def _kind(params: Any) -> int:
    if params is None:
        raise Refusal(INVALID_VALUE)
    try:
        return int(params.type)
    except ValueError:
        raise Refusal(INVALID_VALUE) from None


def _fits(source: NodeData, target: NodeData, edge: EdgeData) -> bool:
    """Whether an edge may have such data: programmatic ones are between kernels."""
    if edge == PLAIN:
        return True
    kernels = source.work.kind == target.work.kind == KERNEL
    return edge.type == _PROGRAMMATIC and edge.from_port in (1, 2) and kernels


def _padded(handles: list[Any], count: int) -> list[Any]:
    return handles + [types.CUgraphNode(0)] * (count - len(handles))


def _nodes(nodes: Sequence[NodeData], count: int) -> tuple[list[Any], int]:
    """The driver's manner: without a count only the number, with one that many handles."""
    if not count:
        return [], len(nodes)
    shown = [node.handle for node in nodes[:count]]
    return _padded(shown, count), len(shown)


def _neighbours(edges: dict[NodeData, EdgeData], count: int) -> tuple[list[Any], list[Any], int]:
    handles, number = _nodes(list(edges), count)
    return handles, [edge.struct() for edge in list(edges.values())[:count]], number


def dot_text(graph: GraphData) -> str:
    """A graph, with the graphs inside it, in Graphviz's language."""
    lines = ["digraph dot {"]
    _dot_graph(graph, lines)
    return "\n".join([*lines, "}", ""])


def _dot_graph(graph: GraphData, lines: list[str]) -> None:
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
