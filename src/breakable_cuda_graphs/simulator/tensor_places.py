"""Tensors of torch as places in memory, and what an operator does with them.

The hard problem: at capture an operator has to be tried without touching real memory, and at replay it runs
on whatever addresses it is launched with. So a tensor is taken apart into an address and a way to see memory,
and each operator is asked what it writes, whether it is a view, and whether it reads the device.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

# ---------------------------------------------------------------- tensors as places in memory


@dataclass(frozen=True)
class TensorPlace:
    """A tensor without its address: how to see some memory as that tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Any) -> TensorPlace:
        """How this tensor sees its memory."""
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise NotImplementedError("the simulator captures plain strided tensors only")
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @property
    def span(self) -> int:
        """Elements from the first to the last one that the tensor reaches."""
        if 0 in self.size:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))

    def over(self, flat: Any) -> Any:
        """The tensor over a flat tensor of at least `span` elements."""
        tensor = flat.as_strided(self.size, self.stride)
        tensor = torch._neg_view(tensor) if self.neg else tensor
        return torch.conj(tensor) if self.conj else tensor

    def at(self, address: int) -> Any:
        """The tensor at an address."""
        if not self.span:
            return self.over(torch.empty(0, dtype=self.dtype))
        raw = (ctypes.c_ubyte * (self.span * self.dtype.itemsize)).from_address(address)
        return self.over(torch.frombuffer(raw, dtype=torch.uint8).view(self.dtype))


#: Storages made by captured work: at a later capture they hold poison, or values of an old replay.
made_in_captures: weakref.WeakSet[Any] = weakref.WeakSet()
making = threading.Lock()  # one thread records while another looks through them


def was_made_in_a_capture(address: int) -> bool:
    """Whether a storage that captured work made begins at an address."""
    with making:
        return any(int(storage.data_ptr()) == address for storage in made_in_captures)


def stand_in(tensor: Any) -> Any:
    """A copy to try an operator on. Poison is replaced by values that no operator stumbles over."""
    place = TensorPlace.of(tensor)
    flat = torch.zeros(place.span, dtype=place.dtype)
    if tensor.untyped_storage() in made_in_captures:
        if place.dtype.is_floating_point or place.dtype.is_complex:
            flat.fill_(1)
    elif place.span:
        plain = torch.conj(tensor) if place.conj else tensor
        plain = torch._neg_view(plain) if place.neg else plain
        flat.copy_(plain.as_strided((place.span,), (1,)))
    return place.over(flat)


def poison(tensor: Any) -> None:
    """Fill with what unwritten memory must not be mistaken for."""
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        if dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(0xFF)
        else:
            tensor.fill_(float("nan"))
    elif dtype == torch.bool:
        tensor.fill_(True)
    else:
        limits = torch.iinfo(dtype)
        tensor.fill_(limits.min or limits.max)


# ---------------------------------------------------------------- what an operator is


ALLOCATES = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty"}
ALLOCATES |= {"new_empty_strided"}
METADATA = {"resize_", "set_", "_unsafe_view", "detach_"}
ENTERS = {"lift_fresh", "lift", "lift_fresh_copy"}
_READS_HOST = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "item"}


def tensors_of(value: Any) -> list[Any]:
    """The tensors in a structure."""
    return [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


def short(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


def title(func: Any) -> str:
    overload = func._schema.overload_name
    return f"{func._schema.name}.{overload}" if overload else str(func._schema.name)


def is_view(func: Any) -> bool:
    """Whether all that it returns are views of its arguments."""
    aliases = [each.alias_info for each in func._schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def _masks(indices: Any) -> list[Any]:
    return [
        each
        for each in indices or ()
        if isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
    ]


#: Collectives between processes: on the CPU the host does them.
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def reads_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host would have to wait for values of the device."""
    name = short(func)
    if func.namespace in _COLLECTIVES:
        return True
    if name == "index":
        return bool(_masks(args[1]))
    if name in ("index_put", "index_put_", "_index_put_impl_"):
        return bool(_masks(args[1])) and args[2].numel() != 1
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    tags = func.tags
    return (
        name in _READS_HOST
        or torch.Tag.data_dependent_output in tags
        or torch.Tag.dynamic_output_shape in tags
    )


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that an operator writes to, by the name of their alias set."""
    found = {}
    for place, argument in enumerate(func._schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for alias in info.before_set:
                found[alias] = value
    return found
