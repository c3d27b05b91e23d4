"""One call of a break while its block captures: run the body once, and note what replays are to call.

The hard problem: replays call the body again, with arguments that must not keep memory alive and results
that must stay where captured work finds them. So each array among the arguments is replaced by an alias or
kept, what the body did to its arguments is compared with before, and its result is refused or settled in
fixed places, all before the next segment begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..frameworks import find
from ..frameworks.protocols import Arrays, Framework, Session
from ..sequence import pytree, static_results
from ..sequence.memory import Memory, Rules, Use
from ..sequence.segments import EagerSegment
from ..sequence.source_lines import Place
from . import errors

#: Bytes of breaks' arguments that are held until the block ends.
_HOLD_LIMIT = 4 << 20

_NOWHERE: frozenset[int] = frozenset()


class BreakCalls:
    """Makes breaks of calls, for one block."""

    def __init__(
        self, framework: Framework, session: Session, memory: Memory, rules: Rules
    ) -> None:
        self._framework, self._session = framework, session
        self._memory, self._rules = memory, rules
        self.find_arrays = find.finder(framework)
        self._held: list[Any] = []  # memory of arguments, until the block ends
        self._held_bytes = 0

    def forget(self) -> None:
        """The block has ended."""
        self._held.clear()

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        name: str, stub: Callable[..., Any] | None, static: bool, index: int,
        place: Place | None, scopes: tuple[str, ...], check: Callable[[str], None],
    ) -> tuple[Any, EagerSegment]:  # fmt: skip
        """Run a break's body (or its stub) once: its result, and what replays are to call.

        `check` is given the break's name when its body has returned, and may raise.
        """
        modes = self._framework.modes()
        self._session.before_break()
        before: list[Any] = []
        given: dict[str, Any] = {}
        own: pytree.Own = {}
        stand_ins, addresses = (args, kwargs), _NOWHERE
        if args or kwargs:
            stand_ins, addresses = self._stand_ins(name, args, kwargs, place)
            before = list(self._states(args, kwargs))
            given = dict(self._inside(args, kwargs))
            own = pytree.without_arrays(args, kwargs, self.find_arrays)
        value = (function if stub is None else stub)(*args, **kwargs)
        check(name)
        static_results.refuse_used_up(name, (*args, *kwargs.values()))
        for path, leaf, arrays, history, where in before:
            if arrays.history(leaf) != history:
                raise errors.history_changed(name, path)
            if where is not None and arrays.place(leaf) != where:
                raise errors.argument_moved(name, path)
        if args or kwargs:
            self._note_put(name, args, kwargs, given, own)
        result = None
        if static:
            scene = static_results.Scene(
                self._memory, self._session, self._rules, self.find_arrays, addresses
            )
            result = static_results.StaticResult(name, value, scene)
            value = result.take()
        elif value is not None:
            call = (args, kwargs)
            static_results.refuse_arrays(name, value, self.find_arrays, self._session, call)
        segment = EagerSegment(
            index, function, stand_ins[0], stand_ins[1], name=name, place=place, scopes=scopes,
            modes=modes, result=result, own=own,
        )  # fmt: skip
        return value, segment

    # ---- arguments

    def _states(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterable[tuple[str, Any, Arrays, Any, Any]]:
        """What a break has to leave as it is in its arguments: (path, array, its library, history, place)."""
        for path, leaf in pytree.leaves_of_call(args, kwargs):
            arrays = self.find_arrays(leaf)
            if arrays is not None:
                place = arrays.place(leaf) if arrays.can_alias(leaf) else None
                yield path, leaf, arrays, arrays.history(leaf), place

    def _inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[tuple[str, Any]]:
        """The arrays in the containers of a call, and those that its arrays have as attributes."""
        for path, leaf in pytree.leaves_of_call(args, kwargs):
            if self.find_arrays(leaf) is not None:
                yield path, leaf
                for name, value in getattr(leaf, "__dict__", {}).items():
                    if self.find_arrays(value) is not None:
                        yield f"{path}.{name}", value
                if getattr(leaf, "is_leaf", False) and leaf.grad is not None:  # others warn
                    yield f"{path}.grad", leaf.grad

    def _note_put(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any],
        own: pytree.Own,
    ) -> None:  # fmt: skip
        """Arrays that a break has made and put where replays put them into a copy or another place."""
        known = {id(value) for value in given.values()}
        known.update(id(leaf) for each in own.values() for _, leaf in pytree.leaves(each))
        for path, value in self._inside(args, kwargs):
            arrays = self.find_arrays(value)
            assert arrays is not None
            if path.endswith(".grad") and path not in given:
                continue  # a first gradient, to which later calls add
            if id(value) not in known and arrays.can_alias(value):
                self._memory.note_put(value, arrays, name, path)

    def _stand_ins(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place | None
    ) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], frozenset[int]]:
        """The arguments as replays see them, and the memory that they lie in."""
        addresses = set()
        known: dict[int, Any] = {}  # one array given twice is one stand-in

        def replace(leaf: Any, path: str) -> Any:
            arrays = self.find_arrays(leaf)
            if arrays is None:
                return leaf
            if id(leaf) in known:
                return known[id(leaf)]
            if arrays.can_alias(leaf):
                address, nbytes, storage = arrays.storage(leaf)
                addresses.add(address)
                self._hold(storage, nbytes)
            role = Use(f"argument {path} of the break {name}", place)
            made = self._memory.argument(leaf, arrays, self._session, self._rules, role)
            known[id(leaf)] = made
            return made

        made = pytree.rebuilt_call(args, kwargs, replace)
        return made, frozenset(addresses)

    def _hold(self, storage: Any, nbytes: int) -> None:
        """Keep an argument's memory from being used again by later segments of this block.

        A replay that a break ends early has then not touched what later segments wrote at the one
        before. Worth a little memory, not more: as far as `_HOLD_LIMIT` goes.
        """
        if self._held_bytes + nbytes <= _HOLD_LIMIT:
            self._held_bytes += nbytes
            self._held.append(storage)
