"""Find the tensors that captured kernels read or write, from the addresses that they were given.

The hard problem: a mode that sees every call of torch would see less than the kernels do (composite
modules hide parameters, compiled code calls nothing), costs microseconds a call, and makes
torch.compile's guards fail, so that code warmed up before the block compiles again inside it. The
kernels' own arguments tell all; what is missing is who owns an address. So addresses are looked up
among the tensors that Python knows: first those found before, then the collector's youngest objects,
and only when something is still missing, all of them. What no tensor owns is reported as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..._driver.bindings import Driver
from ..._driver.kernel_params import is_memory
from ..arrays import MemoryPiece
from ..owners import KnownMemory
from ..protocols import Found, Gone
from .allocator import given_back
from .tensors import is_alias_storage, kind_of, tensors_in

_known: dict[int, KnownMemory] = {}  # of each device


def known_tensors() -> KnownMemory:
    """A record of tensors' memory; a storage that was resized has moved away."""
    return KnownMemory(lambda storage, start: storage.data_ptr() == start)


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
    known = _known.setdefault(device, known_tensors())
    found, left = known.find(
        addresses,
        lambda word: is_memory(driver, word) and not is_ours(word),
        lambda generation: _learn(known, generation),
    )
    maybe_gone = sure().intersection(left) if left else ()
    for address in given_back(device, maybe_gone) if maybe_gone else ():
        words = f"{address:#x} on cuda:{device}, given back before the segment had ended"
        found[address] = Found(address, Gone(words), ("", (), ""))
    return list(found.values()), [word for word in left if word not in found]


def _learn(known: KnownMemory, generation: int) -> None:
    """Take note of all device and pinned tensors in one generation of the collector."""
    for tensor in tensors_in(generation):
        # Fake, functional, uninitialised and other tensors have no memory of their own.
        with contextlib.suppress(Exception):
            if tensor.layout is torch.strided and tensor.device.type in ("cuda", "cpu"):
                learn_tensor(known, tensor)
            gradient = tensor.grad if tensor.is_leaf else None
            if gradient is not None and gradient.layout is torch.strided:
                learn_tensor(known, gradient)


def learn_tensor(known: KnownMemory, tensor: Any) -> None:
    """Take note of the memory of a tensor, unless it is an alias of ours or known already."""
    storage = tensor.untyped_storage()
    if storage.device.type == "meta":  # a fake tensor's, which says that it is on a device
        return
    start, nbytes = storage.data_ptr(), storage.nbytes()
    if nbytes and not is_alias_storage(storage) and not known.lives_at(start):
        known.add(MemoryPiece(start, nbytes, storage, storage), kind_of(tensor))
