"""What is noted about captured nodes while they are captured: scopes, lines, conditionals.

The hard problem: the driver knows none of it, and asking it what is new after every call would cost
more than the call. But nodes are numbered in the order in which they are added, on whichever stream
of a capture, so a scope is just two numbers: how many nodes there were when it began and when it
ended. A journal belongs to one block, or one `Graph.capture`, and is opened by whoever first has
something to note; a capture that nobody annotates pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .._driver.bindings import Driver, types
from .._driver.node_params import Conditional
from .node import Notes

if TYPE_CHECKING:
    from .state import Template


class _Scope(NamedTuple):
    """A label from a node of one segment on."""

    label: str
    segment: int
    start: int


class _Range(NamedTuple):
    """A label, or a stack, for the nodes from `start` to before `stop` (None: to the end)."""

    start: int
    stop: int | None
    what: Any
    is_stack: bool = False


class Journal:
    """What was noted in one block or one recording."""

    def __init__(self, driver: Driver, stream: Any) -> None:
        self._driver = driver
        self._stream = types.CUstream(int(stream))
        self._open: list[_Scope] = []
        self._ranges: dict[int, list[_Range]] = {}
        self._known: dict[int, dict[int, Conditional]] = {}
        self._together: dict[int, dict[int, tuple[int, ...]]] = {}

    def size(self) -> int:
        """How many nodes the open capture has; 0 where none is open."""
        graph = self._driver.capture_info(self._stream).graph
        if graph is None:
            return 0
        return int(self._driver.cuGraphGetNodes(graph, 0)[1])

    # ---- scopes and lines

    def enter(self, label: str, segment: int) -> _Scope:
        """A scope begins."""
        scope = _Scope(label, segment, self.size())
        self._open.append(scope)
        return scope

    @property
    def open_labels(self) -> tuple[str, ...]:
        """The labels of the scopes that are open now, from the outermost in."""
        return tuple(scope.label for scope in self._open)

    def leave(self, scope: _Scope, segment: int) -> None:
        """A scope ends, perhaps in a later segment than it began in."""
        if scope in self._open:
            self._open.remove(scope)
            start = scope.start if scope.segment == segment else 0
            self._ranges.setdefault(segment, []).append(_Range(start, self.size(), scope))

    def note_stack(self, segment: int, start: int, stop: int, stack: tuple[str, ...]) -> None:
        """The nodes from `start` to before `stop` were made by a line."""
        self._ranges.setdefault(segment, []).append(_Range(start, stop, stack, True))

    # ---- conditionals

    def note_conditionals(
        self, segment: int, known: dict[int, Conditional], together: dict[int, tuple[int, ...]]
    ) -> None:
        """What no getter tells of conditional nodes before driver 13.2."""
        self._known.setdefault(segment, {}).update(known)
        self._together.setdefault(segment, {}).update(together)

    # ---- at the end of a segment

    def hand_over(self, template: Template, segment: int, nodes: Sequence[Any]) -> None:
        """Write all that was noted of a segment into its template; `nodes` in the order of adding."""
        template.notes.update(self._notes(segment, nodes))
        template.known.update(self._known.get(segment, {}))
        template.together.update(self._together.get(segment, {}))

    def _notes(self, segment: int, nodes: Sequence[Any]) -> dict[int, Notes]:
        """The notes of a segment's nodes, given in the order in which they were added."""
        ranges = [*self._ranges.get(segment, ())]
        for scope in self._open:
            if scope.segment <= segment:
                start = scope.start if scope.segment == segment else 0
                ranges.append(_Range(start, None, scope))
        found: dict[int, Notes] = {}
        labels: dict[int, list[_Scope]] = {}
        for start, stop, what, is_stack in ranges:
            for number in range(start, len(nodes) if stop is None else min(stop, len(nodes))):
                handle = int(nodes[number])
                if is_stack:
                    found[handle] = Notes((), what)
                else:
                    labels.setdefault(handle, []).append(what)
        for handle, scopes in labels.items():
            scopes.sort(key=lambda scope: (scope.segment, scope.start))
            stack = found.get(handle, Notes()).stack
            found[handle] = Notes(tuple(scope.label for scope in scopes), stack)
        return found


class Page(NamedTuple):
    """A journal and the number of the segment that is captured, or comes next."""

    journal: Journal
    segment: int
