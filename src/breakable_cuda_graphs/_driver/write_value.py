"""Words of eight bytes in device memory, written by the driver where a stream has come to.

The hard problem: it has to cost a replay next to nothing, so no kernel and no pinned memory is used for it.
A device that takes no writes of 64 bits in a stream has them filled, half a word at a time.

Source: the driver API's stream memory operations, cuStreamWriteValue64, and the attribute
CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import bindings

#: Writes a word: a stream, an address (CUdeviceptr) and a number from 0 to 2**64 - 1.
Writer = Callable[[Any, Any, int], None]

_HALF = 1 << 32


def writer(driver: bindings.Driver) -> Writer:
    """What writes words on the device of the current context."""
    attribute = bindings.types.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    can_write = driver.cuDeviceGetAttribute(attribute, driver.cuCtxGetDevice())
    return _whole(driver) if can_write else _in_halves(driver)


def _whole(driver: bindings.Driver) -> Writer:
    call = driver.raw("cuStreamWriteValue64")

    def write(stream: Any, address: Any, value: int) -> None:
        (code,) = call(stream, address, value, 0)
        if code:
            raise driver.error("cuStreamWriteValue64", code)

    return write


def _in_halves(driver: bindings.Driver) -> Writer:
    def write(stream: Any, address: Any, value: int) -> None:
        driver.cuMemsetD32Async(address, value % _HALF, 1, stream)
        driver.cuMemsetD32Async(int(address) + 4, value // _HALF, 1, stream)

    return write
