"""The modes of a thread under which a break runs: grad, inference, autocast.

The hard problem: a break replays where somebody else's modes are set. What it was captured under
is kept as a plain tuple, cheap to read and to compare at each replay; only where they differ are
modes switched, and always switched back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_DEVICE_TYPES = ("cuda", "cpu")

#: (grad mode, inference mode, autocast): compared at each replay, so as plain as can be.
Modes = tuple[bool, bool, tuple[Any, ...]]

_NO_AUTOCAST: tuple[Any, ...] = ()

_is_grad = torch.is_grad_enabled
_is_inference = torch.is_inference_mode_enabled
_is_any_autocast = torch._C._is_any_autocast_enabled


def current() -> Modes:
    """The modes of the calling thread."""
    return _is_grad(), _is_inference(), _autocast() if _is_any_autocast() else _NO_AUTOCAST


def _autocast() -> tuple[Any, ...]:
    """The dtype of each device type whose autocast is on (else None), and the weight cache."""
    dtypes = [
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in _DEVICE_TYPES
    ]
    return (*dtypes, torch.is_autocast_cache_enabled())


@contextlib.contextmanager
def entered(modes: Modes) -> Iterator[None]:
    """Run a block under these modes; the caller's come back afterwards."""
    grad, inference, autocast = modes
    *dtypes, cache = autocast or (*(None for _ in _DEVICE_TYPES), True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype in zip(_DEVICE_TYPES, dtypes, strict=True):
            if dtype is not None:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            elif torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


_keys = torch._C.DispatchKey

#: What `torch.func.grad`, `vmap` and the like see operators by.
_TRANSFORMS = torch._C.DispatchKeySet(
    _keys.FuncTorchDynamicLayerFrontMode
) | torch._C.DispatchKeySet(_keys.FuncTorchDynamicLayerBackMode)

#: The innermost of those that are open in this thread, or None.
transform = torch._C._functorch.peek_interpreter_stack


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Inside, what sees torch's functions and operators is off: modes, transforms, inference mode."""
    guard = torch._C._DisableTorchDispatch()
    try:
        with (
            torch._C._ExcludeDispatchKeyGuard(_TRANSFORMS),
            torch._C.DisableTorchFunction(),
            torch.inference_mode(False),
        ):
            yield
    finally:
        del guard


#: A cast that autocast remembers must not cross a border between captured and eager code: one made
#: in a segment holds nothing until the replay; one made in a break has another address at each
#: replay (`torch.cuda.make_graphed_callables` refuses the cache for the same reason).
clear_weight_cache = torch.clear_autocast_cache
