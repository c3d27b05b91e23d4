"""Conditional nodes: bodies, values, and what such graphs cannot do."""

from __future__ import annotations

from typing import Any

import pytest

from raw_calls import (
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
def test_if_takes_one_of_two_bodies(driver, graph, stream, buffer, value, expected):
    _, bodies, _ = conditional(driver, graph, IF, 2, default=value)
    fill_body(driver, bodies[0], buffer, 1)
    fill_body(driver, bodies[1], buffer + 4, 2)
    launch(driver, graph, stream)
    assert words(driver, buffer, 2) == expected


@pytest.mark.parametrize("value", [0, 1, 2, 3])
def test_switch_takes_the_body_of_its_number_or_none(driver, graph, stream, buffer, value):
    _, bodies, _ = conditional(driver, graph, SWITCH, 3, default=value)
    for number, body in enumerate(bodies):
        fill_body(driver, body, buffer + 4 * number, 1)
    launch(driver, graph, stream)
    assert words(driver, buffer, 3) == [int(value == n) for n in range(3)]


def test_while_runs_until_its_body_clears_the_value(driver, kernels, graph, stream, buffer):
    handle, (body,), _ = conditional(driver, graph, WHILE, 1, default=1)
    params = kernel_params(driver, kernels.count, buffer, 4, int(handle))
    ok(driver.cuGraphAddKernelNode(body, None, 0, params))
    launch(driver, graph, stream)
    assert words(driver, buffer) == [4]


def test_a_setter_kernel_reads_a_flag_of_the_device(driver, kernels, graph, stream, buffer):
    handle = ok(driver.cuGraphConditionalHandleCreate(graph, here(driver), 0, 0))
    before = ok(
        driver.cuGraphAddKernelNode(
            graph, None, 0, kernel_params(driver, kernels.set, int(handle), buffer)
        )
    )
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle, params.conditional.size = handle, 1
    params.conditional.type = driver.CUgraphConditionalNodeType(IF)
    ok(driver.cuGraphAddNode(graph, [before], None, 1, params))
    body = driver.CUgraph(int(params.conditional.phGraph_out[0]))
    fill_body(driver, body, buffer + 4, 7)
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    for flag, expected in ((0, 0), (1, 7)):
        fill(driver, stream, buffer, flag)
        ok(driver.cuGraphLaunch(executable, stream))
        assert words(driver, buffer + 4) == [expected]
    ok(driver.cuGraphExecDestroy(executable))


def test_a_body_can_be_captured_into(driver, graph, stream, buffer):
    _, (body,), _ = conditional(driver, graph, IF, 1, default=1)
    ok(driver.cuStreamBeginCaptureToGraph(stream, body, None, None, 0, mode(driver, RELAXED)))
    fill(driver, stream, buffer, 3)
    assert int(ok(driver.cuStreamEndCapture(stream))) == int(body)
    launch(driver, graph, stream)
    assert words(driver, buffer) == [3]


def test_a_body_takes_no_host_nodes(driver, graph):
    _, (body,), _ = conditional(driver, graph, IF, 1, default=1)
    params = driver.CUDA_HOST_NODE_PARAMS()
    params.fn = driver.CUhostFn(1)
    assert code(driver.cuGraphAddHostNode(body, None, 0, params)) == 801


def test_a_graph_with_a_conditional_cannot_be_cloned_or_be_a_child(driver, graph):
    conditional(driver, graph, IF, 1, default=1)
    assert code(driver.cuGraphClone(graph)) == 1
    outer = ok(driver.cuGraphCreate(0))
    assert code(driver.cuGraphAddChildGraphNode(outer, None, 0, graph)) == 1
    ok(driver.cuGraphDestroy(outer))


def test_a_handle_is_for_one_node_of_its_graph(driver, graph):
    handle, _, _ = conditional(driver, graph, IF, 1, default=1)
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle, params.conditional.size = handle, 1
    assert code(driver.cuGraphAddNode(graph, None, None, 0, params)) == 1


def test_an_unused_handle_is_refused_at_instantiation(driver, graph):
    ok(driver.cuGraphConditionalHandleCreate(graph, here(driver), 1, 1))
    params = driver.CUDA_GRAPH_INSTANTIATE_PARAMS()
    assert code(driver.cuGraphInstantiateWithParams(graph, params)) != 0
    assert int(params.result_out) == 5


def test_nodes_in_a_body_can_be_edited(driver, graph, stream, buffer):
    _, (body,), _ = conditional(driver, graph, IF, 1, default=1)
    params = memset_params(driver, buffer, 1)
    node = ok(driver.cuGraphAddMemsetNode(body, None, 0, params, here(driver)))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    params = memset_params(driver, buffer, 8)
    ok(driver.cuGraphExecMemsetNodeSetParams(executable, node, params, here(driver)))
    ok(driver.cuGraphLaunch(executable, stream))
    assert words(driver, buffer) == [8]
    ok(driver.cuGraphExecDestroy(executable))


def test_an_update_takes_over_the_default_value(driver, graph, stream, buffer):
    _, (body,), _ = conditional(driver, graph, IF, 1, default=0)
    fill_body(driver, body, buffer, 1)
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    other = ok(driver.cuGraphCreate(0))
    _, (body,), _ = conditional(driver, other, IF, 1, default=1)
    fill_body(driver, body, buffer, 2)
    ok(driver.cuGraphExecUpdate(executable, other))
    ok(driver.cuGraphLaunch(executable, stream))
    assert words(driver, buffer) == [2]
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(other))
