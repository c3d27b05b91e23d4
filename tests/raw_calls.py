"""Short words for raw driver answers, in tests that run on the simulator or on a device."""

from __future__ import annotations

import ctypes
from typing import Any

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
NONE, ACTIVE, INVALIDATED = range(3)


def ok(answer: tuple[Any, ...]) -> Any:
    """The outputs of a call that has to succeed."""
    code, *values = answer
    assert int(code) == 0, f"driver call failed with {int(code)}"
    if len(values) == 1:
        return values[0]
    return tuple(values)


def code(answer: tuple[Any, ...]) -> int:
    """The result code as a number."""
    return int(answer[0])


def mode(driver: Any, number: int) -> Any:
    """A capture mode."""
    return driver.CUstreamCaptureMode(number)


def begin(driver: Any, stream: Any, number: int = THREAD_LOCAL) -> None:
    """Open a capture."""
    ok(driver.cuStreamBeginCapture(stream, mode(driver, number)))


def status(driver: Any, stream: Any) -> int:
    """Capture status of a stream."""
    return int(ok(driver.cuStreamIsCapturing(stream)))


def fill(driver: Any, stream: Any, address: Any, value: int, count: int = 1) -> None:
    """One piece of work: set `count` 32-bit words."""
    ok(driver.cuMemsetD32Async(address, value, count, stream))


def here(driver: Any) -> Any:
    """The calling thread's context."""
    return ok(driver.cuCtxGetCurrent())


def words(driver: Any, address: Any, count: int = 1) -> list[int]:
    """32-bit words of device memory, once all work is done; not while something captures."""
    ok(driver.cuCtxSynchronize())
    target = (ctypes.c_uint32 * count)()
    ok(driver.cuMemcpyDtoH(ctypes.addressof(target), address, 4 * count))
    return list(target)


def nodes(driver: Any, graph: Any) -> list[Any]:
    """All nodes of a graph in insertion order."""
    _, count = ok(driver.cuGraphGetNodes(graph, 0))
    if not count:
        return []
    found, count = ok(driver.cuGraphGetNodes(graph, count))
    return list(found)[:count]


def edges(driver: Any, graph: Any) -> set[tuple[int, int]]:
    """All edges as pairs of places in `nodes`."""
    *_, count = ok(driver.cuGraphGetEdges(graph, 0))
    if not count:
        return set()
    sources, targets, _, count = ok(driver.cuGraphGetEdges(graph, count))
    place = {int(node): i for i, node in enumerate(nodes(driver, graph))}
    pairs = zip(sources, targets, strict=True)
    return {(place[int(source)], place[int(target)]) for source, target in pairs}


def kinds(driver: Any, graph: Any) -> list[int]:
    """The kinds of all nodes."""
    return [int(ok(driver.cuGraphNodeGetType(node))) for node in nodes(driver, graph)]


def launch(driver: Any, graph: Any, stream: Any) -> None:
    """Instantiate, launch once, wait, destroy the executable."""
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))
    ok(driver.cuGraphExecDestroy(executable))


def memset_params(driver: Any, address: Any, value: int, width: int = 1) -> Any:
    """CUDA_MEMSET_NODE_PARAMS for 32-bit words."""
    params = driver.CUDA_MEMSET_NODE_PARAMS()
    params.dst = driver.CUdeviceptr(int(address))
    params.value, params.elementSize, params.width, params.height = value, 4, width, 1
    return params


def memcpy_params(driver: Any, target: Any, source: Any, size: int) -> Any:
    """CUDA_MEMCPY3D for a copy between device addresses."""
    params = driver.CUDA_MEMCPY3D()
    device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    params.dstMemoryType = params.srcMemoryType = device
    params.dstDevice = driver.CUdeviceptr(int(target))
    params.srcDevice = driver.CUdeviceptr(int(source))
    params.WidthInBytes, params.Height, params.Depth = size, 1, 1
    return params


def kernel_params(driver: Any, kernel: Any, *values: Any) -> Any:
    """CUDA_KERNEL_NODE_PARAMS for a simulated kernel."""
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.func = kernel.handle
    params.gridDimX = params.gridDimY = params.gridDimZ = 1
    params.blockDimX = params.blockDimY = params.blockDimZ = 1
    if kernel.parameters:
        params.kernelParams = (values, kernel.parameters)
    return params


def launch_kernel(driver: Any, kernel: Any, stream: Any, *values: Any) -> None:
    """cuLaunchKernel with one thread."""
    arguments = (values, kernel.parameters) if kernel.parameters else 0
    ok(driver.cuLaunchKernel(kernel.handle, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0))


def programmatic_config(driver: Any, stream: Any) -> Any:
    """For a launch of one thread that need not wait for the end of the kernel before it."""
    config = driver.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX = config.blockDimY = config.blockDimZ = 1
    config.hStream = stream
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID(6)
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    return config


def arguments(driver: Any, params: Any) -> list[bytes]:
    """The bytes behind `kernelParams`, read as one reads them from the driver."""
    found, index = [], 0
    while True:
        number, _, size = driver.cuFuncGetParamInfo(params.func, index)
        if int(number):
            return found
        cell = ctypes.c_void_p.from_address(int(params.kernelParams) + 8 * index)
        found.append(ctypes.string_at(cell.value or 0, size))
        index += 1
