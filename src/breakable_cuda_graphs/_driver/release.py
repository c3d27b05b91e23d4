"""The queue that finalizers feed and that gives handles back to the driver at a quiet moment.

The hard problem: Python may run a finalizer at any line of any thread, in the middle of a stream
capture too, and most release calls would invalidate that capture. So a finalizer only appends here,
which cannot fail, and `drain()` does the work: never while one of our captures is open, never in a
forked child, never at interpreter exit. While it works, the thread's capture mode is relaxed, so
that a capture that somebody else has open in this process is not harmed either.

Objects of others (a `torch.cuda.CUDAGraph` in a cycle) call the driver in their finalizers. So the mode of
the thread in which Python's collector runs is relaxed for as long, while a capture of ours is open.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from . import bindings, process
from .enums import RELAXED

#: Something that is released by calling it; kept alive, with all that it holds, until then. A second
#: call does nothing.
Release = Callable[[], None]

_queue: deque[tuple[int, Release]] = deque()
_draining = threading.Lock()

_log = logging.getLogger("breakable_cuda_graphs")

# The captures of this library that are open in the process; a set, so that noting one twice, after an
# interrupt, is no harm. Adding and discarding are atomic.
_open: set[object] = set()


def later(epoch: int, release: Release) -> None:
    """Queue a release. Called by finalizers: appending is all that it does."""
    queue((epoch, release))


def queue(entry: tuple[int, Release]) -> None:
    """The same for a pair that was made before, so that no memory is needed."""
    if process.can_release(entry[0]):
        _queue.append(entry)
    else:
        leak(entry)


def leak(
    thing: object, py_object: Any = ctypes.py_object, incref: Any = ctypes.pythonapi.Py_IncRef
) -> None:
    """Keep an object for ever: its own finalizer must not run in a child or at exit.

    What it calls is bound here, since at the very end `ctypes` is an empty module.
    """
    incref(py_object(thing))


#: One more capture is open: nothing is released until it has ended.
capture_opened: Callable[[object], None] = _open.add

#: A capture has ended; the caller drains when it has put everything else in order.
capture_closed: Callable[[object], None] = _open.discard


def open_captures() -> int:
    """How many captures of this library are open in the process."""
    return len(_open)


def drain() -> int:
    """Release what is queued, if this is a moment at which that is safe; returns how many.

    Raises nothing: what cannot be released now stays in the queue.
    """
    if not _queue or _open or not process.can_release(process.epoch):
        return 0
    if not _draining.acquire(blocking=False):
        return 0  # another thread is at it, or this one from inside a release
    try:
        return _drain_all()
    except Exception as error:  # the thread's mode could not be changed
        _log.warning("handles could not be released now: %s", repr(error))
        return 0
    finally:
        _draining.release()


def _driver_is_ours() -> bool:
    """Leaks what a parent process had queued; whether anything is left that is this process's."""
    for entry in list(_queue):
        if entry[0] != process.epoch:
            _queue.remove(entry)
            leak(entry)
    return bool(_queue)


def _drain_all() -> int:
    released = 0
    if not _driver_is_ours():
        return 0
    with relaxed_thread():
        while _queue and not _open:
            epoch, release = _queue[0]
            if epoch != process.epoch:
                leak(release)
            else:
                try:
                    release()
                except Exception as error:  # one that fails must not keep the others from theirs
                    # Not the error itself: whoever keeps the record would keep what was to be released.
                    _log.error("a handle could not be released: %s", repr(error))
                released += 1
            del release  # it may hold the last reference to something that then queues itself
            _queue.popleft()  # only now: one that is interrupted is called again
    return released


class _Owed(threading.local):
    """What puts this thread's capture mode back, while it is relaxed."""

    outermost: relaxed_thread | None = None


_owed = _Owed()


class relaxed_thread:
    """Inside, this thread's driver calls do not harm captures that are open elsewhere.

    `cuThreadExchangeStreamCaptureMode` swaps the mode of the calling thread; the old one comes back
    at the end whatever happens.
    """

    _previous: Any = None

    def __enter__(self) -> None:
        self._driver = bindings.current()
        mode = bindings.types.CUstreamCaptureMode(RELAXED)
        if _owed.outermost is None:
            _owed.outermost = self
        exchange = self._driver.module.cuThreadExchangeStreamCaptureMode
        code, self._previous = exchange(mode)  # in one statement: an interrupt may lie between two
        if code:
            raise self._driver.error("cuThreadExchangeStreamCaptureMode", code)

    def __exit__(self, *_: Any) -> None:
        code: Any = 0
        if self._previous is not None:
            try:
                code, _ = self._driver.module.cuThreadExchangeStreamCaptureMode(self._previous)
            except Exception as error:  # what was done inside must not look as if it had failed
                code = error
        if _owed.outermost is self and not code:
            _owed.outermost = None


class _Collecting(threading.local):
    """This thread's mode while the collector runs in it."""

    relaxed: relaxed_thread | None = None


_collecting = _Collecting()


def guard_collections() -> None:
    """From now on, in this process, no collection harms a capture of ours."""
    if _around_collection not in gc.callbacks:
        gc.callbacks.append(_around_collection)


def _around_collection(phase: str, _: object) -> None:
    """Called by the collector, which is never at work twice, before and after its work."""
    if phase == "start":
        if _open and not process.exiting and not process.driver_lost_in_fork():
            relaxed = relaxed_thread()
            with contextlib.suppress(Exception):  # it collects all the same; nobody could be told
                relaxed.__enter__()
                _collecting.relaxed = relaxed
    elif _collecting.relaxed is not None:
        relaxed, _collecting.relaxed = _collecting.relaxed, None
        relaxed.__exit__()


def put_thread_back() -> None:
    """End what an interrupt or a failed call has kept from ending.

    Called where no `relaxed_thread` can be open.
    """
    if _owed.outermost is not None:
        _owed.outermost.__exit__()


def pending() -> int:
    """How many releases are queued (for tests and for `doctor`)."""
    return len(_queue)
