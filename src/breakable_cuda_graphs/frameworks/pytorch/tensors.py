"""Tensors as arguments and results of breaks.

The hard problem: a sequence that held the tensors which its breaks read would keep the pool from
using their blocks again, and a graph with many breaks would need many times the memory of one graph.
So a break is given, at replay, tensors made from bare addresses: they look like the originals, bit
for bit, but own nothing. Who keeps an address valid is decided elsewhere (`sequence/memory.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import tensor_without_memory
from ..owners import instances
from ..protocols import ArrayKind

#: Kernels load from addresses that are as even as those of the allocator.
_ALIGNED = 512

_ALIAS = "_is_alias_of_breakable_cuda_graphs"


def is_alias_storage(storage: Any) -> bool:
    """Whether a storage was made by `Tensors.alias` and so does not own its memory."""
    return hasattr(storage, _ALIAS)


def alias_storage(address: int, device: Any, nbytes: int) -> Any:
    """A storage over memory that it does not own."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    setattr(storage, _ALIAS, True)
    return storage


class Tensors:
    """Tensors of one device type ("cuda"; "cpu" on the simulated device)."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def owns(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == self._device_type

    def can_alias(self, value: Any) -> bool:
        """Ordinary tensors only: of a subclass, a sparse or a nested one only the object itself is enough."""
        return (
            type(value) in (torch.Tensor, torch.nn.Parameter)
            and value.layout is torch.strided
            and not value.is_quantized
            and not value.is_nested
        )

    def alias(self, value: Any) -> Any:
        """Same bytes, shape, strides, offset, dtype, conj and neg bits; no history, not owning.

        A leaf that autograd works on stands for itself: a gradient belongs to the object, not to its
        memory. That is watched all the same, for `param.data = other`.
        """
        if _is_trained(value):
            return value
        storage = value.untyped_storage()
        view = alias_storage(storage.data_ptr(), value.device, storage.nbytes())
        with torch.inference_mode(value.is_inference()), torch.no_grad():
            made = laid_out_as(value, view, value.storage_offset())
        keep_attributes(made, value)
        return made

    def moved(self, value: Any, start: int, end: int, shift: int) -> Any:
        return moved(value, start, end, shift)

    def detached(self, value: Any) -> Any:
        return value.detach()

    def storage(self, value: Any) -> tuple[int, int, Any]:
        try:
            storage = value.untyped_storage()
        except NotImplementedError as error:
            raise tensor_without_memory() from error
        return storage.data_ptr(), storage.nbytes(), storage

    def keeper(self, value: Any) -> Any:
        return value.untyped_storage()

    def place(self, value: Any) -> tuple[Any, ...]:
        return (
            value.data_ptr(), value.shape, value.stride(), value.is_conj(), value.is_neg()
        )  # fmt: skip

    def kind(self, value: Any) -> ArrayKind:
        return kind_of(value)

    def history(self, value: Any) -> Any:
        return value.grad_fn, value.requires_grad

    def requires_grad(self, value: Any) -> bool:
        return bool(value.requires_grad)

    def new_buffer(self, value: Any) -> Any:
        with torch.no_grad(), torch.inference_mode(False):
            return torch.empty_like(value, memory_format=torch.preserve_format)

    def new_views(self, values: list[Any]) -> list[Any] | None:
        if any(_repeats(value) for value in values):  # torch refuses to copy to such a one
            return None
        starts = [value.storage_offset() * value.element_size() for value in values]
        base = min(starts) & -_ALIGNED
        end = max(
            start + reach(value) * value.element_size()
            for start, value in zip(starts, values, strict=True)
        )
        with torch.no_grad(), torch.inference_mode(False):
            bytes_of_all = torch.empty(end - base, dtype=torch.uint8, device=values[0].device)
            memory = bytes_of_all.untyped_storage()
            return [
                laid_out_as(value, memory, (start - base) // value.element_size())
                for start, value in zip(starts, values, strict=True)
            ]

    def copy(self, target: Any, source: Any) -> None:
        with torch.no_grad():
            target.copy_(source)


def kind_of(value: Any) -> ArrayKind:
    """What kind of array a tensor is."""
    return str(value.dtype).removeprefix("torch."), tuple(value.shape), str(value.device)


def _is_trained(value: Any) -> bool:
    """Whether it has a gradient, or is a parameter that may be given one."""
    if not value.is_leaf:
        return False
    is_parameter = type(value) is torch.nn.Parameter and value.requires_grad
    return value.grad is not None or (is_parameter and torch.is_grad_enabled())


def _repeats(value: Any) -> bool:
    """Whether elements of an expanded tensor are one and the same."""
    return any(n > 1 and not step for n, step in zip(value.shape, value.stride(), strict=True))


def laid_out_as(value: Any, storage: Any, offset: int) -> Any:
    """A tensor of another one's dtype, shape, strides, conj and neg bits, from an element of a storage on."""
    view = torch.empty(0, dtype=value.dtype, device=value.device)
    view.set_(storage, offset, value.size(), value.stride())
    if value.is_conj():
        view = view.conj()
    return torch._neg_view(view) if value.is_neg() else view


def reach(value: Any) -> int:
    """Elements from the first to the last."""
    if not value.numel():
        return 0
    steps = zip(value.shape, value.stride(), strict=True)
    return 1 + sum(int((n - 1) * step) for n, step in steps)


def keep_attributes(alias: Any, value: Any) -> None:
    """What users have written on a tensor (a scale, a name) is looked for on its alias too."""
    written = value.__dict__
    if written:
        alias.__dict__.update(written)


def tensors_in(generation: int | None) -> list[Any]:
    """The tensors among the objects of one generation of the collector; None: of all."""
    if generation is None:
        return [tensor for each in range(3) for tensor in tensors_in(each)]
    return instances(_tensor_types(), generation)


def _tensor_types() -> set[type]:
    types: set[type] = set()
    new: list[type] = [torch.Tensor]
    while new:
        kind = new.pop()
        if kind not in types:
            types.add(kind)
            new += type.__subclasses__(kind)
    return types


def moved(value: Any, start: int, end: int, shift: int) -> Any:
    """An alias of a tensor whose bytes, from `start` to before `end`, have moved by `shift` bytes."""
    storage = value.untyped_storage()
    base, nbytes, offset = storage.data_ptr(), storage.nbytes(), value.storage_offset()
    if base < start or base + nbytes > end:  # only a part of the storage moves
        base, offset = value.data_ptr(), 0
        nbytes = reach(value) * value.element_size()
    view = alias_storage(base + shift, value.device, nbytes)
    with torch.inference_mode(value.is_inference()), torch.no_grad():
        made = laid_out_as(value, view, offset)
    keep_attributes(made, value)
    return made
