"""no_graph and force_no_graph: the marks of what stays eager.

The hard problem: a marked function is called far more often outside of captures than inside, and
from threads that have nothing to do with one. Outside of any block it costs one look at a tuple.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, overload

from .._driver import unfinished
from ..errors import bad_choice, not_callable
from ..sequence import pytree
from . import errors, open_blocks

_OUTPUTS = ("reject", "static")

P = ParamSpec("P")
R = TypeVar("R")


@overload
def no_graph(function: Callable[P, R]) -> Callable[P, R]: ...


@overload
def no_graph(
    function: None = None,
    *,
    enable: bool = True,
    capture_stub: Callable[..., Any] | None = None,
    outputs: Literal["reject", "static"] = "reject",
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def no_graph(
    function: Callable[..., Any] | None = None,
    *,
    enable: bool = True,
    capture_stub: Callable[..., Any] | None = None,
    outputs: str = "reject",
) -> Callable[..., Any]:
    """Mark a function as a break: inside a `breakable_graph` block it runs eagerly, at each replay too.

    Its arguments are those of the capture: numbers and objects as they were given, CUDA tensors by
    their memory. Outside of a capture, and inside another break, it is a plain call.

    enable: False leaves the function as it is, part of the captured segment.
    capture_stub: called at capture instead of the body, with the same arguments; the rest of the
        capture sees what it returns.
    outputs: "reject" refuses at capture a result with CUDA tensors in it; "static" gives each of
        them one fixed place, to which every replay brings the new values. Results are then made of
        tensors, numbers, strings and None in tuples, lists, dicts, named tuples and data classes,
        of the same structure, shapes and types every time.

    Raises `TypeError` or `ValueError` for bad arguments, and for a generator or an async function. A
    call in a capture raises `CaptureError` where the segment before it cannot end, or the result or
    what the body did cannot be replayed; a replay raises `ReplayError` where a static result no longer
    fits, and what the body raises.
    """
    if capture_stub is not None and not callable(capture_stub):
        raise not_callable("capture_stub", capture_stub)
    if outputs not in _OUTPUTS:
        raise bad_choice("outputs", outputs, _OUTPUTS)
    if function is None:
        return functools.partial(
            _mark, enable=enable, stub=capture_stub, static=outputs == "static"
        )
    return _mark(function, enable=enable, stub=capture_stub, static=outputs == "static")


def _mark(
    function: Callable[..., Any], *, enable: bool, stub: Callable[..., Any] | None, static: bool,
    is_bound: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """`is_bound`: the first argument of each call is the owner of a bound method."""
    if isinstance(function, (staticmethod, classmethod)):  # the mark may stand above or below them
        made = _mark(function.__func__, enable=enable, stub=stub, static=static)
        return type(function)(made)
    if isinstance(function, types.MethodType):  # a copy of its owner gets a method of the copy
        made = _mark(
            function.__func__, enable=enable, stub=_without_self(stub), static=static, is_bound=True
        )
        return types.MethodType(made, function.__self__)
    if isinstance(function, property):
        raise errors.marked_property()
    if not callable(function):
        raise not_callable("function", function)
    if not enable:
        return function
    name = _name_of(function)
    _refuse_unfinished(function, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not open_blocks.open_blocks:
            return function(*args, **kwargs)
        block = open_blocks.find()
        if block is None:
            return function(*args, **kwargs)
        body, replacement = function, stub
        is_container = bool(args) and pytree.children(args[0]) is not None
        if is_container and (is_bound or _is_method(function, args[0])):
            # The owner is no argument that holds tensors: it is what it is at the time of the replay.
            body, args = functools.partial(function, args[0]), args[1:]
            replacement = None if stub is None else functools.partial(stub, body.args[0])
        return block.run_break(body, args, kwargs, name=name, stub=replacement, static=static)

    # torch.compile has to leave the call alone, or the break would be compiled into the segment.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def _without_self(stub: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The stub of a bound method, which does not expect the method's owner."""
    if stub is None:
        return None
    given = stub
    return lambda _, *args, **kwargs: given(*args, **kwargs)


def _is_method(function: Callable[..., Any], owner: Any) -> bool:
    """Whether a marked function is a method of an object, under whatever name or decorators."""
    kinds = [kind for kind in type(owner).__mro__ if kind.__module__ != "builtins"]
    members = [member for kind in kinds for member in vars(kind).values()]
    return any(_leads_to(member, function) for member in members)


def _leads_to(member: Any, function: Callable[..., Any]) -> bool:
    while member is not function:
        if isinstance(member, (functools.cached_property, functools.partialmethod)):
            member = member.func
        elif isinstance(member, property):
            member = member.fget
        elif isinstance(member, (staticmethod, classmethod)):
            return False  # its first argument is not the object
        else:
            member = getattr(member, "__dict__", {}).get("__wrapped__")
        if member is None:
            return False
    return True


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _refuse_unfinished(function: Callable[..., Any], name: str) -> None:
    for is_unfinished in (
        inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction,
    ):  # fmt: skip
        if is_unfinished(function):
            raise errors.marked_unfinished(name)


def force_no_graph() -> None:
    """End the current segment and begin the next, with nothing in between.

    Does nothing outside of a capture and inside a break. It leaves an `EagerSegment` in the sequence;
    at replay the segments around it are launched as one, unless one of them draws random numbers,
    allocates or has conditional nodes. Raises `CaptureError` where the segment cannot end.
    """
    block = open_blocks.find() if open_blocks.open_blocks else None
    if block is not None:
        block.border("force_no_graph", _nothing)


def _nothing() -> None:
    """What `force_no_graph` runs at replay."""


def is_in_breakable_graph() -> bool:
    """Whether the calling code is part of a capture: in a segment or a break. False at replay."""
    return bool(open_blocks.open_blocks or unfinished.pending) and open_blocks.find() is not None
