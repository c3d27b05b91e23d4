"""Which framework a capture belongs to: torch, its stand-in on the simulated device, or the driver alone.

The hard problem: nobody says which library will launch the work. Torch's books are kept whenever torch is
at work in this process and the stream is one that torch's memory can be used on, whatever kind of object
named it; and none of the frameworks is imported before it is chosen.
"""

from __future__ import annotations

import sys
from typing import Any

from .._driver import contexts
from .._driver.bindings import Driver
from .protocols import Framework
from .streams import DEFAULT_STREAMS, as_handle


def framework_for(driver: Driver, stream: Any) -> Framework:
    """The framework that a capture on `stream` (None: on a stream of our own) belongs to."""
    torch = sys.modules.get("torch")
    context = _context(driver, stream)
    if driver.simulated:
        if torch is not None:
            from .simulated import SimulatedTorch

            return driver.once(SimulatedTorch, context)
    elif torch is not None and torch.cuda.is_initialized():
        device = _device(driver, torch, stream, context)
        if device is not None:
            from .pytorch.framework import TorchFramework

            return driver.once(TorchFramework, device)
    from .raw import RawFramework

    return driver.once(RawFramework, context)


def _device(driver: Driver, torch: Any, stream: Any, context: int) -> int | None:
    """The device in whose primary context a stream is: torch works in no other."""
    if stream is None:
        return int(torch.cuda.current_device())
    if isinstance(stream, torch.cuda.Stream):
        return int(stream.device_index)
    return contexts.device_of(driver, context)


def _context(driver: Driver, stream: Any) -> int:
    """The context of a stream; without one the thread's own, or the first device's primary one."""
    handle = 0 if stream is None else as_handle(stream)
    if handle not in DEFAULT_STREAMS:
        return contexts.of_stream(driver, handle)
    return contexts.current(driver) or contexts.primary(driver, 0)
