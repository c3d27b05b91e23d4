"""Walk the containers that breaks take and return.

The hard problem: arrays sit inside tuples, lists, dicts, named tuples and data classes, and each
has to be rebuilt as the type that it was, while a container without any array must stay the very
object that it is, so that a break can fill a list of the caller's.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

Replace = Callable[[Any, str], Any]


def children(value: Any) -> list[tuple[str, Any]] | None:
    """The parts of a container as (path step, part), or None for anything else."""
    if isinstance(value, dict):
        return [(_step(key, at), part) for at, (key, part) in enumerate(value.items())]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", part) for name, part in zip(value._fields, value, strict=True)]
    if isinstance(value, (tuple, list)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(f".{name}", getattr(value, name)) for name in names if hasattr(value, name)]
    return None


_NAMES = (str, int, float, bool, bytes, type(None))
_LONG = 80


def _is_name(key: Any) -> bool:
    """Whether a key says in a few words which one it is."""
    kind = type(key)
    return kind in _NAMES and (kind not in (str, bytes) or len(key) <= _LONG)


def _step(key: Any, at: int) -> str:
    """How a key is written in a path: one that could be anything, a tensor even, by its place."""
    return f"[{key!r}]" if _is_name(key) else f"[{type(key).__name__} {at}]"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every part that is no container, with its path; a container inside itself is left out."""
    yield from _leaves(value, path, ())


def _leaves(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    parts = children(value)
    if parts is None:
        yield path, value
    elif id(value) not in above:
        for step, part in parts:
            yield from _leaves(part, path + step, (*above, id(value)))


def rebuilt(value: Any, replace: Replace, path: str = "") -> Any:
    """The value with each leaf replaced; what no leaf changed in is returned as it is."""
    return _rebuilt(value, replace, path, ())


def _rebuilt(value: Any, replace: Replace, path: str, above: tuple[int, ...]) -> Any:
    parts = children(value)
    if parts is None:
        return replace(value, path)
    if id(value) in above:
        return value
    inside = (*above, id(value))
    made = [_rebuilt(part, replace, path + step, inside) for step, part in parts]
    if all(new is old for new, (_, old) in zip(made, parts, strict=True)):
        return value
    return _like(value, made, parts)


def _like(value: Any, made: list[Any], parts: list[tuple[str, Any]]) -> Any:
    """A container of the same type around new parts."""
    if isinstance(value, dict):
        new = copy.copy(value)  # keeps a subclass, its order and its default factory
        for key, part in zip(value, made, strict=True):
            new[key] = part  # not update(): some mappings refuse it
        return new
    if isinstance(value, tuple):
        return _like_tuple(value, made)
    if type(value) is list:
        return made
    new = copy.copy(value)
    if isinstance(value, list):
        new[:] = made
        return new
    for (step, _), part in zip(parts, made, strict=True):
        object.__setattr__(new, step[1:], part)  # a frozen data class too
    return new


def _like_tuple(value: Any, made: list[Any]) -> Any:
    """A tuple of the same type, without its constructor, which may take other arguments."""
    if type(value) is tuple:
        return tuple(made)
    try:
        new = tuple.__new__(type(value), made)
    except TypeError:  # one that C has made (`torch.return_types`): always made from its parts
        return type(value)(made)
    if hasattr(new, "__dict__"):
        vars(new).update(vars(value))
    return new


#: Containers that are their user's own, by identity. They are held: an identity is given out again.
Own = dict[int, Any]


def without_arrays(
    args: tuple[Any, ...], kwargs: dict[str, Any], is_array: Callable[[Any], Any]
) -> Own:
    """The containers of a call without arrays, and those inside of others."""
    found = (each for value in (*args, *kwargs.values()) for each in _containers(value, ()))
    return {id(each): each for each in found if not any(is_array(leaf) for _, leaf in leaves(each))}


def renewal(
    value: Any, is_array: Callable[[Any], Any], own: Own, above: tuple[int, ...] = ()
) -> Callable[[], Any] | None:
    """What makes a container anew, with the same leaves, each time; None: it can be given again.

    That goes for somebody's own, which may have got arrays since, and for those that nobody can change.
    """
    parts = children(value)
    if parts is None or id(value) in above or id(value) in own:
        return None
    if not any(is_array(leaf) for _, leaf in leaves(value)):
        return None
    makers = [renewal(part, is_array, own, (*above, id(value))) for _, part in parts]
    if any(makers):
        pairs = [(make, part) for make, (_, part) in zip(makers, parts, strict=True)]
        return lambda: _like(value, [make() if make else part for make, part in pairs], parts)
    if isinstance(value, tuple) or _is_frozen(value):
        return None
    return value.copy if type(value) in (list, dict) else functools.partial(copy.copy, value)


def _is_frozen(value: Any) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen and not isinstance(value, (list, dict))


def leaves_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The leaves of a call's arguments; a path begins with the argument's number or its name."""
    for index, value in enumerate(args):
        yield from leaves(value, str(index))
    for key, value in kwargs.items():
        yield from leaves(value, key)


def rebuilt_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], replace: Replace
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with each leaf replaced; paths as in `leaves_of_call`."""
    made = tuple(rebuilt(value, replace, str(index)) for index, value in enumerate(args))
    return made, {key: rebuilt(value, replace, key) for key, value in kwargs.items()}


def renewed_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], is_array: Callable[[Any], Any], own: Own
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with each container made anew that `renewal` makes anew."""

    def renewed(value: Any) -> Any:
        make = renewal(value, is_array, own)
        return value if make is None else make()

    return tuple(map(renewed, args)), {key: renewed(value) for key, value in kwargs.items()}


def shape(value: Any, above: tuple[int, ...] = ()) -> Any:
    """The structure of a value without its leaves; two of one structure compare equal."""
    parts = children(value)
    if parts is None:
        return None
    if id(value) in above:
        return above[::-1].index(id(value))  # a container inside itself: how far up it is
    inside = (*above, id(value))
    steps = tuple((step, shape(part, inside)) for step, part in parts)
    return type(value).__name__, steps, _keys_by_place(value)


def _keys_by_place(value: Any) -> dict[Any, int] | None:
    """The keys of a dict that its steps do not name."""
    if not isinstance(value, dict):
        return None
    return {key: at for at, key in enumerate(value) if not _is_name(key)} or None


#: Values that hold nothing which somebody could have put there, or too much.
_OPAQUE = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    types.CodeType, types.FrameType, types.TracebackType, str, bytes, int, float, complex,
)  # fmt: skip

_MANY = 1000


def within(value: Any) -> Iterator[Any]:
    """A value and what it holds, objects that are no containers too: by attribute or as a member.

    Of large ones only the first thousand things.
    """
    return _reached([value], set())


def beside(value: Any) -> Iterator[Any]:
    """What the containers of a value hold besides their parts, and what that holds.

    The attributes of a list or of a data class that are no fields, and the keys of a dict.
    """
    found: list[Any] = []
    parts = [part for _, part in leaves(value)]
    known = {id(part) for part in parts}
    for container in _containers(value, ()):
        known.add(id(container))
        found += gc.get_referents(container)
    return _reached(found, known)


def _containers(value: Any, above: tuple[int, ...]) -> Iterator[Any]:
    parts = children(value)
    if parts is not None and id(value) not in above:
        yield value
        for _, part in parts:
            yield from _containers(part, (*above, id(value)))


def _reached(left: list[Any], seen: set[int]) -> Iterator[Any]:
    most = len(seen) + _MANY
    while left and len(seen) < most:
        each = left.pop()
        if id(each) not in seen and not isinstance(each, _OPAQUE):
            seen.add(id(each))
            yield each
            left += gc.get_referents(
                each
            )  # whatever its type is, and without running code of its own
