"""Conditional nodes: bodies, values, and what such graphs cannot do."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from breakable_cuda_graphs.simulator import SimulatedKernel, conditional_setter, set_conditional

from .helpers import (
    RELAXED,
    code,
    fill,
    here,
    kernel_params,
    launch,
    memset_params,
    mode,
    ok,
    words,
)

IF, WHILE, SWITCH = range(3)


@pytest.fixture
def graph(driver_module: Any) -> Any:
    """An empty graph, destroyed with all that is in it."""
    made = ok(driver_module.cuGraphCreate(0))
    yield made
    ok(driver_module.cuGraphDestroy(made))


def conditional(
    driver: Any, graph: Any, choice: int, size: int, *after: Any, default: int | None = None
) -> tuple[Any, list[Any], Any]:
    """(handle, bodies, node)."""
    flags = 0 if default is None else 1
    handle = ok(driver.cuGraphConditionalHandleCreate(graph, here(driver), default or 0, flags))
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = handle
    params.conditional.type = driver.CUgraphConditionalNodeType(choice)
    params.conditional.size = size
    params.conditional.ctx = here(driver)
    node = ok(driver.cuGraphAddNode(graph, list(after) or None, None, len(after), params))
    bodies = [driver.CUgraph(int(body)) for body in params.conditional.phGraph_out[:size]]
    return handle, bodies, node


def fill_body(driver: Any, body: Any, address: int, value: int) -> None:
    params = memset_params(driver, address, value)
    ok(driver.cuGraphAddMemsetNode(body, None, 0, params, here(driver)))


@pytest.mark.parametrize(("value", "expected"), [(0, [0, 2]), (1, [1, 0]), (5, [1, 0])])
def test_if_takes_one_of_two_bodies(driver_module, graph, stream, buffer, value, expected):
    _, bodies, _ = conditional(driver_module, graph, IF, 2, default=value)
    fill_body(driver_module, bodies[0], buffer, 1)
    fill_body(driver_module, bodies[1], buffer + 4, 2)
    launch(driver_module, graph, stream)
    assert words(driver_module, buffer, 2) == expected


@pytest.mark.parametrize("value", [0, 1, 2, 3])
def test_switch_takes_the_body_of_its_number_or_none(driver_module, graph, stream, buffer, value):
    _, bodies, _ = conditional(driver_module, graph, SWITCH, 3, default=value)
    for number, body in enumerate(bodies):
        fill_body(driver_module, body, buffer + 4 * number, 1)
    launch(driver_module, graph, stream)
    assert words(driver_module, buffer, 3) == [int(value == n) for n in range(3)]


def test_while_runs_until_its_body_clears_the_value(driver_module, graph, stream, buffer):
    handle, (body,), _ = conditional(driver_module, graph, WHILE, 1, default=1)

    def step(address: int, condition: int) -> None:
        cell = ctypes.c_uint32.from_address(address)
        cell.value += 1
        set_conditional(condition, int(cell.value < 4))

    kernel = SimulatedKernel(step, (ctypes.c_void_p, ctypes.c_uint64))
    params = kernel_params(driver_module, kernel, buffer, int(handle))
    ok(driver_module.cuGraphAddKernelNode(body, None, 0, params))
    launch(driver_module, graph, stream)
    assert words(driver_module, buffer) == [4]


def test_a_setter_kernel_reads_a_flag_of_the_device(driver_module, graph, stream, buffer):
    setter = conditional_setter(ctypes.c_uint32)
    handle = ok(driver_module.cuGraphConditionalHandleCreate(graph, here(driver_module), 0, 0))
    before = ok(
        driver_module.cuGraphAddKernelNode(
            graph, None, 0, kernel_params(driver_module, setter, int(handle), buffer)
        )
    )
    params = driver_module.CUgraphNodeParams()
    params.type = driver_module.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle, params.conditional.size = handle, 1
    params.conditional.type = driver_module.CUgraphConditionalNodeType(IF)
    ok(driver_module.cuGraphAddNode(graph, [before], None, 1, params))
    body = driver_module.CUgraph(int(params.conditional.phGraph_out[0]))
    fill_body(driver_module, body, buffer + 4, 7)
    executable = ok(driver_module.cuGraphInstantiate(graph, 0))
    for flag, expected in ((0, 0), (1, 7)):
        fill(driver_module, stream, buffer, flag)
        ok(driver_module.cuGraphLaunch(executable, stream))
        assert words(driver_module, buffer + 4) == [expected]
    ok(driver_module.cuGraphExecDestroy(executable))


def test_a_body_can_be_captured_into(driver_module, graph, stream, buffer):
    _, (body,), _ = conditional(driver_module, graph, IF, 1, default=1)
    ok(
        driver_module.cuStreamBeginCaptureToGraph(
            stream, body, None, None, 0, mode(driver_module, RELAXED)
        )
    )
    fill(driver_module, stream, buffer, 3)
    assert int(ok(driver_module.cuStreamEndCapture(stream))) == int(body)
    launch(driver_module, graph, stream)
    assert words(driver_module, buffer) == [3]


def test_a_body_takes_no_host_nodes(driver_module, graph):
    _, (body,), _ = conditional(driver_module, graph, IF, 1, default=1)
    params = driver_module.CUDA_HOST_NODE_PARAMS()
    params.fn = driver_module.CUhostFn(1)
    assert code(driver_module.cuGraphAddHostNode(body, None, 0, params)) == 801


def test_a_graph_with_a_conditional_cannot_be_cloned_or_be_a_child(driver_module, graph):
    conditional(driver_module, graph, IF, 1, default=1)
    assert code(driver_module.cuGraphClone(graph)) == 1
    outer = ok(driver_module.cuGraphCreate(0))
    assert code(driver_module.cuGraphAddChildGraphNode(outer, None, 0, graph)) == 1
    ok(driver_module.cuGraphDestroy(outer))


def test_a_handle_is_for_one_node_of_its_graph(driver_module, graph):
    handle, _, _ = conditional(driver_module, graph, IF, 1, default=1)
    params = driver_module.CUgraphNodeParams()
    params.type = driver_module.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle, params.conditional.size = handle, 1
    assert code(driver_module.cuGraphAddNode(graph, None, None, 0, params)) == 1


def test_an_unused_handle_is_refused_at_instantiation(driver_module, graph):
    ok(driver_module.cuGraphConditionalHandleCreate(graph, here(driver_module), 1, 1))
    params = driver_module.CUDA_GRAPH_INSTANTIATE_PARAMS()
    assert code(driver_module.cuGraphInstantiateWithParams(graph, params)) != 0
    assert int(params.result_out) == 5


def test_nodes_in_a_body_can_be_edited(driver_module, graph, stream, buffer):
    _, (body,), _ = conditional(driver_module, graph, IF, 1, default=1)
    params = memset_params(driver_module, buffer, 1)
    node = ok(driver_module.cuGraphAddMemsetNode(body, None, 0, params, here(driver_module)))
    executable = ok(driver_module.cuGraphInstantiate(graph, 0))
    params = memset_params(driver_module, buffer, 8)
    ok(driver_module.cuGraphExecMemsetNodeSetParams(executable, node, params, here(driver_module)))
    ok(driver_module.cuGraphLaunch(executable, stream))
    assert words(driver_module, buffer) == [8]
    ok(driver_module.cuGraphExecDestroy(executable))


def test_an_update_takes_over_the_default_value(driver_module, graph, stream, buffer):
    _, (body,), _ = conditional(driver_module, graph, IF, 1, default=0)
    fill_body(driver_module, body, buffer, 1)
    executable = ok(driver_module.cuGraphInstantiate(graph, 0))
    other = ok(driver_module.cuGraphCreate(0))
    _, (body,), _ = conditional(driver_module, other, IF, 1, default=1)
    fill_body(driver_module, body, buffer, 2)
    ok(driver_module.cuGraphExecUpdate(executable, other))
    ok(driver_module.cuGraphLaunch(executable, stream))
    assert words(driver_module, buffer) == [2]
    ok(driver_module.cuGraphExecDestroy(executable))
    ok(driver_module.cuGraphDestroy(other))
