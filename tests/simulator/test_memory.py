"""Memory, copies and fills. Uses nothing a device lacks, but for host addresses as device ones."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from .helpers import begin, code, kinds, launch, nodes, ok, words


def test_copies_go_between_host_and_device(driver_module, stream, buffer):
    source = (ctypes.c_uint32 * 4)(1, 2, 3, 4)
    target = (ctypes.c_uint32 * 4)()
    ok(driver_module.cuMemcpyHtoDAsync(buffer, ctypes.addressof(source), 16, stream))
    ok(driver_module.cuMemcpyDtoDAsync(buffer + 64, buffer, 16, stream))
    ok(driver_module.cuMemcpyDtoHAsync(ctypes.addressof(target), buffer + 64, 16, stream))
    ok(driver_module.cuStreamSynchronize(stream))
    assert list(target) == [1, 2, 3, 4]


def test_the_host_side_may_be_a_buffer(driver_module, buffer):
    ok(driver_module.cuMemcpyHtoD(buffer, b"\x05\0\0\0", 4))
    assert words(driver_module, buffer) == [5]
    target = bytearray(4)
    ok(driver_module.cuMemcpyDtoH(target, buffer, 4))
    assert target == b"\x05\0\0\0"


@pytest.mark.parametrize(("bits", "value"), [(8, 0xAB), (16, 0xABCD), (32, 0xABCDEF01)])
def test_fills_have_three_widths(driver_module, stream, buffer, bits, value):
    ok(getattr(driver_module, f"cuMemsetD{bits}Async")(buffer, value, 64 // bits, stream))
    ok(driver_module.cuStreamSynchronize(stream))
    expected = value.to_bytes(bits // 8, "little") * (64 // bits)
    assert words(driver_module, buffer, 2) == [
        int.from_bytes(expected[:4], "little"),
        int.from_bytes(expected[4:], "little"),
    ]


def test_a_misaligned_fill_is_refused(driver_module, stream, buffer):
    assert code(driver_module.cuMemsetD32Async(buffer + 2, 1, 1, stream)) == 1


def test_captured_copies_say_what_memory_they_connect(driver_module, stream, buffer):
    host = (ctypes.c_uint32 * 1)(7)
    begin(driver_module, stream)
    ok(driver_module.cuMemcpyHtoDAsync(buffer, ctypes.addressof(host), 4, stream))
    ok(driver_module.cuMemcpyAsync(buffer + 4, buffer, 4, stream))
    graph = ok(driver_module.cuStreamEndCapture(stream))
    assert kinds(driver_module, graph) == [1, 1]
    first, second = (
        ok(driver_module.cuGraphMemcpyNodeGetParams(node)) for node in nodes(driver_module, graph)
    )
    assert (int(first.srcMemoryType), int(first.dstMemoryType)) == (1, 2)
    assert (int(second.srcMemoryType), int(second.dstMemoryType)) == (4, 4)
    assert (first.WidthInBytes, first.Height, first.Depth) == (4, 1, 1)
    host[0] = 9  # a captured copy reads the host again at each launch
    launch(driver_module, graph, stream)
    assert words(driver_module, buffer, 2) == [9, 9]
    ok(driver_module.cuGraphDestroy(graph))


def test_two_dimensional_copies_follow_their_pitches(driver_module, stream, buffer):
    source = (ctypes.c_uint32 * 8)(*range(8))
    params = driver_module.CUDA_MEMCPY3D()
    params.srcMemoryType = driver_module.CUmemorytype.CU_MEMORYTYPE_HOST
    params.srcHost, params.srcPitch = ctypes.addressof(source), 16
    params.dstMemoryType = driver_module.CUmemorytype.CU_MEMORYTYPE_DEVICE
    params.dstDevice, params.dstPitch = driver_module.CUdeviceptr(buffer), 8
    params.WidthInBytes, params.Height, params.Depth = 8, 2, 1
    ok(driver_module.cuMemcpy3DAsync(params, stream))
    assert words(driver_module, buffer, 4) == [0, 1, 4, 5]


def test_a_pointer_tells_its_kind_and_range(driver_module, buffer):
    attribute = driver_module.CUpointer_attribute
    ask = driver_module.cuPointerGetAttribute
    kind = ok(ask(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, buffer + 4))
    assert int(kind) == 2
    base, size = ok(driver_module.cuMemGetAddressRange(buffer + 4))
    assert (int(base), size) == (buffer, 1024)
    pinned = ok(driver_module.cuMemAllocHost(16))
    assert int(ok(ask(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pinned))) == 1
    ok(driver_module.cuMemFreeHost(pinned))
    assert code(ask(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 16)) == 1


def test_free_memory_is_counted(driver_module):
    free, total = ok(driver_module.cuMemGetInfo())
    address = ok(driver_module.cuMemAlloc(1 << 20))
    assert ok(driver_module.cuMemGetInfo())[0] <= free - (1 << 20)
    ok(driver_module.cuMemFree(address))
    assert ok(driver_module.cuMemGetInfo()) == (free, total)


def test_nothing_can_be_allocated_and_too_much_neither(driver_module):
    assert code(driver_module.cuMemAlloc(0)) == 1
    total = ok(driver_module.cuMemGetInfo())[1]
    assert code(driver_module.cuMemAlloc(total + 1)) == 2


# ---------------------------------------------------------------- stream-ordered memory


def captured_allocation(driver: Any, stream: Any, *, free: bool) -> tuple[int, Any]:
    """A capture that allocates, fills and perhaps frees; (address, graph)."""
    begin(driver, stream)
    address = int(ok(driver.cuMemAllocAsync(64, stream)))
    ok(driver.cuMemsetD32Async(address, 3, 16, stream))
    if free:
        ok(driver.cuMemFreeAsync(address, stream))
    return address, ok(driver.cuStreamEndCapture(stream))


def test_stream_ordered_memory_is_ordinary_outside_a_capture(driver_module, stream):
    address = ok(driver_module.cuMemAllocAsync(64, stream))
    ok(driver_module.cuMemsetD32Async(address, 3, 1, stream))
    assert words(driver_module, address) == [3]
    ok(driver_module.cuMemFreeAsync(address, stream))


def test_captured_allocations_become_nodes(driver_module, stream):
    address, graph = captured_allocation(driver_module, stream, free=True)
    assert kinds(driver_module, graph) == [10, 2, 11]
    first = nodes(driver_module, graph)[0]
    assert int(ok(driver_module.cuGraphMemAllocNodeGetParams(first)).dptr) == address
    executable = ok(driver_module.cuGraphInstantiate(graph, 0))
    for _ in range(2):
        ok(driver_module.cuGraphLaunch(executable, stream))
    ok(driver_module.cuGraphExecDestroy(executable))
    ok(driver_module.cuGraphDestroy(graph))


def test_memory_left_by_a_launch_forbids_the_next_one_unless_it_is_freed(driver_module, stream):
    address, graph = captured_allocation(driver_module, stream, free=False)
    executable = ok(driver_module.cuGraphInstantiate(graph, 0))
    ok(driver_module.cuGraphLaunch(executable, stream))
    assert words(driver_module, address) == [3]
    assert code(driver_module.cuGraphLaunch(executable, stream)) == 1
    ok(driver_module.cuMemFreeAsync(address, stream))
    ok(driver_module.cuGraphLaunch(executable, stream))
    ok(driver_module.cuMemFree(address))
    ok(driver_module.cuGraphExecDestroy(executable))
    ok(driver_module.cuGraphDestroy(graph))


def test_automatic_freeing_allows_relaunches(driver_module, stream):
    _, graph = captured_allocation(driver_module, stream, free=False)
    executable = ok(driver_module.cuGraphInstantiate(graph, 1))
    for _ in range(3):
        ok(driver_module.cuGraphLaunch(executable, stream))
    ok(driver_module.cuGraphExecDestroy(executable))
    ok(driver_module.cuGraphDestroy(graph))


def test_a_graph_that_allocates_is_restricted(driver_module, stream):
    _, graph = captured_allocation(driver_module, stream, free=True)
    assert code(driver_module.cuGraphClone(graph)) == 1
    outer = ok(driver_module.cuGraphCreate(0))
    assert code(driver_module.cuGraphAddChildGraphNode(outer, None, 0, graph)) == 1
    assert code(driver_module.cuGraphDestroyNode(nodes(driver_module, graph)[1])) == 1
    executable = ok(driver_module.cuGraphInstantiate(graph, 0))
    assert code(driver_module.cuGraphInstantiate(graph, 0)) == 1
    ok(driver_module.cuGraphExecDestroy(executable))
    ok(driver_module.cuGraphExecDestroy(ok(driver_module.cuGraphInstantiate(graph, 0))))
    for each in (outer, graph):
        ok(driver_module.cuGraphDestroy(each))


def test_a_graph_that_allocates_can_be_moved_into_another(driver_module, stream):
    _, graph = captured_allocation(driver_module, stream, free=True)
    outer = ok(driver_module.cuGraphCreate(0))
    params = driver_module.CUgraphNodeParams()
    params.type = driver_module.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
    params.graph.graph = graph
    params.graph.ownership = driver_module.CUgraphChildGraphNodeOwnership(1)
    node = ok(driver_module.cuGraphAddNode(outer, None, None, 0, params))
    assert int(ok(driver_module.cuGraphChildGraphNodeGetGraph(node))) == int(graph)
    launch(driver_module, outer, stream)
    ok(driver_module.cuGraphDestroy(outer))
