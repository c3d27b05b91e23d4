"""Find the arrays that captured kernels read or write, by their addresses: CuPy's and Numba's here.

The hard problem: a kernel's arguments name memory, not arrays. So addresses are looked up among the
arrays found before, then among those that Python's collector knows, the young ones first; only when
something is still missing, all of them. An address that no array owns is reported as it is.
"""

from __future__ import annotations

import bisect
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .._driver.bindings import Driver
from .._driver.kernel_params import is_memory
from . import loaded
from .arrays import MemoryPiece, piece_of
from .protocols import ArrayKind, Found


class KnownMemory:
    """Memory whose owner was found, by its first address. What has died is dropped when it is met.

    `is_at` tells whether a living storage is still at an address.
    """

    def __init__(self, is_at: Callable[[Any, int], bool]) -> None:
        self._is_at = is_at
        self._starts: list[int] = []
        self._entries: dict[int, tuple[int, weakref.ref[Any], weakref.ref[Any], ArrayKind]] = {}
        self._lock = threading.Lock()
        # Addresses that all objects were searched for in vain -> how often the collector had run by
        # then: only a collection moves objects to where they have been looked for.
        self._nobodys: dict[int, int] = {}

    def add(self, piece: MemoryPiece, kind: ArrayKind) -> None:
        """Take note of some memory and of an array in it."""
        if piece.address not in self._entries:
            bisect.insort(self._starts, piece.address)
        end = piece.address + piece.nbytes
        entry = (end, weakref.ref(piece.storage), weakref.ref(piece.keeper), kind)
        self._entries[piece.address] = entry

    def lives_at(self, start: int) -> bool:
        """Whether the memory that was found at an address is still there."""
        return start in self._entries and self._alive(start) is not None

    def _alive(self, start: int) -> Found | None:
        _, storage_of, keeper_of, kind = self._entries[start]
        storage, keeper = storage_of(), keeper_of()
        if storage is None or keeper is None or not self._is_at(storage, start):
            return None
        return Found(start, storage, kind, kind[2] == "cpu", keeper)

    def owner(self, address: int) -> Found | None:
        """The living memory that an address lies in."""
        while at := bisect.bisect_right(self._starts, address):  # thousands may have died since
            start = self._starts[at - 1]
            found = self._alive(start)
            if found is not None:
                return found if address < self._entries[start][0] else None
            del self._starts[at - 1], self._entries[start]
        return None

    def find(
        self,
        addresses: Iterable[int],
        is_wanted: Callable[[int], bool],
        learn: Callable[[int], None],
    ) -> tuple[dict[int, Found], list[int]]:
        """The memory that addresses lie in, and of the wanted ones those that nobody owns.

        `learn` adds what the arrays in a generation of the collector own; it is called while
        something is missing.
        """
        with self._lock:
            found: dict[int, Found] = {}
            left = [word for word in self._look_up(addresses, found) if is_wanted(word)]
            for generation in range(3):
                now = collections()
                if not left or (
                    generation == 2 and all(self._nobodys.get(word) == now for word in left)
                ):
                    break
                learn(generation)
                left = self._look_up(left, found)
            self._nobodys.update(dict.fromkeys(left, collections()))
            return found, left

    def _look_up(self, addresses: Iterable[int], found: dict[int, Found]) -> list[int]:
        left = []
        for address in addresses:
            owner = self.owner(address)
            if owner is None:
                left.append(address)
            else:
                found[owner.address] = owner
        return left


_known = KnownMemory(lambda storage, start: True)


def find(driver: Driver, addresses: Iterable[int]) -> tuple[list[Found], list[int]]:
    """The memory that addresses lie in, as far as arrays of CuPy or Numba own it, and the rest."""

    def learn(generation: int) -> None:
        for value in instances(_array_types(driver), generation):
            piece = piece_of(value)
            if piece is not None and piece.nbytes and piece.storage is not None:
                _known.add(piece, (str(value.dtype), tuple(value.shape), "cuda"))

    found, left = _known.find(addresses, lambda word: is_memory(driver, word), learn)
    return list(found.values()), left


def _array_types(driver: Driver) -> set[type]:
    """The types of the libraries' arrays. Only types are looked at, no object is asked."""
    kinds = set()
    cupy = loaded.loaded(driver, "cupy")
    if cupy is not None:
        kinds.add(cupy.ndarray)
    numba = loaded.loaded(driver, "numba.cuda")
    if numba is not None:
        kinds.add(numba.cudadrv.devicearray.DeviceNDArray)
    return kinds


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
