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
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..._driver.bindings import Driver, types
from ..base import Found


class _Known:
    """The storages found so far in this process, by address. Dead ones are skipped and dropped."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._entries: dict[int, tuple[int, weakref.ref[Any], Any]] = {}

    def add(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        start, nbytes = storage.data_ptr(), storage.nbytes()
        if not nbytes:
            return
        if start not in self._entries:
            bisect.insort(self._starts, start)
        kind = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), str(tensor.device))
        self._entries[start] = (start + nbytes, weakref.ref(storage), kind)

    def owner(self, address: int) -> Found | None:
        """The living storage that an address lies in."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start = self._starts[at]
        end, reference, kind = self._entries[start]
        storage = reference()
        if storage is None or storage.data_ptr() != start:
            del self._starts[at], self._entries[start]
            return self.owner(address)
        return Found(start, storage, kind) if address < end else None


_known: dict[int, _Known] = {}
_nobodys: set[int] = set()  # addresses that all of Python's objects were searched for in vain


def find(
    driver: Driver, device: int, addresses: Iterable[int], is_ours: Callable[[int], bool]
) -> tuple[list[Found], list[int]]:
    """The storages that addresses lie in, and the addresses that belong to nobody we know.

    `is_ours` tells the memory that needs no watching: the pool's and the workspaces'.
    """
    known = _known.setdefault(device, _Known())
    found: dict[int, Found] = {}
    left = _look_up(known, addresses, found)
    left = [word for word in left if not is_ours(word) and _is_memory(driver, word)]
    for generation in (0, 1, 2):
        if not left or (generation == 2 and _nobodys.issuperset(left)):
            break
        _learn(known, generation)
        left = _look_up(known, left, found)
    _nobodys.update(left)
    return list(found.values()), left


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
    is_tensor: dict[type, bool] = {}
    for thing in gc.get_objects(generation):
        kind = type(thing)
        wanted = is_tensor.get(kind)
        if wanted is None:
            wanted = is_tensor[kind] = issubclass(kind, torch.Tensor)
        if wanted:
            _learn_tensor(known, thing)


def _learn_tensor(known: _Known, tensor: Any) -> None:
    try:
        if tensor.layout is torch.strided and tensor.device.type in ("cuda", "cpu"):
            known.add(tensor)
        gradient = tensor.grad if tensor.is_leaf else None
    except (RuntimeError, NotImplementedError):
        return  # fake, functional or meta tensors: no memory
    if gradient is not None and gradient.layout is torch.strided:
        known.add(gradient)


def _is_memory(driver: Driver, word: int) -> bool:
    """Whether a word is the address of device or pinned memory, or only looks like a number."""
    if not 1 << 20 < word < 1 << 57:
        return False
    attribute = types.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    code, _ = driver.module.cuPointerGetAttribute(attribute, word)
    return int(code) == 0
