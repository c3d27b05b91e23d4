"""Notice torch work that a block's capture misses because another stream is current.

The hard problem: such work runs once, at capture, and is silently not in the graph. A function mode
sees the calls, but costs microseconds each, and torch.compile guards on the stack of such modes, so
code compiled before the block would compile again inside it. So the mode is on only while a stream
is current that the capture does not include, which `torch.cuda.set_stream` tells; and not at all
once torch.compile is loaded. It warns only for calls that made or changed a device tensor.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from ..._driver.threads import Home
from ...errors import EscapedWorkWarning
from ..errors import escaped_work

_set_stream = torch.cuda.set_stream
_watches: list[StrayWatch] = []  # of the open blocks of all threads
_lock = threading.RLock()  # a finalizer may end another block in the middle


class StrayWatch:
    """Warns once a block about work on a stream that is not in its capture."""

    def __init__(self, is_captured: Callable[[], bool]) -> None:
        self._is_captured = is_captured
        self._mode: _StrayWork | None = None
        self._is_on = False
        self._home = Home()

    def start(self) -> None:
        """Watch this thread from now on."""
        self._is_on = "torch._dynamo" not in sys.modules
        if self._is_on:
            with _lock:
                _watches.append(self)
                torch.cuda.set_stream = _noted_set_stream

    def stop(self) -> None:
        """Watch no more. A second call does nothing; on another thread it leaves that one's modes alone."""
        if self._is_on:
            with _lock:
                if self in _watches:
                    _watches.remove(self)
                if not _watches:
                    torch.cuda.set_stream = _set_stream
            self._leave_mode()

    def stream_changed(self) -> None:
        """Another stream has become current in this thread."""
        if not self._home.is_here():
            return
        if self._is_captured():
            self._leave_mode()
        elif self._mode is None:
            self._mode = _StrayWork(self._is_captured)
            self._mode.__enter__()

    def _leave_mode(self) -> None:
        """Leave the mode, unless one that was entered later is still on: it then does no harm."""
        if self._mode is not None and _get_current_function_mode() is self._mode:
            self._mode.__exit__(None, None, None)
            self._mode = None


def _noted_set_stream(stream: Any) -> None:
    """`torch.cuda.set_stream` while blocks are open."""
    _set_stream(stream)
    for watch in list(_watches):
        watch.stream_changed()


class _StrayWork(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
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
            warnings.warn(escaped_work(name), EscapedWorkWarning, stacklevel=2)
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
