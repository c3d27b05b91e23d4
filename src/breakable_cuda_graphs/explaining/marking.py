"""Mark a function @no_graph for a while, wherever it is referred to.

The hard problem: a function is known by many names: an attribute of a module, of a class, a variable
of a closure, an entry of a list of hooks. What `@no_graph` before its `def` would reach is all of
them, so the function object itself is changed: for the time of a trial its code is a few lines that
call the marked copy, and afterwards its own code is put back.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from ..capture.breaks import no_graph

#: How far up the stack a function without a public name is looked for.
_CALLERS = 4


class Callee(NamedTuple):
    """A function without what it closes over, which may be memory that the call is judged by."""

    reference: weakref.ref[FunctionType]
    globals: dict[str, Any]
    name: str
    qualname: str
    module: Any
    defaults: Any
    kwdefaults: Any

    @classmethod
    def of(cls, function: FunctionType) -> Callee:
        """A function, without keeping it."""
        return cls(
            weakref.ref(function), function.__globals__, function.__name__, function.__qualname__,
            function.__module__, function.__defaults__, function.__kwdefaults__,
        )  # fmt: skip

    def with_code(self, code: CodeType, closure: Any) -> FunctionType:
        """A function like this one, with some code and variables to close over."""
        made = FunctionType(code, self.globals, self.name, self.defaults, closure)
        made.__kwdefaults__, made.__qualname__ = self.kwdefaults, self.qualname
        made.__module__ = self.module
        return made


def function_of(frame: FrameType) -> FunctionType | None:
    """The function that a frame runs, or None where it cannot be found.

    A frame does not say. It is looked for by its qualified name, in the class of its first argument,
    and among what its caller can see.
    """
    code = frame.f_code
    for thing in _candidates(frame):
        function = getattr(thing, "__func__", thing)
        if isinstance(function, FunctionType) and function.__code__ is code:
            return function
    return None


def _candidates(frame: FrameType) -> Iterator[Any]:
    code = frame.f_code
    first, _, rest = code.co_qualname.partition(".")
    found = frame.f_globals.get(first)
    for name in rest.split(".") if rest else ():
        found = vars(found).get(name) if isinstance(found, type) else None
    yield from _unwrapped(found)
    if code.co_argcount:
        owner = frame.f_locals.get(code.co_varnames[0])
        for kind in (*type(owner).__mro__, *(owner.__mro__ if isinstance(owner, type) else ())):
            yield from _unwrapped(vars(kind).get(code.co_name))
    caller = frame.f_back
    for _ in range(_CALLERS):
        if caller is not None:
            for seen in list(caller.f_locals.values()):
                yield from _unwrapped(seen)
            caller = caller.f_back


def _unwrapped(thing: Any) -> Iterator[Any]:
    """A function and what its decorators wrapped; what a property or a class method holds."""
    for _ in range(32):
        if thing is None:
            return
        yield thing
        inner = None
        if isinstance(thing, (staticmethod, classmethod, FunctionType)):
            inner = getattr(thing, "__wrapped__", None)
        elif isinstance(thing, property):
            inner = thing.fget
        thing = inner


def others_with(code: CodeType) -> list[FunctionType]:
    """The functions with this very code, such as the closures that one `def` has made."""
    found = gc.get_referrers(code)
    return [each for each in found if isinstance(each, FunctionType) and each.__code__ is code]


@contextlib.contextmanager
def marked(
    callee: Callee, code: CodeType, callers: Iterable[Callee], decorator: Any = no_graph
) -> Iterator[None]:
    """Inside, a function is a break, whoever calls it by whatever name.

    `callers` are functions on the way to it: if one of them has the `def` in its body, it makes the
    function anew each time that it runs, and what it makes is marked too.
    """
    with contextlib.ExitStack() as undo:
        for each in _alive([callee], others_with(code)):
            undo.callback(_put_back, each, each.__code__, each.__kwdefaults__)
            copy = Callee.of(each).with_code(code, each.__closure__)
            each.__code__ = _passing_on(code, decorator(copy))
            each.__kwdefaults__ = None
        for caller in _alive(callers):
            inside = _with_inner(caller.__code__, code, _making(callee, code, decorator))
            if inside is not caller.__code__:
                undo.callback(_put_back, caller, caller.__code__, caller.__kwdefaults__)
                caller.__code__ = inside
        yield


def _put_back(function: FunctionType, code: CodeType, defaults: dict[str, Any] | None) -> None:
    function.__code__ = code
    function.__kwdefaults__ = defaults


def _alive(callees: Iterable[Callee], others: Iterable[FunctionType] = ()) -> list[FunctionType]:
    """The functions that are still there, each once."""
    known = [callee.reference() for callee in callees]
    return list({id(each): each for each in (*known, *others) if each is not None}.values())


# ---------------------------------------------------------------- code

#: Stands in the source of the code below for an object, which then takes its place.
_STAND_IN = "what is called"


def _passing_on(code: CodeType, target: Callable[..., Any]) -> CodeType:
    """Code that calls `target` with all that it is given.

    A function's code can only be replaced by one with as many free variables, so it mentions them.
    """
    return _compiled(
        code, f"if 0: [{', '.join(code.co_freevars)}]", "target(*args, **kwargs)", target
    )


def _making(callee: Callee, code: CodeType, decorator: Any) -> CodeType:
    """The same for a function that is made each time anew: each is called with its own variables."""

    def call(cells: tuple[Any, ...] | None, args: Any, kwargs: Any) -> Any:
        return decorator(callee.with_code(code, cells))(*args, **kwargs)

    variables = f"cells = (lambda: [{', '.join(code.co_freevars)}]).__closure__"
    return _compiled(code, variables, "target(cells, args, kwargs)", call)


def _compiled(code: CodeType, first: str, call: str, target: Callable[..., Any]) -> CodeType:
    """A function's code that takes anything, runs a line and returns a call of `target`."""
    name = code.co_name if code.co_name.isidentifier() else "function"
    lines = [
        "def outer():",
        *(f"    {variable} = None" for variable in code.co_freevars),
        f"    def {name}(*args, **kwargs):",
        f"        target = {_STAND_IN!r}",
        f"        {first}",
        f"        return {call}",
        f"    return {name}",
    ]
    scope: dict[str, Any] = {}
    exec(compile("\n".join(lines), __file__, "exec"), scope)
    made: CodeType = scope["outer"]().__code__
    return _with_constant(made, _STAND_IN, target)


def _with_constant(code: CodeType, old: Any, new: Any) -> CodeType:
    constants = (
        new if type(each) is type(old) and each == old else each for each in code.co_consts
    )
    return code.replace(co_consts=tuple(constants))


def _with_inner(code: CodeType, old: CodeType, new: CodeType) -> CodeType:
    """Code in whose body one `def` makes functions with other code; the same where it has none."""
    constants = tuple(
        new if each is old else _with_inner(each, old, new) if isinstance(each, CodeType) else each
        for each in code.co_consts
    )
    if all(a is b for a, b in zip(constants, code.co_consts, strict=True)):
        return code
    return code.replace(co_consts=constants)
