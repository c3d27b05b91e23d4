"""Whose memory an address is in, in words.

The hard problem: a kernel's arguments are numbers, and which of them are addresses, and of what, only
the sequence knows: it made aliases for breaks, watches inputs, and has a pool. What nobody here knows
but the driver does is called other memory; what the driver does not know either is no address.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from .._driver import bindings
from ..graph.arguments import array_memory
from . import pytree
from .memory import Memory, nbytes_of

_LOWEST, _HIGHEST = 1 << 12, 1 << 57


class Knowing(Protocol):
    """What is asked of a sequence: whose memory is where."""

    _segments: Any  # the segments; those of breaks have arguments
    _memory: Memory
    _pool: Any


class Places:
    """Names addresses for the graphs of one sequence."""

    def __init__(self, sequence: Knowing) -> None:
        self._sequence = weakref.ref(sequence)

    def name(self, address: int) -> str | None:
        """What an address points into; None if it is none that anybody knows."""
        if not _LOWEST <= address < _HIGHEST:
            return None
        return Ranges(self._sequence()).name(address)


class Ranges:
    """What a sequence knows of memory at one moment, for as many addresses as one likes."""

    def __init__(self, sequence: Knowing | None) -> None:
        self._pool = None if sequence is None else sequence._pool
        self._has_looked = False
        self._named: dict[tuple[int, int], str] = {}  # first address and bytes -> the first name
        if sequence is None:
            return
        for segment in sequence._segments:
            for path, value in _arguments(segment):
                array = array_memory(value)
                if array is not None:
                    name = getattr(segment, "name", "")
                    self._note(array.address, array.nbytes, f"break argument {path} of {name}")
        memory = sequence._memory
        for start, (reference, described, _) in list(memory._watched.items()):
            self._note(start, nbytes_of(reference()), f"input, {described}")
        for start, storage in list(memory._kept.items()):
            self._note(start, nbytes_of(storage), "memory that the sequence owns")

    def _note(self, start: int, nbytes: int | None, text: str) -> None:
        if nbytes:
            self._named.setdefault((start, nbytes), text)

    def name(self, address: int) -> str | None:
        """What an address points into; None if it is none that anybody knows."""
        if not _LOWEST <= address < _HIGHEST:
            return None
        for (start, nbytes), text in self._named.items():
            if start <= address < start + nbytes:
                return _with_offset(text, address - start)
        if self._is_in_pool(address):
            return "pool block"
        return None if bindings.current().allocation(address) is None else "other"

    def _is_in_pool(self, address: int) -> bool:
        pool = self._pool
        if pool is None or not hasattr(pool, "contains"):
            return False
        if not pool.contains(address) and not self._has_looked:
            self._has_looked = True
            pool.look()
        return bool(pool.contains(address))


def _arguments(segment: Any) -> list[tuple[str, Any]]:
    if not hasattr(segment, "fn"):
        return []
    return list(pytree.leaves_of_call(segment.args, segment.kwargs))


def _with_offset(text: str, offset: int) -> str:
    return f"{text}, +{offset} bytes" if offset else text
