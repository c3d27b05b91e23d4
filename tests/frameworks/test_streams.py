"""What counts as a stream: every library's spelling, handles, and nothing else."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from breakable_cuda_graphs._driver.bindings import types
from breakable_cuda_graphs.frameworks.streams import DEFAULT_STREAMS, as_handle


class Protocol:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __cuda_stream__(self) -> Any:
        return self.value


class Number:
    def __init__(self, value: int) -> None:
        self.handle = self
        self.value = value

    def __int__(self) -> int:
        return self.value


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (2, 2),
        (0x7F00, 0x7F00),
        (SimpleNamespace(cuda_stream=5), 5),  # torch
        (SimpleNamespace(cuda_stream=0), 0),
        (Protocol((0, 6)), 6),
        (SimpleNamespace(__cuda_stream__=(0, 7)), 7),  # a property, as some libraries had it
        (SimpleNamespace(ptr=8), 8),  # CuPy
        (SimpleNamespace(ptr=0), 0),
        (SimpleNamespace(handle=9), 9),
        (SimpleNamespace(handle=ctypes.c_void_p(10)), 10),  # Numba
        (SimpleNamespace(handle=ctypes.c_void_p(0)), 0),  # Numba's default stream
        (SimpleNamespace(handle=types.CUstream(11)), 11),
        (types.CUstream(12), 12),
    ],
)
def test_each_spelling_gives_the_handle(stream, handle):
    assert as_handle(stream) == handle


@pytest.mark.parametrize(
    "thing",
    [
        None,
        True,
        False,
        "stream",
        1.5,
        object(),
        Protocol((1, 6)),
        Protocol(6),
        Protocol((0, 6, 7)),
        SimpleNamespace(handle="text"),
        SimpleNamespace(ptr=[]),
        -1,
        1 << 64,
        SimpleNamespace(ptr=-1),
    ],
)
def test_anything_else_is_refused_by_its_type(thing):
    with pytest.raises(TypeError, match=type(thing).__name__):
        as_handle(thing)


def test_torchs_attribute_wins_over_the_protocol():
    class Both(Protocol):
        cuda_stream = 3

    assert as_handle(Both((0, 4))) == 3


def test_the_default_streams_have_names():
    assert set(DEFAULT_STREAMS) == {0, 1, 2}
    assert "per-thread" in DEFAULT_STREAMS[2]
