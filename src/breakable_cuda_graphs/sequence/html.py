"""A sequence, or two that are compared, as plain values for a page.

The hard problem: size. A model has thousands of nodes with ten arguments each, and to say whose memory
an address is in takes a look through all that the sequence knows. So each address is looked up once,
edges are numbers, and what is not there is left out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from .._driver import bindings
from .._driver.kernel_params import steps_of
from ..graph.abbreviate import shortened, shown, size_of
from ..graph.arguments import array_memory
from ..graph.node import Look, Node
from ..graph.nodes import KernelNode
from ..graph.view import look_at
from . import pytree
from .addresses import Ranges
from .pages import assemble
from .plan import scope_of, short_name
from .segments import EagerSegment, GraphSegment
from .state import SequenceState

_SHOWN_BYTES = 32  # of an argument
_SHOWN_TEXT = 200
_LOWEST, _HIGHEST = 1 << 32, 1 << 57  # where addresses of memory lie

Json = dict[str, Any]


def page(sequence: SequenceState, other: SequenceState | None = None) -> str:
    """The page of a sequence, or of two side by side."""
    title = repr(sequence) if other is None else f"{sequence!r} and {other!r}"
    return assemble.page("sequence", title, _data(sequence, other))


def _data(sequence: SequenceState, other: SequenceState | None) -> Json:
    """What the page shows: `sides`, and for two of them, `changes` by the number of the part."""
    sides = [_Side(each) for each in (sequence, other) if each is not None]
    data: Json = {
        "sides": [side.data for side in sides],
        "simulated": bindings.current().simulated,
    }
    if other is not None:
        data["changes"] = _changes(*sides)
    return data


class _Side:
    """One sequence: its data, and the numbers that the data calls the nodes by."""

    def __init__(self, sequence: SequenceState) -> None:
        self.segments = sequence.segments
        self.numbers: dict[int, int] = {}  # a node's handle -> its number on the page
        self._next = itertools.count()
        self._resolve = functools.cache(Ranges(sequence).name)
        self.data: Json = {
            "name": repr(sequence),
            "parts": [self._part(number, segment) for number, segment in enumerate(self.segments)],
        }

    def _part(self, number: int, segment: GraphSegment | EagerSegment) -> Json:
        if isinstance(segment, EagerSegment):
            arguments = [(path, text + where) for path, text, where in _arguments(segment)]
            part: Json = {
                "kind": "break", "name": short_name(segment.name), "args": arguments,
            }  # fmt: skip
            scope = "/".join(segment.scopes)
        else:
            part = {"kind": "graph", "name": f"segment {number}", "nodes": [], "edges": []}
            scope = scope_of([segment])
            if not segment.is_empty:
                part |= self._graph(look_at(segment.graph))
        if scope:
            part["scope"] = scope
        if segment.line:
            part["line"] = segment.line
        return part

    def _graph(self, look: Look) -> Json:
        nodes = look.nodes
        place = {}
        for number, node in enumerate(nodes):
            place[node.handle] = number
            self.numbers[node.handle] = next(self._next)
        return {
            "nodes": [self._node(node) for node in nodes],
            "edges": [
                [place[edge.source.handle], place[edge.target.handle]]
                + ([] if edge.kind == "full" else [edge.kind])
                for edge in look.edges
            ],
        }

    def _node(self, node: Node) -> Json:
        resolve = self._resolve
        made: Json = {
            "id": self.numbers[node.handle],
            "kind": node.kind,
            "name": node.label,
            "short": shortened(node.label, 34),
            "facts": node._facts(resolve),
        }
        if node.scopes:
            made["scope"] = node.scope
        if node.stack:
            made["stack"] = list(node.stack)
        if not node.enabled:
            made["disabled"] = True
        if isinstance(node, KernelNode):
            made["args"] = [_argument(node, index, resolve) for index in range(len(node.args))]
        inside = [
            {"title": title, **self._graph(inner.snapshot())} for title, inner in node._inside()
        ]
        if inside:
            made["inside"] = inside
        return made


def _argument(node: KernelNode, index: int, resolve: Callable[[int], str | None]) -> list[Any]:
    """[bytes, first bytes in hexadecimal, what they are the address of]."""
    data = node._work.args[index]
    known = dict.fromkeys(what for word in steps_of(data) if (what := resolve(word)))
    text = data[:_SHOWN_BYTES].hex(" ") + (" …" if len(data) > _SHOWN_BYTES else "")
    if len(data) == 8:
        text = f"{int.from_bytes(data, 'little'):#x}"
    return [len(data), text, "; ".join(known)]


def _arguments(segment: EagerSegment) -> list[tuple[str, str, str]]:
    """(path, what it is, where it lies) of each argument of a break."""
    found = []
    for path, value in pytree.leaves_of_call(segment.args, segment.kwargs):
        memory, where = array_memory(value), ""
        if memory is None:
            text = _in_words(value)
        else:
            shape = list(getattr(value, "shape", ()))
            size = "" if memory.nbytes is None else f", {size_of(memory.nbytes)}"
            text = f"{getattr(value, 'dtype', type(value).__name__)} {shape}{size}"
            where = f" at {memory.address:#x}"
        found.append((path, text if len(text) <= _SHOWN_TEXT else text[:_SHOWN_TEXT] + " …", where))
    return found


def _in_words(value: Any) -> str:
    """How an object shows itself; that is its user's code, and may fail."""
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


# ---------------------------------------------------------------- two of them


def _changes(left: _Side, right: _Side) -> list[list[Json]]:
    """What differs, part by part; parts are paired by their place."""
    pairs = itertools.zip_longest(left.segments, right.segments)
    return [_part_changes(left, right, one, other) for one, other in pairs]


def _part_changes(left: _Side, right: _Side, one: Any, other: Any) -> list[Json]:
    if one is None or other is None:
        return [_change("part", "nothing" if one is None else _name(one), _name(other))]
    if isinstance(one, GraphSegment) != isinstance(other, GraphSegment):
        return [_change("part", _name(one), _name(other))]
    if isinstance(one, EagerSegment):
        return list(_break_changes(one, other))
    if one.is_empty and other.is_empty:
        return []
    found = []
    for change in one.graph.diff(other.graph):
        entry = _change(change.field, shown(change.old), shown(change.new))
        if _is_address(change.old) and _is_address(change.new):
            entry["address"] = True
        if change.before is not None:
            entry["left"] = left.numbers.get(change.before.handle)
        if change.after is not None:
            entry["right"] = right.numbers.get(change.after.handle)
        found.append(entry)
    return found


def _break_changes(one: EagerSegment, other: EagerSegment) -> Iterator[Json]:
    if one.name != other.name:
        yield _change("function", one.name, other.name)
    before, after = (
        {path: (text, where) for path, text, where in _arguments(each)} for each in (one, other)
    )
    for path in dict.fromkeys([*before, *after]):
        old, new = (arguments.get(path, ("nothing", "")) for arguments in (before, after))
        if old != new:
            change = _change(path, "".join(old), "".join(new))
            if old[0] == new[0]:
                change["address"] = True
            yield change


def _is_address(value: Any) -> bool:
    """Whether a value may be one: arguments have no types, so a large number looks like it too."""
    if isinstance(value, bytes) and len(value) == 8:
        value = int.from_bytes(value, "little")
    return isinstance(value, int) and _LOWEST <= value < _HIGHEST


def _name(segment: GraphSegment | EagerSegment | None) -> str:
    if segment is None:
        return "nothing"
    return segment.name if isinstance(segment, EagerSegment) else repr(segment)


def _change(field: str, old: str, new: str) -> Json:
    return {"field": field, "old": old, "new": new}
