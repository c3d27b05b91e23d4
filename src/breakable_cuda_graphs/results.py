"""What a break returns, and how the next segment finds it at each replay.

The hard problem: the next segment was captured with the addresses that the result had once. So
with `outputs="static"` each array of a result gets one fixed place: a new buffer that the sequence
owns and into which every later result is copied; or, for an array that lies in memory which the
capture knows (an argument, a view of one, something captured work made), that memory itself, with
nothing to copy. A result that no longer fits its place is refused before anything is copied: a
plain copy would broadcast, cast or misalign without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any, NamedTuple

from . import errors, structures
from .frameworks.base import Arrays, Birth, Session
from .liveness import Memory, Rules, describe

#: Types of results, beside arrays, that may be returned by a break with static outputs.
_PLAIN = (type(None), Number, str, bytes)

FindArrays = Callable[[Any], Arrays | None]


class Scene(NamedTuple):
    """What a result is judged by at capture."""

    memory: Memory
    session: Session
    rules: Rules
    find: FindArrays
    arguments: frozenset[int]  # first addresses of the memory of the break's own arguments


class _Place(NamedTuple):
    """The fixed place of one array in a result."""

    arrays: Arrays
    kind: tuple[Any, ...]
    target: Any  # the static array that the capture goes on with
    fixed: tuple[Any, ...] | None  # the result has to be just this memory; None: copied to target


def refuse_arrays(name: str, value: Any, find: FindArrays) -> None:
    """Without static outputs a break may return anything but device arrays."""
    for path, leaf in structures.leaves(value):
        if find(leaf) is not None:
            raise errors.break_returns_arrays(name, path)


class StaticResult:
    """The static result of one break: `value` is made at capture, `fill` is called at replay."""

    def __init__(self, name: str, value: Any, scene: Scene) -> None:
        self._name = name
        self._find = scene.find
        self._shape = structures.shape(value)
        self._places: dict[str, _Place] = {}
        self._by_origin: dict[tuple[Any, ...], _Place] = {}
        self._fresh: set[int] = set()  # memory of results that got a buffer
        self._outline = outline(value)
        #: what the rest of the capture sees; the caller takes it, nothing is kept of it here
        self.value = structures.rebuilt(value, lambda leaf, path: self._settle(leaf, path, scene))
        self._by_origin.clear()
        self._fresh.clear()

    def take(self) -> Any:
        """The static result, once: holding it would keep memory that the pool may use again."""
        value, self.value = self.value, None
        return value

    # ---- at capture

    def _settle(self, leaf: Any, path: str, scene: Scene) -> Any:
        """The static stand-in for one leaf."""
        arrays = scene.find(leaf)
        if arrays is None:
            if not isinstance(leaf, _PLAIN):
                raise errors.result_of_unknown_type(self._name, path, type(leaf).__name__)
            return leaf
        if arrays.requires_grad(leaf):
            raise errors.result_requires_grad(self._name, path)
        if not arrays.can_alias(leaf):
            raise errors.result_of_unknown_type(self._name, path, type(leaf).__name__)
        origin = (arrays.kind(leaf), arrays.place(leaf))
        place = self._by_origin.get(origin)
        if place is None:
            place = self._by_origin[origin] = self._new_place(leaf, path, arrays, scene)
        self._places[path] = place
        return place.target if place.fixed is None else arrays.detached(leaf)

    def _new_place(self, leaf: Any, path: str, arrays: Arrays, scene: Scene) -> _Place:
        address, nbytes, _ = arrays.storage(leaf)
        kind = arrays.kind(leaf)
        is_known = address in scene.arguments or scene.session.birth(address) is Birth.POOL
        if nbytes and is_known:
            role = f"returned by {self._name} as result{path}"
            scene.memory.note(leaf, arrays, scene.session, scene.rules, role)
            return _Place(arrays, kind, arrays.alias(leaf), arrays.place(leaf))
        if nbytes and address in self._fresh:
            raise errors.results_overlap(self._name, path)
        self._fresh.add(address)
        buffer = arrays.new_buffer(leaf)
        arrays.copy(buffer, leaf)
        scene.memory.own(buffer, arrays)
        return _Place(arrays, kind, buffer, None)

    # ---- at replay

    def fill(self, value: Any) -> None:
        """Bring a later result to its places; raises before the first copy if one does not fit."""
        if structures.shape(value) != self._shape:
            raise errors.result_structure_changed(self._name, self._outline, outline(value))
        copies: dict[int, tuple[_Place, Any, Any]] = {}
        for path, leaf in structures.leaves(value):
            place, arrays = self._places.get(path), self._find(leaf)
            if place is not None:
                self._check(place, path, leaf, arrays)
                self._plan_copy(copies, place, path, leaf)
            elif arrays is not None:
                raise errors.result_changed(self._name, path, "no array", describe(arrays, leaf))
        for place, leaf, _ in copies.values():
            place.arrays.copy(place.target, leaf)

    def _check(self, place: _Place, path: str, leaf: Any, arrays: Arrays | None) -> None:
        if arrays is not place.arrays or arrays.kind(leaf) != place.kind:
            now = describe(arrays, leaf) if arrays is not None else outline(leaf)
            raise errors.result_changed(self._name, path, describe(place.arrays, place.target), now)
        if place.fixed is not None and arrays.place(leaf) != place.fixed:
            raise errors.result_moved(self._name, path)

    def _plan_copy(
        self, copies: dict[int, tuple[_Place, Any, Any]], place: _Place, path: str, leaf: Any
    ) -> None:
        """One copy a place; two results that were one array at capture have to be one again."""
        if place.fixed is not None:
            return
        origin = place.arrays.place(leaf)
        _, _, before = copies.setdefault(id(place), (place, leaf, origin))
        if before != origin:
            raise errors.result_moved(self._name, path)


def outline(value: Any) -> str:
    """The structure of a value in one line: (tensor, [tensor], None)."""
    parts = structures.children(value)
    if parts is None:
        device = getattr(value, "device", None)
        where = f" on {device}" if device is not None else ""
        return "None" if value is None else type(value).__name__ + where
    inside = ", ".join(f"{step.strip('.')}: {outline(part)}" for step, part in parts[:8])
    more = ", ..." if len(parts) > 8 else ""
    return f"{type(value).__name__}({inside}{more})"
