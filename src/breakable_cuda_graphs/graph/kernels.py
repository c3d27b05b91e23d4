"""Kernels of every library as one kind of function handle: one small adapter for each.

The hard problem: each library wraps a CUfunction in a class of its own, compiles it at a moment of
its own choosing, and some (Numba, Triton) hand their kernels other arguments than the ones people
write. An adapter gives the handle, what keeps it loaded, and, where it differs, how the arguments
are spelled for the driver.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._driver.bindings import Driver, types
from ..errors import bad_type
from . import errors
from .arguments import array_memory

Arguments = Sequence[Any]


class Function(NamedTuple):
    """A kernel that can be launched: `handle` is a CUfunction or CUkernel, `keep` its library's object.

    `block` and `shared_bytes` are what the kernel was compiled for, if that is fixed; `spelled` turns
    arguments as people write them into the kernel's own, given how many the kernel takes.
    """

    handle: Any
    keep: object
    block: tuple[int, int, int] | None = None
    shared_bytes: int = 0
    spelled: Callable[[Arguments, int], Arguments] | None = None


def as_function(fn: Any) -> Function:
    """The handle behind a kernel of any library.

    Takes a CUfunction or CUkernel, a CUfunction's number, a cuda.core `Kernel`, a CuPy `RawKernel`
    or function, a Numba kernel compiled for one signature, a compiled Triton kernel, and whatever
    has one of the first two as its `.handle`. Raises `TypeError` for anything else.
    """
    if isinstance(fn, (types.CUfunction, types.CUkernel)):
        return Function(fn, fn)
    if isinstance(fn, int) and not isinstance(fn, bool):
        return Function(types.CUfunction(fn), None)
    for adapter in (_numba, _triton, _cupy, _with_handle):
        function = adapter(fn)
        if function is not None:
            return function
    raise errors.not_a_kernel(fn)


# ---------------------------------------------------------------- adapters


def _module_of(fn: Any) -> str:
    return str(type(fn).__module__).partition(".")[0]


def _with_handle(fn: Any) -> Function | None:
    """cuda.core's `Kernel` (CUkernel), and anything else with a handle of the bindings."""
    for name in ("handle", "_handle", "func"):
        handle = getattr(fn, name, None)
        if isinstance(handle, (types.CUfunction, types.CUkernel)):
            return Function(handle, fn)
        if isinstance(handle, ctypes.c_void_p) and handle.value:  # torch.cuda's compiled kernels
            return Function(types.CUfunction(handle.value), fn)
    return None


def _cupy(fn: Any) -> Function | None:
    """`cupy.RawKernel`, compiled here if it was not, and `cupy.cuda.Function`."""
    if _module_of(fn) != "cupy":
        return None
    function = getattr(fn, "kernel", fn)
    pointer = getattr(function, "ptr", None)
    return Function(types.CUfunction(int(pointer)), fn) if pointer else None


def _triton(fn: Any) -> Function | None:
    """`triton.compiler.CompiledKernel`: what `kernel[grid](...)` and `.warmup(...)` return."""
    metadata = getattr(fn, "metadata", None)
    if metadata is None or not hasattr(metadata, "num_warps"):
        return None
    if not getattr(fn, "function", None) and hasattr(fn, "_init_handles"):
        fn._init_handles()
    if not fn.function:
        return None
    scratch = [
        getattr(metadata, name, 0) or 0 for name in ("global_scratch_size", "profile_scratch_size")
    ]

    def spelled(args: Arguments, count: int) -> Arguments:
        """Newer Triton adds addresses of scratch memory; null for a kernel that needs none."""
        missing = count - len(args)
        if 0 < missing <= len(scratch) and not any(scratch):
            return [*args, *(ctypes.c_void_p(0) for _ in range(missing))]
        return args

    warp = getattr(getattr(metadata, "target", None), "warp_size", 32)
    block = (int(warp) * int(metadata.num_warps), 1, 1)
    return Function(
        types.CUfunction(int(fn.function)), fn, block, int(getattr(metadata, "shared", 0)), spelled
    )


def _numba(fn: Any) -> Function | None:
    """A kernel of `numba.cuda.jit` that was compiled for just one signature."""
    if not str(type(fn).__module__).startswith("numba"):
        return None
    overloads = getattr(fn, "overloads", None)
    if overloads is not None:
        if len(overloads) != 1:
            raise errors.kernel_not_compiled_once(len(overloads))
        (fn,) = overloads.values()
    library = getattr(fn, "_codelibrary", None)
    if library is None:
        return None
    handle = library.get_cufunc().handle  # the bindings' object, or up to numba-cuda 0.2x a number
    if not isinstance(handle, (types.CUfunction, types.CUkernel)):
        handle = types.CUfunction(int(getattr(handle, "value", handle)))
    kinds = getattr(getattr(fn, "signature", None), "args", ())

    def spelled(args: Arguments, count: int) -> Arguments:
        if len(args) != len(kinds):
            return args  # spelled out already
        parts: list[Any] = []
        for value, kind in zip(args, kinds, strict=True):
            parts += _numba_array(value, kind) if hasattr(kind, "ndim") else [value]
        return parts

    return Function(handle, fn, spelled=spelled)


def _numba_array(value: Any, kind: Any) -> list[Any]:
    """An array as Numba's kernels take it: two nulls, items, item size, address, shape, strides.

    See `_Kernel._prepare_args` in numba-cuda's dispatcher.
    """
    memory = array_memory(value)
    if memory is None or memory.kind is None:
        raise bad_type("argument", value, "an array")
    shape = tuple(memory.kind[1])
    strides = tuple(memory.kind[2])
    if hasattr(value, "element_size"):  # torch counts strides in elements
        strides = tuple(step * memory.itemsize for step in strides)
    if len(shape) != kind.ndim:
        raise bad_type("argument", value, f"an array of {kind.ndim} dimensions")
    numbers = [ctypes.c_ssize_t(n) for n in (math.prod(shape), memory.itemsize)]
    rest = [ctypes.c_ssize_t(n) for n in (*shape, *strides)]
    nulls = [ctypes.c_void_p(0), ctypes.c_void_p(0)]
    return [*nulls, *numbers, value, *rest]


# ---------------------------------------------------------------- limits

_THREADS, _DYNAMIC_SHARED = (
    0,
    8,
)  # CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, _MAX_DYNAMIC_SHARED_SIZE

#: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (3.0 and later)
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)


def as_dim(value: Any, name: str) -> tuple[int, int, int]:
    """A launch dimension from an int or from one to three ints; the rest are 1."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    try:
        numbers = [int(part.__index__()) for part in parts]
    except AttributeError:
        raise bad_type(name, value, "one to three ints") from None
    if not 1 <= len(numbers) <= 3:
        raise bad_type(name, value, "one to three ints")
    padded = (*numbers, 1, 1)
    return padded[0], padded[1], padded[2]


def check_launch(
    driver: Driver, function: Any, kernel: str, grid: tuple[int, int, int],
    block: tuple[int, int, int], shared_bytes: int,
) -> None:  # fmt: skip
    """Refuse a launch shape that the device or the kernel cannot have, before the driver sees it.

    The driver takes some of them at an edit and fails at the launch. Raises `ValueError`.
    """
    for name, dim, limits in (("grid", grid, _MAX_GRID), ("block", block, _MAX_BLOCK)):
        if any(not 1 <= n <= limit for n, limit in zip(dim, limits, strict=True)):
            raise errors.launch_shape(kernel, name, dim, limits)
    threads = block[0] * block[1] * block[2]
    most = _attribute(driver, function, _THREADS) or 1024
    if threads > most:
        raise errors.too_many_threads(kernel, block, threads, most)
    shared = _attribute(driver, function, _DYNAMIC_SHARED)
    if shared_bytes < 0 or (shared and shared_bytes > shared):
        raise errors.too_much_shared_memory(kernel, shared_bytes, shared)


def _attribute(driver: Driver, function: Any, attribute: int) -> int:
    """An attribute of a kernel; 0 where the driver does not tell."""
    if isinstance(function, types.CUkernel):
        function = driver.cuKernelGetFunction(function)
    found = driver.ask("cuFuncGetAttribute", types.CUfunction_attribute(attribute), function)
    return 0 if found is None else int(found[0])
