"""cuda.bindings alone: addresses, a stream and a kernel, captured as bare driver calls."""

import ctypes
from typing import Any

from cuda.bindings import driver, nvrtc

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph

SOURCE = rb"""
extern "C" __global__ void twice_plus(float* x, float amount, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = 2 * x[i] + amount;
}
"""
N = 1024


def done(answer: tuple[Any, ...]) -> Any:
    """What a call of the driver or of NVRTC returned; raises if it failed."""
    code, *values = answer
    if int(code):
        raise RuntimeError(f"the call failed with {code!r}")
    return values[0] if len(values) == 1 else values


def compiled(name: bytes) -> Any:
    major, minor = (done(driver.cuDeviceGetAttribute(a, device)) for a in CAPABILITY)
    program = done(nvrtc.nvrtcCreateProgram(SOURCE, b"example.cu", 0, [], []))
    option = f"--gpu-architecture=sm_{major}{minor}".encode()
    done(nvrtc.nvrtcCompileProgram(program, 1, [option]))
    image = b" " * done(nvrtc.nvrtcGetCUBINSize(program))
    done(nvrtc.nvrtcGetCUBIN(program, image))
    return done(driver.cuModuleGetFunction(done(driver.cuModuleLoadData(image)), name))


Attribute = driver.CUdevice_attribute
CAPABILITY = (
    Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
    Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
)
done(driver.cuInit(0))
device = done(driver.cuDeviceGet(0))
done(driver.cuCtxSetCurrent(done(driver.cuDevicePrimaryCtxRetain(device))))
stream = done(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
x = int(done(driver.cuMemAlloc(4 * N)))
kernel = compiled(b"twice_plus")
host = (ctypes.c_float * N)()


def twice_plus(amount: float) -> None:
    arguments = ((x, amount, N), (ctypes.c_void_p, ctypes.c_float, ctypes.c_int))
    done(driver.cuLaunchKernel(kernel, N // 256, 1, 1, 256, 1, 1, 0, stream, arguments, 0))


def read() -> list[float]:
    done(driver.cuMemcpyDtoHAsync(ctypes.addressof(host), x, 4 * N, stream))
    done(driver.cuStreamSynchronize(stream))
    return list(host)


@no_graph
def report(seen: list[float]) -> None:
    """A break: the host looks at what the first segment has made, at each replay."""
    seen.append(read()[0])


seen: list[float] = []
sequence = CUDAGraphSequence()
with breakable_graph(sequence, stream=stream):
    twice_plus(1)
    report(seen)
    twice_plus(3)

seen.clear()
for value in (0, 1, 5):
    host[:] = [value] * N
    done(driver.cuMemcpyHtoDAsync(x, ctypes.addressof(host), 4 * N, stream))
    sequence.replay(stream)
    assert read() == [2 * (2 * value + 1) + 3] * N
assert seen == [1, 3, 11]
print("the driver: the same as eager")
