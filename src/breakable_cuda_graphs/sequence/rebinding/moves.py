"""What `rebind` is asked to move, as ranges of addresses.

The hard problem: a move that does not fit does not fail, it reads and writes somebody else's memory.
So both sides are looked at here, before any graph is: arrays have to be of one type, shape, layout
and device, ranges have to lie in one allocation each, and targets must not overlap each other nor,
in part, what is moved away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..._driver.bindings import Driver
from ...errors import bad_type
from ...graph.arguments import MemoryRange, array_memory
from ..errors import cannot_rebind


@dataclass(frozen=True, eq=False)
class Move:
    """Addresses from `start` to before `end` become those from `target` on."""

    start: int
    end: int
    target: int
    old: MemoryRange
    new: MemoryRange

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def shift(self) -> int:
        return self.target - self.start

    def covers(self, start: int, nbytes: int) -> bool:
        """Whether a range lies in what is moved."""
        return self.start <= start and start + nbytes <= self.end


def moves_of(driver: Driver, given: Any) -> list[Move]:
    """The moves that a mapping or pairs of arrays, or of (address, nbytes), describe.

    Raises `TypeError` for what is neither, and `ValueError` for what cannot be moved so.
    """
    pairs = given.items() if isinstance(given, Mapping) else given
    if isinstance(pairs, (str, bytes)) or not isinstance(pairs, Iterable):
        raise bad_type("moves", given, "a mapping or pairs of arrays or (address, nbytes)")
    moves = []
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise bad_type("a move", pair, "a pair of arrays or of (address, nbytes)")
        move = _move(driver, *pair)
        if move.nbytes:
            moves.append(move)
    _require_apart(moves)
    return moves


def move_of(moves: Iterable[Move], address: int) -> Move | None:
    """The move whose old range an address lies in."""
    for move in moves:
        if move.start <= address < move.end:
            return move
    return None


def _move(driver: Driver, old: Any, new: Any) -> Move:
    before, after = _memory(old), _memory(new)
    for memory in (before, after):
        _require_on_device(driver, memory)
    if before.kind is not None and after.kind is not None:
        _require_same_kind(before.kind, after.kind)
    nbytes, room = before.nbytes or 0, after.nbytes or 0
    if room < nbytes:
        raise cannot_rebind(f"the target has a size of {room} bytes, and {nbytes} are needed")
    return Move(before.address, before.address + nbytes, after.address, before, after)


def _memory(value: Any) -> MemoryRange:
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(n, int) for n in value):
        return MemoryRange(value[0], value[1])
    memory = array_memory(value)
    if memory is None:
        raise bad_type("a side of a move", value, "an array or (address, nbytes)")
    return memory


_KIND_WORDS = ("dtype", "shape", "strides", "device")


def _require_same_kind(old: tuple[Any, ...], new: tuple[Any, ...]) -> None:
    for word, one, other in zip(_KIND_WORDS, old, new, strict=True):
        if one == other or _is_torch(one) != _is_torch(other):
            continue  # where one is torch's and the other is not, their sizes are compared
        raise cannot_rebind(
            f"the {word} of old and new differ ({one} and {other}); a graph can only be given "
            "memory of the same kind"
        )


def _is_torch(word: Any) -> bool:
    """Whether a word of a kind is one of torch's: a dtype or a device."""
    return type(word).__module__.partition(".")[0] == "torch"


def _require_on_device(driver: Driver, memory: MemoryRange) -> None:
    """In device memory, within one allocation."""
    if not memory.nbytes:
        return
    allocation = driver.allocation(memory.address)
    if allocation is None:
        if driver.simulated and memory.address:  # CPU tensors stand for device memory there
            return
        raise cannot_rebind(
            f"{memory.address:#x} is not in device memory: it is on the host, or was freed"
        )
    start, size = allocation
    if memory.address + memory.nbytes > start + size:
        raise cannot_rebind(
            f"{memory.nbytes} bytes from {memory.address:#x} on reach beyond their allocation"
        )


def _require_apart(moves: list[Move]) -> None:
    for place, one in enumerate(moves):
        for other in moves[place + 1 :]:
            if _overlap(one.start, other.start, one.nbytes, other.nbytes):
                raise cannot_rebind("two of the old ranges overlap")
            if _overlap(one.target, other.target, one.nbytes, other.nbytes):
                raise cannot_rebind("two of the targets overlap")
    for one in moves:
        for other in moves:
            same = one.target == other.start and one.nbytes == other.nbytes
            if not same and _overlap(one.target, other.start, one.nbytes, other.nbytes):
                raise cannot_rebind(
                    "a target overlaps a part of what is moved away: give the whole of it, or other "
                    "memory"
                )


def _overlap(one: int, other: int, size: int, other_size: int) -> bool:
    return one < other + other_size and other < one + size
