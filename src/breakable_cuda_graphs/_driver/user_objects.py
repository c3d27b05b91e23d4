"""Keep Python objects for as long as a graph of somebody else needs them.

The hard problem: the driver tells when a graph and all that was made from it is gone, but on a
thread that may neither take the GIL for long nor call CUDA. The destructor that it is given is
therefore libc's own `sem_post` on a semaphore of ours: no Python runs there. The objects are let go
at a later call of this library that finds the semaphore raised.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from . import bindings
from .enums import MOVE, NO_DESTRUCTOR_SYNC

_SEMAPHORE_BYTES = 64  # sizeof(sem_t) is 32 on 64-bit Linux

_libc = ctypes.CDLL(None)
_held: list[tuple[Any, object]] = []
_lock = threading.Lock()


def hold(driver: bindings.Driver, graph: Any, thing: object) -> None:
    """Keep `thing` until the graph, its clones and its executables are gone."""
    sweep()
    semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
    _libc.sem_init(semaphore, 0, 0)
    destructor = ctypes.cast(_libc.sem_post, ctypes.c_void_p).value
    signal = (ctypes.addressof(semaphore), bindings.types.CUhostFn(destructor))
    flags = bindings.types.CUuserObject_flags(NO_DESTRUCTOR_SYNC)
    held, owner = (semaphore, thing), None
    try:
        with _lock:
            _held.append(held)
        owner = driver.cuUserObjectCreate(*signal, 1, flags)
        driver.cuGraphRetainUserObject(graph, owner, 1, MOVE)
    except BaseException:
        if owner is None:
            with _lock:
                _held[:] = [pair for pair in _held if pair is not held]
        else:
            driver.cuUserObjectRelease(owner, 1)  # raises the semaphore too, and `sweep` lets go
        raise


def sweep() -> None:
    """Let go of what no graph needs any more."""
    if not _held:
        return
    with _lock:
        gone = [pair for pair in _held if _libc.sem_trywait(pair[0]) == 0]
        for pair in gone:
            _held.remove(pair)


def held() -> int:
    """How many objects are kept (for tests)."""
    return len(_held)
