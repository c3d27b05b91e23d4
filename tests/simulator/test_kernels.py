"""Simulated kernels: their arguments in every form, their names, their nodes."""

from __future__ import annotations

import ctypes
import gc

import pytest

from breakable_cuda_graphs.simulator import SimulatedKernel, current_launch
from raw_calls import (
    arguments,
    begin,
    code,
    kernel_params,
    launch,
    launch_kernel,
    nodes,
    ok,
    programmatic_config,
    words,
)


def add(address: int, value: int) -> None:
    ctypes.c_uint32.from_address(address).value += value


@pytest.fixture
def adder() -> SimulatedKernel:
    """Adds a 32-bit value to a word."""
    return SimulatedKernel(add, (ctypes.c_void_p, ctypes.c_uint32))


def test_an_eager_launch_runs_at_once(driver_module, adder, stream, buffer):
    launch_kernel(driver_module, adder, stream, buffer, 5)
    assert words(driver_module, buffer) == [5]


def test_a_captured_launch_runs_with_the_arguments_it_was_captured_with(
    driver_module, adder, stream, buffer
):
    value = ctypes.c_uint32(5)
    address = ctypes.c_void_p(buffer)
    table = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(value))
    begin(driver_module, stream)
    ok(
        driver_module.cuLaunchKernel(
            adder.handle, 1, 1, 1, 1, 1, 1, 0, stream, ctypes.addressof(table), 0
        )
    )
    graph = ok(driver_module.cuStreamEndCapture(stream))
    value.value = 100  # the driver has copied it
    launch(driver_module, graph, stream)
    assert words(driver_module, buffer) == [5]
    ok(driver_module.cuGraphDestroy(graph))


def test_a_numpy_array_of_addresses_is_a_table_too(driver_module, adder, stream, buffer):
    numpy = pytest.importorskip("numpy")
    values = numpy.array([buffer, 4], dtype=numpy.uint64)
    table = numpy.array([values.ctypes.data, values.ctypes.data + 8], dtype=numpy.uint64)
    answer = driver_module.cuLaunchKernel(adder.handle, 1, 1, 1, 1, 1, 1, 0, stream, table, 0)
    ok(answer)
    assert words(driver_module, buffer) == [4]


def test_a_packed_buffer_is_a_third_form(driver_module, adder, stream, buffer):
    packed = ctypes.create_string_buffer(
        buffer.to_bytes(8, "little") + (7).to_bytes(4, "little"), 12
    )
    size = ctypes.c_size_t(12)
    extra = (ctypes.c_size_t * 5)(1, ctypes.addressof(packed), 2, ctypes.addressof(size), 0)
    answer = driver_module.cuLaunchKernel(
        adder.handle, 1, 1, 1, 1, 1, 1, 0, stream, 0, ctypes.addressof(extra)
    )
    ok(answer)
    assert words(driver_module, buffer) == [7]


def test_a_node_shows_copies_of_its_arguments(driver_module, adder, buffer):
    graph = ok(driver_module.cuGraphCreate(0))
    params = kernel_params(driver_module, adder, buffer, 5)
    node = ok(driver_module.cuGraphAddKernelNode(graph, None, 0, params))
    shown = ok(driver_module.cuGraphKernelNodeGetParams(node))
    assert isinstance(shown.kernelParams, int)
    assert int(shown.func) == int(adder.handle)
    assert arguments(driver_module, shown) == [
        buffer.to_bytes(8, "little"),
        (5).to_bytes(4, "little"),
    ]
    ok(driver_module.cuGraphDestroy(graph))


def test_a_struct_from_the_getter_can_be_given_to_a_setter(driver_module, adder, stream, buffer):
    graph = ok(driver_module.cuGraphCreate(0))
    one = ok(
        driver_module.cuGraphAddKernelNode(
            graph, None, 0, kernel_params(driver_module, adder, buffer, 5)
        )
    )
    two = ok(
        driver_module.cuGraphAddKernelNode(
            graph, None, 0, kernel_params(driver_module, adder, buffer + 4, 6)
        )
    )
    executable = ok(driver_module.cuGraphInstantiate(graph, 0))
    params = ok(driver_module.cuGraphKernelNodeGetParams(two))
    ok(driver_module.cuGraphExecKernelNodeSetParams(executable, one, params))
    ok(driver_module.cuGraphLaunch(executable, stream))
    assert words(driver_module, buffer, 2) == [0, 12]
    ok(driver_module.cuGraphExecDestroy(executable))
    ok(driver_module.cuGraphDestroy(graph))


def test_a_packed_kernel_shows_the_other_form(driver_module, stream, buffer):
    kernel = SimulatedKernel(add, (ctypes.c_void_p, ctypes.c_uint32), packed=True)
    begin(driver_module, stream)
    launch_kernel(driver_module, kernel, stream, buffer, 3)
    graph = ok(driver_module.cuStreamEndCapture(stream))
    (node,) = nodes(driver_module, graph)
    shown = ok(driver_module.cuGraphKernelNodeGetParams(node))
    assert int(shown.kernelParams) == 0
    assert int(shown.extra) != 0
    assert int(shown.kern) == int(kernel.kernel_handle)
    executable = ok(driver_module.cuGraphInstantiate(graph, 0))
    ok(driver_module.cuGraphExecKernelNodeSetParams(executable, node, shown))
    ok(driver_module.cuGraphLaunch(executable, stream))
    assert words(driver_module, buffer) == [3]
    ok(driver_module.cuGraphExecDestroy(executable))
    ok(driver_module.cuGraphDestroy(graph))


def test_structures_go_through_whole(driver_module, stream, buffer):
    class Pair(ctypes.Structure):
        _fields_ = (("address", ctypes.c_void_p), ("value", ctypes.c_uint32))

    def body(pair: Pair) -> None:
        add(pair.address, pair.value)

    kernel = SimulatedKernel(body, (Pair,))
    launch_kernel(driver_module, kernel, stream, Pair(buffer, 8))
    assert words(driver_module, buffer) == [8]


def test_parameters_are_laid_out_as_in_c(driver_module):
    kernel = SimulatedKernel(
        lambda *_: None, (ctypes.c_uint8, ctypes.c_double, ctypes.c_uint16), name="mixed"
    )
    info = driver_module.cuFuncGetParamInfo
    assert [ok(info(kernel.handle, i)) for i in range(3)] == [(0, 1), (8, 8), (16, 2)]
    assert code(info(kernel.handle, 3)) == 1
    assert ok(driver_module.cuFuncGetName(kernel.handle)) == b"mixed"
    assert ok(driver_module.cuKernelGetName(kernel.kernel_handle)) == b"mixed"
    assert int(ok(driver_module.cuKernelGetFunction(kernel.kernel_handle))) == int(kernel.handle)


def test_a_missing_or_short_argument_is_refused(driver_module, adder, stream, buffer):
    launch_it = driver_module.cuLaunchKernel
    grid = (1, 1, 1, 1, 1, 1, 0, stream)
    assert code(launch_it(adder.handle, *grid, 0, 0)) == 1
    assert code(launch_it(adder.handle, *grid, ((buffer,), (ctypes.c_void_p,)), 0)) == 1
    short = ((buffer, 1), (ctypes.c_uint32, ctypes.c_uint32))
    assert code(launch_it(adder.handle, *grid, short, 0)) == 1


def test_an_empty_grid_is_refused(driver_module, adder, stream, buffer):
    values = ((buffer, 1), adder.parameters)
    answer = driver_module.cuLaunchKernel(adder.handle, 0, 1, 1, 1, 1, 1, 0, stream, values, 0)
    assert code(answer) == 1


def test_a_kernel_knows_its_launch(driver_module, stream):
    seen = []
    kernel = SimulatedKernel(lambda: seen.append(current_launch()))
    ok(driver_module.cuLaunchKernel(kernel.handle, 4, 3, 2, 8, 2, 1, 64, stream, 0, 0))
    (found,) = seen
    assert (found.grid, found.block, found.shared_bytes) == ((4, 3, 2), (8, 2, 1), 64)


def test_a_node_keeps_its_kernel(driver_module, stream, buffer):
    kernel = SimulatedKernel(add, (ctypes.c_void_p, ctypes.c_uint32))
    begin(driver_module, stream)
    launch_kernel(driver_module, kernel, stream, buffer, 2)
    graph = ok(driver_module.cuStreamEndCapture(stream))
    handle = kernel.handle
    del kernel
    gc.collect()
    launch(driver_module, graph, stream)
    assert words(driver_module, buffer) == [2]
    ok(driver_module.cuGraphDestroy(graph))
    gc.collect()
    assert code(driver_module.cuFuncGetName(handle)) == 400


def test_a_kernel_stays_in_its_context(driver_module, buffer):
    here = ok(driver_module.cuCtxGetCurrent())
    elsewhere = ok(driver_module.cuCtxCreate(None, 0, 0))
    ok(driver_module.cuCtxPopCurrent())
    mine = SimulatedKernel(lambda: None, name="mine", context=here)
    theirs = SimulatedKernel(lambda: None, name="theirs", context=elsewhere)
    graph = ok(driver_module.cuGraphCreate(0))
    node = ok(
        driver_module.cuGraphAddKernelNode(graph, None, 0, kernel_params(driver_module, mine))
    )
    executable = ok(driver_module.cuGraphInstantiate(graph, 0))
    params = kernel_params(driver_module, theirs)
    answer = driver_module.cuGraphExecKernelNodeSetParams(executable, node, params)
    assert code(answer) == 1
    ok(driver_module.cuGraphExecDestroy(executable))
    ok(driver_module.cuGraphDestroy(graph))
    ok(driver_module.cuCtxDestroy(elsewhere))


def test_a_programmatic_launch_makes_a_programmatic_edge(driver_module, adder, stream, buffer):
    config = programmatic_config(driver_module, stream)
    begin(driver_module, stream)
    launch_kernel(driver_module, adder, stream, buffer, 1)
    values = ((buffer, 1), adder.parameters)
    ok(driver_module.cuLaunchKernelEx(config, adder.handle, values, 0))
    graph = ok(driver_module.cuStreamEndCapture(stream))
    *_, data, count = ok(driver_module.cuGraphGetEdges(graph, 1))
    assert (data[0].type, data[0].from_port, count) == (1, 1, 1)
    ok(driver_module.cuGraphDestroy(graph))


def test_attributes_are_copied_from_node_to_node_and_priority_from_the_stream(
    driver_module, adder, buffer
):
    stream = ok(driver_module.cuStreamCreateWithPriority(1, -3))
    begin(driver_module, stream)
    for _ in range(2):
        values = ((buffer, 1), adder.parameters)
        ok(driver_module.cuLaunchKernel(adder.handle, 4, 1, 1, 1, 1, 1, 0, stream, values, 0))
    graph = ok(driver_module.cuStreamEndCapture(stream))
    one, two = nodes(driver_module, graph)
    get = driver_module.cuGraphKernelNodeGetAttribute
    priority, cluster = driver_module.CUkernelNodeAttrID(8), driver_module.CUkernelNodeAttrID(4)
    assert ok(get(one, priority)).priority == -3
    value = driver_module.CUkernelNodeAttrValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = 2, 1, 1
    ok(driver_module.cuGraphKernelNodeSetAttribute(one, cluster, value))
    params = kernel_params(driver_module, adder, buffer, 2)
    params.gridDimX = 4
    ok(driver_module.cuGraphKernelNodeSetParams(one, params))  # keeps the attributes
    ok(driver_module.cuGraphKernelNodeCopyAttributes(two, one))
    assert ok(get(two, cluster)).clusterDim.x == 2
    ok(driver_module.cuGraphDestroy(graph))
    ok(driver_module.cuStreamDestroy(stream))
