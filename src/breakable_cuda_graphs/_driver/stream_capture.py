"""Begin, end and look at a stream capture.

The hard problem: a capture that failed has no graph any more (the driver frees it, and a handle
fetched earlier dangles), so the end of a capture is the one call whose result code is an answer
rather than an error. It is returned as a value, and nothing here raises for it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

from ..errors import CUDAError
from . import bindings
from .enums import CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, GLOBAL, RELAXED, THREAD_LOCAL
from .handles import GraphHandle


class Status(IntEnum):
    """`CUstreamCaptureStatus`."""

    NONE = 0
    ACTIVE = 1
    INVALIDATED = 2


#: `capture_error_mode` as torch spells it
MODES = {
    "global": bindings.types.CUstreamCaptureMode(GLOBAL),
    "thread_local": bindings.types.CUstreamCaptureMode(THREAD_LOCAL),
    "relaxed": bindings.types.CUstreamCaptureMode(RELAXED),
}


class Ended(NamedTuple):
    """How a capture ended: a graph that we own now, or the code that says why there is none."""

    code: int
    graph: GraphHandle | None
    is_over: bool = True  # False where the stream still captures


def begin(driver: bindings.Driver, stream: Any, mode: str) -> None:
    """Open a capture on a stream (`cuStreamBeginCapture`)."""
    driver.cuStreamBeginCapture(stream, MODES[mode])


def end(driver: bindings.Driver, stream: Any) -> Ended:
    """End the capture that was begun on this stream, whatever state it is in.

    From another thread than the one that began it (but for relaxed mode) this gives 908 and no graph,
    and ends the capture all the same (seen on a device).
    """
    graph = GraphHandle(driver)
    slot = graph.slot
    code, slot[0] = driver.module.cuStreamEndCapture(stream)
    if not code and slot[0] is not None and int(slot[0]):
        return Ended(0, graph)
    graph.forget()
    try:
        is_over = status(driver, stream) is Status.NONE
    except CUDAError:  # a stream that does not answer has nothing left to end
        is_over = True
    return Ended(int(code) or CAPTURE_INVALIDATED, None, is_over)


def discard(driver: bindings.Driver, stream: Any) -> None:
    """End whatever capture the stream is in, wanting nothing of it; raises if that cannot be done."""
    if status(driver, stream) is not Status.NONE:
        ended = end(driver, stream)
        if ended.graph is not None:
            ended.graph.close()
        if not ended.is_over:
            raise driver.error("cuStreamEndCapture", ended.code)


def status(driver: bindings.Driver, stream: Any) -> Status:
    """Whether the stream is capturing.

    The legacy stream cannot capture, and answers IMPLICIT while one that it would wait for does.
    Raises `CUDAError` for any other error: what is not known must not count as "no".
    """
    code, value = driver.module.cuStreamIsCapturing(stream)
    if not code:
        return Status(int(value))
    if int(code) == CAPTURE_IMPLICIT:
        return Status.NONE
    raise driver.error("cuStreamIsCapturing", code)
