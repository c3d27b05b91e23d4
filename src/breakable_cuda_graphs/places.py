"""Whose memory an address is in, in words.

The hard problem: a kernel's arguments are numbers, and which of them are addresses, and of what, only
the sequence knows: it made aliases for breaks, watches inputs, and has a pool. What nobody here knows
but the driver does is called other memory; what the driver does not know either is no address.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from . import structures
from ._driver import bindings
from .arguments import array_memory
from .liveness import nbytes_of

if TYPE_CHECKING:
    from .sequence import CUDAGraphSequence

__all__ = ["Places"]

_LOWEST, _HIGHEST = 1 << 12, 1 << 57


class Places:
    """Names addresses for the graphs of one sequence."""

    def __init__(self, sequence: CUDAGraphSequence) -> None:
        self._sequence = weakref.ref(sequence)

    def name(self, address: int) -> str | None:
        """What an address points into; None if it is none that anybody knows."""
        if not _LOWEST <= address < _HIGHEST:
            return None
        sequence = self._sequence()
        if sequence is not None:
            named = self._break_argument(sequence, address) or self._input(sequence, address)
            if named is not None:
                return named
            if _in_pool(sequence, address):
                return "pool block"
        return None if bindings.current().allocation(address) is None else "other"

    def _break_argument(self, sequence: CUDAGraphSequence, address: int) -> str | None:
        for segment in sequence.segments:
            for path, value in _arguments(segment):
                memory = array_memory(value)
                if memory is not None and memory.nbytes:
                    at = address - memory.address
                    if 0 <= at < memory.nbytes:
                        return _with_offset(f"break argument {path} of {segment.name}", at)  # type: ignore[union-attr]
        return None

    def _input(self, sequence: CUDAGraphSequence, address: int) -> str | None:
        memory = sequence._memory
        for start, (reference, described, _) in list(memory._watched.items()):
            if start <= address < start + nbytes_of(reference()):
                return _with_offset(f"input, {described}", address - start)
        for start, storage in list(memory._kept.items()):
            if start <= address < start + nbytes_of(storage):
                return _with_offset("memory that the sequence owns", address - start)
        return None


def _arguments(segment: Any) -> list[tuple[str, Any]]:
    if not hasattr(segment, "fn"):
        return []
    return list(structures.leaves_of_call(segment.args, segment.kwargs))


def _in_pool(sequence: CUDAGraphSequence, address: int) -> bool:
    pool: Any = sequence._pool
    if pool is None or not hasattr(pool, "contains"):
        return False
    if not pool.contains(address):
        pool.look()
    return bool(pool.contains(address))


def _with_offset(text: str, offset: int) -> str:
    return f"{text}, +{offset} bytes" if offset else text
