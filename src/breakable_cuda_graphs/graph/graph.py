"""Graph: a CUDA graph to look into, to build by hand, and to capture into.

The hard problem: three kinds of graphs look alike and are not: one's own, which may grow; one that
a sequence captured, which is only looked at and is edited through its executable; and graphs inside
nodes, which live in another. A `Graph` is a face of a `Template`, which knows the difference, and
each call checks it before the driver hears of it.

    graph = Graph()
    fill = graph.memset(y, 0, y.nbytes)
    scale = graph.kernel(kernel, grid=n // 256, block=256, args=(y, x, ctypes.c_int(n)), after=fill)
    with graph.capture(stream, after=scale) as part:
        torch.add(y, 1, out=z)
    execution = graph.instantiate()
    execution.launch()
    execution.update(scale, args={1: x2})
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .._driver import bindings, conditionals, contexts, enums, node_params, release, set_params
from .._driver.handles import INSTANTIATE_FLAGS, GraphHandle
from ..errors import bad_type
from ..frameworks import choose
from . import build, checks, errors, exec, kernels
from .build import Condition, as_scalar
from .change import GraphEditor
from .checks import Owned
from .exec import GraphExec
from .node import Field, Node, OwningGraph
from .nodes import (
    NODES,
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
)
from .part import Part
from .state import Ending, Template
from .view import everywhere, template_of


class ChildNode(Node):
    """A graph as one node."""

    __slots__ = ()
    kind = "child"
    _template: Template

    @property
    def graph(self) -> Graph:
        """The graph inside, to be looked at; its nodes can be edited in an executable."""
        return face_of(self._template.inner(self)[0])

    def _fields(self) -> list[tuple[str, Any]]:
        return [("nodes", len(self.graph))]

    def _inside(self) -> list[tuple[str, OwningGraph]]:
        return [("graph", self._template.inner(self)[0])]


_CHOICES = {enums.IF: "if", enums.WHILE: "while", enums.SWITCH: "switch"}


class ConditionalNode(Node):
    """Runs one of its bodies, or one of them again and again, as device code decides."""

    __slots__ = ()
    kind = "conditional"
    _work: node_params.Conditional
    _template: Template

    @property
    def type(self) -> str:
        """ "if", "while" or "switch"; "unknown" for one that this driver cannot read."""
        return _CHOICES.get(self._work.choice, "unknown")

    condition = Field[int](
        "handle", "The CUgraphConditionalHandle: what a kernel of your own sets."
    )

    @property
    def bodies(self) -> tuple[Graph, ...]:
        """The graphs inside; fill them with `.capture()` or node by node."""
        return tuple(face_of(inner) for inner in self._template.inner(self))

    @property
    def body(self) -> Graph:
        """The first body: of an IF, what runs when the flag is not zero."""
        return self.bodies[0]

    @property
    def orelse(self) -> Graph:
        """The second body of an IF: what runs when the flag is zero.

        Raises `RuntimeError` for a node that has none: `if_(flag, orelse=True)` makes one.
        """
        bodies = self.bodies
        if self.type not in ("if", "unknown") or len(bodies) < 2:
            raise errors.no_second_body(self)
        return bodies[1]

    def _describe(self) -> str:
        return f" {self.type}"

    def _fields(self) -> list[tuple[str, Any]]:
        return [("type", self.type), ("bodies", len(self._work.bodies))]

    def _line(self, addresses: bool = True) -> str:
        return f"{self.type} node" if addresses else self.type

    def _inside(self) -> list[tuple[str, OwningGraph]]:
        names = ("body", "orelse") if self.type in ("if", "while") else ()
        bodies = self._template.inner(self) if self._work.bodies else ()
        return [
            (names[place] if place < len(names) else f"body {place}", body)
            for place, body in enumerate(bodies)
        ]


NODES[node_params.Child] = ChildNode
NODES[node_params.Conditional] = ConditionalNode

After = Node | Iterable[Node] | None
N = TypeVar("N", bound=Node)

_AUTO_FREE, _USE_PRIORITY = 1, 8  # CUgraphInstantiate_flags


class Graph(GraphEditor):
    """A CUDA graph. `Graph()` makes an empty one; `segment.graph` shows a captured one.

    `after=` takes the node, or the nodes, that a new node waits for. Every method that adds returns
    the new node. Arrays passed to it are kept alive by the graph and by its executables. The nodes of
    a segment's graph show what will run, edits included; those of one's own show the template, and
    an executable starts from what the template is when it is made.

    A graph is used by one thread at a time. Refuses (`RuntimeError`) nodes of other graphs, nodes
    that were removed, and all calls once it is closed.
    """

    __slots__ = ()

    def __init__(self) -> None:
        release.drain()
        driver = bindings.current()
        contexts.ensure(driver, choose.framework_for(driver, None).context)
        context = contexts.current(driver)
        self._template = Template(driver, GraphHandle.create(driver), context=context)

    # ---- building

    def kernel(
        self, fn: Any, grid: Any, block: Any, args: Iterable[Any] = (), *, shared_bytes: int = 0,
        after: After = None, cluster: Any = None, cooperative: bool = False,
        priority: int | None = None,
    ) -> KernelNode:  # fmt: skip
        """Add a kernel launch.

        fn: a CUfunction or CUkernel, a cuda.core, CuPy, compiled Numba or compiled Triton kernel.
        grid, block: blocks, and threads a block: one to three ints. `block=None` for Triton.
        args: arrays (their address), typed numbers (ctypes, numpy), structures, or bytes; a bare
            Python number is refused, its size is unknown.
        shared_bytes: dynamic shared memory a block.
        cluster: blocks a cluster, one to three ints.
        cooperative: whether all blocks run at once and may wait for each other.
        priority: as a stream's; smaller numbers run first.

        Raises `TypeError` or `ValueError` for what does not fit the kernel.
        """
        self._template.require_open()
        driver = self._template.driver
        function = kernels.as_function(fn)
        work, owners = build.kernel(driver, function, grid, block, list(args), shared_bytes)
        node = self._add(KernelNode, work, _nodes(after), owners)
        if cluster is None and not cooperative and priority is None:
            return node
        try:
            build.set_attributes(driver, node._handle, cluster, cooperative, priority)
        except BaseException:
            self.remove(node)
            raise
        return _known_as(KernelNode, self._template.node(node._handle))

    def memcpy(
        self, dst: Any, src: Any, nbytes: int | tuple[int, ...], after: After = None, *,
        dst_pitch: int | None = None, src_pitch: int | None = None, dst_rows: int | None = None,
        src_rows: int | None = None,
    ) -> MemcpyNode:  # fmt: skip
        """Add a copy between memory of the device or the host.

        dst, src: arrays, or addresses as ints.
        nbytes: how many bytes; or bytes a row, rows and slices, for two or three dimensions.
        dst_pitch, src_pitch: bytes from row to row, by default without gaps.
        dst_rows, src_rows: rows from slice to slice, by default without gaps.

        Raises `ValueError` for an array that is too small, for no bytes and for rows that overlap,
        `TypeError` for what is no memory.
        """
        template = self._template
        template.require_open()
        pitches, rows = {"src": src_pitch, "dst": dst_pitch}, {"src": src_rows, "dst": dst_rows}
        made = build.copy(template.driver, self._context, dst, src, nbytes, pitches, rows)
        return self._add(MemcpyNode, made.work, _nodes(after), made.owners)

    def memset(
        self, ptr: Any, value: Any, nbytes: int | tuple[int, int], after: After = None, *,
        element_size: int = 1, pitch: int | None = None,
    ) -> MemsetNode:  # fmt: skip
        """Add a fill of device memory with a value.

        ptr: an array, or an address as an int.
        value: an int that fits an element, or a typed number (ctypes, numpy) of the element's size.
        nbytes: how many bytes; or bytes a row and rows, for two dimensions.
        element_size: bytes of an element, where `value` is an int: 1, 2 or 4.
        pitch: bytes from row to row, by default without gaps.

        Raises `ValueError` where sizes do not fit, `TypeError` for what is no memory or number.
        """
        self._template.require_open()
        made = build.fill(self._context, ptr, value, nbytes, element_size, pitch)
        return self._add(MemsetNode, made.work, _nodes(after), made.owners)

    def child(self, graph: Graph, after: After = None) -> ChildNode:
        """Add a copy of another graph, as it is now, as one node.

        Raises `ValueError` for a graph with allocations or conditional nodes: the driver has no
        copies of those. `RuntimeError` for that of a segment that draws random numbers.
        """
        self._template.require_open()
        other = template_of("graph", graph)
        if other.root is self._template.root:
            raise errors.child_of_itself()
        if other.root.draws:
            raise errors.only_its_sequence_draws()
        for node in everywhere(other.snapshot()):
            if node.type_id in (enums.MEM_ALLOC, enums.MEM_FREE, enums.CONDITIONAL):
                raise errors.cannot_be_a_child(node)
        owners: dict[object, object] = {"child": [other.kept(), other.root.lease]}
        return self._add(ChildNode, node_params.Child(int(other.value)), _nodes(after), owners)

    def join(self, *nodes: Node) -> EmptyNode:
        """Add an empty node that waits for all of the given ones."""
        return self._add(EmptyNode, node_params.Empty(), nodes)

    def event_record(self, event: Any, after: After = None) -> EventRecordNode:
        """Add the recording of an event (of torch, CuPy, Numba, the bindings, or a handle).

        Raises `TypeError` for what is no event.
        """
        number, owner = checks.as_event(event)
        return self._add(
            EventRecordNode, node_params.EventRecord(number), _nodes(after), {"event": owner}
        )

    def event_wait(self, event: Any, after: After = None) -> EventWaitNode:
        """Add a wait for an event that is recorded outside of the graph; see `event_record`."""
        number, owner = checks.as_event(event)
        return self._add(
            EventWaitNode, node_params.EventWait(number), _nodes(after), {"event": owner}
        )

    def host(self, fn: Callable[[], object], after: After = None) -> HostNode:
        """Add a call of `fn`, a Python function without arguments, on a thread of the driver's.

        It must not use CUDA. What it raises is printed and lost.
        """
        self._template.require_open()
        return self._add(HostNode, build.host_call(fn), _nodes(after))

    def batch_mem_op(self, operations: Iterable[Any], after: After = None) -> BatchMemOpNode:
        """Add waits for, and writes of, single words of device memory, done in order.

        operations: tuples `(what, ptr, value)`, or operations of another node. `what` is "write", or
            how a wait compares the word with the value: "wait_geq", "wait_eq", "wait_and" (any of its
            bits), "wait_nor". `value` is a typed number (ctypes, numpy) of 4 or 8 bytes.

        A wait holds up the graph until somebody else, on another stream, has written the word.
        Raises `TypeError` or `ValueError` for a word that is not aligned or has another size.
        """
        self._template.require_open()
        made = build.batch(self._context, operations)
        return self._add(BatchMemOpNode, made.work, _nodes(after), made.owners)

    def mem_alloc(
        self, nbytes: int, after: After = None, *, device: int | None = None
    ) -> MemAllocNode:
        """Add an allocation: `.address` is valid from this node to the one that frees it.

        nbytes: how large the memory is; not zero.
        device: its number, by default that of the current context.

        A graph with allocations has one executable at a time, is no child of another, and nothing can
        be removed from it. Raises `CUDAError` where the driver refuses.
        """
        template = self._template
        template.require_open()
        if device is None:
            device = int(template.driver.cuCtxGetDevice())
        where = checks.as_size(device, "device")
        size = checks.as_size(nbytes, "nbytes")
        if not size:
            raise errors.nothing_to_copy("nbytes")
        before = template.handles(_nodes(after))
        handle, address = set_params.add_allocation(
            template.driver, template.value, before, size, where
        )
        node = _known_as(MemAllocNode, template.added(handle))
        assert node.address == address
        return node

    def mem_free(self, memory: MemAllocNode | int, after: After = None) -> MemFreeNode:
        """Add the end of an allocation of this graph: of the node that made it, or by its address."""
        if isinstance(memory, MemAllocNode):
            address = memory.address
        elif isinstance(memory, (bool, float)) or not hasattr(memory, "__int__"):
            raise bad_type("memory", memory, "the node that allocates it, or its address")
        else:
            address = int(memory)  # the bindings' CUdeviceptr too
        return self._add(MemFreeNode, node_params.Release(address), _nodes(after))

    def _add(
        self,
        kind: type[N],
        work: node_params.Work,
        after: Iterable[Node],
        owners: Owned | None = None,
    ) -> N:
        return _known_as(kind, self._template.add(work, after, owners))

    # ---- conditionals

    def if_(self, flag: Any, orelse: bool = False, *, after: After = None) -> ConditionalNode:
        """Add a node that runs `node.body` if the flag is not zero, else `node.orelse` if wanted.

        `flag` is an array of one number in device memory, read when the graph runs. Fill the bodies
        with `node.body.capture(...)` or node by node; they may hold kernels, copies and fills of the
        device, child graphs and further conditionals. The flag is read by a small kernel that is
        compiled on first use. Raises `TypeError` for what is no such array, `RuntimeError` without
        NVRTC, `CUDAError` on drivers before 12.4 (12.8 with `orelse`).
        """
        return self._conditional(enums.IF, 2 if orelse else 1, flag, after)

    def while_(self, flag: Any, *, after: After = None) -> ConditionalNode:
        """Add a node that runs `node.body` for as long as the flag is not zero.

        The flag is read before the first round and at the end of each.
        """
        return self._conditional(enums.WHILE, 1, flag, after)

    def switch(self, index: Any, n: int, *, after: After = None) -> ConditionalNode:
        """Add a node that runs the body of the index's number, of `n` in `node.bodies`, or none.

        `index` is an array of one whole number in device memory; otherwise as `if_`.
        """
        size = checks.as_size(n, "n")
        if not size:
            raise errors.nothing_to_copy("n")
        return self._conditional(enums.SWITCH, size, index, after)

    def _conditional(self, choice: int, size: int, flag: Any, after: After) -> ConditionalNode:
        template = self._template
        template.require_open()
        driver, root = template.driver, template.root
        scalar, owner = as_scalar(flag, choice)
        conditionals.prepare(driver)
        before = template.handles(_nodes(after))
        condition = Condition.of_graph(driver, root.value, root.context, choice, size, scalar)
        setter = template.added(condition.add_setter(template.value, before), {"flag": owner})
        made = condition.add_nodes(template.value, setter._handle)
        root.known.update(made.known)
        root.together.update(made.together)
        if choice == enums.WHILE:
            root.endings.append(Ending(int(made.bodies[0]), condition))
        return _known_as(ConditionalNode, template.added(made.nodes[0]))

    # ---- capturing

    def capture(
        self, stream: Any = None, after: After = None, *, mode: str = "thread_local"
    ) -> Part:
        """Capture the block's work into this graph: `with graph.capture(stream) as part:`.

        The stream (of any library, or a handle) is current for torch and CuPy inside; by default a
        new one is used (`part.stream`). Streams forked from it must be joined again. Afterwards
        `part.nodes` are the new nodes, and `part.frontier` is what later work waits for:
        `after=part.frontier` goes on behind it, several frontiers join, and parts without a path
        between them may run at the same time. torch's memory of the block is kept for as long as
        the graph. What was captured before a failure is dropped; the graph stays as it was.

        mode: as `capture_error_mode` of `breakable_graph`.

        Raises `CaptureError` where the capture cannot begin or was lost, and for random numbers of
        torch, host callbacks, and in a body for what it cannot hold; `UnjoinedStreamError` for forked
        work that was not joined.
        """
        self._template.require_open()
        before = _nodes(after)
        self._template.handles(before)
        return Part(self._template, stream, before, mode)

    # ---- running and ending

    def instantiate(self, *, auto_free: bool = True, use_node_priority: bool = True) -> GraphExec:
        """An executable of the graph as it is now; later changes of the graph do not reach it.

        auto_free: a launch first frees what an earlier one allocated and left.
        use_node_priority: kernels run with the priorities of the streams that they were captured on.

        Raises `CUDAError` if the driver refuses the graph (a cycle, an empty WHILE body, ...).
        """
        release.drain()
        template = self._template
        if template.parent is not None:
            raise errors.graph_is_inside()
        if template.closed:
            raise errors.graph_is_closed()
        if template.draws:
            raise errors.only_its_sequence_draws()
        flags = INSTANTIATE_FLAGS & ~(_AUTO_FREE | _USE_PRIORITY)
        flags |= _AUTO_FREE if auto_free else 0
        flags |= _USE_PRIORITY if use_node_priority else 0
        return exec.instantiate(template, flags)

    def close(self) -> None:
        """Give the graph back. Executables of it can still be launched, and no longer edited.

        The graph of a segment belongs to its sequence, and one inside a node to the outer graph:
        closing those does nothing, and neither does a second call.
        """
        template = self._template
        if template.parent is None and template.is_open and not template.closed:
            template.close()

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _context(self) -> int:
        return self._template.root.context


def _known_as(kind: type[N], node: Node) -> N:
    """A node of a kind that is known, for the type checker and as a check."""
    assert isinstance(node, kind)
    return node


def _nodes(after: After) -> list[Node]:
    if after is None:
        return []
    if isinstance(after, Node):
        return [after]
    if not isinstance(after, Iterable):
        raise bad_type("after", after, "a node of the graph, or several in a list or the like")
    return list(after)


def face_of(template: Template) -> Graph:
    """The `Graph` for a template: the same one for as long as somebody has it."""
    graph = None if template.face is None else template.face()
    if graph is None:
        graph = Graph.__new__(Graph)
        graph._template = template
        template.face = weakref.ref(graph)
    assert isinstance(graph, Graph)
    return graph
