"""Words that are written in a stream's order, on devices with and without writes of 64 bits."""

from __future__ import annotations

import ctypes

import pytest

from breakable_cuda_graphs import CUDAError
from breakable_cuda_graphs._driver import write_value
from breakable_cuda_graphs._driver.bindings import types

VALUES = [0, 7, (1 << 32) + 5, (1 << 64) - 1]


@pytest.fixture(params=[1, 0], ids=["writes", "fills"])
def write(request, driver, monkeypatch):
    monkeypatch.setattr(driver.module, "cuDeviceGetAttribute", lambda *_: (0, request.param))
    return write_value.writer(driver)


@pytest.mark.parametrize("value", VALUES)
def test_a_word_is_written_whole(driver, write, value):
    stream, memory = driver.cuStreamCreate(1), driver.cuMemAlloc(24)
    words = (ctypes.c_uint64 * 3).from_address(int(memory))
    words[:] = (1, 2, 3)
    write(stream, types.CUdeviceptr(int(memory) + 8), value)
    assert list(words) == [1, value, 3]
    driver.cuMemFree(memory)
    driver.cuStreamDestroy(stream)


def test_a_write_that_fails_raises(driver, write):
    stream = driver.cuStreamCreate(1)
    with pytest.raises(CUDAError, match=r"cuStreamWriteValue64|cuMemsetD32Async"):
        write(types.CUstream(0xDEAD0), types.CUdeviceptr(1 << 40), 5)
    driver.cuStreamDestroy(stream)
