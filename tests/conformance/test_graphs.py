"""Graphs that are built, read and changed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from raw_calls import (
    code,
    edges,
    here,
    kernel_params,
    kinds,
    launch,
    memcpy_params,
    memset_params,
    nodes,
    ok,
    words,
)


def empty(driver: Any, graph: Any, *after: Any) -> Any:
    """An empty node."""
    return ok(driver.cuGraphAddEmptyNode(graph, list(after) or None, len(after)))


def fill_node(driver: Any, graph: Any, address: int, value: int, *after: Any) -> Any:
    """A node that sets one word."""
    params = memset_params(driver, address, value)
    return ok(
        driver.cuGraphAddMemsetNode(graph, list(after) or None, len(after), params, here(driver))
    )


def test_nodes_are_listed_in_the_order_of_their_making(driver, graph):
    made = [empty(driver, graph) for _ in range(4)]
    assert [int(node) for node in nodes(driver, graph)] == [int(node) for node in made]


def test_a_list_is_filled_up_with_null_handles(driver, graph):
    empty(driver, graph)
    found, count = ok(driver.cuGraphGetNodes(graph, 3))
    assert count == 1
    assert [int(node) for node in found[1:]] == [0, 0]


def test_edges_roots_and_neighbours_agree(driver, graph):
    a = empty(driver, graph)
    b = empty(driver, graph, a)
    c = empty(driver, graph, a, b)
    assert edges(driver, graph) == {(0, 1), (0, 2), (1, 2)}
    roots, count = ok(driver.cuGraphGetRootNodes(graph, 4))
    assert [int(node) for node in roots[:count]] == [int(a)]
    found, _, count = ok(driver.cuGraphNodeGetDependencies(c, 2))
    assert {int(node) for node in found[:count]} == {int(a), int(b)}
    found, _, count = ok(driver.cuGraphNodeGetDependentNodes(a, 2))
    assert {int(node) for node in found[:count]} == {int(b), int(c)}


def test_dependencies_can_be_added_and_removed(driver, graph):
    a, b = empty(driver, graph), empty(driver, graph)
    ok(driver.cuGraphAddDependencies(graph, [a], [b], None, 1))
    assert edges(driver, graph) == {(0, 1)}
    assert code(driver.cuGraphAddDependencies(graph, [a], [b], None, 1)) == 1
    ok(driver.cuGraphRemoveDependencies(graph, [a], [b], None, 1))
    assert edges(driver, graph) == set()
    assert code(driver.cuGraphRemoveDependencies(graph, [a], [b], None, 1)) == 1


def test_a_dependency_may_be_given_once(driver, graph):
    a = empty(driver, graph)
    assert code(driver.cuGraphAddEmptyNode(graph, [a, a], 2)) == 1


def test_a_node_cannot_wait_for_itself_or_for_a_stranger(driver, graph):
    a = empty(driver, graph)
    other = ok(driver.cuGraphCreate(0))
    stranger = empty(driver, other)
    assert code(driver.cuGraphAddDependencies(graph, [a], [a], None, 1)) == 1
    assert code(driver.cuGraphAddEmptyNode(graph, [stranger], 1)) == 1
    ok(driver.cuGraphDestroy(other))


def test_a_removed_node_takes_its_edges_along(driver, graph):
    a = empty(driver, graph)
    b = empty(driver, graph, a)
    empty(driver, graph, b)
    ok(driver.cuGraphDestroyNode(b))
    assert len(nodes(driver, graph)) == 2
    assert edges(driver, graph) == set()


def edge_data(driver: Any, kind: int, port: int) -> Any:
    data = driver.CUgraphEdgeData()
    data.type, data.from_port = kind, port
    return data


def test_edge_data_survives(driver, kernels, graph):
    a, b = (kernel_node(driver, kernels, graph) for _ in range(2))
    data = edge_data(driver, 1, 1)
    ok(driver.cuGraphAddDependencies(graph, [a], [b], [data], 1))
    *_, found, count = ok(driver.cuGraphGetEdges(graph, 1))
    assert (found[0].type, found[0].from_port, found[0].to_port, count) == (1, 1, 0, 1)
    ok(driver.cuGraphRemoveDependencies(graph, [a], [b], [data], 1))


def test_an_edge_is_removed_whatever_its_data_if_none_is_given(driver, kernels, graph):
    a, b = (kernel_node(driver, kernels, graph) for _ in range(2))
    ok(driver.cuGraphAddDependencies(graph, [a], [b], [edge_data(driver, 1, 1)], 1))
    ok(driver.cuGraphRemoveDependencies(graph, [a], [b], None, 1))
    assert edges(driver, graph) == set()


@pytest.mark.parametrize(("kind", "port", "expected"), [(1, 1, 0), (1, 2, 0), (7, 2, 1), (0, 1, 1)])
def test_edges_have_known_types_and_ports(driver, kernels, graph, kind, port, expected):
    a, b = (kernel_node(driver, kernels, graph) for _ in range(2))
    data = edge_data(driver, kind, port)
    assert code(driver.cuGraphAddDependencies(graph, [a], [b], [data], 1)) == expected


def test_programmatic_edges_are_between_kernels(driver, kernels, graph):
    kernel, other = kernel_node(driver, kernels, graph), empty(driver, graph)
    data = [edge_data(driver, 1, 1)]
    assert code(driver.cuGraphAddDependencies(graph, [kernel], [other], data, 1)) == 1
    assert code(driver.cuGraphAddDependencies(graph, [other], [other], data, 1)) == 1


def test_of_a_list_of_edges_those_before_a_bad_one_are_added(driver, graph):
    a, b = empty(driver, graph), empty(driver, graph)
    assert code(driver.cuGraphAddDependencies(graph, [a, a], [b, b], None, 2)) == 1
    assert edges(driver, graph) == {(0, 1)}


def kernel_node(driver: Any, kernels: Any, graph: Any) -> Any:
    params = kernel_params(driver, kernels.nothing)
    return ok(driver.cuGraphAddKernelNode(graph, None, 0, params))


def test_a_cycle_is_refused_at_instantiation_and_named(driver, graph):
    a = empty(driver, graph)
    b = empty(driver, graph, a)
    ok(driver.cuGraphAddDependencies(graph, [b], [a], None, 1))
    assert code(driver.cuGraphInstantiate(graph, 0)) == 1
    params = driver.CUDA_GRAPH_INSTANTIATE_PARAMS()
    assert code(driver.cuGraphInstantiateWithParams(graph, params)) == 1
    assert int(params.result_out) == 2
    assert int(params.hErrNode_out) in (int(a), int(b))


def test_parameters_of_copies_and_fills_can_be_read_and_set(driver, graph, buffer):
    filled = fill_node(driver, graph, buffer, 7)
    params = ok(driver.cuGraphMemsetNodeGetParams(filled))
    assert (int(params.dst), params.value, params.width) == (buffer, 7, 1)
    params.value = 8
    ok(driver.cuGraphMemsetNodeSetParams(filled, params))
    assert ok(driver.cuGraphMemsetNodeGetParams(filled)).value == 8
    copied = ok(
        driver.cuGraphAddMemcpyNode(
            graph,
            [filled],
            1,
            memcpy_params(driver, buffer + 8, buffer, 4),
            here(driver),
        )
    )
    params = ok(driver.cuGraphMemcpyNodeGetParams(copied))
    assert (int(params.dstDevice), int(params.srcDevice)) == (buffer + 8, buffer)
    params.dstDevice = driver.CUdeviceptr(buffer + 16)
    ok(driver.cuGraphMemcpyNodeSetParams(copied, params))
    assert int(ok(driver.cuGraphMemcpyNodeGetParams(copied)).dstDevice) == buffer + 16


def test_a_getter_of_another_kind_is_refused(driver, graph):
    node = empty(driver, graph)
    for getter in ("Kernel", "Memcpy", "Memset", "Host"):
        assert code(getattr(driver, f"cuGraph{getter}NodeGetParams")(node)) == 1


def test_the_generic_call_adds_the_same_nodes(driver, graph, stream, buffer):
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    params.memset.dst = driver.CUdeviceptr(buffer)
    params.memset.value, params.memset.elementSize = 6, 4
    params.memset.width, params.memset.height = 2, 1
    first = ok(driver.cuGraphAddNode(graph, None, None, 0, params))
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY
    copy = memcpy_params(driver, buffer + 8, buffer, 8)
    params.memcpy.copyParams = copy
    ok(driver.cuGraphAddNode(graph, [first], None, 1, params))
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY
    ok(driver.cuGraphAddNode(graph, [first], None, 1, params))
    assert kinds(driver, graph) == [2, 1, 5]
    launch(driver, graph, stream)
    assert words(driver, buffer, 4) == [6, 6, 6, 6]


# ---------------------------------------------------------------- copies


def test_a_clone_is_independent_and_remembers_whose_it_is(driver, graph, stream, buffer):
    node = fill_node(driver, graph, buffer, 1)
    clone = ok(driver.cuGraphClone(graph))
    twin = ok(driver.cuGraphNodeFindInClone(node, clone))
    assert int(twin) != int(node)
    params = memset_params(driver, buffer, 2)
    ok(driver.cuGraphMemsetNodeSetParams(node, params))
    launch(driver, clone, stream)
    assert words(driver, buffer) == [1]
    ok(driver.cuGraphDestroy(clone))


def test_a_child_is_a_copy_that_the_node_owns(driver, graph, stream, buffer):
    inner = ok(driver.cuGraphCreate(0))
    node = fill_node(driver, inner, buffer, 1)
    child = ok(driver.cuGraphAddChildGraphNode(graph, None, 0, inner))
    ok(driver.cuGraphMemsetNodeSetParams(node, memset_params(driver, buffer, 9)))
    ok(driver.cuGraphDestroy(inner))
    embedded = ok(driver.cuGraphChildGraphNodeGetGraph(child))
    assert kinds(driver, embedded) == [2]
    launch(driver, graph, stream)
    assert words(driver, buffer) == [1]


def test_changes_of_an_embedded_graph_are_seen_by_the_next_instantiation(
    driver, graph, stream, buffer
):
    inner = ok(driver.cuGraphCreate(0))
    fill_node(driver, inner, buffer, 1)
    child = ok(driver.cuGraphAddChildGraphNode(graph, None, 0, inner))
    ok(driver.cuGraphDestroy(inner))
    embedded = ok(driver.cuGraphChildGraphNodeGetGraph(child))
    (node,) = nodes(driver, embedded)
    ok(driver.cuGraphMemsetNodeSetParams(node, memset_params(driver, buffer, 3)))
    launch(driver, graph, stream)
    assert words(driver, buffer) == [3]


def test_a_dot_file_names_every_node(driver, graph, tmp_path, buffer):
    first = fill_node(driver, graph, buffer, 1)
    empty(driver, graph, first)
    path = tmp_path / "graph.dot"
    ok(driver.cuGraphDebugDotPrint(graph, str(path).encode(), 0))
    text = path.read_text()
    assert text.startswith("digraph dot {")
    assert text.count(" -> ") == 1
    with pytest.raises(TypeError):
        driver.cuGraphDebugDotPrint(graph, str(path), 0)
