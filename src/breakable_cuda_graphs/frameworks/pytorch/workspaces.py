"""cuBLAS workspaces of capture streams, in memory that is kept for good.

The hard problem: a workspace is found by (handle, stream) and baked into captured kernels, but can
be freed by anybody (`torch._C._cuda_clearCublasWorkspaces`, which Inductor calls), and replays then
write into memory of others. So what a capture stream's workspaces are allocated from is a pool of
that stream, which is kept and which nobody else allocates from: a foreign clear only returns them
to where nobody takes them. Sequences that may replay at the same time must not share a workspace;
whoever has one in its kernels therefore keeps its capture stream (`pools.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import Any

import torch

from ...errors import WorkspaceWarning
from ..errors import WORKSPACE_ELSEWHERE, warn
from .allocator import ranges, snapshot

_pools: dict[int, tuple[int, int]] = {}  # capture stream -> its workspace pool
_ranges: dict[int, list[tuple[int, int]]] = {}


class _Thread(threading.local):
    """Handles belong to threads, so a thread that is new to a stream adds a workspace."""

    def __init__(self) -> None:
        self.known: set[tuple[int, bool]] = set()


_thread = _Thread()


def make(device: int, stream: Any) -> None:
    """Make cuBLAS ready for captures on a stream.

    Products of two by two run on the stream, eagerly and for each block anew: the first product of a
    process cannot happen in a capture, and somebody may have cleared all workspaces since the last
    block, of which a warm-up may have made some again. With gradients on, autograd's thread, whose
    handles are its own, runs some too; but not inside another capture, which that thread's calls might
    kill. What they allocate on this stream goes to its workspace pool.
    """
    handle = int(stream.cuda_stream)
    grad = torch.is_grad_enabled() and not torch.cuda.is_current_stream_capturing()
    is_new = handle not in _pools
    pool = _pools.setdefault(handle, torch.cuda.graph_pool_handle())
    is_known = (handle, grad) in _thread.known
    # No function mode is to see this: an outer block's would take it for work that it misses.
    with torch._C.DisableTorchFunction(), torch.cuda.stream(stream), torch.inference_mode(False):
        try:  # an interrupt may come right behind the first call
            torch._C._cuda_beginAllocateCurrentStreamToPool(device, pool)
            _products(device, grad)
        finally:
            with contextlib.suppress(RuntimeError):  # it has not begun
                torch._C._cuda_endAllocateToPool(device, pool)
    if not is_known:
        _thread.known.add((handle, grad))
        _look(handle, pool, is_new)


def make_first(device: int, stream: Any) -> None:
    """The workspaces of a stream that the user is shown, before a warm-up makes them elsewhere."""
    if int(stream.cuda_stream) not in _pools and not torch.cuda.is_current_stream_capturing():
        with torch.enable_grad():
            make(device, stream)


def _look(handle: int, pool: tuple[int, int], is_new: bool) -> None:
    segments = snapshot(pool)
    _ranges[handle] = ranges(segments)
    if is_new and not any(segment["active_size"] for segment in segments):
        # The stream, one of the user's, had its workspace already, in memory of others.
        warn(WORKSPACE_ELSEWHERE, WorkspaceWarning)


def contains(stream: int, address: int) -> bool:
    """Whether an address lies in the workspaces of a capture stream."""
    return any(start <= address < end for start, end in _ranges.get(stream, ()))


def contain(stream: int, kernels: Iterable[list[int]]) -> bool:
    """Whether any kernel's arguments point into the workspaces of a capture stream."""
    for start, end in _ranges.get(stream, ()):
        for words in kernels:
            for word in words:  # no generator: this is for each word of each captured kernel
                if start <= word < end:
                    return True
    return False


def _products(device: int, grad: bool) -> None:
    """A product through cuBLAS and one through cuBLASLt, and their backward where wanted."""
    with torch.set_grad_enabled(grad), torch.autocast("cuda", enabled=False):
        left = torch.ones(2, 2, device=f"cuda:{device}", requires_grad=grad)
        result = torch.addmm(left[0].detach(), left @ left, left)
        if grad:
            torch.autograd.grad(result.sum(), left)
