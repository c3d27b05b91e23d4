"""One small file or folder a framework: what it must be told when a segment begins and ends.

    base.py        the protocols
    pytorch/       torch, whose allocator and generators have to see a capture as their own
    raw.py         streams of anybody, captured by the driver alone
    simulated.py   torch's CPU tensors on the simulated device
    companions.py  the libraries beside the framework of a block
    cupy.py        CuPy: private memory, its current stream, its arrays
    numba.py       Numba: what it must not do inside a segment, and its arrays
    libraries.py   which of them are loaded
    interfaces.py  who knows a value as a device array, and whose memory it lies in
    owners.py      arrays by the addresses that captured kernels have
    collector.py   arrays that Python's collector knows
    gone.py        memory that was given back while its segment was being captured
    enclosed.py    captures that stand on their own, for graphs and bodies

The hard problem here: to choose. Torch's books are kept whenever torch is at work in this process
and the stream is one that torch's memory can be used on, whatever kind of object named it.
"""

from __future__ import annotations

import sys
from typing import Any

from .._driver import contexts
from .._driver.bindings import Driver
from .protocols import Framework
from .streams import DEFAULT_STREAMS, as_handle

__all__ = ["framework_for"]


def framework_for(driver: Driver, stream: Any) -> Framework:
    """The framework that a capture on `stream` (None: on a stream of our own) belongs to."""
    torch = sys.modules.get("torch")
    context = _context(driver, stream)
    if driver.simulated:
        if torch is not None:
            from .simulated import SimulatedTorch

            return _once(driver, context, SimulatedTorch)
    elif torch is not None and torch.cuda.is_initialized():
        device = _device(driver, torch, stream, context)
        if device is not None:
            from .pytorch.framework import TorchFramework

            return _once(driver, device, TorchFramework)
    from .raw import RawFramework

    return _once(driver, context, RawFramework)


def _once(driver: Driver, where: int, make: Any) -> Framework:
    key = (make, where)
    if key not in driver.cache:
        driver.cache[key] = make(driver, where)
    made: Framework = driver.cache[key]
    return made


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
