"""What every node of a graph has, and what it asks of the graph that it is in.

The hard problem: a node needs its graph, to know its neighbours and whose memory its addresses are in, and
a graph is made of nodes. So a node says here what it asks of a graph, and of the look that it came from,
and whatever answers that may be one.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from .._driver import node_params
from ..errors import not_copyable
from .abbreviate import shown

#: Whose memory an address is in, if that is known.
Resolve = Callable[[int], str | None]

T = TypeVar("T")


# ---------------------------------------------------------------- what a node asks


class OwningGraph(Protocol):
    """The graph that a node is in."""

    @property
    def root(self) -> OwningGraph:
        """The outermost graph."""

    @property
    def value(self) -> Any:
        """The driver's handle; raises once it is gone."""

    def check(self, node: Node) -> None:
        """Refuse a node that is not, or no longer, in this graph."""

    def node(self, handle: Any) -> Node:
        """The value for one node, read anew."""

    def inner(self, node: Node) -> tuple[OwningGraph, ...]:
        """The graphs inside a node."""

    def snapshot(self) -> Look:
        """All nodes and edges as they are now."""

    def resolve(self, value: int) -> str | None:
        """Whose memory an address is in, if that is known."""

    def kept(self) -> list[object]:
        """What owns the memory that the nodes name."""


class Look(Protocol):
    """The look at a graph that a node came from."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """In topological order."""

    @property
    def by_insertion(self) -> tuple[Node, ...]:
        """As they were added."""

    @property
    def edges(self) -> tuple[Edge, ...]:
        """By target, then by source."""

    def neighbours(self, handle: int) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """What a node waits for, and what waits for it."""


class Edge(NamedTuple):
    """`target` waits for `source`: for all of it ("full"), or, "programmatic", for a trigger in it.

    The ports are the driver's: which event of the source kernel, which part of the target.
    """

    source: Node
    target: Node
    kind: str = "full"
    from_port: int = 0
    to_port: int = 0

    @property
    def src(self) -> Node:
        """The same as `source`."""
        return self.source

    @property
    def dst(self) -> Node:
        """The same as `target`."""
        return self.target


class Notes(NamedTuple):
    """What was noted of a node when it was captured."""

    scopes: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()


class NodeState(NamedTuple):
    """One node at one moment."""

    handle: Any
    work: node_params.Work
    serial: int
    notes: Notes
    enabled: bool


# ---------------------------------------------------------------- nodes


class Field(property, Generic[T]):
    """A property that hands on what is at `path` in the node's work."""

    if TYPE_CHECKING:

        def __get__(self, node: Any, owner: Any = None, /) -> T: ...  # type: ignore[override]

    def __init__(self, path: str, doc: str) -> None:
        super().__init__(attrgetter(f"_work.{path}"), doc=doc)


class Node:
    """One node of a graph, as it was when it was looked at."""

    __slots__ = ("_enabled", "_handle", "_look", "_notes", "_serial", "_template", "_work")

    kind: ClassVar[str] = "node"

    def __init__(self, template: OwningGraph, state: NodeState, look: Look | None) -> None:
        self._template, self._look = template, look
        self._handle, self._work, self._serial, self._notes, self._enabled = state

    @property
    def handle(self) -> int:
        """The driver's CUgraphNode, as a number. The graph owns it."""
        return int(self._handle)

    @property
    def type_id(self) -> int:
        """CUgraphNodeType."""
        return self._work.kind

    @property
    def label(self) -> str:
        """The name of a kernel, the kind of any other node."""
        return self.kind

    @property
    def enabled(self) -> bool:
        """False for a node that the executable which runs this graph skips."""
        return self._enabled

    @property
    def scopes(self) -> tuple[str, ...]:
        """The `annotate` blocks that the node was captured in, from the outermost in."""
        return self._notes.scopes

    @property
    def scope(self) -> str:
        """The same in one line: "model/layer 3"."""
        return "/".join(self._notes.scopes)

    @property
    def stack(self) -> tuple[str, ...]:
        """The Python lines that captured it ("file.py:12 in step"), the innermost last.

        Empty unless the capture was told to keep them (`record_stacks=True`).
        """
        return self._notes.stack

    @property
    def predecessors(self) -> tuple[Node, ...]:
        """The nodes that this one waits for."""
        return self._neighbours()[0]

    @property
    def successors(self) -> tuple[Node, ...]:
        """The nodes that wait for this one."""
        return self._neighbours()[1]

    def _neighbours(self) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        look = self._look
        if look is None:
            self._template.check(self)
            look = self._template.snapshot()
        return look.neighbours(int(self._handle))

    def __eq__(self, other: object) -> bool:
        """Whether both are the same node of the same graph, whatever they show."""
        return (
            isinstance(other, Node)
            and self._template.root is other._template.root
            and self._serial == other._serial
        )

    def __hash__(self) -> int:
        return hash((id(self._template.root), self._serial))

    def __copy__(self) -> Node:
        return self  # it never changes

    def __deepcopy__(self, memo: Any) -> Node:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copyable(type(self).__name__)

    def __repr__(self) -> str:
        state = "" if self._enabled else " disabled"
        scope = f" in {self.scope}" if self.scopes else ""
        return f"<{type(self).__name__}{self._describe()}{scope}{state}>"

    # ---- what each kind says of itself

    def _describe(self) -> str:
        """In its repr."""
        return ""

    def _names(self) -> tuple[str, ...]:
        """What `Graph.find` finds it by."""
        return (self.label,)

    def _fields(self) -> list[tuple[str, Any]]:
        """What two nodes are compared by, addresses and argument bytes included."""
        return [(name, value) for name, value in vars(self._work).items() if name != "context"]

    def _line(self, addresses: bool = True) -> str:
        """In one line, without `addresses` if they differ from run to run."""
        return self.label

    def _picture(self) -> list[str]:
        """The lines of its box in a picture."""
        return [self._line(addresses=False)]

    def _facts(self, resolve: Resolve) -> list[list[str]]:
        """What it does, as pairs of a word and a value; the first one fits on its box."""
        return [
            [name, shown(value)]
            for name, value in self._fields()
            if not isinstance(value, (tuple, list))
        ]

    def _inside(self) -> list[tuple[str, OwningGraph]]:
        """The graphs inside, as far as they are known, with what they are called."""
        return []
