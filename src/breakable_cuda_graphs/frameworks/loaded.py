"""Which libraries with device memory of their own are loaded beside a framework.

The hard problem: asking must not load them. What is not in `sys.modules` has made no array and has
launched nothing. What is there may be half loaded, by another thread, or be Numba's own simulator. On
the simulated device none counts: their kernels would run on a real one.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Container
from typing import Any

from .._driver.bindings import Driver

#: What must be there of a module for the adapters to work with it.
_WHOLE = {
    "cupy": operator.attrgetter("cuda.using_allocator", "ndarray"),
    "numba.cuda": operator.attrgetter(
        "cudadrv.driver.Context", "cudadrv.devicearray.DeviceNDArray", "dispatcher._Kernel"
    ),
}

NAMES = tuple(_WHOLE)


def loaded(driver: Driver, name: str) -> Any:
    """The module of a library, or None if it is not loaded or cannot work with this driver."""
    module = None if driver.simulated else sys.modules.get(name)
    if module is None:
        return None
    try:
        _WHOLE[name](module)
    except AttributeError:
        return None
    return module


def newly_loaded(driver: Driver, known: Container[str]) -> list[str]:
    """The libraries that are loaded and not among the known ones. Asked twice a segment: quick."""
    if sys.modules.keys().isdisjoint(NAMES):
        return []
    return [name for name in NAMES if name not in known and loaded(driver, name) is not None]
