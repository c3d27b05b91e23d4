"""The streams that captures run on: ours, few, and never destroyed.

The hard problem: torch's own streams are 32 that everybody shares, so a capture needs one of its
own; but the allocator remembers the stream of each block for ever, and a stream that has seen a
matrix product has a cuBLAS workspace of tens of megabytes. So streams are leased for a block and
used again by the next. Only one whose workspace is baked into kernels, or that the user has been
shown, stays with its pool.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._driver import contexts, release, stream_order
from ..._driver.bindings import Driver
from ..._driver.handles import StreamHandle


class CaptureStream:
    """A non-blocking stream of our own."""

    def __init__(self, driver: Driver, device: int) -> None:
        self.device = device
        self.handle = StreamHandle.create(driver)
        self.external: Any = torch.cuda.ExternalStream(int(self.handle), device=device)
        stream_order.lasting.add(int(self.handle))
        release.leak(self)  # blocks of the allocator name it for as long as the process lives


_idle: dict[int, list[CaptureStream]] = {}


def take(driver: Driver, device: int, preferred: CaptureStream | None) -> CaptureStream:
    """A stream that nobody has: the preferred one if it is free, any other, or a new one."""
    idle = _idle.setdefault(device, [])
    try:
        if preferred is not None and preferred in idle:
            idle.remove(preferred)
            return preferred
        return idle.pop()
    except (IndexError, ValueError):  # another thread was faster
        with contexts.made_current(driver, contexts.primary(driver, device)):
            return CaptureStream(driver, device)


def give_back(stream: CaptureStream) -> None:
    """Let the next block have the stream."""
    _idle.setdefault(stream.device, []).append(stream)
