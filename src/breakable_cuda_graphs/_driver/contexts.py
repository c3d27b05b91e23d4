"""Which context a thread's driver calls go to.

The hard problem: the CUDA runtime makes the primary context current by itself, the driver does not.
A thread that never touched CUDA has none, and a thread that works in a context of its own must get
it back. So a capture or replay makes its own context current where there is none. Where there is
another, all depends on whose it is: the primary context of a device stands for that device, which
may be changed for a while; a context that somebody made is theirs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from . import bindings

_lock = threading.RLock()  # a finalizer may end a block in the middle, and ask too


def current(driver: bindings.Driver) -> int:
    """The handle of the calling thread's context; 0 if it has none."""
    return int(driver.cuCtxGetCurrent())


def primary(driver: bindings.Driver, device: int) -> int:
    """The primary context of a device; retained once and kept, as the runtime does."""
    key = ("primary context", device)
    with _lock:  # two threads at once would retain it twice
        if key not in driver.cache:
            driver.cache[key] = int(driver.cuDevicePrimaryCtxRetain(device))
        return int(driver.cache[key])


def of_stream(driver: bindings.Driver, handle: int) -> int:
    """The context that a stream was made in."""
    return int(driver.cuStreamGetCtx(bindings.types.CUstream(handle)))


def device_of(driver: bindings.Driver, context: int) -> int | None:
    """The device whose primary context this is; None for a context that somebody made."""
    for device in range(int(driver.cuDeviceGetCount())):
        _, active = driver.cuDevicePrimaryCtxGetState(device)
        if active and primary(driver, device) == context:
            return device
    return None


def ensure(driver: bindings.Driver, context: int) -> bool:
    """Make a context current in a thread that has none; whether it is current now."""
    now = int(driver.cuCtxGetCurrent())
    if not now:
        driver.cuCtxSetCurrent(bindings.types.CUcontext(context))
    return now in (0, context)


def make_current(driver: bindings.Driver, context: int) -> None:
    """`cuCtxSetCurrent`."""
    driver.cuCtxSetCurrent(bindings.types.CUcontext(context))


def instead_of(driver: bindings.Driver, context: int) -> int | None:
    """The context of another device that this one may take the place of for a while.

    0 where nothing has to change: a thread that has no context has this one now. None where the
    current context, or this one, is somebody's own.
    """
    if ensure(driver, context):
        return 0
    before = current(driver)
    is_free = device_of(driver, before) is not None and device_of(driver, context) is not None
    return before if is_free else None


@contextlib.contextmanager
def visited(driver: bindings.Driver, context: int) -> Iterator[None]:
    """Inside, the context is current; afterwards what was before, be it none.

    A thread that has none is on device 0 for the runtime, and would be on another one.
    """
    before = current(driver)
    try:
        with made_current(driver, context):
            yield
    finally:
        if not before:
            make_current(driver, 0)


@contextlib.contextmanager
def made_current(driver: bindings.Driver, context: int) -> Iterator[None]:
    """Inside, the context is current; a thread that had another has it again afterwards."""
    before = current(driver)
    if before == context:
        yield
        return
    driver.cuCtxSetCurrent(bindings.types.CUcontext(context))
    try:
        yield
    finally:
        if before:  # a thread that had none keeps it, as with the runtime
            driver.cuCtxSetCurrent(bindings.types.CUcontext(before))
