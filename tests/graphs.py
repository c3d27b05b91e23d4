"""What the tests of graphs share: kernels whose bodies are Python, and arrays that they work on.

The hard problem: a launch that did nothing must not pass. So every result starts out as a number
that no kernel here makes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy

from breakable_cuda_graphs import Graph
from breakable_cuda_graphs.simulator import SimulatedKernel

N = 8
UNTOUCHED = -9.0


def array(value: float = UNTOUCHED, n: int = N) -> Any:
    """A new array of n floats; host memory, which the simulated device can reach."""
    return numpy.full(n, value, "f4")


def _scale(out: int, source: int, factor: float, count: int) -> None:
    target = (ctypes.c_float * count).from_address(out)
    given = (ctypes.c_float * count).from_address(source)
    for i in range(count):
        target[i] = given[i] * factor


def scale_kernel(**options: Any) -> SimulatedKernel:
    """out[i] = source[i] * factor, with the arguments (out, source, factor, count)."""
    return SimulatedKernel(
        _scale,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_int),
        **{"name": "scale", **options},
    )


f32 = numpy.float32
i32 = numpy.int32


def scale(
    graph: Graph, out: Any, source: Any, factor: float, after: Any = None, **more: Any
) -> Any:
    """Add the known kernel to a graph."""
    kernel = more.pop("kernel", None) or scale_kernel()
    grid = more.pop("grid", (1, 1, 1))
    args = (out, source, f32(factor), i32(len(out)))
    return graph.kernel(kernel, grid, (N, 1, 1), args, after=after, **more)


def launch_scale(driver: Any, kernel: SimulatedKernel, stream: Any, out: Any, source: Any,
                 factor: float) -> None:  # fmt: skip
    """Launch the known kernel on a stream, as any library would."""
    values = (out.ctypes.data, source.ctypes.data, float(factor), len(out))
    (code,) = driver.cuLaunchKernel(
        kernel.handle, 1, 1, 1, N, 1, 1, 0, stream, (values, kernel.parameters), 0
    )
    assert int(code) == 0
