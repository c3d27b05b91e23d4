"""CuPy: elementwise work, a reduction and a RawKernel in segments, a host-side step between them."""

import cupy

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph

N = 1024
soften = cupy.RawKernel(
    r"""
    extern "C" __global__ void soften(float* x, float limit, int count)
    {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < count) x[i] = x[i] / (1.0f + fabsf(x[i]) * limit);
    }
    """,
    "soften",
)


@no_graph
def choose(total: cupy.ndarray, factor: cupy.ndarray) -> None:
    """A break: `float(total)` reads the device. CuPy's current stream is the replay's."""
    factor.fill(0.5 if float(total) > 1000 else 2.0)


def step(x: cupy.ndarray, factor: cupy.ndarray) -> cupy.ndarray:
    y = x * 2 + 1  # what is allocated in a segment is private to the sequence
    choose(y.sum(), factor)
    out = y * factor
    soften((N // 256,), (256,), (out, cupy.float32(0.25), cupy.int32(N)))
    return out


x, factor = cupy.zeros(N, dtype="f4"), cupy.zeros(1, dtype="f4")
step(x, factor)  # a kernel is compiled at its first launch, which no capture survives

sequence = CUDAGraphSequence()
with breakable_graph(sequence):
    out = step(x, factor)

for k in range(5):
    x[...] = cupy.arange(N, dtype="f4") / 512 * k
    sequence.replay()
    cupy.testing.assert_array_equal(out, step(x, factor))
print("CuPy: the same as eager")
