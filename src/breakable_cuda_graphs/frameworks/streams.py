"""What counts as a stream: torch, CuPy, Numba, cuda.core, anything with the protocol, or a handle.

The hard problem: each library spells it differently, and zero is a stream too (the legacy default
one), so 'nothing given' and 'the default stream' must stay apart.
"""

from __future__ import annotations

from typing import Any

from . import errors

#: Handles that mean a default stream: null, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD.
DEFAULT_STREAMS = {0: "legacy default", 1: "legacy default", 2: "per-thread default"}

_END = 1 << 64  # a handle is a pointer


def as_handle(stream: Any) -> int:
    """The driver's handle of a stream-like object, as an int; 0 is the legacy default stream.

    Accepts a torch stream (`.cuda_stream`), an object with the `__cuda_stream__` protocol
    (https://nvidia.github.io/cuda-python/cuda-core/latest/interoperability.html), a CuPy stream
    (`.ptr`), a Numba stream or bindings object (`.handle`, or convertible to int), or an int.
    Raises `TypeError` for anything else.
    """
    if isinstance(stream, bool):
        raise errors.not_a_stream(stream)
    if isinstance(stream, int):
        return _checked(stream, stream)
    handle = getattr(stream, "cuda_stream", None)  # before the protocol: torch 2.9 has only this
    if handle is None:
        handle = _from_protocol(stream)
    if handle is None:
        handle = getattr(stream, "ptr", None)
    if handle is None:
        handle = getattr(stream, "handle", None)
        handle = getattr(handle, "value", handle)  # Numba wraps it in a ctypes pointer
    if handle is None and type(stream).__name__ == "CUstream":
        handle = stream
    if handle is None:
        if hasattr(stream, "handle"):  # Numba's default stream: a null ctypes pointer
            return 0
        raise errors.not_a_stream(stream)
    try:
        return _checked(int(handle), stream)
    except (TypeError, ValueError):
        raise errors.not_a_stream(stream) from None


def _checked(handle: int, stream: Any) -> int:
    if 0 <= handle < _END:
        return handle
    raise errors.not_a_stream(stream)


def refuse_default(stream: Any) -> None:
    """Raise `CaptureError` for a stream-like object on which no capture can begin."""
    name = DEFAULT_STREAMS.get(as_handle(stream))
    if name is not None:
        raise errors.capture_on_default_stream(name)


def _from_protocol(stream: Any) -> Any:
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        return None
    value = protocol() if callable(protocol) else protocol
    if not isinstance(value, tuple) or len(value) != 2 or value[0] != 0:
        raise errors.not_a_stream(stream)
    return value[1]
