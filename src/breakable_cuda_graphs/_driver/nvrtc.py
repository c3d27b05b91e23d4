"""Compile a little CUDA C++ at run time and load it into the current context.

The hard problem: loading a module is a call that no capture but a relaxed one survives, and this may
be asked for in the middle of one. So the compiler, which knows no device, runs first, and the load
happens with this thread's capture mode relaxed; both happen once a context.

NVRTC comes with the bindings' own wheels or with the CUDA toolkit; where it is missing, the error
says so (https://docs.nvidia.com/cuda/nvrtc).
"""

from __future__ import annotations

import threading
from typing import Any

from . import bindings, errors, release

types = bindings.types

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*

#: (driver, context, source) -> module. Never unloaded: graphs name its functions.
_modules: dict[tuple[int, int, str], Any] = {}
_lock = threading.Lock()


def function(driver: bindings.Driver, source: str, name: str) -> Any:
    """A kernel of a source, compiled for the current context's device, as a CUfunction."""
    key = (id(driver), int(driver.cuCtxGetCurrent()), source)
    with _lock:
        module = _modules.get(key)
        if module is None:
            image = _compile(source, _architecture(driver))
            with release.relaxed_thread():
                module = _modules[key] = driver.cuModuleLoadData(image)
    with release.relaxed_thread():
        return driver.cuModuleGetFunction(module, name.encode())


def _architecture(driver: bindings.Driver) -> str:
    device = driver.cuCtxGetDevice()
    major, minor = (
        driver.cuDeviceGetAttribute(types.CUdevice_attribute(attribute), device)
        for attribute in (_MAJOR, _MINOR)
    )
    return f"sm_{major}{minor}"


def _compile(source: str, architecture: str) -> bytes:
    """The machine code of a source."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise errors.no_compiler(error) from error
    try:
        program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], []))
    except RuntimeError as error:  # the library itself is missing
        raise errors.no_compiler(error) from error
    try:
        options = [f"--gpu-architecture={architecture}".encode()]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(code):
            raise errors.does_not_compile(int(code), _log(nvrtc, program))
        image = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, image))
        return bytes(image)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(nvrtc: Any, program: Any) -> str:
    text = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
    _checked(nvrtc.nvrtcGetProgramLog(program, text))
    return str(text.decode(errors="replace")).strip("\0 \n")


def _checked(answer: tuple[Any, ...]) -> Any:
    code, *values = answer
    if int(code):
        raise RuntimeError(f"NVRTC failed with code {int(code)}")
    return values[0] if values else None
