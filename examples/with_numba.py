"""Numba: kernels on a stream of one's own, and a host-side step between them."""

import numpy
from numba import cuda

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph

N = 1024


@cuda.jit
def scale(out, source, factor):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < out.size:
        out[i] = source[i] * factor[0]


@cuda.jit
def add_up(total, source):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < source.size:
        cuda.atomic.add(total, 0, source[i])


stream = cuda.stream()
x = cuda.to_device(numpy.zeros(N, dtype="f4"))
y = cuda.device_array(N, dtype="f4")
out = cuda.device_array(N, dtype="f4")
total = cuda.to_device(numpy.zeros(1, dtype="f4"))
factor = cuda.to_device(numpy.ones(1, dtype="f4"))


@no_graph
def choose(total, factor):  # type: ignore[no-untyped-def]
    """A break: what is copied to the host here is copied at each replay."""
    host = total.copy_to_host(stream=stream)
    stream.synchronize()
    factor.copy_to_device(numpy.array([0.5 if host[0] > 100 else 2], dtype="f4"), stream=stream)
    total.copy_to_device(numpy.zeros(1, dtype="f4"), stream=stream)


def step() -> None:
    """Numba has no current stream: each launch names it."""
    scale[N // 256, 256, stream](y, x, factor)
    add_up[N // 256, 256, stream](total, y)
    choose(total, factor)
    scale[N // 256, 256, stream](out, y, factor)


step()  # compiles; arrays are made before the block too

sequence = CUDAGraphSequence()
with breakable_graph(sequence, stream=stream):
    step()

for k in range(5):
    x.copy_to_device(numpy.full(N, k, dtype="f4"))
    before = factor.copy_to_host()
    sequence.replay(stream)
    stream.synchronize()
    replayed = out.copy_to_host()
    factor.copy_to_device(before)
    step()
    stream.synchronize()
    numpy.testing.assert_array_equal(replayed, out.copy_to_host())
print("Numba: the same as eager")
