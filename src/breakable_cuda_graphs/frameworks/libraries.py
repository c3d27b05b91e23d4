"""Which libraries with device memory of their own are loaded beside a framework.

The hard problem: asking must not load them. What is not in `sys.modules` has made no array and has
launched nothing. On the simulated device none counts: their kernels would run on a real one.
"""

from __future__ import annotations

import sys
from typing import Any

from .._driver.bindings import Driver

#: What must be there of a module before it is whole: another thread may be importing it.
_WHOLE = {"cupy": ("cuda", "ndarray"), "numba.cuda": ("cudadrv", "jit")}

NAMES = tuple(_WHOLE)


def loaded(driver: Driver, name: str) -> Any:
    """The module of a library, or None if it is not loaded or cannot work with this driver."""
    module = None if driver.simulated else sys.modules.get(name)
    if module is None or not all(hasattr(module, part) for part in _WHOLE[name]):
        return None
    return module
