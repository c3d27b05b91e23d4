"""Find the arrays of CuPy and Numba that captured kernels read or write, by their addresses.

The hard problem: a kernel's arguments name memory, not arrays. So addresses are looked up among the
arrays that Python's collector knows, the young ones first; what was found is remembered by address.
An address that no array owns is reported as it is.
"""

from __future__ import annotations

import bisect
import gc
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from .._driver.bindings import Driver
from .._driver.kernel_params import is_memory
from . import loaded
from .arrays import home
from .protocols import Found


class _Known:
    """Memory whose owner was found, by its first address. What has died is dropped when it is met."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._entries: dict[int, tuple[int, Any, Any, Any]] = {}

    def add(self, value: Any, kind: tuple[str, tuple[int, ...], str]) -> None:
        """Take note of the memory of an array."""
        where = home(value)
        if where is None or not where.nbytes or where.storage is None:
            return
        if where.address not in self._entries:
            bisect.insort(self._starts, where.address)
        end = where.address + where.nbytes
        entry = (end, weakref.ref(where.storage), weakref.ref(where.keeper), kind)
        self._entries[where.address] = entry

    def owner(self, address: int) -> Found | None:
        """The living memory that an address lies in."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start = self._starts[at]
        end, storage, keeper, kind = self._entries[start]
        if storage() is None or keeper() is None:
            del self._starts[at], self._entries[start]
            return self.owner(address)
        return Found(start, storage(), kind, keeper=keeper()) if address < end else None


_known = _Known()

_lock = threading.Lock()

# Addresses that all objects were searched for in vain -> how often the collector had run by then.
_nobodys: dict[int, int] = {}


def find(driver: Driver, addresses: Iterable[int]) -> tuple[list[Found], list[int]]:
    """The memory that addresses lie in, as far as arrays of CuPy or Numba own it, and the rest."""
    with _lock:
        found: dict[int, Found] = {}
        words = [word for word in addresses if is_memory(driver, word)]
        left = _look_up(words, found)
        for generation in range(3):
            now = collections()
            if not left or (generation == 2 and all(_nobodys.get(word) == now for word in left)):
                break
            for value, kind in _arrays(driver, generation):
                _known.add(value, kind)
            left = _look_up(left, found)
        _nobodys.update(dict.fromkeys(left, collections()))
        return list(found.values()), left


def _look_up(addresses: Iterable[int], found: dict[int, Found]) -> list[int]:
    left = []
    for address in addresses:
        owner = _known.owner(address)
        if owner is None:
            left.append(address)
        else:
            found[owner.address] = owner
    return left


def _arrays(driver: Driver, generation: int) -> list[tuple[Any, tuple[str, tuple[int, ...], str]]]:
    """The arrays in one generation of the collector. Only types are looked at, no object is asked."""
    kinds = set()
    cupy = loaded.loaded(driver, "cupy")
    if cupy is not None:
        kinds.add(cupy.ndarray)
    numba = loaded.loaded(driver, "numba.cuda")
    if numba is not None:
        kinds.add(numba.cudadrv.devicearray.DeviceNDArray)
    return [
        (value, (str(value.dtype), tuple(value.shape), "cuda"))
        for value in instances(kinds, generation)
    ]


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
