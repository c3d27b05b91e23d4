"""cuda.core: a kernel compiled by NVRTC, launched on a cuda.core stream, with a break between."""

import ctypes

from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph

SOURCE = r"""
extern "C" __global__ void twice_plus(float* x, float amount, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = 2 * x[i] + amount;
}
"""
N = 1024

device = Device()
device.set_current()
stream = device.create_stream()
options = ProgramOptions(arch=f"sm_{device.arch}")
kernel = Program(SOURCE, "c++", options).compile("cubin").get_kernel("twice_plus")
config = LaunchConfig(grid=N // 256, block=256)
buffer = device.allocate(4 * N, stream=stream)
host = (ctypes.c_float * N)()


def read() -> list[float]:
    address = int(buffer.handle)
    (code,) = driver.cuMemcpyDtoHAsync(ctypes.addressof(host), address, 4 * N, stream.handle)
    assert not code
    stream.sync()
    return list(host)


@no_graph
def report(seen: list[float]) -> None:
    """A break: the host looks at what the first segment has made, at each replay."""
    seen.append(read()[0])


def twice_plus(amount: float) -> None:
    launch(stream, config, kernel, buffer, ctypes.c_float(amount), ctypes.c_int(N))


twice_plus(0)  # a kernel is loaded at its first launch, which no capture survives
seen: list[float] = []
sequence = CUDAGraphSequence()
with breakable_graph(sequence, stream=stream):
    twice_plus(1)
    report(seen)
    twice_plus(3)

seen.clear()
for value in (0, 1, 5):
    host[:] = [value] * N
    address = int(buffer.handle)
    (code,) = driver.cuMemcpyHtoDAsync(address, ctypes.addressof(host), 4 * N, stream.handle)
    assert not code
    sequence.replay(stream)
    assert read() == [2 * (2 * value + 1) + 3] * N
assert seen == [1, 3, 11]
sequence.reset()
print("cuda.core: the same as eager")
