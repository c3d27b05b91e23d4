"""The calls that build, read and change graphs.

The hard problem: many spellings of few operations. Every typed call is one line of reading its
struct and one of the few operations below: add a node, set its work, list something in the
"how many, then give me that many" manner of the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from .contexts import Contexts
from .graphs import Edge, Graph, Graphs, Node, link, unlink
from .nodes import (
    CHILD,
    CONDITIONAL,
    KERNEL,
    MEM_ALLOC,
    MEM_FREE,
    SWITCH,
    WHILE,
    Child,
    Conditional,
    Empty,
    Host,
    Kernel,
    MemAlloc,
    Memcpy,
    MemFree,
    Memset,
    RecordEvent,
    WaitEvent,
    Work,
)
from .structs import (
    Structs,
    attribute_bytes,
    attribute_struct,
    fill_host,
    fill_kernel,
    fill_memcpy,
    fill_memset,
    kernel_struct,
    publish_bodies,
    show,
)
from .world import (
    ILLEGAL_STATE,
    INVALID_VALUE,
    NOT_SUPPORTED,
    Calls,
    Handle,
    Refusal,
    as_int,
    call,
    new_identity,
    types,
)

_MOVE = 1  # CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
_ASSIGN_DEFAULT = 1

W = TypeVar("W", bound=Work)


class TemplateCalls(Calls):
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
        self.captures.guard_release(f"graph {graph.address:#x}", refuse=True)
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
            file.write(_dot(self.graphs.live.get(hGraph)))

    # ---- adding nodes

    def _add(self, graph: Handle, dependencies: Any, count: int, work: Work) -> Any:
        target = self.graphs.live.get(graph)
        found = self.graphs.dependencies(target, dependencies, None, count)
        return self.graphs.add(target, work, found).handle

    @call(1)
    def cuGraphAddEmptyNode(self, hGraph: Handle, dependencies: Any, numDependencies: int) -> Any:
        return self._add(hGraph, dependencies, numDependencies, Empty())

    @call(1)
    def cuGraphAddKernelNode(
        self, hGraph: Handle, dependencies: Any, numDependencies: int, nodeParams: Any
    ) -> Any:
        return self._add(hGraph, dependencies, numDependencies, self.structs.kernel(nodeParams))

    @call(1)
    def cuGraphAddMemcpyNode(
        self,
        hGraph: Handle,
        dependencies: Any,
        numDependencies: int,
        copyParams: Any,
        ctx: Handle,
    ) -> Any:
        work = self.structs.memcpy(copyParams, ctx)
        return self._add(hGraph, dependencies, numDependencies, work)

    @call(1)
    def cuGraphAddMemsetNode(
        self,
        hGraph: Handle,
        dependencies: Any,
        numDependencies: int,
        memsetParams: Any,
        ctx: Handle,
    ) -> Any:
        work = self.structs.memset(memsetParams, ctx)
        return self._add(hGraph, dependencies, numDependencies, work)

    @call(1)
    def cuGraphAddHostNode(
        self, hGraph: Handle, dependencies: Any, numDependencies: int, nodeParams: Any
    ) -> Any:
        return self._add(hGraph, dependencies, numDependencies, self.structs.host(nodeParams))

    @call(1)
    def cuGraphAddEventRecordNode(
        self, hGraph: Handle, dependencies: Any, numDependencies: int, event: Handle
    ) -> Any:
        return self._add(hGraph, dependencies, numDependencies, self.structs.record(event))

    @call(1)
    def cuGraphAddEventWaitNode(
        self, hGraph: Handle, dependencies: Any, numDependencies: int, event: Handle
    ) -> Any:
        return self._add(hGraph, dependencies, numDependencies, self.structs.wait(event))

    @call(1)
    def cuGraphAddChildGraphNode(
        self, hGraph: Handle, dependencies: Any, numDependencies: int, childGraph: Handle
    ) -> Any:
        target = self.graphs.live.get(hGraph)
        found = self.graphs.dependencies(target, dependencies, None, numDependencies)
        child = Child(self.graphs.clone(self.graphs.live.get(childGraph)))
        return self.graphs.add(target, child, found).handle

    @call(1)
    def cuGraphAddNode(
        self,
        hGraph: Handle,
        dependencies: Any,
        dependencyData: Any,
        numDependencies: int,
        nodeParams: Any,
    ) -> Any:
        return self._add_generic(hGraph, dependencies, dependencyData, numDependencies, nodeParams)

    @call(1, since=13020)
    def cuGraphAddNode_v3(
        self,
        hGraph: Handle,
        dependencies: Any,
        dependencyData: Any,
        numDependencies: int,
        nodeParams: Any,
    ) -> Any:
        return self._add_generic(hGraph, dependencies, dependencyData, numDependencies, nodeParams)

    def _add_generic(
        self, handle: Handle, dependencies: Any, data: Any, count: int, params: Any
    ) -> Any:
        graph = self.graphs.live.get(handle)
        found = self.graphs.dependencies(graph, dependencies, data, count)
        kind = _kind(params)
        if kind == CHILD:
            work: Work = self._child(params.graph)
        elif kind == CONDITIONAL:
            return self._add_conditional(graph, found, params.conditional)
        elif kind == MEM_ALLOC:
            return self._add_alloc(graph, found, params.alloc)
        elif kind == MEM_FREE:
            work = MemFree(as_int(params.free.dptr))
        else:
            work = self.structs.generic(params)
        return self.graphs.add(graph, work, found).handle

    def _child(self, params: Any) -> Child:
        graph = self.graphs.live.get(params.graph)
        if int(getattr(params, "ownership", 0)) != _MOVE:
            return Child(self.graphs.clone(graph))
        if graph.owner is not None or graph.captures or graph.execs:
            raise Refusal(INVALID_VALUE)
        if graph.holds({CONDITIONAL}):
            raise Refusal(INVALID_VALUE)
        return Child(graph)

    def _add_alloc(self, graph: Graph, found: dict[Node, Edge], params: Any) -> Any:
        if graph.owner is not None:
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
        self.contexts.of(ctx)
        if int(flags) not in (0, _ASSIGN_DEFAULT):
            raise Refusal(INVALID_VALUE)
        handle = new_identity()
        graph.root().conditionals[handle] = (defaultLaunchValue, bool(flags))
        return types.CUgraphConditionalHandle(handle)

    def _add_conditional(self, graph: Graph, found: dict[Node, Edge], params: Any) -> Any:
        handle, choice, size = int(params.handle), int(params.type), int(params.size)
        if handle not in graph.root().conditionals or _uses_handle(graph.root(), handle):
            raise Refusal(INVALID_VALUE)
        limit = 1 if choice == WHILE else size if choice == SWITCH else 2
        if not 1 <= size <= limit:
            raise Refusal(INVALID_VALUE)
        context = self.contexts.of(params.ctx)
        bodies = tuple(self.graphs.create(lent=True) for _ in range(size))
        node = self.graphs.add(graph, Conditional(handle, choice, bodies, context.address), found)
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

    @call(1)
    def cuGraphChildGraphNodeGetGraph(self, hNode: Handle) -> Any:
        return self._work(hNode, Child).graph.handle

    # ---- changing the structure

    @call()
    def cuGraphDestroyNode(self, hNode: Handle) -> None:
        node = self.graphs.nodes.find(hNode)
        if node is None:
            self.graphs.nodes.release(hNode)
            return
        self._may_lose_parts(node.graph)
        self.graphs.remove(node)

    def _may_lose_parts(self, graph: Graph) -> None:
        if graph.root().captures or graph.captures:
            raise Refusal(ILLEGAL_STATE)
        if graph.holds({MEM_ALLOC, MEM_FREE}):
            raise Refusal(INVALID_VALUE)

    @call()
    def cuGraphAddDependencies(
        self, hGraph: Handle, from_: Any, to: Any, edgeData: Any, numDependencies: int
    ) -> None:
        graph = self.graphs.live.get(hGraph)
        pairs = self._pairs(graph, from_, to, numDependencies)
        edges = [Edge.read(data) for data in edgeData or [None] * numDependencies]
        if any(target in source.dependents for source, target in pairs):
            raise Refusal(INVALID_VALUE)
        if len(set(pairs)) != len(pairs) or any(source is target for source, target in pairs):
            raise Refusal(INVALID_VALUE)
        for (source, target), edge in zip(pairs, edges, strict=False):
            link(source, target, edge)

    @call()
    def cuGraphRemoveDependencies(
        self, hGraph: Handle, from_: Any, to: Any, edgeData: Any, numDependencies: int
    ) -> None:
        graph = self.graphs.live.get(hGraph)
        self._may_lose_parts(graph)
        pairs = self._pairs(graph, from_, to, numDependencies)
        edges = [Edge.read(data) for data in edgeData or [None] * numDependencies]
        for (source, target), edge in zip(pairs, edges, strict=False):
            if source.dependents.get(target) != edge:
                raise Refusal(INVALID_VALUE)
        for source, target in pairs:
            unlink(source, target)

    def _pairs(self, graph: Graph, sources: Any, targets: Any, count: int) -> list[Any]:
        if count and (len(sources or ()) < count or len(targets or ()) < count):
            raise RuntimeError("List is too short for the number of dependencies given")
        return [
            (self.graphs.node_of(graph, source), self.graphs.node_of(graph, target))
            for source, target in zip(
                list(sources or ())[:count], list(targets or ())[:count], strict=True
            )
        ]

    # ---- parameters

    def _work(self, handle: Handle, kind: type[W]) -> W:
        work = self.graphs.nodes.get(handle).work
        if not isinstance(work, kind):
            raise Refusal(INVALID_VALUE)
        return work

    def _set(self, handle: Handle, work: Work) -> None:
        node = self.graphs.nodes.get(handle)
        if node.work.kind != work.kind:
            raise Refusal(INVALID_VALUE)
        if isinstance(work, Kernel) and isinstance(node.work, Kernel):
            work = with_attributes(work, node.work.attributes)
        node.replace(work)

    @call(1)
    def cuGraphKernelNodeGetParams(self, hNode: Handle) -> Any:
        work = self._work(hNode, Kernel)
        return kernel_struct(work, _shown(self.graphs.nodes.get(hNode), work))

    @call()
    def cuGraphKernelNodeSetParams(self, hNode: Handle, nodeParams: Any) -> None:
        self._set(hNode, self.structs.kernel(nodeParams))

    @call(1)
    def cuGraphMemcpyNodeGetParams(self, hNode: Handle) -> Any:
        params = types.CUDA_MEMCPY3D()
        fill_memcpy(params, self._work(hNode, Memcpy))
        return params

    @call()
    def cuGraphMemcpyNodeSetParams(self, hNode: Handle, nodeParams: Any) -> None:
        self._set(hNode, self.structs.memcpy(nodeParams, self._work(hNode, Memcpy).context))

    @call(1)
    def cuGraphMemsetNodeGetParams(self, hNode: Handle) -> Any:
        params = types.CUDA_MEMSET_NODE_PARAMS()
        fill_memset(params, self._work(hNode, Memset))
        return params

    @call()
    def cuGraphMemsetNodeSetParams(self, hNode: Handle, nodeParams: Any) -> None:
        self._set(hNode, self.structs.memset(nodeParams, self._work(hNode, Memset).context))

    @call(1)
    def cuGraphHostNodeGetParams(self, hNode: Handle) -> Any:
        params = types.CUDA_HOST_NODE_PARAMS()
        fill_host(params, self._work(hNode, Host))
        return params

    @call()
    def cuGraphHostNodeSetParams(self, hNode: Handle, nodeParams: Any) -> None:
        self._set(hNode, self.structs.host(nodeParams))

    @call(1)
    def cuGraphEventRecordNodeGetEvent(self, hNode: Handle) -> Any:
        return self._work(hNode, RecordEvent).event.handle

    @call()
    def cuGraphEventRecordNodeSetEvent(self, hNode: Handle, event: Handle) -> None:
        self._set(hNode, self.structs.record(event))

    @call(1)
    def cuGraphEventWaitNodeGetEvent(self, hNode: Handle) -> Any:
        return self._work(hNode, WaitEvent).event.handle

    @call()
    def cuGraphEventWaitNodeSetEvent(self, hNode: Handle, event: Handle) -> None:
        self._set(hNode, self.structs.wait(event))

    @call()
    def cuGraphNodeSetParams(self, hNode: Handle, nodeParams: Any) -> None:
        self._set(hNode, self.structs.generic(nodeParams))

    @call(since=13020)
    def cuGraphNodeSetParams_v2(self, hNode: Handle, nodeParams: Any) -> None:
        self._set(hNode, self.structs.generic(nodeParams))

    @call(1, since=13020)
    def cuGraphNodeGetParams(self, hNode: Handle) -> Any:
        return _generic_struct(self.graphs.nodes.get(hNode))

    @call(1)
    def cuGraphMemAllocNodeGetParams(self, hNode: Handle) -> Any:
        work = self._work(hNode, MemAlloc)
        params = types.CUDA_MEM_ALLOC_NODE_PARAMS()
        params.bytesize, params.dptr = work.size, types.CUdeviceptr(work.address)
        return params

    @call(1)
    def cuGraphMemFreeNodeGetParams(self, hNode: Handle) -> Any:
        return types.CUdeviceptr(self._work(hNode, MemFree).address)

    # ---- attributes of kernel nodes

    @call(1)
    def cuGraphKernelNodeGetAttribute(self, hNode: Handle, attr: int) -> Any:
        raw = self._work(hNode, Kernel).attribute(int(attr))
        return attribute_struct(raw or b"")

    @call()
    def cuGraphKernelNodeSetAttribute(self, hNode: Handle, attr: int, value: Any) -> None:
        work = self._work(hNode, Kernel)
        changed = dict(work.attributes) | {int(attr): attribute_bytes(value)}
        self.graphs.nodes.get(hNode).replace(with_attributes(work, tuple(changed.items())))

    @call()
    def cuGraphKernelNodeCopyAttributes(self, dst: Handle, src: Handle) -> None:
        attributes = self._work(src, Kernel).attributes
        work = self._work(dst, Kernel)
        self.graphs.nodes.get(dst).replace(with_attributes(work, attributes))


# ---------------------------------------------------------------- helpers


def with_attributes(work: Kernel, attributes: tuple[tuple[int, bytes], ...]) -> Kernel:
    """The same launch with other attributes."""
    fields = {**work.__dict__, "attributes": attributes}
    return Kernel(**fields)


def _kind(params: Any) -> int:
    if params is None:
        raise Refusal(INVALID_VALUE)
    try:
        return int(params.type)
    except ValueError:
        raise Refusal(INVALID_VALUE) from None


def _uses_handle(graph: Graph, handle: int) -> bool:
    for node in graph.nodes:
        if isinstance(node.work, Conditional) and node.work.handle == handle:
            return True
        if any(_uses_handle(child, handle) for child in node.work.child_graphs()):
            return True
    return False


def _shown(node: Node, work: Kernel) -> Any:
    if node.shown is None:
        node.shown = show(work)
    return node.shown


def _generic_struct(node: Node) -> Any:
    params = types.CUgraphNodeParams()
    params.type = types.CUgraphNodeType(node.work.kind)
    work = node.work
    if isinstance(work, Kernel):
        fill_kernel(params.kernel, work, _shown(node, work))
    elif isinstance(work, Memcpy):
        fill_memcpy(params.memcpy.copyParams, work)
        params.memcpy.copyCtx = types.CUcontext(work.context)
    elif isinstance(work, Memset):
        fill_memset(params.memset, work)
        params.memset.ctx = types.CUcontext(work.context)
    elif isinstance(work, Host):
        fill_host(params.host, work)
    elif isinstance(work, RecordEvent):
        params.eventRecord.event = work.event.handle
    elif isinstance(work, WaitEvent):
        params.eventWait.event = work.event.handle
    elif isinstance(work, Child):
        params.graph.graph = work.graph.handle
    elif isinstance(work, Conditional):
        _fill_conditional(params.conditional, node, work)
    elif not isinstance(work, Empty):
        raise Refusal(NOT_SUPPORTED)
    return params


def _fill_conditional(params: Any, node: Node, work: Conditional) -> None:
    params.handle = types.CUgraphConditionalHandle(work.handle)
    params.type = types.CUgraphConditionalNodeType(work.choice)
    params.size = len(work.bodies)
    node.shown = publish_bodies(params, [body.address for body in work.bodies], work.context)


def _padded(handles: list[Any], count: int) -> list[Any]:
    return handles + [types.CUgraphNode(0)] * (count - len(handles))


def _nodes(nodes: Sequence[Node], count: int) -> tuple[list[Any], int]:
    """The driver's manner: without a count only the number, with one that many handles."""
    if not count:
        return [], len(nodes)
    shown = [node.handle for node in nodes[:count]]
    return _padded(shown, count), len(shown)


def _neighbours(edges: dict[Node, Edge], count: int) -> tuple[list[Any], list[Any], int]:
    handles, number = _nodes(list(edges), count)
    return handles, [edge.struct() for edge in list(edges.values())[:count]], number


def _dot(graph: Graph) -> str:
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
