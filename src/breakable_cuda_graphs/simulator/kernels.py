"""Kernels whose body is a Python callable, and the bytes of their arguments.

The hard problem: kernel arguments cross the driver's border as untyped bytes behind `void**`, in
three spellings (the bindings' tuple, an array of addresses, one packed buffer), and the driver
copies them at once and hands out addresses of its own copies later. A simulated kernel knows its
parameter types, so the bytes can be cut to size on the way in and typed again for the body.

A body gets one value a parameter: what `ctypes` makes of it (addresses are ints; a structure is an
instance). `current_launch()` says grid, block and shared bytes. A body must not call the driver.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._driver.enums import INVALID_HANDLE, INVALID_VALUE
from .._driver.kernel_params import layout_of, packed_buffer
from .._driver.node_params import Dim
from .._driver.set_params import argument_table, packed_arguments
from .world import Handle, Refusal, address_of, as_int, new_address, types

#: Weak: a kernel lives as long as its maker or a node that launches it.
_kernels: weakref.WeakValueDictionary[int, SimulatedKernel] = weakref.WeakValueDictionary()


class SimulatedKernel:
    """A kernel of the simulated driver.

    `parameters` are ctypes types, one a parameter of `fn`. `context` binds it to one context, as a
    `CUfunction` is (0: usable in any, as a `CUkernel` is). With `packed=True` its nodes hand their
    arguments out in the packed-buffer form (`extra`), as cuBLAS's Hopper kernels do.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        parameters: Sequence[Any] = (),
        *,
        name: str | None = None,
        context: Handle = 0,
        packed: bool = False,
    ) -> None:
        self.fn = fn
        self.parameters = tuple(parameters)
        self.name: str = name or str(getattr(fn, "__name__", "kernel"))
        self.context = as_int(context)
        self.packed = packed
        self.layout = layout_of(self.parameters)
        self._function, self._kernel = new_address(), new_address()
        _kernels[self._function] = _kernels[self._kernel] = self

    @property
    def handle(self) -> Any:
        """The `CUfunction`."""
        return types.CUfunction(self._function)

    @property
    def kernel_handle(self) -> Any:
        """The `CUkernel`."""
        return types.CUkernel(self._kernel)

    def __int__(self) -> int:
        return self._function

    def __repr__(self) -> str:
        return f"<SimulatedKernel {self.name}>"


def kernel_of(*handles: Handle) -> SimulatedKernel:
    """The kernel behind the first handle that is not null."""
    for handle in handles:
        if as_int(handle):
            kernel = _kernels.get(as_int(handle))
            if kernel is None:
                raise Refusal(INVALID_HANDLE)
            return kernel
    raise Refusal(INVALID_HANDLE)


# ---------------------------------------------------------------- arguments


def has_table(params: Any) -> bool:
    """Whether a launch gives its arguments one by one."""
    return isinstance(params, tuple) or bool(address_of(params))


def has_buffer(extra: Any) -> bool:
    """Whether a launch gives its arguments as one buffer."""
    return bool(address_of(extra))


def copy_arguments(kernel: SimulatedKernel, params: Any, extra: Any) -> tuple[bytes, ...]:
    """The bytes of each argument, copied out of whichever form the caller chose."""
    if not kernel.layout:
        return ()
    if isinstance(params, tuple):
        return _from_tuple(kernel, params)
    table = address_of(params)
    if table:
        return _from_table(kernel, table)
    packed = packed_buffer(address_of(extra))
    if not packed:
        raise Refusal(INVALID_VALUE)
    return tuple(packed[at : at + size].ljust(size, b"\0") for at, size in kernel.layout)


def _from_table(kernel: SimulatedKernel, table: int) -> tuple[bytes, ...]:
    addresses = (ctypes.c_void_p * len(kernel.layout)).from_address(table)
    if not all(addresses):
        raise Refusal(INVALID_VALUE)
    return tuple(
        ctypes.string_at(address, size)
        for address, (_, size) in zip(addresses, kernel.layout, strict=True)
        if address
    )


def _from_tuple(kernel: SimulatedKernel, params: tuple[Any, ...]) -> tuple[bytes, ...]:
    values, ctypes_types = params
    if len(values) != len(ctypes_types):
        raise TypeError("kernelParams: as many ctypes types as values")
    if len(values) < len(kernel.layout):
        raise Refusal(INVALID_VALUE)
    return tuple(
        _argument_bytes(value, kind, size)
        for value, kind, (_, size) in zip(values, ctypes_types, kernel.layout, strict=False)
    )


def _argument_bytes(value: Any, kind: Any, size: int) -> bytes:
    """One value of the tuple form, as the bindings lay it out."""
    if isinstance(value, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)):
        data = bytes(value)
    elif callable(getattr(value, "getPtr", None)):
        data = ctypes.string_at(value.getPtr(), size)
    elif kind is None:
        raise TypeError(f"kernelParams: no ctypes type for {type(value).__name__}")
    else:
        data = bytes(kind(value if isinstance(value, float) else int(value)))
    if len(data) < size:  # a driver would read past the value's end
        raise Refusal(INVALID_VALUE)
    return data[:size]


@dataclass(frozen=True)
class ArgumentBuffers:
    """Memory of the driver's own that shows a node's arguments: valid as long as this lives."""

    kernel_params: int
    extra: int
    keep: object


def expose_arguments(
    kernel: SimulatedKernel, arguments: tuple[bytes, ...], *, packed: bool
) -> ArgumentBuffers:
    """Copies of the arguments behind the form in which a node shows them; none for no arguments."""
    if not arguments:
        return ArgumentBuffers(0, 0, None)
    if packed:
        extra, keep, _ = packed_arguments(kernel.layout, arguments)
        return ArgumentBuffers(0, extra, keep)
    table, keep, _ = argument_table(arguments)
    return ArgumentBuffers(table, 0, keep)


# ---------------------------------------------------------------- inside a running kernel


@dataclass(frozen=True)
class Launch:
    """What a running kernel may know of its launch, and the conditional handles it may set."""

    grid: Dim
    block: Dim
    shared_bytes: int
    conditionals: dict[int, int]


class _Running(threading.local):
    launch: Launch | None = None


_running = _Running()


def run_kernel(kernel: SimulatedKernel, arguments: tuple[bytes, ...], launch: Launch) -> None:
    """Call a kernel's body with its typed arguments."""
    values = [
        _typed(parameter, data)
        for parameter, data in zip(kernel.parameters, arguments, strict=True)
    ]
    _running.launch = launch
    try:
        kernel.fn(*values)
    finally:
        _running.launch = None


def _typed(parameter: Any, data: bytes) -> Any:
    value = parameter.from_buffer_copy(data)
    if isinstance(value, ctypes._SimpleCData):
        return 0 if value.value is None else value.value
    return value


def current_launch() -> Launch:
    """The launch that is running on this thread; only a kernel's body may ask."""
    if _running.launch is None:
        raise RuntimeError("no simulated kernel is running on this thread")
    return _running.launch


def set_conditional(handle: int, value: int) -> None:
    """`cudaGraphSetConditional`: device code, so only a kernel's body may call it."""
    conditionals = current_launch().conditionals
    if int(handle) not in conditionals:
        raise RuntimeError(f"conditional handle {int(handle):#x} is not of the running graph")
    conditionals[int(handle)] = int(value)


def conditional_setter(flag: Any = ctypes.c_uint32) -> SimulatedKernel:
    """A kernel `(handle, address of a flag of that ctypes type)` that sets the handle from it."""

    def set_from_flag(handle: int, address: int) -> None:
        set_conditional(handle, int(flag.from_address(address).value))

    return SimulatedKernel(
        set_from_flag, (ctypes.c_uint64, ctypes.c_void_p), name="set_conditional"
    )
