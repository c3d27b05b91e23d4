"""Capturing into a graph: `with graph.capture(stream, after=...) as part`.

The hard problem: a capture that fails must leave the graph as it was, but the driver gives up a graph
that it was capturing into. So a recording fills a graph of its own, and its nodes are planted into
the target only when it has ended well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from .._driver import enums, kernel_params, release, transplant
from .._driver.handles import GraphHandle
from ..errors import not_copyable
from . import errors
from .node import Node, Notes
from .recording import Recording
from .state import Template


class Part:
    """What `graph.capture(...)` yields. Inside the block: `.stream`; after it the nodes as well.

    nodes: the nodes that were captured, in order.
    frontier: the nodes that work behind this part has to wait for: `after=part.frontier`. Where
        nothing was captured they are those that the part itself was to wait for.
    """

    def __init__(self, target: Template, stream: Any, after: Sequence[Node], mode: str) -> None:
        self._target, self._after = target, list(after)
        self._recording = Recording(target.driver, stream, mode)
        self._is_done = False
        self.nodes: tuple[Node, ...] = ()
        self.frontier: tuple[Node, ...] = ()

    @property
    def stream(self) -> Any:
        """The stream that is captured: pass it to what does not follow the current stream."""
        return self._recording.stream

    def __enter__(self) -> Part:
        if self._is_done:
            raise errors.part_is_used_up()
        self._is_done = True
        self._recording.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._recording.__exit__(kind, error, traceback)
        if error is None:
            with release.relaxed_thread():
                self._plant()

    def __del__(self) -> None:
        """A part that was entered by hand and never left: the next use of the library ends it."""
        recording = getattr(self, "_recording", None)
        if recording is not None:
            recording.is_abandoned = True

    def _plant(self) -> None:
        target, recording = self._target, self._recording
        target.require_open()
        nodes, frontier = plant(target, recording, target.handles(self._after))
        self.nodes = tuple(target.added(node) for node in nodes)
        by_handle = {node.handle: node for node in self.nodes}
        self.frontier = tuple(by_handle[int(node)] for node in frontier) or tuple(self._after)

    def __repr__(self) -> str:
        return f"<Part {len(self.nodes)} nodes>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copyable("captured part")


def plant(
    target: Template, recording: Recording, after: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Put what was recorded into a graph: the new nodes, and those that end it."""
    source, root, driver = recording.template, target.root, target.driver
    if target.parent is not None:
        check_body(source)
    ground = transplant.Ground(driver, target.value, root.value, root.context)
    handle = source.handle
    assert isinstance(handle, GraphHandle)
    planted = transplant.transplant(ground, handle, after, source.known)
    inputs = [piece.storage for piece in recording.inputs[0]]
    root.owners.keep([recording.keep, inputs, *source.owners.all()])
    root.known.update(planted.conditionals)
    _move_notes(source, root, planted)
    nodes = list(planted.nodes.values())
    if planted.is_child:
        return nodes, nodes
    return nodes, [planted.nodes[old] for old in recording.frontier]


def check_body(source: Template) -> None:
    """The bodies of conditional nodes take few kinds of nodes; refused before one is added."""
    driver = source.driver
    for node in driver.graph_nodes(source.value):
        if kernel_params.node_type(driver, node) not in enums.IN_BODIES:
            raise errors.not_in_a_body(source.node(node).label)


def _move_notes(source: Template, root: Template, planted: transplant.Planted) -> None:
    for old, notes in source.notes.items():
        new = planted.nodes.get(old)
        if new is not None and notes != Notes():
            root.notes[int(new)] = notes
    for first, _ in source.together.items():
        new = planted.nodes.get(first)
        if new is not None:
            work = planted.conditionals[int(new)]
            pair = _second_of(source, first, planted)
            root.together[int(new)] = (*work.bodies, *pair)


def _second_of(source: Template, first: int, planted: transplant.Planted) -> tuple[int, ...]:
    """The bodies of the node that stands for the other half of a two-body conditional."""
    bodies = source.together[first]
    for old, work in source.known.items():
        if old != first and work.bodies and work.bodies[0] == bodies[-1]:
            return planted.conditionals[int(planted.nodes[old])].bodies
    return ()
