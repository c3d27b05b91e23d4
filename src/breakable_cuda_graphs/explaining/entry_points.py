"""CuPy's and Numba's own ways to wait, to copy, to call back and to compile, where they are loaded.

The hard problem: both are partly compiled, so some of their functions cannot be replaced, and both call
themselves inside without passing by the names that users know. What is listed here are the names at
which a user's call enters and can be seen; a trial capture tells of the rest.

Names: cupy/cuda/compiler.py, cupy/cuda/stream.pyx; numba_cuda/numba/cuda/{dispatcher,api}.py and
cudadrv/{driver,devicearray}.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple


class EntryPoint(NamedTuple):
    """A function of a library: where it is, its name, what calling it means, what to call it."""

    owner: Any
    name: str
    kind: str
    operator: str
    from_host: bool = False  # it counts only where the first argument is on the host


_CUPY_READS = ("get", "item", "tolist", "__float__", "__int__", "__bool__", "__repr__", "__str__")
_CUPY_RUNTIME = {
    "deviceSynchronize": "sync", "streamSynchronize": "sync", "eventSynchronize": "sync",
    "memcpy": "sync", "launchHostFunc": "callback", "streamAddCallback": "callback",
}  # fmt: skip


def entries() -> Iterator[EntryPoint]:
    """What can be seen of the libraries that are loaded."""
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        yield from _cupy(cupy)
    if "numba.cuda" in sys.modules:
        yield from _numba(sys.modules)


def _cupy(cupy: Any) -> Iterator[EntryPoint]:
    for name in _CUPY_READS:
        yield EntryPoint(cupy.ndarray, name, "host read", f"cupy.ndarray.{name}")
    yield EntryPoint(cupy.ndarray, "set", "pageable copy", "cupy.ndarray.set")
    for name in ("array", "asarray", "ascontiguousarray"):
        yield EntryPoint(cupy, name, "pageable copy", f"cupy.{name}", from_host=True)
    for name, kind in _CUPY_RUNTIME.items():
        yield EntryPoint(cupy.cuda.runtime, name, kind, f"cupy.cuda.runtime.{name}")
    stream = cupy.cuda.stream._BaseStream  # of streams of all kinds, external ones too
    yield EntryPoint(stream, "synchronize", "sync", "cupy.cuda.Stream.synchronize")
    yield EntryPoint(stream, "launch_host_func", "callback", "cupy.cuda.Stream.launch_host_func")
    yield EntryPoint(stream, "add_callback", "callback", "cupy.cuda.Stream.add_callback")
    yield EntryPoint(cupy.cuda.Event, "synchronize", "sync", "cupy.cuda.Event.synchronize")
    yield EntryPoint(cupy.cuda.compiler, "_compile_with_cache_cuda", "compile", "CuPy's compiler")


def _numba(modules: Any) -> Iterator[EntryPoint]:
    cuda = modules["numba.cuda"]
    yield EntryPoint(cuda, "synchronize", "sync", "numba.cuda.synchronize")
    yield EntryPoint(cuda, "to_device", "pageable copy", "numba.cuda.to_device", from_host=True)
    driver = modules.get("numba.cuda.cudadrv.driver")
    if driver is not None:
        yield EntryPoint(driver.Stream, "synchronize", "sync", "numba.cuda.stream.synchronize")
        yield EntryPoint(
            driver.Stream, "add_callback", "callback", "numba.cuda.stream.add_callback"
        )
        yield EntryPoint(driver.Event, "synchronize", "sync", "numba.cuda.event.synchronize")
    arrays = modules.get("numba.cuda.cudadrv.devicearray")
    if arrays is not None:
        array = arrays.DeviceNDArrayBase
        yield EntryPoint(array, "copy_to_host", "host read", "DeviceNDArray.copy_to_host")
    dispatcher = modules.get("numba.cuda.dispatcher")
    if dispatcher is not None:
        yield EntryPoint(dispatcher._Kernel, "__init__", "compile", "Numba's compiler")


def is_on_host(value: Any) -> bool:
    """Whether a value would have to be copied to the device: no array of a device."""
    return not hasattr(value, "__cuda_array_interface__")
