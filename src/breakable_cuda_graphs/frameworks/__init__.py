"""One small file or folder a framework: what it must be told when a segment begins and ends.

    base.py       the protocols
    pytorch/      torch, whose allocator and generators have to see a capture as their own
    raw.py        streams of anybody, captured by the driver alone
    simulated.py  torch's CPU tensors on the simulated device

The hard problem here: to choose. Torch's books are kept whenever torch is at work in this process
and the stream is one that torch's memory can be used on, whatever kind of object named it.
"""

from __future__ import annotations

import sys
from typing import Any

from .._driver.bindings import Driver
from .base import Framework

__all__ = ["choose"]

_made: dict[tuple[int, str, int], Framework] = {}


def choose(driver: Driver, stream: Any) -> Framework:
    """The framework that a capture on `stream` (None: on a stream of our own) belongs to."""
    torch = sys.modules.get("torch")
    if driver.simulated:
        if torch is not None:
            from .simulated import SimulatedTorch

            return _once(driver, "simulated torch", 0, SimulatedTorch)
    elif torch is not None and torch.cuda.is_initialized():
        device = _torch_device(driver, torch, stream)
        if device is not None:
            from .pytorch import TorchFramework

            return _once(driver, "torch", device, TorchFramework)
    from .raw import RawFramework

    return _once(driver, "raw", _current_device(driver), RawFramework)


def _once(driver: Driver, name: str, device: int, make: Any) -> Framework:
    key = (id(driver), name, device)
    if key not in _made:
        _made[key] = make(driver, device)
    return _made[key]


def _torch_device(driver: Driver, torch: Any, stream: Any) -> int | None:
    """The device of a stream in a primary context, the only ones that torch works in."""
    if stream is None:
        return int(torch.cuda.current_device())
    if isinstance(stream, torch.cuda.Stream):
        return int(stream.device_index)
    from ..streams import DEFAULT_STREAMS, as_handle

    handle = as_handle(stream)
    if handle in DEFAULT_STREAMS:
        return int(torch.cuda.current_device())
    context = _stream_context(driver, handle)
    for device in range(torch.cuda.device_count()):
        if context == _primary_context(driver, device):
            return device
    return None


def _stream_context(driver: Driver, handle: int) -> int:
    from .._driver.bindings import types

    return int(driver.cuStreamGetCtx(types.CUstream(handle)))


def _primary_context(driver: Driver, device: int) -> int:
    """The primary context of a device that is active, else 0."""
    _, active = driver.cuDevicePrimaryCtxGetState(device)
    if not active:
        return 0
    context = int(driver.cuDevicePrimaryCtxRetain(device))
    driver.cuDevicePrimaryCtxRelease(device)
    return context


def _current_device(driver: Driver) -> int:
    return int(driver.cuCtxGetDevice()) if int(driver.cuCtxGetCurrent()) else 0
