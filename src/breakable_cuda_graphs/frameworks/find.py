"""Who knows a value as a device array: the framework of the block, or a library beside it.

The hard problem: each value that a break is given or returns is asked about, and most are numbers or
strings. So those are told by their type alone, and a library is asked only once it is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import loaded
from .arrays import ForeignArrays, interface_of
from .protocols import Arrays, Framework

#: Values that are certainly no arrays, and most of what breaks are given.
_PLAIN = (int, float, str, bytes, bool, type(None))


def finder(framework: Framework) -> Callable[[Any], Arrays | None]:
    """The function that tells who knows a value as a device array: the framework, or another.

    No bound method, and always the same arrays for a library: results are compared by them.
    """
    key = (finder, framework.arrays)
    made: Callable[[Any], Arrays | None] | None = framework.driver.cache.get(key)
    if made is None:
        made = framework.driver.cache[key] = functools.partial(_find, framework, {})
    return made


def _find(framework: Framework, known: dict[str, Arrays], value: Any) -> Arrays | None:
    if type(value) in _PLAIN:
        return None
    if framework.arrays.owns(value):
        return framework.arrays
    for name in loaded.newly_loaded(framework.driver, ()):
        if name not in known:
            known[name] = _arrays_of(framework, name, loaded.loaded(framework.driver, name))
        if known[name].owns(value):
            return known[name]
    if interface_of(value) is None or framework.driver.simulated:
        return None
    return known.setdefault("foreign", ForeignArrays())


def _arrays_of(framework: Framework, name: str, module: Any) -> Arrays:
    if name == "cupy":
        from .cupy import CupyArrays

        return CupyArrays(module)
    from .numba import NumbaArrays

    return NumbaArrays(module, framework)
