"""The names of C++ functions as people write them.

The hard problem: kernels are known by mangled names, and neither the driver nor the bindings can
read them. The C++ runtime that is loaded with nearly every framework can; where it is missing, names
stay as they are. Itanium C++ ABI, `__cxa_demangle`.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_LIBRARY = "libstdc++.so.6"


@functools.cache
def _demangler() -> Any:
    try:
        function = ctypes.CDLL(_LIBRARY).__cxa_demangle
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return function


@functools.lru_cache(maxsize=4096)
def demangled(name: str) -> str:
    """A mangled name in C++, any other name as it is."""
    demangle = _demangler() if name.startswith("_Z") else None
    if demangle is None:
        return name
    status = ctypes.c_int()
    address = demangle(name.encode(), None, None, ctypes.byref(status))
    if not address:
        return name
    try:
        return ctypes.string_at(address).decode(errors="replace")
    finally:
        _free(address)


def _free(address: int) -> None:
    free = ctypes.CDLL(None).free
    free.argtypes = (ctypes.c_void_p,)
    free(address)
