"""Memory that a call of the function replaces, moves or keeps.

The hard problem: a replay uses the addresses of the capture, for ever. Nothing is wrong with memory
that a call makes and lets go, the pool does the same; but what a call puts in the place of what it
read, moves by `resize_`, or keeps in a list or a cache is another piece at the next call. So each
storage that is older than the call and each one that the call made is followed by a weak reference,
and judged when the call and its result are gone.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..frameworks.pytorch.tensors import Tensors, is_alias_storage, tensors_in
from ..sequence.memory import describe
from .frames import Stack
from .watching import Watch


class _Seen(NamedTuple):
    """A piece of memory, and the call that made it or first used it."""

    storage: weakref.ref[Any]
    described: str
    operator: str
    stack: Stack


class Growth:
    """The memory of one watched run. Make it before the run, while only older memory exists."""

    def __init__(
        self, watch: Watch, device: str, save: Callable[[Any], None] | None = None
    ) -> None:
        self._watch, self._arrays, self._save = watch, Tensors(device), save
        self._older = weakref.WeakSet(_storage(each) for each in self._all())
        self._used: dict[int, _Seen] = {}  # older memory, by address
        self._made: dict[int, _Seen] = {}  # memory of this run, by address

    def before(self, inputs: list[Any], written: list[Any]) -> list[tuple[int, int]]:
        """Where the inputs of an operator lie before it runs; what it will write is saved, if asked."""
        if self._save is not None:
            for tensor in written:
                if (storage := _storage(tensor)) is not None and storage in self._older:
                    self._save(tensor)
        return [_extent(tensor) for tensor in inputs]

    def after(
        self, operator: str, before: list[tuple[int, int]], inputs: list[Any], made: list[Any]
    ) -> None:
        """An operator has run."""
        for (address, nbytes), tensor in zip(before, inputs, strict=True):
            storage = _storage(tensor)
            if storage is None or storage not in self._older:
                continue
            if nbytes and _extent(tensor)[0] != address:
                described = describe(self._arrays, tensor)
                self._watch.note("memory", operator, f"{described} was moved")
            elif address and address not in self._used:
                self._used[address] = self._seen(tensor, storage, operator)
        for tensor in made:
            storage = _storage(tensor)
            if storage is None or storage in self._older or not storage.nbytes():
                continue
            known = self._made.get(storage.data_ptr())
            if known is None or known.storage() is not storage:
                self._made[storage.data_ptr()] = self._seen(tensor, storage, operator)

    def _seen(self, tensor: Any, storage: Any, operator: str) -> _Seen:
        described = describe(self._arrays, tensor)
        return _Seen(weakref.ref(storage), described, operator, self._watch.stack())

    def ended(self, results: list[Any]) -> None:
        """The run is over and its result is let go, but for these storages."""
        for used in self._used.values():
            if used.storage() is None:
                self._watch.note(
                    "memory", used.operator, f"{used.described}, used here, was replaced or dropped",
                    used.stack,
                )  # fmt: skip
        spared = {id(storage) for storage in results} | self._gradients()
        kept = [(made, made.storage()) for made in self._made.values()]
        alive = {id(storage) for _, storage in kept if storage is not None} - spared
        held = _held_by_python([each for each in self._all() if id(_storage(each)) in alive])
        for made, storage in kept:
            if storage is not None and id(storage) in held:
                self._watch.note(
                    "memory", made.operator, f"{made.described}, made here, is kept after the call",
                    made.stack,
                )  # fmt: skip

    def _all(self) -> list[Any]:
        """All tensors of the device that Python knows and that own memory."""
        return [
            tensor
            for tensor in tensors_in(None)
            if self._arrays.owns(tensor) and _storage(tensor) is not None
        ]

    def _gradients(self) -> set[int]:
        """The storages of gradients: the first backward makes them, and later ones write them."""
        return {
            id(_storage(tensor.grad))
            for tensor in self._all()
            if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None
        }


def _held_by_python(tensors: list[Any]) -> set[int]:
    """The storages of those that an object of Python refers to; others are autograd's own."""
    return {
        id(_storage(tensor))
        for tensor in tensors
        if any(each is not tensors for each in gc.get_referrers(tensor))
    }


def _storage(tensor: Any) -> Any:
    """The storage of a plain tensor with memory of its own; None for others."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # fake, functional and nested tensors have none
        return None
    return None if is_alias_storage(storage) else storage


def _extent(tensor: Any) -> tuple[int, int]:
    storage = _storage(tensor)
    return (0, 0) if storage is None else (int(storage.data_ptr()), int(storage.nbytes()))
