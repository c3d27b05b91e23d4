"""The arrays that Python's collector knows.

The hard problem: `gc.get_objects()` also hands out tuples that another thread is just building, which
must not be held when that thread goes on; and asking an object for its class may run code of its own.
So only types are looked at, in a second list of the same objects, and everything from the first list to
the last object let go happens in one call of C functions, during which no other thread runs.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any


def instances(kinds: set[type], generation: int) -> list[Any]:
    """The objects of exactly these types in one generation of the collector."""
    is_wanted = kinds.__contains__
    collects = gc.isenabled()
    gc.disable()  # a collection between the two lists would move objects
    try:
        wanted = map(is_wanted, map(type, _objects(generation)))
        found = itertools.compress(_objects(generation), wanted)
        # The second list ends with the first; unless it is read to its end it holds itself.
        return list(itertools.chain(found, itertools.filterfalse(type, wanted)))
    finally:
        if collects:
            gc.enable()


def _objects(generation: int) -> Iterator[Any]:
    """The collector's objects, listed when the first is asked for."""
    return itertools.chain.from_iterable(map(gc.get_objects, (generation,)))


def collections() -> int:
    """How often the collector has run in this process: only that moves objects to old generations."""
    return sum(generation["collections"] for generation in gc.get_stats())
