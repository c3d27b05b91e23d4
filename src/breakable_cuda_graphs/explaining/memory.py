"""The memory that a function reads its inputs from and writes to: saved, put back, compared.

The hard problem: runs are comparable only if each begins where the first began. What the arguments
hold is saved before the first run; other memory is saved the moment before it is first written.
Python's own state (counters, lists) cannot be put back, and is not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..sequence import pytree


class SavedMemory:
    """What is put back before each run: memory, and the generators' states."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> None:
        self._tensors = list(_tensors_of(args, kwargs, device))
        self._saved: dict[int, _Saved] = {}  # by the storage's identity
        self._generators = [
            torch.default_generator,
            *(_cuda_generators() if device == "cuda" else ()),
        ]
        for _, value in pytree.leaves_of_call(args, kwargs):
            if isinstance(value, torch.Generator):
                self._generators.append(value)
        self._states = [generator.get_state() for generator in self._generators]
        self._python = random.getstate()
        for tensor in self._tensors:
            self.save(tensor)

    def save(self, tensor: Any) -> None:
        """Remember what a tensor's memory holds, unless that is known already."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._saved and storage.nbytes():
            self._saved[id(storage)] = _Saved(storage, _flat(storage, tensor))

    def restore(self) -> None:
        """Bring all of it back."""
        with torch.no_grad():
            for saved in self._saved.values():
                now = _flat(saved.storage, saved.contents, copy=False)
                if (
                    now.shape == saved.contents.shape
                ):  # else it was resized, and is not ours to mend
                    now.copy_(saved.contents)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        random.setstate(self._python)

    def add_generator(self, generator: Any) -> None:
        """A generator that the first run is about to draw from: its present state is put back too."""
        if all(generator is not known for known in self._generators):
            self._generators.append(generator)
            self._states.append(generator.get_state())

    def change(self) -> bool:
        """Bring other numbers into the floating arguments; whether there are any."""
        floats = [t for t in self._tensors if t.is_floating_point() and t.numel()]
        with torch.no_grad():
            for tensor in floats:
                plain = tensor.detach()
                reverse = plain.flip(list(range(plain.dim()))) if plain.dim() else plain
                plain.copy_(reverse.clone() * 0.5)
        return bool(floats)

    def outcome(self, result: Any) -> list[Any]:
        """Copies of a result's tensors, its other leaves, and what saved memory holds now."""
        leaves = [_copied(leaf) for _, leaf in pytree.leaves(result)]
        return [*leaves, *(_flat(each.storage, each.contents) for each in self._saved.values())]


class _Saved(NamedTuple):
    """A piece of memory and what it held, as one flat tensor."""

    storage: Any
    contents: Any


def _flat(storage: Any, like: Any, copy: bool = True) -> Any:
    """All of a storage as one flat tensor of the dtype of another tensor."""
    with torch.no_grad():
        count = storage.nbytes() // like.dtype.itemsize
        flat = torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, 0, (count,))
        return flat.clone() if copy else flat


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Iterator[Any]:
    for _, leaf in pytree.leaves_of_call(args, kwargs):
        is_plain = type(leaf) in (torch.Tensor, torch.nn.Parameter)
        if is_plain and leaf.device.type == device and leaf.layout is torch.strided:
            yield leaf


def _cuda_generators() -> tuple[Any, ...]:
    return tuple(torch.cuda.default_generators)


def difference(one: list[Any], other: list[Any]) -> float:
    """The largest difference of two outcomes; infinite where they cannot be compared."""
    if len(one) != len(other):
        return math.inf
    return max((_difference(a, b) for a, b in zip(one, other, strict=True)), default=0.0)


def _difference(a: Any, b: Any) -> float:
    if not isinstance(a, torch.Tensor):
        return 0.0 if isinstance(b, type(a)) and _equal(a, b) else math.inf
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not a.numel():
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if bool((a == b).all()) else math.inf
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, torch.zeros((), dtype=torch.float64, device=a.device), (a - b).abs())
    worst = float(apart.max())
    return math.inf if math.isnan(worst) else worst


def size(outcome: list[Any]) -> float:
    """The largest number of an outcome."""
    floats = [
        leaf.abs().nan_to_num(0.0, 0.0, 0.0)
        for leaf in outcome
        if isinstance(leaf, torch.Tensor) and leaf.numel() and leaf.is_floating_point()
    ]
    return max((float(leaf.max()) for leaf in floats), default=0.0)


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # objects that cannot be compared are left out
        return True


def storages_of(value: Any) -> list[Any]:
    """The storages of the tensors in a value."""
    leaves = [leaf for _, leaf in pytree.leaves(value)]
    return [
        leaf.untyped_storage()
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
