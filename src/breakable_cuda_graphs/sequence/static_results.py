"""What a break returns, and how the next segment finds it at each replay.

The hard problem: the next segment was captured with the addresses that the result had once. So
with `outputs="static"` each array of a result gets one fixed place: a new buffer that the sequence
owns and into which every later result is copied; or, for an array that lies in memory which the
capture knows (an argument, a view of one, something captured work made), that memory itself, with
nothing to copy. A result that no longer fits its place is refused before anything is copied: a
plain copy would broadcast, cast or misalign without a word.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable
from numbers import Number
from types import GeneratorType
from typing import Any, NamedTuple

from ..frameworks.protocols import Arrays, Birth, Session
from . import errors, pytree
from .memory import Memory, Rules, Use, describe

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
    kin: _Kin | None = None  # several views of one new piece of memory have to stay that


class _Kin(NamedTuple):
    """How one of several views of one piece of memory lies to the first of them."""

    family: int
    place: tuple[Any, ...]


def _beside(place: tuple[Any, ...], first: tuple[Any, ...]) -> tuple[Any, ...]:
    """A view's place, its address counted from that of the first view."""
    return (place[0] - first[0], *place[1:])


def refuse_arrays(
    name: str, value: Any, find: FindArrays, session: Session, call: tuple[Any, Any]
) -> None:
    """Without static outputs a break may return anything but device arrays that it has made.

    Those it may have put into an object; what an argument of its call holds is where it was.
    """
    given: set[int] | None = None
    for path, leaf in pytree.leaves(value):
        if find(leaf) is not None:
            raise errors.break_returns_arrays(name, path)
        if leaf is None or isinstance(leaf, _PLAIN):
            continue
        refuse_unfinished(name, path, leaf)
        if given is None:
            given = {id(each) for _, each in pytree.leaves_of_call(*call)}
        if id(leaf) not in given and _are_any_new(pytree.within(leaf), find, session):
            raise errors.break_returns_hidden_arrays(name, path, type(leaf).__name__)
    refuse_beside(name, value, find, session)


def refuse_beside(name: str, value: Any, find: FindArrays, session: Session) -> None:
    """What a container holds besides its parts is not brought to any place by a replay."""
    if _are_any_new(pytree.beside(value), find, session):
        raise errors.break_returns_arrays_beside(name, type(value).__name__)


def _are_any_new(things: Iterable[Any], find: FindArrays, session: Session) -> bool:
    for each in things:
        arrays = find(each)
        if arrays is not None and _is_new(each, arrays, session):
            return True
    return False


def _is_new(value: Any, arrays: Arrays, session: Session) -> bool:
    """Whether a break has made an array; of a kind of tensor that says nothing of its memory: no."""
    try:
        address, nbytes, _ = arrays.storage(value)
    except Exception:
        if arrays.can_alias(value):
            raise
        return False
    return bool(nbytes) and session.birth(address) is Birth.BREAK


#: What a call returns whose body is still to be run, by whoever asks for the result.
_UNFINISHED = (Generator, AsyncGenerator, Awaitable, map, filter)


def is_unfinished(value: Any) -> bool:
    """Whether a call's work is still to be done; of a coroutine that is given up with this question."""
    if isinstance(value, Coroutine):
        value.close()  # or Python warns that it was never awaited
    is_region = type(value).__module__ == "contextlib" and hasattr(value, "gen")  # @contextmanager
    return is_region or isinstance(value, _UNFINISHED)


def refuse_unfinished(name: str, path: str, value: Any) -> None:
    """What runs later runs in the next segment at capture, and not at all at a replay."""
    if is_unfinished(value):
        raise errors.break_unfinished(name, path, type(value).__name__)


def refuse_used_up(name: str, values: tuple[Any, ...]) -> None:
    """A generator that the body went through gives nothing any more to the replays."""
    for index, value in enumerate(values):
        if type(value) is GeneratorType and value.gi_frame is None:
            raise errors.argument_used_up(name, index)


class StaticResult:
    """The static result of one break: `value` is made at capture, `fill` is called at replay."""

    def __init__(self, name: str, value: Any, scene: Scene) -> None:
        self._name = name
        self._find = scene.find
        self._shape = pytree.shape(value)
        self._places: dict[str, _Place] = {}
        self._by_origin: dict[tuple[Any, ...], _Place] = {}
        self._fresh: set[int] = set()  # memory of results that got a buffer
        self._outline = outline(value)
        refuse_beside(name, value, scene.find, scene.session)
        self._share(value, scene)
        #: what the rest of the capture sees; the caller takes it, nothing is kept of it here
        self.value = pytree.rebuilt(value, lambda leaf, path: self._settle(leaf, path, scene))
        self._by_origin.clear()
        self._fresh.clear()

    def take(self) -> Any:
        """The static result, once: holding it would keep memory that the pool may use again."""
        value, self.value = self.value, None
        return value

    # ---- at capture

    def _share(self, value: Any, scene: Scene) -> None:
        """Places for new memory that a result has several views of, which lie to each other as they do."""
        views: dict[int, dict[tuple[Any, ...], tuple[Arrays, Any]]] = {}
        for _, leaf in pytree.leaves(value):
            arrays = scene.find(leaf)
            if arrays is not None and arrays.can_alias(leaf) and not arrays.requires_grad(leaf):
                address, _, _ = arrays.storage(leaf)
                if 0 not in arrays.kind(leaf)[1]:
                    origin = (arrays.kind(leaf), arrays.place(leaf))
                    views.setdefault(address, {})[origin] = (arrays, leaf)
        for address, of_one in views.items():
            if len(of_one) > 1 and not self._is_known(address, scene):
                self._found_family(of_one, scene)

    def _found_family(self, views: dict[tuple[Any, ...], tuple[Arrays, Any]], scene: Scene) -> None:
        kinds = [arrays for arrays, _ in views.values()]
        leaves = [leaf for _, leaf in views.values()]
        made = kinds[0].new_views(leaves) if len(set(map(id, kinds))) == 1 else None
        if made is None:  # the second of them is refused when it is settled
            return
        first, family = next(iter(views))[1], len(self._by_origin)
        for ((kind, place), (arrays, leaf)), target in zip(views.items(), made, strict=True):
            arrays.copy(target, leaf)
            kin = _Kin(family, _beside(place, first))
            self._by_origin[kind, place] = _Place(arrays, kind, target, None, kin)
        scene.memory.own(made[0], kinds[0])

    def _is_known(self, address: int, scene: Scene) -> bool:
        return address in scene.arguments or scene.session.birth(address) is Birth.POOL

    def _settle(self, leaf: Any, path: str, scene: Scene) -> Any:
        """The static stand-in for one leaf."""
        arrays = scene.find(leaf)
        if arrays is None:
            if not isinstance(leaf, _PLAIN):
                refuse_unfinished(self._name, path, leaf)
                raise errors.result_of_unknown_type(self._name, path, in_words(leaf))
            return leaf
        if arrays.requires_grad(leaf):
            raise errors.result_requires_grad(self._name, path)
        if not arrays.can_alias(leaf):
            raise errors.result_of_unknown_type(self._name, path, in_words(leaf))
        origin = (arrays.kind(leaf), arrays.place(leaf))
        place = self._by_origin.get(origin)
        if place is None:
            place = self._by_origin[origin] = self._new_place(leaf, path, arrays, scene)
        self._places[path] = place
        return place.target if place.fixed is None else arrays.detached(leaf)

    def _new_place(self, leaf: Any, path: str, arrays: Arrays, scene: Scene) -> _Place:
        address, nbytes, _ = arrays.storage(leaf)
        kind = arrays.kind(leaf)
        if nbytes and self._is_known(address, scene):
            role = Use(f"returned by {self._name} as result{path}")
            scene.memory.note(leaf, arrays, scene.session, scene.rules, role)
            return _Place(arrays, kind, arrays.alias(leaf), arrays.place(leaf))
        if address in self._fresh and 0 not in kind[1]:
            raise errors.results_overlap(self._name, path)
        self._fresh.add(address)
        buffer = arrays.new_buffer(leaf)
        arrays.copy(buffer, leaf)
        scene.memory.own(buffer, arrays)
        return _Place(arrays, kind, buffer, None)

    # ---- at replay

    def fill(self, value: Any) -> None:
        """Bring a later result to its places; raises before the first copy if one does not fit."""
        if pytree.shape(value) != self._shape:
            raise errors.result_structure_changed(self._name, self._outline, outline(value))
        copies: dict[int, tuple[_Place, Any, Any]] = {}
        families: dict[int, tuple[Any, ...]] = {}  # where the first view of each is
        for path, leaf in pytree.leaves(value):
            place, arrays = self._places.get(path), self._find(leaf)
            if place is not None:
                self._check(place, path, leaf, arrays)
                self._plan_copy(copies, families, place, path, leaf)
            elif arrays is not None:
                raise errors.result_changed(self._name, path, "no array", describe(arrays, leaf))
        for place, leaf, _ in copies.values():
            place.arrays.copy(place.target, leaf)

    def _check(self, place: _Place, path: str, leaf: Any, arrays: Arrays | None) -> None:
        known = place.arrays
        is_plain = arrays is known and known.can_alias(leaf)
        if not is_plain or known.kind(leaf) != place.kind:
            now = describe(known, leaf) if is_plain else in_words(leaf)
            raise errors.result_changed(self._name, path, describe(known, place.target), now)
        if place.fixed is not None and known.place(leaf) != place.fixed:
            raise errors.result_moved(self._name, path)

    def _plan_copy(
        self, copies: dict[int, tuple[_Place, Any, Any]], families: dict[int, tuple[Any, ...]],
        place: _Place, path: str, leaf: Any,
    ) -> None:  # fmt: skip
        """One copy a place; two results that were one array at capture have to be one again."""
        if place.fixed is not None:
            return
        origin = place.arrays.place(leaf)
        _, _, before = copies.setdefault(id(place), (place, leaf, origin))
        if place.kin is not None:
            first = families.setdefault(place.kin.family, origin)
            if _beside(origin, first) != place.kin.place:
                raise errors.result_moved(self._name, path)
        if before != origin:
            raise errors.result_moved(self._name, path)


#: Where arrays come from; the attributes of other objects may be anything, and asking for them may fail.
_LIBRARIES = frozenset({"torch", "cupy", "numba", "numpy"})


def in_words(leaf: Any) -> str:
    """The type of a leaf, and of a tensor what makes it another kind of tensor."""
    if leaf is None:
        return "None"
    if _LIBRARIES.isdisjoint(kind.__module__.partition(".")[0] for kind in type(leaf).__mro__):
        return type(leaf).__name__
    layout = str(getattr(leaf, "layout", "")).removeprefix("torch.")
    words = [type(leaf).__name__]
    if layout not in ("", "strided"):
        words.append(f"of layout {layout}")
    if getattr(leaf, "is_quantized", False):
        words.append(f"of type {leaf.dtype}".replace("torch.", ""))
    if getattr(leaf, "is_nested", False):
        words.append("of nested tensors")
    device = getattr(leaf, "device", None)
    return " ".join([*words, f"on {device}"] if device is not None else words)


def outline(value: Any, depth: int = 8) -> str:
    """The structure of a value in one line: (tensor, [tensor], None)."""
    parts = pytree.children(value)
    if parts is None:
        return in_words(value)
    if not depth:
        return f"{type(value).__name__}(...)"
    inside = ", ".join(f"{step.strip('.')}: {outline(part, depth - 1)}" for step, part in parts[:8])
    more = ", ..." if len(parts) > 8 else ""
    return f"{type(value).__name__}({inside}{more})"
