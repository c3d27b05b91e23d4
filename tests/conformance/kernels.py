"""A few tiny kernels by name: compiled for the device, or Python callables on the simulator.

The hard problem: both must be the same kernel, parameter for parameter, or a rule about argument
bytes compares two things. Each kernel is one entry with its source, its parameters and its callable.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from breakable_cuda_graphs._driver import nvrtc
from breakable_cuda_graphs.simulator import SimulatedKernel, current_launch, set_conditional
from raw_calls import ok

word = ctypes.c_uint32
_POINTER, _HANDLE = ctypes.c_void_p, ctypes.c_uint64


class Pair(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("value", ctypes.c_uint32))


class _Entry(NamedTuple):
    parameters: tuple[Any, ...]
    body: Callable[..., Any]
    source: str


def _add(address: int, value: int) -> None:
    cell = word.from_address(address)
    cell.value += value


def _count(address: int, limit: int, handle: int) -> None:
    _add(address, 1)
    set_conditional(handle, int(word.from_address(address).value < limit))


def _set(handle: int, address: int) -> None:
    set_conditional(handle, word.from_address(address).value)


def _dims(address: int) -> None:
    launch = current_launch()
    (word * 6).from_address(address)[:] = [*launch.grid, *launch.block]


_ENTRIES = {
    "nothing": _Entry((), lambda: None, "nothing() {}"),
    "add": _Entry((_POINTER, word), _add, "add(unsigned* at, unsigned value) { *at += value; }"),
    "add_twice": _Entry(
        (_POINTER, word),
        lambda address, value: _add(address, 2 * value),
        "add_twice(unsigned* at, unsigned value) { *at += 2 * value; }",
    ),
    "add_pair": _Entry(
        (Pair,),
        lambda pair: _add(pair.address, pair.value),
        "add_pair(Pair pair) { *pair.address += pair.value; }",
    ),
    "mixed": _Entry(
        (ctypes.c_uint8, ctypes.c_double, ctypes.c_uint16, Pair),
        lambda small, big, half, pair: _add(pair.address, small + int(big) + half),
        "mixed(unsigned char small, double big, unsigned short half, Pair pair)"
        " { *pair.address += small + (unsigned)big + half; }",
    ),
    "dims": _Entry(
        (_POINTER,),
        _dims,
        "dims(unsigned* out) { if (threadIdx.x + threadIdx.y + threadIdx.z == 0) {"
        " out[0] = gridDim.x; out[1] = gridDim.y; out[2] = gridDim.z;"
        " out[3] = blockDim.x; out[4] = blockDim.y; out[5] = blockDim.z; } }",
    ),
    "set": _Entry(
        (_HANDLE, _POINTER),
        _set,
        "set(unsigned long long handle, const unsigned* flag)"
        " { cudaGraphSetConditional(handle, *flag); }",
    ),
    "count": _Entry(
        (_POINTER, word, _HANDLE),
        _count,
        "count(unsigned* at, unsigned limit, unsigned long long handle)"
        " { *at += 1; cudaGraphSetConditional(handle, *at < limit); }",
    ),
}

SOURCE = (
    'extern "C" __device__ void cudaGraphSetConditional(unsigned long long, unsigned);\n'
    "struct Pair { unsigned* address; unsigned value; };\n"
) + "\n".join(f'extern "C" __global__ void {entry.source}' for entry in _ENTRIES.values())


class Kernel(NamedTuple):
    """A kernel of one driver: its CUfunction, its CUkernel and its ctypes parameters."""

    name: str
    handle: Any
    kernel_handle: Any
    parameters: tuple[Any, ...]
    keep: Any = None


class Kernels:
    """The kernels of one driver, as attributes and by `get`."""

    _made: dict[int, Kernels] = {}  # noqa: RUF012

    def __init__(self, driver: Any) -> None:
        self._found = _simulated() if driver.is_simulated else _compiled(driver)

    @classmethod
    def of(cls, driver: Any) -> Kernels:
        """Compiled once for the device; new ones for each simulated driver."""
        if driver.is_simulated:
            return cls(driver)
        return cls._made.setdefault(0, cls._made.get(0) or cls(driver))

    def get(self, name: str) -> Kernel:
        return self._found[name]

    def __getattr__(self, name: str) -> Kernel:
        try:
            return self._found[name]
        except KeyError:
            raise AttributeError(name) from None


def _simulated() -> dict[str, Kernel]:
    made = {
        name: SimulatedKernel(entry.body, entry.parameters, name=name)
        for name, entry in _ENTRIES.items()
    }
    return {
        name: Kernel(name, kernel.handle, kernel.kernel_handle, kernel.parameters, kernel)
        for name, kernel in made.items()
    }


def _compiled(driver: Any) -> dict[str, Kernel]:
    attribute = driver.CUdevice_attribute
    major, minor = (
        ok(driver.cuDeviceGetAttribute(attribute(number), ok(driver.cuCtxGetDevice())))
        for number in (75, 76)
    )
    image = nvrtc._compile(SOURCE, f"sm_{major}{minor}")
    library = ok(driver.cuLibraryLoadData(image, [], [], 0, [], [], 0))
    found = {}
    for name, entry in _ENTRIES.items():
        kernel = ok(driver.cuLibraryGetKernel(library, name.encode()))
        function = ok(driver.cuKernelGetFunction(kernel))
        found[name] = Kernel(name, function, kernel, entry.parameters)
    return found
