"""After a test that has found something: put back by force what was left, so that the next is alone."""

from __future__ import annotations

from typing import Any

from breakable_cuda_graphs._driver import bindings, release, unfinished, user_objects
from breakable_cuda_graphs.capture import open_blocks
from breakable_cuda_graphs.simulator import tensors
from helping import settle


def mend() -> None:
    """Nothing is open any more, as far as this process knows."""
    from torch.overrides import _get_current_function_mode, _pop_mode
    from torch.utils import _python_dispatch

    for block in open_blocks.open_blocks:
        open_blocks.remove(block)
    unfinished.pending.clear()
    release._open.clear()
    release._owed.outermost = None
    user_objects._held.clear()
    tensors._current.handle = 0
    while _python_dispatch._get_current_dispatch_mode() is not None:
        _python_dispatch._pop_mode()
    while _get_current_function_mode() is not None:
        _pop_mode()
    mode: Any = bindings.types.CUstreamCaptureMode(0)
    bindings.current().module.cuThreadExchangeStreamCaptureMode(mode)
    settle()
