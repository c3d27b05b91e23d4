"""Kernels: their parameters, arguments in each form, limits, nodes and attributes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from raw_calls import (
    INVALIDATED,
    arguments,
    begin,
    code,
    kernel_params,
    launch,
    launch_kernel,
    nodes,
    ok,
    programmatic_config,
    status,
    words,
)

from .kernels import Pair

LAYOUTS = {
    "nothing": [],
    "add": [(0, 8), (8, 4)],
    "add_pair": [(0, 16)],
    "mixed": [(0, 1), (8, 8), (16, 2), (24, 16)],
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("call", ["cuFuncGetParamInfo", "cuKernelGetParamInfo"])
def test_parameters_are_told_one_by_one_until_there_are_no_more(driver, kernels, name, call):
    kernel = kernels.get(name)
    handle = kernel.handle if call.startswith("cuFunc") else kernel.kernel_handle
    ask = getattr(driver, call)
    wanted = LAYOUTS[name]
    assert [ok(ask(handle, index)) for index in range(len(wanted))] == wanted
    assert code(ask(handle, len(wanted))) == 1


def test_a_kernel_has_a_name_and_a_function(driver, kernels):
    kernel = kernels.add
    assert ok(driver.cuFuncGetName(kernel.handle)) == b"add"
    assert ok(driver.cuKernelGetName(kernel.kernel_handle)) == b"add"
    assert int(ok(driver.cuKernelGetFunction(kernel.kernel_handle))) == int(kernel.handle)


# ---------------------------------------------------------------- arguments


def table(*values: Any) -> Any:
    """A `void*[]` with the addresses of ctypes values; keeps them."""
    made = (ctypes.c_void_p * max(len(values), 1))(*(ctypes.addressof(v) for v in values))
    made.kept = values
    return made


def packed(data: bytes) -> Any:
    """The packed-buffer form of `extra`; keeps what it points to."""
    buffer, size = ctypes.create_string_buffer(data, len(data)), ctypes.c_size_t(len(data))
    extra = (ctypes.c_size_t * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)
    extra.kept = (buffer, size)
    return extra


def launch_on(
    driver: Any, kernel: Any, stream: Any, params: Any = 0, extra: Any = 0,
    grid: Any = (1, 1, 1), block: Any = (1, 1, 1), shared: int = 0,
) -> int:  # fmt: skip
    """The code of a launch."""
    return code(driver.cuLaunchKernel(kernel.handle, *grid, *block, shared, stream, params, extra))


def test_arguments_may_be_a_tuple_with_their_types(driver, kernels, stream, buffer):
    launch_kernel(driver, kernels.add, stream, buffer, 5)
    assert words(driver, buffer) == [5]


def test_arguments_may_be_a_table_of_addresses(driver, kernels, stream, buffer):
    params = table(ctypes.c_void_p(buffer), ctypes.c_uint32(6))
    assert launch_on(driver, kernels.add, stream, ctypes.addressof(params)) == 0
    assert words(driver, buffer) == [6]


def test_arguments_may_be_one_packed_buffer(driver, kernels, stream, buffer):
    extra = packed(buffer.to_bytes(8, "little") + (7).to_bytes(4, "little"))
    assert launch_on(driver, kernels.add, stream, 0, ctypes.addressof(extra)) == 0
    assert words(driver, buffer) == [7]


def test_not_both_of_them(driver, kernels, stream, buffer):
    extra = packed(buffer.to_bytes(8, "little") + (7).to_bytes(4, "little"))
    values = ((buffer, 1), kernels.add.parameters)
    assert launch_on(driver, kernels.add, stream, values, ctypes.addressof(extra)) == 1


def test_and_not_none(driver, kernels, stream):
    assert launch_on(driver, kernels.add, stream) == 1
    assert launch_on(driver, kernels.nothing, stream) == 0


def test_a_structure_goes_through_whole(driver, kernels, stream, buffer):
    params = table(Pair(buffer, 8))
    assert launch_on(driver, kernels.add_pair, stream, ctypes.addressof(params)) == 0
    assert words(driver, buffer) == [8]


def test_arguments_of_many_sizes_are_laid_out_as_in_c(driver, kernels, stream, buffer):
    params = table(ctypes.c_uint8(3), ctypes.c_double(2.0), ctypes.c_uint16(4), Pair(buffer, 8))
    assert launch_on(driver, kernels.mixed, stream, ctypes.addressof(params)) == 0
    assert words(driver, buffer) == [9]


def test_a_kernel_sees_its_grid_and_block(driver, kernels, stream, buffer):
    values = ((buffer,), kernels.dims.parameters)
    assert launch_on(driver, kernels.dims, stream, values, 0, (4, 3, 2), (8, 2, 1)) == 0
    assert words(driver, buffer, 6) == [4, 3, 2, 8, 2, 1]


def test_a_cukernel_can_be_launched_as_a_function(driver, kernels, stream, buffer):
    function = driver.CUfunction(int(kernels.add.kernel_handle))
    values = ((buffer, 4), kernels.add.parameters)
    ok(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, values, 0))
    assert words(driver, buffer) == [4]


# ---------------------------------------------------------------- limits

LIMITS: dict[str, tuple[Any, Any, int, int]] = {
    "no blocks": ((0, 1, 1), (1, 1, 1), 0, 1),
    "no threads": ((1, 1, 1), (0, 1, 1), 0, 1),
    "1024 threads": ((1, 1, 1), (1024, 1, 1), 0, 0),
    "1025 threads": ((1, 1, 1), (1025, 1, 1), 0, 1),
    "65 threads in z": ((1, 1, 1), (1, 1, 65), 0, 1),
    "2048 threads in three dimensions": ((1, 1, 1), (32, 32, 2), 0, 1),
    "65535 blocks in y": ((1, 65535, 1), (1, 1, 1), 0, 0),
    "65536 blocks in y": ((1, 65536, 1), (1, 1, 1), 0, 1),
    "a million blocks in x": ((1 << 20, 1, 1), (1, 1, 1), 0, 0),
    "48 KiB shared": ((1, 1, 1), (1, 1, 1), 48 << 10, 0),
    "a byte more": ((1, 1, 1), (1, 1, 1), (48 << 10) + 1, 1),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_launches_have_limits(driver, kernels, stream, limit):
    grid, block, shared, expected = LIMITS[limit]
    assert launch_on(driver, kernels.nothing, stream, 0, 0, grid, block, shared) == expected


@pytest.mark.parametrize("limit", [name for name, each in LIMITS.items() if each[3]])
def test_nodes_have_the_same_limits(driver, kernels, graph, limit):
    grid, block, shared, _ = LIMITS[limit]
    params = kernel_params(driver, kernels.nothing)
    params.gridDimX, params.gridDimY, params.gridDimZ = grid
    params.blockDimX, params.blockDimY, params.blockDimZ = block
    params.sharedMemBytes = shared
    assert code(driver.cuGraphAddKernelNode(graph, None, 0, params)) == 1


@pytest.mark.parametrize("limit", [name for name, each in LIMITS.items() if each[3]])
def test_a_launch_outside_the_limits_invalidates_the_capture(driver, kernels, stream, limit):
    grid, block, shared, _ = LIMITS[limit]
    begin(driver, stream)
    assert launch_on(driver, kernels.nothing, stream, 0, 0, grid, block, shared) == 1
    assert status(driver, stream) == INVALIDATED
    assert code(driver.cuStreamEndCapture(stream)) == 901


WRONG: dict[str, Callable[..., tuple[Any, ...]]] = {
    "no function": lambda driver, kernels, stream: driver.cuLaunchKernel(
        driver.CUfunction(0), 1, 1, 1, 1, 1, 1, 0, stream, 0, 0
    ),
    "no arguments": lambda driver, kernels, stream: driver.cuLaunchKernel(
        kernels.add.handle, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_launch_that_cannot_be_understood_does_not(driver, kernels, stream, what):
    begin(driver, stream)
    assert code(WRONG[what](driver, kernels, stream)) == (400 if what == "no function" else 1)
    ok(driver.cuGraphDestroy(ok(driver.cuStreamEndCapture(stream))))


# ---------------------------------------------------------------- nodes


def shown(driver: Any, node: Any) -> Any:
    return ok(driver.cuGraphKernelNodeGetParams(node))


def test_a_captured_kernel_shows_its_launch(driver, kernels, stream, buffer, captured, only_node):
    values = ((buffer, 5), kernels.add.parameters)
    graph = captured(
        lambda: ok(
            driver.cuLaunchKernel(kernels.add.handle, 2, 1, 1, 3, 1, 1, 16, stream, values, 0)
        )
    )
    params = shown(driver, only_node(graph))
    assert int(params.func) == int(kernels.add.handle)
    assert int(params.kern) == int(kernels.add.kernel_handle)
    assert int(params.ctx) == int(ok(driver.cuCtxGetCurrent()))
    assert (params.gridDimX, params.blockDimX, params.sharedMemBytes) == (2, 3, 16)
    assert int(params.extra) == 0
    wanted = [buffer.to_bytes(8, "little"), (5).to_bytes(4, "little")]
    assert arguments(driver, params) == wanted


def test_arguments_that_came_packed_are_shown_packed(
    driver, kernels, stream, buffer, captured, only_node
):
    data = buffer.to_bytes(8, "little") + (7).to_bytes(4, "little")
    extra = packed(data)
    graph = captured(lambda: launch_on(driver, kernels.add, stream, 0, ctypes.addressof(extra)))
    params = shown(driver, only_node(graph))
    assert int(params.kernelParams) == 0
    assert int(params.extra) != 0
    launch(driver, graph, stream)
    assert words(driver, buffer) == [7]


def test_no_arguments_are_shown_as_nothing(driver, kernels, stream, captured, only_node):
    graph = captured(lambda: launch_on(driver, kernels.nothing, stream))
    params = shown(driver, only_node(graph))
    assert (int(params.kernelParams), int(params.extra)) == (0, 0)


@pytest.mark.parametrize("by", ["func", "kern", "both"])
def test_a_node_may_name_its_kernel_by_either_handle(driver, kernels, graph, stream, buffer, by):
    params = kernel_params(driver, kernels.add, buffer, 3)
    if by != "func":
        params.kern = kernels.add.kernel_handle
    if by == "kern":
        params.func = driver.CUfunction(0)
    node = ok(driver.cuGraphAddKernelNode(graph, None, 0, params))
    found = shown(driver, node)
    assert (int(found.func), int(found.kern)) == (
        int(kernels.add.handle),
        int(kernels.add.kernel_handle),
    )
    launch(driver, graph, stream)
    assert words(driver, buffer) == [3]


def test_a_node_needs_a_kernel_and_its_arguments(driver, kernels, graph):
    params = kernel_params(driver, kernels.nothing)
    params.func = driver.CUfunction(0)
    assert code(driver.cuGraphAddKernelNode(graph, None, 0, params)) == 400
    params.func = kernels.add.handle
    assert code(driver.cuGraphAddKernelNode(graph, None, 0, params)) == 1


def test_what_a_getter_gave_can_be_set_in_an_executable(
    driver, kernels, graph, instantiate, stream, buffer
):
    params = kernel_params(driver, kernels.add, buffer, 5)
    one = ok(driver.cuGraphAddKernelNode(graph, None, 0, params))
    params = kernel_params(driver, kernels.add, buffer + 4, 6)
    two = ok(driver.cuGraphAddKernelNode(graph, [one], 1, params))
    executable = instantiate(graph)
    ok(driver.cuGraphExecKernelNodeSetParams(executable, one, shown(driver, two)))
    ok(driver.cuGraphLaunch(executable, stream))
    assert words(driver, buffer, 2) == [0, 12]


def test_an_executable_takes_another_kernel_grid_and_arguments(
    driver, kernels, graph, instantiate, stream, buffer
):
    params = kernel_params(driver, kernels.add, buffer, 5)
    node = ok(driver.cuGraphAddKernelNode(graph, None, 0, params))
    executable = instantiate(graph)
    other = kernel_params(driver, kernels.add_twice, buffer + 4, 5)
    ok(driver.cuGraphExecKernelNodeSetParams(executable, node, other))
    ok(driver.cuGraphLaunch(executable, stream))
    assert words(driver, buffer, 2) == [0, 10]
    ok(
        driver.cuGraphExecKernelNodeSetParams(
            executable, node, kernel_params(driver, kernels.nothing)
        )
    )
    ok(driver.cuGraphLaunch(executable, stream))
    assert words(driver, buffer, 2) == [0, 10]


@pytest.mark.parametrize(("grid", "block"), [(0, 1), (1, 2048)])
def test_an_executable_keeps_the_limits(driver, kernels, graph, instantiate, grid, block):
    params = kernel_params(driver, kernels.nothing)
    node = ok(driver.cuGraphAddKernelNode(graph, None, 0, params))
    executable = instantiate(graph)
    params.gridDimX, params.blockDimX = grid, block
    assert code(driver.cuGraphExecKernelNodeSetParams(executable, node, params)) == 1


# ---------------------------------------------------------------- attributes


def wide(driver: Any, kernels: Any, graph: Any, buffer: int) -> Any:
    """A kernel node of four blocks."""
    params = kernel_params(driver, kernels.add, buffer, 1)
    params.gridDimX = 4
    return ok(driver.cuGraphAddKernelNode(graph, None, 0, params))


def cluster(driver: Any, node: Any, size: int) -> int:
    value = driver.CUkernelNodeAttrValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = size, 1, 1
    identity = driver.CUkernelNodeAttrID(4)
    return code(driver.cuGraphKernelNodeSetAttribute(node, identity, value))


def cluster_of(driver: Any, node: Any) -> int:
    value = ok(driver.cuGraphKernelNodeGetAttribute(node, driver.CUkernelNodeAttrID(4)))
    return int(value.clusterDim.x)


def test_cluster_sizes_divide_the_grid(driver, kernels, graph, buffer):
    node = wide(driver, kernels, graph, buffer)
    assert [cluster(driver, node, size) for size in (2, 3, 8)] == [0, 912, 912]
    assert cluster_of(driver, node) == 2
    params = kernel_params(driver, kernels.add, buffer, 1)
    params.gridDimX = 3
    assert code(driver.cuGraphKernelNodeSetParams(node, params)) == 912


def test_attributes_outlive_parameters_and_can_be_copied(driver, kernels, graph, buffer):
    one, two = (wide(driver, kernels, graph, buffer) for _ in range(2))
    cluster(driver, one, 2)
    params = kernel_params(driver, kernels.add, buffer, 2)
    params.gridDimX = 4
    ok(driver.cuGraphKernelNodeSetParams(one, params))
    ok(driver.cuGraphKernelNodeCopyAttributes(two, one))
    assert (cluster_of(driver, one), cluster_of(driver, two)) == (2, 2)


def test_a_priority_is_clamped(driver, kernels, graph, buffer):
    node, identity = wide(driver, kernels, graph, buffer), driver.CUkernelNodeAttrID(8)
    value = driver.CUkernelNodeAttrValue()
    value.priority = -100
    ok(driver.cuGraphKernelNodeSetAttribute(node, identity, value))
    _, greatest = ok(driver.cuCtxGetStreamPriorityRange())
    assert ok(driver.cuGraphKernelNodeGetAttribute(node, identity)).priority == greatest


def test_only_kernels_have_attributes(driver, graph):
    node = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    assert code(driver.cuGraphKernelNodeGetAttribute(node, driver.CUkernelNodeAttrID(8))) == 1


def test_a_captured_kernel_has_the_priority_of_its_stream(driver, kernels):
    stream = ok(driver.cuStreamCreateWithPriority(1, -3))
    begin(driver, stream)
    launch_kernel(driver, kernels.nothing, stream)
    graph = ok(driver.cuStreamEndCapture(stream))
    (node,) = nodes(driver, graph)
    value = ok(driver.cuGraphKernelNodeGetAttribute(node, driver.CUkernelNodeAttrID(8)))
    assert value.priority == -3
    ok(driver.cuGraphDestroy(graph))
    ok(driver.cuStreamDestroy(stream))


# ---------------------------------------------------------------- programmatic launches


def programmatic(driver: Any, kernel: Any, stream: Any, *values: Any) -> None:
    """A launch that need not wait for the end of the kernel before it."""
    config = programmatic_config(driver, stream)
    ok(driver.cuLaunchKernelEx(config, kernel.handle, (values, kernel.parameters), 0))


@pytest.mark.parametrize("before", ["kernel", "fill", "nothing"])
def test_a_programmatic_launch_makes_a_programmatic_edge_from_a_kernel(
    driver, kernels, stream, buffer, captured, before
):
    def work() -> None:
        if before == "kernel":
            launch_kernel(driver, kernels.add, stream, buffer, 1)
        elif before == "fill":
            ok(driver.cuMemsetD32Async(buffer, 1, 1, stream))
        programmatic(driver, kernels.add, stream, buffer, 1)

    graph = captured(work)
    *_, data, count = ok(driver.cuGraphGetEdges(graph, 2))
    found = [(each.type, each.from_port, each.to_port) for each in list(data or ())[:count]]
    assert found == {"kernel": [(1, 1, 0)], "fill": [(0, 0, 0)], "nothing": []}[before]
    last = nodes(driver, graph)[-1]
    assert code(driver.cuGraphKernelNodeGetAttribute(last, driver.CUkernelNodeAttrID(6))) == 1
