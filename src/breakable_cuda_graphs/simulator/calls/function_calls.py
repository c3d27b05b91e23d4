"""The calls of the simulated driver: functions and their parameters.

The hard problem: a kernel with a Python body has to answer about its parameters as a compiled one does.
"""

from __future__ import annotations

from typing import Any

from ..._driver.enums import INVALID_VALUE
from ..kernels import SimulatedKernel, kernel_of
from ..world import DriverCalls, Handle, Refusal, as_int, call, types


class FunctionCalls(DriverCalls):
    """cuFunc*, cuKernel*: what can be asked of a kernel."""

    def _name(self, hfunc: Handle) -> bytes:
        return _asked(hfunc).name.encode()

    cuFuncGetName = call(1, name="cuFuncGetName")(_name)
    cuKernelGetName = call(1, name="cuKernelGetName")(_name)

    @call(2)
    def cuFuncGetParamInfo(self, func: Handle, paramIndex: int) -> tuple[int, int]:
        return _parameter(_asked(func), paramIndex)

    @call(2)
    def cuKernelGetParamInfo(self, kernel: Handle, paramIndex: int) -> tuple[int, int]:
        return _parameter(_asked(kernel), paramIndex)

    @call(1, since=13020)
    def cuFuncGetParamCount(self, func: Handle) -> int:
        return len(kernel_of(func).layout)

    @call(1, since=13020)
    def cuKernelGetParamCount(self, kernel: Handle) -> int:
        return len(kernel_of(kernel).layout)

    @call(1)
    def cuKernelGetFunction(self, kernel: Handle) -> Any:
        return kernel_of(kernel).handle

    @call(1)
    def cuFuncGetAttribute(self, attrib: int, hfunc: Handle) -> int:
        kernel_of(hfunc)
        return 1024 if int(attrib) == 0 else 0  # threads a block

    @call(1)
    def cuFuncIsLoaded(self, function: Handle) -> Any:
        kernel_of(function)
        return types.CUfunctionLoadingState(1)


def _asked(handle: Handle) -> SimulatedKernel:
    """The kernel that a question is about: here a null handle is another error than in a launch."""
    if not as_int(handle):
        raise Refusal(INVALID_VALUE)
    return kernel_of(handle)


def _parameter(kernel: SimulatedKernel, index: int) -> tuple[int, int]:
    if not 0 <= index < len(kernel.layout):
        raise Refusal(INVALID_VALUE)
    return kernel.layout[index]
