"""Kernels whose names and arguments the device tests know, and launches of them.

The hard problem: what a graph says of a kernel is only worth comparing with what was really
launched, so the launches here go through the driver, with arguments laid out by hand.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy

from breakable_cuda_graphs._driver import bindings, contexts, nvrtc
from breakable_cuda_graphs.graph.nodes import KernelNode

from . import libraries
from .helpers import torch

BLOCK = 64

SOURCE = """
extern "C" __global__ void known_scale(float* out, const float* in, float factor, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = in[i] * factor;
}
struct Mixed { double scale; int shift; char flag; };
extern "C" __global__ void known_mixed(
    float* out, Mixed mixed, unsigned short half_bits, long long big, char small)
{
    out[threadIdx.x] = (float)(mixed.scale + mixed.shift + mixed.flag + half_bits + big + small);
}
extern "C" __global__ void known_nothing() {}
extern "C" __global__ void known_shared(float* out)
{
    extern __shared__ float words[];
    words[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = words[blockDim.x - 1 - threadIdx.x];
}
__device__ float twice(float x) { return 2 * x; }
__global__ void known_mangled(float* out) { out[threadIdx.x] = twice(threadIdx.x); }
extern "C" __global__ void known_decrement(int* counter, float* sum)
{
    *sum += *counter;
    *counter -= 1;
}
"""

f32, i32 = numpy.float32, numpy.int32


class Mixed(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_double), ("shift", ctypes.c_int), ("flag", ctypes.c_byte))


def kernel(name: str = "known_scale") -> Any:
    """A kernel of the source above; asking for it in a capture adds nothing to that."""
    driver = bindings.current()
    contexts.ensure(driver, contexts.primary(driver, 0))
    return nvrtc.function(driver, SOURCE, name)


def launch(function: Any, grid: int, block: int, *args: Any, stream: Any = None,
           shared_bytes: int = 0) -> None:  # fmt: skip
    """Launch on a raw stream handle, by default torch's current one. A tensor is its address."""
    values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in args]
    table = (ctypes.c_void_p * max(len(values), 1))(*[ctypes.addressof(v) for v in values])
    handle = torch.cuda.current_stream().cuda_stream if stream is None else stream
    bindings.current().cuLaunchKernel(
        function, grid, 1, 1, block, 1, 1, shared_bytes, handle, ctypes.addressof(table), 0
    )


def launch_scale(out: Any, source: Any, factor: float, stream: Any = None) -> None:
    """out = source * factor."""
    count = out.numel()
    launch(
        kernel(), -(-count // BLOCK), BLOCK, out, source, ctypes.c_float(factor),
        ctypes.c_int(count), stream=stream,
    )  # fmt: skip


def add_scale(graph: Any, out: Any, source: Any, factor: float, after: Any = None) -> Any:
    """The same as a node of a graph."""
    count = out.numel()
    args = (out, source, f32(factor), i32(count))
    return graph.kernel(kernel(), -(-count // BLOCK), BLOCK, args, after=after)


# ---------------------------------------------------------------- kernels of libraries


def cupy_scale() -> Any:
    """CuPy's known_cupy(out, source, factor, count), compiled."""
    kernel = libraries.cupy().RawKernel(
        r"""extern "C" __global__ void known_cupy(float* out, const float* in, float f, int n)
        { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) out[i] = in[i] * f; }""",
        "known_cupy",
    )
    kernel.compile()
    return kernel


def numba_scale() -> Any:
    """Numba's known_numba(out, source, factor); compiled at its first launch."""
    cuda = libraries.numba_cuda()

    @cuda.jit
    def known_numba(out, source, factor):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        if i < out.size:
            out[i] = source[i] * factor

    return known_numba


def triton_double() -> Any:
    """Triton's known_triton(out, source, count, BLOCK): out = 2 * source; compiled at its first launch."""
    libraries.triton()
    from .triton_kernels import known_triton

    return known_triton


def found(seq: Any, text: str) -> list[tuple[Any, Any]]:
    """Every (segment, kernel node) whose kernel's name contains a text."""
    from breakable_cuda_graphs import GraphSegment

    return [
        (segment, node)
        for segment in seq.segments
        if isinstance(segment, GraphSegment)
        for node in segment.graph.nodes
        if isinstance(node, KernelNode) and text in node.name
    ]
