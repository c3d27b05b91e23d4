"""Memory, copies and fills."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from raw_calls import begin, code, kinds, launch, nodes, ok, words


def test_copies_go_between_host_and_device(driver, stream, buffer):
    source = (ctypes.c_uint32 * 4)(1, 2, 3, 4)
    target = (ctypes.c_uint32 * 4)()
    ok(driver.cuMemcpyHtoDAsync(buffer, ctypes.addressof(source), 16, stream))
    ok(driver.cuMemcpyDtoDAsync(buffer + 64, buffer, 16, stream))
    ok(driver.cuMemcpyDtoHAsync(ctypes.addressof(target), buffer + 64, 16, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert list(target) == [1, 2, 3, 4]


def test_the_host_side_may_be_a_buffer(driver, buffer):
    ok(driver.cuMemcpyHtoD(buffer, b"\x05\0\0\0", 4))
    assert words(driver, buffer) == [5]
    target = bytearray(4)
    ok(driver.cuMemcpyDtoH(target, buffer, 4))
    assert target == b"\x05\0\0\0"


@pytest.mark.parametrize(("bits", "value"), [(8, 0xAB), (16, 0xABCD), (32, 0xABCDEF01)])
def test_fills_have_three_widths(driver, stream, buffer, bits, value):
    ok(getattr(driver, f"cuMemsetD{bits}Async")(buffer, value, 64 // bits, stream))
    ok(driver.cuStreamSynchronize(stream))
    expected = value.to_bytes(bits // 8, "little") * (64 // bits)
    assert words(driver, buffer, 2) == [
        int.from_bytes(expected[:4], "little"),
        int.from_bytes(expected[4:], "little"),
    ]


def test_a_misaligned_fill_is_refused(driver, stream, buffer):
    assert code(driver.cuMemsetD32Async(buffer + 2, 1, 1, stream)) == 1


def test_captured_copies_say_what_memory_they_connect(driver, stream, buffer):
    host = (ctypes.c_uint32 * 1)(7)
    begin(driver, stream)
    ok(driver.cuMemcpyHtoDAsync(buffer, ctypes.addressof(host), 4, stream))
    ok(driver.cuMemcpyAsync(buffer + 4, buffer, 4, stream))
    graph = ok(driver.cuStreamEndCapture(stream))
    assert kinds(driver, graph) == [1, 1]
    first, second = (ok(driver.cuGraphMemcpyNodeGetParams(node)) for node in nodes(driver, graph))
    assert (int(first.srcMemoryType), int(first.dstMemoryType)) == (1, 2)
    assert (int(second.srcMemoryType), int(second.dstMemoryType)) == (4, 4)
    assert (first.WidthInBytes, first.Height, first.Depth) == (4, 1, 1)
    host[0] = 9  # a captured copy reads the host again at each launch
    launch(driver, graph, stream)
    assert words(driver, buffer, 2) == [9, 9]
    ok(driver.cuGraphDestroy(graph))


def test_two_dimensional_copies_follow_their_pitches(driver, stream, buffer):
    source = (ctypes.c_uint32 * 8)(*range(8))
    params = driver.CUDA_MEMCPY3D()
    params.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
    params.srcHost, params.srcPitch = ctypes.addressof(source), 16
    params.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    params.dstDevice, params.dstPitch = driver.CUdeviceptr(buffer), 8
    params.WidthInBytes, params.Height, params.Depth = 8, 2, 1
    ok(driver.cuMemcpy3DAsync(params, stream))
    assert words(driver, buffer, 4) == [0, 1, 4, 5]


def test_a_pointer_tells_its_kind_and_range(driver, buffer):
    attribute = driver.CUpointer_attribute
    ask = driver.cuPointerGetAttribute
    kind = ok(ask(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, buffer + 4))
    assert int(kind) == 2
    base, size = ok(driver.cuMemGetAddressRange(buffer + 4))
    assert (int(base), size) == (buffer, 1024)
    pinned = ok(driver.cuMemAllocHost(16))
    assert int(ok(ask(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pinned))) == 1
    ok(driver.cuMemFreeHost(pinned))
    assert code(ask(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 16)) == 1


def test_free_memory_is_counted(driver):
    free, total = ok(driver.cuMemGetInfo())
    address = ok(driver.cuMemAlloc(256 << 20))
    less, same_total = ok(driver.cuMemGetInfo())
    assert less <= free - (128 << 20)
    assert same_total == total
    ok(driver.cuMemFree(address))
    assert ok(driver.cuMemGetInfo())[0] > less


def test_nothing_can_be_allocated_and_too_much_neither(driver):
    assert code(driver.cuMemAlloc(0)) == 1
    total = ok(driver.cuMemGetInfo())[1]
    assert code(driver.cuMemAlloc(total + 1)) == 2


# ---------------------------------------------------------------- stream-ordered memory


def captured_allocation(driver: Any, stream: Any, *, free: bool) -> tuple[int, Any]:
    """A capture that allocates, fills and perhaps frees; (address, graph)."""
    begin(driver, stream)
    address = int(ok(driver.cuMemAllocAsync(64, stream)))
    ok(driver.cuMemsetD32Async(address, 3, 16, stream))
    if free:
        ok(driver.cuMemFreeAsync(address, stream))
    return address, ok(driver.cuStreamEndCapture(stream))


def test_stream_ordered_memory_is_ordinary_outside_a_capture(driver, stream):
    address = ok(driver.cuMemAllocAsync(64, stream))
    ok(driver.cuMemsetD32Async(address, 3, 1, stream))
    assert words(driver, address) == [3]
    ok(driver.cuMemFreeAsync(address, stream))


def test_captured_allocations_become_nodes(driver, stream):
    address, graph = captured_allocation(driver, stream, free=True)
    assert kinds(driver, graph) == [10, 2, 11]
    first = nodes(driver, graph)[0]
    assert int(ok(driver.cuGraphMemAllocNodeGetParams(first)).dptr) == address
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    for _ in range(2):
        ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(graph))


def test_memory_left_by_a_launch_forbids_the_next_one_unless_it_is_freed(driver, stream):
    address, graph = captured_allocation(driver, stream, free=False)
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphLaunch(executable, stream))
    assert words(driver, address) == [3]
    assert code(driver.cuGraphLaunch(executable, stream)) == 1
    ok(driver.cuMemFreeAsync(address, stream))
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuMemFree(address))
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(graph))


def test_automatic_freeing_allows_relaunches(driver, stream):
    _, graph = captured_allocation(driver, stream, free=False)
    executable = ok(driver.cuGraphInstantiate(graph, 1))
    for _ in range(3):
        ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(graph))


def test_a_graph_that_allocates_is_restricted(driver, stream):
    _, graph = captured_allocation(driver, stream, free=True)
    assert code(driver.cuGraphClone(graph)) == 801
    outer = ok(driver.cuGraphCreate(0))
    assert code(driver.cuGraphAddChildGraphNode(outer, None, 0, graph)) == 801
    assert code(driver.cuGraphDestroyNode(nodes(driver, graph)[1])) == 801
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    assert code(driver.cuGraphInstantiate(graph, 0)) == 801
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphExecDestroy(ok(driver.cuGraphInstantiate(graph, 0))))
    for each in (outer, graph):
        ok(driver.cuGraphDestroy(each))


def test_a_graph_that_allocates_can_be_moved_into_another(driver, stream):
    _, graph = captured_allocation(driver, stream, free=True)
    outer = ok(driver.cuGraphCreate(0))
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
    params.graph.graph = graph
    params.graph.ownership = driver.CUgraphChildGraphNodeOwnership(1)
    node = ok(driver.cuGraphAddNode(outer, None, None, 0, params))
    assert int(ok(driver.cuGraphChildGraphNodeGetGraph(node))) == int(graph)
    launch(driver, outer, stream)
    ok(driver.cuGraphDestroy(outer))
