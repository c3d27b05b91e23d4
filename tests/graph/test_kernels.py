"""Kernels of every library give up their handle, whatever it is wrapped in."""

from __future__ import annotations

import ctypes
import types as python_types
from typing import Any

import pytest

from breakable_cuda_graphs._driver.bindings import types
from breakable_cuda_graphs.graph.kernels import as_function


def numba_kernel(handle: Any) -> Any:
    """What `numba.cuda.jit` makes, compiled for one signature, with this handle in it."""
    library = python_types.SimpleNamespace(
        get_cufunc=lambda: python_types.SimpleNamespace(handle=handle)
    )
    made = type("CUDADispatcher", (), {"__module__": "numba.cuda.dispatcher"})()
    made.overloads = {(): python_types.SimpleNamespace(_codelibrary=library)}
    return made


@pytest.mark.parametrize(
    ("handle", "kind"),
    [
        (types.CUkernel(0x1234), types.CUkernel),  # numba-cuda on cuda.core
        (types.CUfunction(0x1234), types.CUfunction),
        (ctypes.c_void_p(0x1234), types.CUfunction),
        (0x1234, types.CUfunction),
    ],
)
def test_a_kernel_of_numba_keeps_the_kind_of_its_handle(handle: Any, kind: type) -> None:
    function = as_function(numba_kernel(handle))
    assert type(function.handle) is kind
    assert int(function.handle) == 0x1234
