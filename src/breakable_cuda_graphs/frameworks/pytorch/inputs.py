"""Find the tensors that captured kernels read or write, from the addresses that they were given.

The hard problem: a mode that sees every call of torch would see less than the kernels do (composite
modules hide parameters, compiled code calls nothing), costs microseconds a call, and makes
torch.compile's guards fail, so that code warmed up before the block compiles again inside it. The
kernels' own arguments tell all; what is missing is who owns an address. So addresses are looked up
among the tensors that Python knows: first those found before, then the collector's youngest objects,
and only when something is still missing, all of them. What no tensor owns is reported as it is.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..._driver.bindings import Driver
from ..._driver.kernel_params import is_memory
from ..owners import collections
from ..protocols import Found, Gone
from .allocator import given_back
from .tensors import is_alias_storage, tensors_in


class _Known:
    """The storages found so far in this process, by address. Dead ones are skipped and dropped."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._entries: dict[int, tuple[int, weakref.ref[Any], Any]] = {}

    def add(self, tensor: Any) -> None:
        """Take note of the memory of a tensor, unless it is an alias of ours or known already."""
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # a fake tensor's, which says that it is on a device
            return
        start, nbytes = storage.data_ptr(), storage.nbytes()
        if not nbytes or is_alias_storage(storage) or self._is_known(start):
            return
        kind = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), str(tensor.device))
        if start not in self._entries:
            bisect.insort(self._starts, start)
        self._entries[start] = (start + nbytes, weakref.ref(storage), kind)

    def _is_known(self, start: int) -> bool:
        """Whether the storage that was found at an address is still there."""
        entry = self._entries.get(start)
        storage = entry[1]() if entry is not None else None
        return storage is not None and storage.data_ptr() == start

    def owner(self, address: int) -> Found | None:
        """The living storage that an address lies in."""
        while at := bisect.bisect_right(self._starts, address):  # thousands may have died since
            start = self._starts[at - 1]
            end, reference, kind = self._entries[start]
            storage = reference()
            if storage is not None and storage.data_ptr() == start:
                return Found(start, storage, kind, kind[2] == "cpu") if address < end else None
            del self._starts[at - 1], self._entries[start]
        return None


_known: dict[int, _Known] = {}

_lock = threading.Lock()

# Addresses that the old generation was searched for in vain -> how often the collector had run by
# then: only a collection moves objects there.
_nobodys: dict[int, int] = {}


def find(
    driver: Driver,
    device: int,
    addresses: Iterable[int],
    is_ours: Callable[[int], bool],
    sure: Callable[[], set[int]],
) -> tuple[list[Found], list[int]]:
    """The storages that addresses lie in, and the addresses that belong to nobody we know.

    Where torch has taken the memory back, something `Gone` stands for the storage.

    `is_ours` tells the memory that needs no watching: the pool's and the workspaces'. `sure` gives the
    words that have to be addresses.
    """
    with _lock:
        known = _known.setdefault(device, _Known())
        found, left = _find(driver, known, addresses, is_ours)
    maybe_gone = sure().intersection(left) if left else ()
    for address in given_back(device, maybe_gone) if maybe_gone else ():
        words = f"{address:#x} on cuda:{device}, given back before the segment had ended"
        found[address] = Found(address, Gone(words), ("", (), ""))
    return list(found.values()), [word for word in left if word not in found]


def _find(
    driver: Driver, known: _Known, addresses: Iterable[int], is_ours: Callable[[int], bool]
) -> tuple[dict[int, Found], list[int]]:
    found: dict[int, Found] = {}
    left = _look_up(known, addresses, found)
    left = [word for word in left if is_memory(driver, word) and not is_ours(word)]
    for generation in (0, 1, 2):
        now = collections()
        if not left or (generation == 2 and all(_nobodys.get(word) == now for word in left)):
            break
        _learn(known, generation)
        left = _look_up(known, left, found)
    _nobodys.update(dict.fromkeys(left, collections()))
    return found, left


def _look_up(known: _Known, addresses: Iterable[int], found: dict[int, Found]) -> list[int]:
    left = []
    for address in addresses:
        owner = known.owner(address)
        if owner is None:
            left.append(address)
        else:
            found[owner.address] = owner
    return left


def _learn(known: _Known, generation: int) -> None:
    """Take note of all device and pinned tensors in one generation of the collector."""
    for tensor in tensors_in(generation):
        _learn_tensor(known, tensor)


def _learn_tensor(known: _Known, tensor: Any) -> None:
    try:
        if tensor.layout is torch.strided and tensor.device.type in ("cuda", "cpu"):
            known.add(tensor)
        gradient = tensor.grad if tensor.is_leaf else None
        if gradient is not None and gradient.layout is torch.strided:
            known.add(gradient)
    except Exception:
        return  # fake, functional, uninitialised and other tensors without memory of their own
