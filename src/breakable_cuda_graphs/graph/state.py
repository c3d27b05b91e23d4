"""A graph's handles and all that is remembered of its nodes: what a `Graph` is a face of.

The hard problem: the driver names nodes by addresses that it uses again, knows nothing of scopes,
of Python objects behind addresses or of the parts of conditional nodes, and hands out graphs inside
graphs that live as long as the outermost. So one tree of templates stands for one tree of graphs:
the root owns, remembers and numbers; everything below is a view that ends with it.

What an executable was told to run differently (`Shadow`) is kept apart from the template and only
laid over it where a segment of a sequence is looked at: there the nodes show what will run.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from .._driver import enums, kernel_params, node_params, release, set_params
from .._driver.bindings import Driver, types
from .._driver.handles import GraphHandle, GraphView
from ..errors import bad_type
from . import errors
from .build import Condition, leaves
from .node import Node, NodeState, Notes
from .nodes import NODES, as_node
from .snapshot import Snapshot

_NO_NOTES = Notes()


class Shadow:
    """What one executable was told about nodes: their work now, and which of them it skips.

    There are no getters for executables (CUDA driver API), so this is the only record.
    """

    __slots__ = ("disabled", "owners", "sources", "works")

    def __init__(self) -> None:
        self.works: dict[int, node_params.Work] = {}
        self.disabled: set[int] = set()
        self.owners = Owners()
        self.sources: object = None  # owners of the graph that a whole update came from

    @property
    def is_empty(self) -> bool:
        return not self.works and not self.disabled


class Owners:
    """Python objects that memory belongs to, by the node and the place in it that name them."""

    __slots__ = ("_by_place", "_for_good")

    def __init__(self) -> None:
        self._by_place: dict[tuple[int, object], object] = {}
        self._for_good: list[object] = []

    def keep(self, things: Iterable[object]) -> None:
        """Keep objects for as long as this lives."""
        self._for_good.extend(things)

    def put(self, node: int, places: dict[object, object]) -> list[object]:
        """Note what places of a node name now; returns what they named before."""
        before = []
        for place, thing in places.items():
            old = self._by_place.pop((node, place), None)
            if old is not None:
                before.append(old)
            if thing is not None:
                self._by_place[node, place] = thing
        return before

    def drop(self, node: int) -> None:
        """A node is gone."""
        for key in [key for key in self._by_place if key[0] == node]:
            del self._by_place[key]

    def all(self) -> list[object]:
        """Everything that is kept."""
        return [*self._for_good, *self._by_place.values()]


class Ending(NamedTuple):
    """The kernel that a WHILE body must end with: it sets the condition for the next round."""

    body: int
    condition: Condition


class Template:
    """One graph: a root of our own, somebody's root, or a graph inside another."""

    def __init__(
        self, driver: Driver, handle: GraphHandle | GraphView, *, parent: Template | None = None,
        context: int = 0, is_open: bool = True, is_alive: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        self.driver = driver
        self.handle = handle
        self.parent = parent
        self.is_open = is_open  # whether nodes may be added and removed
        # Weak in both: a graph must be given back when its last user lets go, not at a collection.
        self._inner: dict[int, tuple[weakref.ref[Template], ...]] = {}
        self.face: weakref.ref[Any] | None = None  # the `Graph` that shows this
        if parent is None:
            self.context = context
            self.owners = Owners()
            self.notes: dict[int, Notes] = {}
            self.known: dict[int, node_params.Conditional] = {}
            self.together: dict[int, tuple[int, ...]] = {}  # bodies of several nodes, by the first
            self.endings: list[Ending] = []
            self.shown: Shadow | None = None
            self.resolver: Callable[[int], str | None] = _nothing_known
            self.lease: object = None  # what the memory of captured work is kept by
            self.inventory: object = None  # of a segment's graph, once it was asked for
            self.draws = False  # whether each launch has to be prepared, for random numbers
            self._is_alive = is_alive
            self._serials: dict[int, int] = {}
            self._count = itertools.count()
            self._setters: dict[Ending, Any] = {}

    @property
    def root(self) -> Template:
        """The template of the outermost graph."""
        return self if self.parent is None else self.parent.root

    # ---- the handle

    @property
    def value(self) -> Any:
        """The driver's handle; raises once the root is closed."""
        if self.closed:
            raise errors.graph_is_closed()
        return self.handle.value

    @property
    def closed(self) -> bool:
        root = self.root
        if root._is_alive is not None and not root._is_alive():
            return True
        return isinstance(root.handle, GraphHandle) and root.handle.closed

    def close(self) -> None:
        """Give the graph back, if it is ours."""
        with release.relaxed_thread():
            self.root.handle.close()

    # ---- nodes

    def serial(self, handle: Any) -> int:
        """A number for a node that no other node of this tree has or had."""
        serials = self.root._serials
        serial = serials.get(int(handle))
        if serial is None:
            serial = serials[int(handle)] = next(self.root._count)
        return serial

    def check(self, node: Node) -> None:
        """Refuse a node that is not, or no longer, in this tree, before the driver sees it."""
        if not isinstance(node, Node):
            raise bad_type("node", node, "a node of the graph")
        if self.closed:
            raise errors.graph_is_closed()
        if node._template.root is not self.root:
            raise errors.node_of_another_graph(node)
        if self.root._serials.get(node.handle) != node._serial:
            raise errors.node_was_removed(node)

    def resolve(self, value: int) -> str | None:
        """Whose memory an address is in, if that is known."""
        return self.root.resolver(value)

    def kept(self) -> list[object]:
        """What owns the memory that the nodes of this tree name."""
        return self.root.owners.all()

    def inner(self, node: Node) -> tuple[Template, ...]:
        """The graphs inside a child or conditional node."""
        known = tuple(view() for view in self._inner.get(node.handle, ()))
        if known and all(view is not None for view in known):
            return known  # type: ignore[return-value]
        self.check(node)
        graphs = self._graphs_inside(node)
        if not graphs:
            raise errors.bodies_unknown(node)
        is_open = self.is_open and isinstance(node._work, node_params.Conditional)
        made = tuple(self._view(graph, is_open) for graph in graphs)
        self._inner[node.handle] = tuple(weakref.ref(view) for view in made)
        return made

    def _graphs_inside(self, node: Node) -> tuple[int, ...]:
        """Of a conditional that had to be made of two nodes, the first has the bodies of both."""
        work = node._work
        if isinstance(work, node_params.Child):
            return (work.graph,)
        together = self.root.together.get(node.handle)
        if together is not None:
            return together
        return work.bodies if isinstance(work, node_params.Conditional) else ()

    def _view(self, graph: int, is_open: bool) -> Template:
        view = GraphView(self.driver, types.CUgraph(graph))
        return Template(self.driver, view, parent=self, is_open=is_open)

    # ---- reading

    def reader(self) -> node_params.Reader:
        """A reader for one look at this tree."""
        return node_params.Reader(self.driver, self.root.known, self.root.context)

    def current(
        self, handle: Any, reader: node_params.Reader, shadow: Shadow | None
    ) -> node_params.Work:
        """What a node does in the executable that a shadow is of (None: in the template)."""
        if shadow is not None:
            work = shadow.works.get(int(handle))
            if work is not None:
                return work
        return reader.read(handle)

    def state(self, handle: Any, reader: node_params.Reader | None = None) -> NodeState:
        """All that there is to say of one node now."""
        shadow = self.root.shown
        work = self.current(handle, reader or self.reader(), shadow)
        enabled = shadow is None or int(handle) not in shadow.disabled
        notes = self.root.notes.get(int(handle), _NO_NOTES)
        return NodeState(handle, work, self.serial(handle), notes, enabled)

    def node(self, handle: Any) -> Node:
        """The value for one node."""
        return as_node(self, self.state(handle), None)

    def snapshot(self) -> Snapshot:
        """All nodes and edges as they are now."""
        handles, edges = self.driver.graph_nodes(self.value), self.driver.graph_edges(self.value)
        reader = self.reader()
        return Snapshot(self, [self.state(handle, reader) for handle in handles], edges)

    def walk(self) -> Iterator[tuple[Template, Any]]:
        """Every node handle of this graph and of the graphs inside it, each after its outer one."""
        for handle in self.driver.graph_nodes(self.value):
            yield self, handle
            if kernel_params.node_type(self.driver, handle) in (enums.CHILD, enums.CONDITIONAL):
                node = self.node(handle)
                if isinstance(node._work, node_params.Child):
                    yield from self.inner(node)[0].walk()
                elif isinstance(node._work, node_params.Conditional):
                    for body in node._work.bodies:
                        yield from self._view(body, False).walk()

    # ---- building

    def add(
        self,
        work: node_params.Work,
        after: Iterable[Node],
        owners: dict[object, object] | None = None,
    ) -> Node:
        """Add a node behind others."""
        self.require_open()
        # The driver takes any node into a body, and refuses to instantiate the whole graph later.
        if self.parent is not None and work.kind not in enums.IN_BODIES:
            raise errors.not_in_a_body(NODES[type(work)].kind)
        handle = set_params.add(self.driver, self.value, self.handles(after), work)
        return self.added(handle, owners)

    def added(self, handle: Any, owners: dict[object, object] | None = None) -> Node:
        """The value for a node that was just made."""
        self.root._serials.pop(int(handle), None)
        if owners:
            self.root.owners.put(int(handle), owners)
        return self.node(handle)

    def require_open(self) -> None:
        """Refuse to build on what belongs to a sequence, or was copied into another graph."""
        if self.closed:
            raise errors.graph_is_closed()
        if not self.is_open or not self.root.is_open:
            raise errors.graph_is_fixed()

    def handles(self, nodes: Iterable[Node]) -> list[Any]:
        """Handles of nodes that have to be directly in this graph; each one once."""
        found: dict[int, Any] = {}
        for node in nodes:
            self.check(node)
            if int(node._template.value) != int(self.value):
                raise errors.node_of_another_graph(node)
            found[node.handle] = node._handle
        return list(found.values())

    def forget(self, node: Node) -> None:
        """A node was removed."""
        root = self.root
        root._serials.pop(node.handle, None)
        root.owners.drop(node.handle)
        root.notes.pop(node.handle, None)
        root.known.pop(node.handle, None)
        root.together.pop(node.handle, None)
        self._inner.pop(node.handle, None)

    def finish(self) -> None:
        """Give the bodies of WHILE nodes the kernels that they must end with."""
        for ending in self.root.endings:
            self._finish_body(ending)

    def _finish_body(self, ending: Ending) -> None:
        driver, graph = self.driver, types.CUgraph(ending.body)
        setter = self.root._setters.get(ending)
        last = leaves(driver, graph, setter)
        if setter is not None:
            if {int(node) for node in driver.node_dependencies(setter)} == set(map(int, last)):
                return
            driver.cuGraphDestroyNode(setter)
            self.root._serials.pop(int(setter), None)
        self.root._setters[ending] = ending.condition.add_setter(graph, last)


def _nothing_known(value: int) -> str | None:
    return None
