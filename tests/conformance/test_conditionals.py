"""Conditional nodes: bodies, values, and what such graphs cannot do."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from raw_calls import (
    RELAXED,
    begin,
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


def node_params(driver: Any, handle: Any, choice: int = IF, size: int = 1) -> Any:
    """The parameters of a conditional node."""
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle, params.conditional.size = handle, size
    params.conditional.type = driver.CUgraphConditionalNodeType(choice)
    params.conditional.ctx = here(driver)
    return params


def conditional(
    driver: Any, graph: Any, choice: int, size: int, *after: Any, default: int | None = None
) -> tuple[Any, list[Any], Any]:
    """(handle, bodies, node)."""
    flags = 0 if default is None else 1
    handle = ok(driver.cuGraphConditionalHandleCreate(graph, here(driver), default or 0, flags))
    params = node_params(driver, handle, choice, size)
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
    params.conditional.ctx = here(driver)
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


FOREIGN = {
    "host": lambda driver, body, event: driver.cuGraphAddHostNode(body, None, 0, host(driver)),
    "record": lambda driver, body, event: driver.cuGraphAddEventRecordNode(body, None, 0, event),
    "wait": lambda driver, body, event: driver.cuGraphAddEventWaitNode(body, None, 0, event),
}


def host(driver: Any) -> Any:
    params = driver.CUDA_HOST_NODE_PARAMS()
    params.fn = driver.CUhostFn(ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value)
    return params


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_a_body_cannot_hold_is_refused_when_the_graph_is_instantiated(
    driver, graph, events, kind
):
    _, (body,), _ = conditional(driver, graph, IF, 1, default=1)
    ok(FOREIGN[kind](driver, body, events[0]))
    assert code(driver.cuGraphInstantiate(graph, 0)) == 1


def test_a_child_in_a_body_is_held_to_the_same_rule(driver, graph, new_graph):
    _, (body,), _ = conditional(driver, graph, IF, 1, default=1)
    inner = new_graph()
    ok(driver.cuGraphAddHostNode(inner, None, 0, host(driver)))
    ok(driver.cuGraphAddChildGraphNode(body, None, 0, inner))
    assert code(driver.cuGraphInstantiate(graph, 0)) == 1


def test_a_graph_with_a_conditional_cannot_be_cloned_or_be_a_child(driver, graph):
    _, (body,), _ = conditional(driver, graph, IF, 1, default=1)
    outer = ok(driver.cuGraphCreate(0))
    for each in (graph, body):
        assert code(driver.cuGraphClone(each)) == 801
        assert code(driver.cuGraphAddChildGraphNode(outer, None, 0, each)) == 801
    ok(driver.cuGraphDestroy(outer))


def test_a_body_cannot_be_instantiated_by_itself(driver, graph):
    _, (body,), _ = conditional(driver, graph, IF, 1, default=1)
    assert code(driver.cuGraphInstantiate(body, 0)) == 801


def test_a_handle_and_its_node_need_a_context_by_name(driver, graph):
    create = driver.cuGraphConditionalHandleCreate
    assert code(create(graph, 0, 0, 0)) == 201
    params = node_params(driver, ok(create(graph, here(driver), 1, 1)))
    params.conditional.ctx = driver.CUcontext(0)
    assert code(driver.cuGraphAddNode(graph, None, None, 0, params)) == 201


SIZES = [
    (IF, 0, 1),
    (IF, 1, 0),
    (IF, 2, 0),
    (IF, 3, 1),
    (WHILE, 0, 1),
    (WHILE, 1, 0),
    (WHILE, 2, 1),
]
SIZES += [(SWITCH, 0, 1), (SWITCH, 1, 0), (SWITCH, 5, 0)]


@pytest.mark.parametrize(("choice", "size", "expected"), SIZES)
def test_each_kind_has_its_numbers_of_bodies(driver, graph, choice, size, expected):
    handle = ok(driver.cuGraphConditionalHandleCreate(graph, here(driver), 1, 1))
    params = node_params(driver, handle, choice, size)
    assert code(driver.cuGraphAddNode(graph, None, None, 0, params)) == expected


def test_a_handle_belongs_to_its_graph(driver, graph, new_graph):
    handle = ok(driver.cuGraphConditionalHandleCreate(graph, here(driver), 1, 1))
    other = new_graph()
    assert code(driver.cuGraphAddNode(other, None, None, 0, node_params(driver, handle))) == 1


def test_handle_flags_are_checked(driver, graph):
    assert code(driver.cuGraphConditionalHandleCreate(graph, here(driver), 0, 2)) == 1


def test_bodies_nest_and_the_handle_may_be_of_the_body(driver, graph, stream, buffer):
    _, (body,), _ = conditional(driver, graph, IF, 1, default=1)
    _, (inner,), _ = conditional(driver, body, IF, 1, default=1)
    fill_body(driver, inner, buffer, 9)
    launch(driver, graph, stream)
    assert words(driver, buffer) == [9]


def test_a_handle_of_the_root_may_be_for_a_node_in_a_body(driver, graph, stream, buffer):
    handle = ok(driver.cuGraphConditionalHandleCreate(graph, here(driver), 1, 1))
    _, (body,), _ = conditional(driver, graph, IF, 1, default=1)
    params = node_params(driver, handle)
    ok(driver.cuGraphAddNode(body, None, None, 0, params))
    fill_body(driver, driver.CUgraph(int(params.conditional.phGraph_out[0])), buffer, 9)
    launch(driver, graph, stream)
    assert words(driver, buffer) == [9]


def test_without_a_default_the_value_is_what_was_set_last(
    driver, kernels, graph, instantiate, stream, buffer
):
    handle = ok(driver.cuGraphConditionalHandleCreate(graph, here(driver), 1, 0))
    setter = kernel_params(driver, kernels.set, int(handle), buffer)
    before = ok(driver.cuGraphAddKernelNode(graph, None, 0, setter))
    params = node_params(driver, handle)
    ok(driver.cuGraphAddNode(graph, [before], None, 1, params))
    fill_body(driver, driver.CUgraph(int(params.conditional.phGraph_out[0])), buffer + 4, 7)
    executable = instantiate(graph)
    for flag in (0, 1, 0, 1):
        fill(driver, stream, buffer, flag)
        fill(driver, stream, buffer + 4, 0)
        ok(driver.cuGraphLaunch(executable, stream))
        assert words(driver, buffer, 2) == [flag, 7 * flag]
    ok(driver.cuGraphNodeSetEnabled(executable, before, 0))
    fill(driver, stream, buffer + 4, 0)
    ok(driver.cuGraphLaunch(executable, stream))
    assert words(driver, buffer + 4) == [7]


def test_a_conditional_cannot_be_switched_off_and_what_is_in_it_can(
    driver, graph, instantiate, stream, buffer
):
    _, (body,), node = conditional(driver, graph, IF, 1, default=1)
    params = memset_params(driver, buffer, 5)
    inner = ok(driver.cuGraphAddMemsetNode(body, None, 0, params, here(driver)))
    executable = instantiate(graph)
    assert code(driver.cuGraphNodeSetEnabled(executable, node, 0)) == 1
    ok(driver.cuGraphNodeSetEnabled(executable, inner, 0))
    ok(driver.cuGraphLaunch(executable, stream))
    assert words(driver, buffer) == [0]


def test_a_conditional_goes_into_an_open_capture(driver, stream, new_stream, buffer):
    side = new_stream()
    begin(driver, stream)
    fill(driver, stream, buffer, 1)
    _, _, graph, before, *_ = ok(driver.cuStreamGetCaptureInfo(stream))
    _, (body,), node = conditional(driver, graph, IF, 1, *list(before)[:1], default=1)
    relaxed = mode(driver, RELAXED)
    ok(driver.cuStreamBeginCaptureToGraph(side, body, None, None, 0, relaxed))
    fill(driver, side, buffer + 4, 2)
    ok(driver.cuStreamEndCapture(side))
    ok(driver.cuStreamUpdateCaptureDependencies(stream, [node], None, 1, 1))
    fill(driver, stream, buffer + 8, 3)
    captured = ok(driver.cuStreamEndCapture(stream))
    launch(driver, captured, stream)
    assert words(driver, buffer, 3) == [1, 2, 3]
    ok(driver.cuGraphDestroy(captured))


def test_a_removed_node_leaves_its_handle_unused(driver, graph):
    _, _, node = conditional(driver, graph, IF, 1, default=1)
    ok(driver.cuGraphDestroyNode(node))
    params = driver.CUDA_GRAPH_INSTANTIATE_PARAMS()
    assert code(driver.cuGraphInstantiateWithParams(graph, params)) == 1
    assert int(params.result_out) == 5


def test_an_empty_body_is_fine(driver, graph, stream):
    conditional(driver, graph, IF, 1, default=1)
    launch(driver, graph, stream)


def test_a_graph_with_a_conditional_is_not_for_device_launch(driver, graph):
    conditional(driver, graph, IF, 1, default=1)
    params = driver.CUDA_GRAPH_INSTANTIATE_PARAMS()
    params.flags = 4
    assert code(driver.cuGraphInstantiateWithParams(graph, params)) == 1
    assert int(params.result_out) == 3


def test_the_parameters_of_a_conditional_cannot_be_set(driver, graph, instantiate):
    handle, _, node = conditional(driver, graph, IF, 1, default=1)
    params = node_params(driver, handle)
    assert code(driver.cuGraphNodeSetParams(node, params)) == 801
    assert code(driver.cuGraphExecNodeSetParams(instantiate(graph), node, params)) == 801


def test_a_handle_is_for_one_node_of_its_graph(driver, graph):
    handle, _, _ = conditional(driver, graph, IF, 1, default=1)
    assert code(driver.cuGraphAddNode(graph, None, None, 0, node_params(driver, handle))) == 1


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
