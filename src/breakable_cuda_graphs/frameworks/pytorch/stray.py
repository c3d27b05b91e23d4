"""Notice torch work that a block's capture misses because another stream is current.

The hard problem: such work runs once, at capture, and is silently not in the graph. A function mode
sees the calls, but torch.compile guards on the stack of such modes: code compiled before the block
would compile again inside it. So the mode is used only while torch.compile is not loaded; and it
warns only for calls that made or changed a device tensor, since looking at one launches nothing.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ... import errors


def watch(is_captured: Callable[[], bool]) -> Any:
    """A mode to enter for a block; None where it would do harm."""
    if "torch._dynamo" in sys.modules:
        return None
    return _StrayWork(is_captured)


class _StrayWork(TorchFunctionMode):
    """Warns once a block about work on a stream that is not in the capture."""

    def __init__(self, is_captured: Callable[[], bool]) -> None:
        super().__init__()
        self._is_captured = is_captured
        self._has_warned = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._has_warned and not self._is_captured() and _works(func, args, kwargs, result):
            self._has_warned = True
            name = getattr(func, "__name__", str(func))
            warnings.warn(errors.escaped_work(name), errors.EscapedWorkWarning, stacklevel=2)
        return result


def _works(func: Any, args: Any, kwargs: dict[str, Any] | None, result: Any) -> bool:
    """Whether a call launched something: it changed a device tensor or made a new one."""
    if not _is_device_tensor(result):
        return False
    inputs = [value for value in (*args, *(kwargs or {}).values()) if _is_device_tensor(value)]
    if any(result is value for value in inputs):
        return str(getattr(func, "__name__", "")).endswith("_") or "out" in (kwargs or {})
    memory = result.untyped_storage().data_ptr()
    return bool(inputs) and all(value.untyped_storage().data_ptr() != memory for value in inputs)


def _is_device_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda
