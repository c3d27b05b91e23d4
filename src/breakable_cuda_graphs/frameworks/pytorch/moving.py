"""Tensors from bare addresses, moved to other memory.

The hard problem: a break's argument is an alias that owns nothing and may be a view far inside a
storage, of which only a part is moved. The new one has the same shape, strides, type and bits, and
its storage begins where the moved part allows.
"""

from __future__ import annotations

from typing import Any

import torch

from .tensors import alias_storage, keep_attributes, laid_out_as, reach


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
