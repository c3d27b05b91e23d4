"""Who keeps the memory that a sequence reads: the pool, the sequence, or its user, who is watched.

The hard problem: a graph holds bare addresses. Owning every array that they lie in would keep a
model's inputs alive for ever; owning none reads freed memory without a word. So each array is
judged by its birth. Made by captured work: its pool keeps it. Made in a break: the sequence owns it
until `reset()`. Older: it stays the user's, and a weak reference on its storage flips one flag when
the memory dies, so a replay tests one attribute however many arrays there are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from .._driver.survey import Survey
from ..frameworks.protocols import Arrays, Birth, Found, Gone, Session
from . import errors
from .source_lines import Place, line_of


class Use(NamedTuple):
    """What memory is used for, and where that was captured; put in words when somebody asks."""

    what: str
    place: Place | None = None

    def __str__(self) -> str:
        return (
            self.what if self.place is None else f"{self.what}, captured at {line_of(self.place)}"
        )


class Memory:
    """What one sequence owns and watches.

    `stale` is None until something watched has died, and then what is to be said of it. Weak
    reference callbacks write it, and only assign: they may run in any thread, at any line.
    """

    __slots__ = ("__weakref__", "_kept", "_put", "_unknown", "_watched", "stale")

    def __init__(self) -> None:
        self.stale: tuple[str, Use] | None = None  # (tensor, role)
        self._kept: dict[int, Any] = {}  # address -> storage, owned until reset
        self._watched: dict[int, tuple[weakref.ref[Any], str, Use]] = {}
        # What breaks have put into their arguments: (storage, break, where).
        self._put: dict[int, tuple[weakref.ref[Any], str, str]] = {}
        self._unknown: dict[int, Use] = {}  # addresses whose owner nobody knows -> their role

    def argument(
        self, value: Any, arrays: Arrays, session: Session, rules: Rules, role: Use
    ) -> Any:
        """What stands for an array argument at replay: an alias, or the array itself, owned."""
        if not arrays.can_alias(value):
            return value
        self.note(value, arrays, session, rules, role)
        return arrays.alias(value)

    def note(self, value: Any, arrays: Arrays, session: Session, rules: Rules, role: Use) -> None:
        """Keep, watch or leave the memory of an array that the sequence will read or write."""
        address, nbytes, storage = arrays.storage(value)
        if nbytes:
            found = Found(address, storage, arrays.kind(value), keeper=arrays.keeper(value))
            self._judge(found, session, rules, role)

    def note_segment(
        self, survey: Survey, session: Session, rules: Rules, index: int, place: Place | None
    ) -> None:
        """The same for all memory that a captured segment reads or writes, as far as it shows."""
        found, unknown = session.inputs(survey)
        if not found and not unknown:
            return
        self.take(found, unknown, session, rules, Use(f"read or written in segment {index}", place))

    def take(
        self, found: list[Found], unknown: list[int], session: Session, rules: Rules, role: Use
    ) -> None:
        """Keep, watch or leave each piece of memory that captured work names."""
        for piece in found:
            self._judge(piece, session, rules, role)
        for address in unknown:
            self._unknown.setdefault(address, role)

    def _judge(self, found: Found, session: Session, rules: Rules, role: Use) -> None:
        address, storage, kind, is_host, keeper = found
        if address in self._kept:
            return
        if isinstance(storage, Gone):
            self._watched[address] = (_dead_reference(), storage.words, role)
            self.stale = self.stale or (storage.words, role)
            return
        keeper = storage if keeper is None else keeper
        if is_host:  # small, and its birth is not known: torch may have pinned it in the capture
            self._kept[address] = keeper
            return
        birth = session.birth(address, storage)
        if birth is Birth.POOL:
            return
        if birth is Birth.BREAK and address in self._put:
            reference, name, path = self._put[address]
            if reference() is storage:
                raise errors.argument_filled(name, path, role)
        if birth is Birth.BREAK or rules.keep_inputs or storage is None:
            self._kept[address] = keeper
        elif rules.check_liveness:
            self.watch(address, storage, _in_words(kind), role)

    def note_put(self, value: Any, arrays: Arrays, name: str, path: str) -> None:
        """A break has put a new array into an argument: replays do not bring the next one there."""
        address, nbytes, storage = arrays.storage(value)
        if nbytes and storage is not None:
            self._put[address] = (weakref.ref(storage), name, path)

    def own(self, value: Any, arrays: Arrays) -> None:
        """Keep the memory of an array until `reset()`."""
        address, nbytes, _ = arrays.storage(value)
        if nbytes:
            self._kept[address] = arrays.keeper(value)

    def begins(self, address: int) -> bool:
        """Whether memory that is owned or watched begins at an address."""
        return address in self._watched or address in self._kept

    def let_go(self, lies_in: Callable[[int, Any], bool]) -> tuple[list[Any], bool, str | None]:
        """Forget pieces that `lies_in` (first address, storage) tells: `rebind` has moved them.

        Returns what they were, whether one was owned, and what was said of one that was watched.
        """
        kept = [address for address, storage in self._kept.items() if lies_in(address, storage)]
        gone = [self._kept.pop(address) for address in kept]
        words = None
        for address, (reference, described, _) in list(self._watched.items()):
            if lies_in(address, reference()):
                del self._watched[address]
                gone.append(reference())
                words = described
        return gone, bool(kept), words

    def hold(self, address: int, thing: Any) -> None:
        """Keep what the memory at an address belongs to until `reset()`."""
        self._kept[address] = thing

    def watch(self, address: int, storage: Any, described: str, role: Use) -> None:
        """Let the death of a storage be noticed."""
        known = self._watched.get(address)
        if known is not None and known[0]() is storage:
            return
        owner = weakref.ref(self)

        def died(_: Any, owner: Any = owner, described: str = described, role: Use = role) -> None:
            memory = owner()
            if memory is not None and memory.stale is None:
                memory.stale = (described, role)

        self._watched[address] = (weakref.ref(storage, died), described, role)

    @property
    def owned(self) -> int:
        """How many pieces of memory the sequence keeps."""
        return len(self._kept)

    @property
    def watched(self) -> tuple[str, ...]:
        """What is watched: one line each."""
        return tuple(f"{described}, {role}" for _, described, role in self._watched.values())

    @property
    def unwatched(self) -> tuple[str, ...]:
        """Addresses that captured work uses and of which nobody knows the owner: one line each."""
        return tuple(f"{address:#x}, {role}" for address, role in self._unknown.items())

    def clear(self) -> None:
        """Forget everything; what was owned has to be kept by others until no replay reads it."""
        self._kept.clear()
        self._put.clear()
        self._watched.clear()
        self._unknown.clear()
        self.stale = None

    def mark(self) -> tuple[frozenset[int], ...]:
        """What is known now, for `back_to` after a capture that failed."""
        return tuple(frozenset(table) for table in self._tables())

    def back_to(self, mark: tuple[frozenset[int], ...]) -> None:
        """Forget what was added since."""
        for known, table in zip(mark, self._tables(), strict=True):
            for address in [a for a in table if a not in known]:
                del table[address]
        dead = [entry[1:] for entry in self._watched.values() if entry[0]() is None]
        self.stale = dead[0] if dead else None

    def adopt(self, other: Memory) -> list[Any]:
        """Keep and watch for this sequence too what another one does; it is embedded in this one.

        Returns what is kept, for graphs of others that hold it by themselves.
        """
        self._kept.update(other._kept)
        for address, (reference, described, role) in list(other._watched.items()):
            storage = reference()
            if storage is None:
                self.stale = self.stale or (described, role)
            else:
                self.watch(address, storage, described, role)
        return other.kept()

    def kept(self) -> list[Any]:
        """The pieces of memory that are owned."""
        return list(self._kept.values())

    def _tables(self) -> tuple[dict[int, Any], ...]:
        return self._kept, self._watched, self._unknown


def _dead_reference() -> weakref.ref[Any]:
    return weakref.ref(Gone(""))


class Rules:
    """What a block was asked to do with the memory of others."""

    __slots__ = ("check_liveness", "keep_inputs", "looks_into_segments")

    def __init__(self, *, keep_inputs: bool, check_liveness: bool) -> None:
        self.keep_inputs, self.check_liveness = keep_inputs, check_liveness
        self.looks_into_segments = keep_inputs or check_liveness


def nbytes_of(storage: Any) -> int:
    """The size of what `Memory` keeps or watches: a storage, an array of others, or None once dead."""
    nbytes = getattr(storage, "nbytes", 0)
    return int(nbytes() if callable(nbytes) else nbytes)


def describe(arrays: Arrays, value: Any) -> str:
    """An array in a few words, for messages."""
    return _in_words(arrays.kind(value))


def _in_words(kind: tuple[str, tuple[int, ...], str]) -> str:
    dtype, shape, device = kind
    return f"{dtype} {list(shape)} on {device}"
