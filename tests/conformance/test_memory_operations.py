"""Batch memory operations: words that a graph writes and waits for."""

from __future__ import annotations

import ctypes
from typing import Any

from raw_calls import code, here, kinds, ok, words

WAIT_32, WRITE_32 = 1, 2
GEQ, EQ = 0, 1
BATCH_MEM_OP = 12


def batch_params(driver: Any, *operations: tuple[int, int, int, int]) -> Any:
    """CUDA_BATCH_MEM_OP_NODE_PARAMS from (type, address, value, flags)."""
    made = []
    for kind, address, value, flags in operations:
        operation = driver.CUstreamBatchMemOpParams()
        half = operation.waitValue if kind == WAIT_32 else operation.writeValue
        half.operation = driver.CUstreamBatchMemOpType(kind)
        half.address = driver.CUdeviceptr(address)
        half.value64 = driver.cuuint64_t(value)
        half.flags = flags
        made.append(operation)
    params = driver.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    params.ctx, params.count, params.paramArray, params.flags = here(driver), len(made), made, 0
    return params


def run(driver: Any, executable: Any, stream: Any) -> None:
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))


def test_operations_are_done_in_order(driver, graph, instantiate, stream, buffer):
    params = batch_params(
        driver, (WRITE_32, buffer, 7, 0), (WAIT_32, buffer, 5, GEQ), (WRITE_32, buffer + 4, 9, 0)
    )
    ok(driver.cuGraphAddBatchMemOpNode(graph, None, 0, params))
    assert kinds(driver, graph) == [BATCH_MEM_OP]
    run(driver, instantiate(graph), stream)
    assert words(driver, buffer, 2) == [7, 9]


def test_operations_are_read_back(driver, graph, buffer):
    params = batch_params(driver, (WRITE_32, buffer, 7, 0), (WAIT_32, buffer, 7, EQ))
    node = ok(driver.cuGraphAddBatchMemOpNode(graph, None, 0, params))
    read = ok(driver.cuGraphBatchMemOpNodeGetParams(node))
    start = read.getPtr()
    assert ctypes.c_uint.from_address(start + 8).value == 2
    at = ctypes.c_void_p.from_address(start + 16).value
    told = []
    for place in (at, at + 48):
        kind, flags = (ctypes.c_uint.from_address(place + offset).value for offset in (0, 24))
        address = ctypes.c_uint64.from_address(place + 8).value
        told.append((kind, address, ctypes.c_uint32.from_address(place + 16).value, flags))
    assert told == [(WRITE_32, buffer, 7, 0), (WAIT_32, buffer, 7, EQ)]


def test_addresses_values_and_comparisons_can_be_edited(driver, graph, instantiate, stream, buffer):
    params = batch_params(driver, (WRITE_32, buffer, 7, 0), (WAIT_32, buffer, 7, EQ))
    node = ok(driver.cuGraphAddBatchMemOpNode(graph, None, 0, params))
    executable = instantiate(graph)
    other = batch_params(driver, (WRITE_32, buffer + 4, 3, 0), (WAIT_32, buffer + 4, 1, GEQ))
    ok(driver.cuGraphExecBatchMemOpNodeSetParams(executable, node, other))
    run(driver, executable, stream)
    assert words(driver, buffer, 2) == [0, 3]


def test_the_number_and_the_types_of_operations_stay(driver, graph, instantiate, stream, buffer):
    params = batch_params(driver, (WRITE_32, buffer, 7, 0), (WAIT_32, buffer, 7, EQ))
    node = ok(driver.cuGraphAddBatchMemOpNode(graph, None, 0, params))
    executable = instantiate(graph)
    for other in (
        batch_params(driver, (WRITE_32, buffer, 1, 0)),
        batch_params(driver, (WRITE_32, buffer, 1, 0), (WRITE_32, buffer, 1, 0)),
    ):
        assert code(driver.cuGraphExecBatchMemOpNodeSetParams(executable, node, other)) != 0
    run(driver, executable, stream)
    assert words(driver, buffer) == [7]


def test_a_word_of_64_bits_is_written_where_the_stream_has_come_to(driver, stream, buffer):
    ok(driver.cuMemsetD32Async(buffer, 1, 4, stream))
    ok(driver.cuStreamWriteValue64(stream, buffer + 8, (7 << 32) + 9, 0))
    ok(driver.cuStreamSynchronize(stream))
    assert words(driver, buffer, 4) == [1, 1, 9, 7]
    assert code(driver.cuStreamWriteValue64(stream, buffer + 4, 1, 0)) == 1


def test_a_captured_write_of_a_word_is_a_node(driver, captured, instantiate, stream, buffer):
    graph = captured(lambda: ok(driver.cuStreamWriteValue64(stream, buffer, (3 << 32) + 5, 0)))
    assert kinds(driver, graph) == [BATCH_MEM_OP]
    assert words(driver, buffer, 2) == [0, 0]
    run(driver, instantiate(graph), stream)
    assert words(driver, buffer, 2) == [5, 3]


def test_a_device_says_whether_it_writes_words_of_64_bits(driver, stream, buffer):
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    can = ok(driver.cuDeviceGetAttribute(attribute, ok(driver.cuCtxGetDevice())))
    assert bool(can) is (code(driver.cuStreamWriteValue64(stream, buffer, 1, 0)) == 0)
