"""Graphs that are built, read and changed by hand. Uses nothing a device lacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .helpers import (
    code,
    edges,
    here,
    kinds,
    launch,
    memcpy_params,
    memset_params,
    nodes,
    ok,
    words,
)


@pytest.fixture
def graph(driver_module: Any) -> Iterator[Any]:
    """An empty graph."""
    made = ok(driver_module.cuGraphCreate(0))
    yield made
    ok(driver_module.cuGraphDestroy(made))


def empty(driver: Any, graph: Any, *after: Any) -> Any:
    """An empty node."""
    return ok(driver.cuGraphAddEmptyNode(graph, list(after) or None, len(after)))


def fill_node(driver: Any, graph: Any, address: int, value: int, *after: Any) -> Any:
    """A node that sets one word."""
    params = memset_params(driver, address, value)
    return ok(
        driver.cuGraphAddMemsetNode(graph, list(after) or None, len(after), params, here(driver))
    )


def test_nodes_are_listed_in_the_order_of_their_making(driver_module, graph):
    made = [empty(driver_module, graph) for _ in range(4)]
    assert [int(node) for node in nodes(driver_module, graph)] == [int(node) for node in made]


def test_a_list_is_filled_up_with_null_handles(driver_module, graph):
    empty(driver_module, graph)
    found, count = ok(driver_module.cuGraphGetNodes(graph, 3))
    assert count == 1
    assert [int(node) for node in found[1:]] == [0, 0]


def test_edges_roots_and_neighbours_agree(driver_module, graph):
    a = empty(driver_module, graph)
    b = empty(driver_module, graph, a)
    c = empty(driver_module, graph, a, b)
    assert edges(driver_module, graph) == {(0, 1), (0, 2), (1, 2)}
    roots, count = ok(driver_module.cuGraphGetRootNodes(graph, 4))
    assert [int(node) for node in roots[:count]] == [int(a)]
    found, _, count = ok(driver_module.cuGraphNodeGetDependencies(c, 2))
    assert {int(node) for node in found[:count]} == {int(a), int(b)}
    found, _, count = ok(driver_module.cuGraphNodeGetDependentNodes(a, 2))
    assert {int(node) for node in found[:count]} == {int(b), int(c)}


def test_dependencies_can_be_added_and_removed(driver_module, graph):
    a, b = empty(driver_module, graph), empty(driver_module, graph)
    ok(driver_module.cuGraphAddDependencies(graph, [a], [b], None, 1))
    assert edges(driver_module, graph) == {(0, 1)}
    assert code(driver_module.cuGraphAddDependencies(graph, [a], [b], None, 1)) == 1
    ok(driver_module.cuGraphRemoveDependencies(graph, [a], [b], None, 1))
    assert edges(driver_module, graph) == set()
    assert code(driver_module.cuGraphRemoveDependencies(graph, [a], [b], None, 1)) == 1


def test_a_dependency_may_be_given_once(driver_module, graph):
    a = empty(driver_module, graph)
    assert code(driver_module.cuGraphAddEmptyNode(graph, [a, a], 2)) == 1


def test_a_node_cannot_wait_for_itself_or_for_a_stranger(driver_module, graph):
    a = empty(driver_module, graph)
    other = ok(driver_module.cuGraphCreate(0))
    stranger = empty(driver_module, other)
    assert code(driver_module.cuGraphAddDependencies(graph, [a], [a], None, 1)) == 1
    assert code(driver_module.cuGraphAddEmptyNode(graph, [stranger], 1)) == 1
    ok(driver_module.cuGraphDestroy(other))


def test_a_removed_node_takes_its_edges_along(driver_module, graph):
    a = empty(driver_module, graph)
    b = empty(driver_module, graph, a)
    empty(driver_module, graph, b)
    ok(driver_module.cuGraphDestroyNode(b))
    assert len(nodes(driver_module, graph)) == 2
    assert edges(driver_module, graph) == set()


def test_edge_data_survives(driver_module, graph):
    a, b = empty(driver_module, graph), empty(driver_module, graph)
    data = driver_module.CUgraphEdgeData()
    data.type, data.from_port = 1, 1
    ok(driver_module.cuGraphAddDependencies(graph, [a], [b], [data], 1))
    *_, found, count = ok(driver_module.cuGraphGetEdges(graph, 1))
    assert (found[0].type, found[0].from_port, found[0].to_port, count) == (1, 1, 0, 1)
    assert code(driver_module.cuGraphRemoveDependencies(graph, [a], [b], None, 1)) == 1
    ok(driver_module.cuGraphRemoveDependencies(graph, [a], [b], [data], 1))


def test_a_cycle_is_refused_at_instantiation_and_named(driver_module, graph):
    a = empty(driver_module, graph)
    b = empty(driver_module, graph, a)
    ok(driver_module.cuGraphAddDependencies(graph, [b], [a], None, 1))
    assert code(driver_module.cuGraphInstantiate(graph, 0)) == 1
    params = driver_module.CUDA_GRAPH_INSTANTIATE_PARAMS()
    assert code(driver_module.cuGraphInstantiateWithParams(graph, params)) == 1
    assert int(params.result_out) == 2
    assert int(params.hErrNode_out) in (int(a), int(b))


def test_parameters_of_copies_and_fills_can_be_read_and_set(driver_module, graph, buffer):
    filled = fill_node(driver_module, graph, buffer, 7)
    params = ok(driver_module.cuGraphMemsetNodeGetParams(filled))
    assert (int(params.dst), params.value, params.width) == (buffer, 7, 1)
    params.value = 8
    ok(driver_module.cuGraphMemsetNodeSetParams(filled, params))
    assert ok(driver_module.cuGraphMemsetNodeGetParams(filled)).value == 8
    copied = ok(
        driver_module.cuGraphAddMemcpyNode(
            graph,
            [filled],
            1,
            memcpy_params(driver_module, buffer + 8, buffer, 4),
            here(driver_module),
        )
    )
    params = ok(driver_module.cuGraphMemcpyNodeGetParams(copied))
    assert (int(params.dstDevice), int(params.srcDevice)) == (buffer + 8, buffer)
    params.dstDevice = driver_module.CUdeviceptr(buffer + 16)
    ok(driver_module.cuGraphMemcpyNodeSetParams(copied, params))
    assert int(ok(driver_module.cuGraphMemcpyNodeGetParams(copied)).dstDevice) == buffer + 16


def test_a_getter_of_another_kind_is_refused(driver_module, graph):
    node = empty(driver_module, graph)
    for getter in ("Kernel", "Memcpy", "Memset", "Host"):
        assert code(getattr(driver_module, f"cuGraph{getter}NodeGetParams")(node)) == 1


def test_the_generic_call_adds_the_same_nodes(driver_module, graph, stream, buffer):
    params = driver_module.CUgraphNodeParams()
    params.type = driver_module.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    params.memset.dst = driver_module.CUdeviceptr(buffer)
    params.memset.value, params.memset.elementSize = 6, 4
    params.memset.width, params.memset.height = 2, 1
    first = ok(driver_module.cuGraphAddNode(graph, None, None, 0, params))
    params = driver_module.CUgraphNodeParams()
    params.type = driver_module.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY
    copy = memcpy_params(driver_module, buffer + 8, buffer, 8)
    params.memcpy.copyParams = copy
    ok(driver_module.cuGraphAddNode(graph, [first], None, 1, params))
    params = driver_module.CUgraphNodeParams()
    params.type = driver_module.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY
    ok(driver_module.cuGraphAddNode(graph, [first], None, 1, params))
    assert kinds(driver_module, graph) == [2, 1, 5]
    launch(driver_module, graph, stream)
    assert words(driver_module, buffer, 4) == [6, 6, 6, 6]


# ---------------------------------------------------------------- copies


def test_a_clone_is_independent_and_remembers_whose_it_is(driver_module, graph, stream, buffer):
    node = fill_node(driver_module, graph, buffer, 1)
    clone = ok(driver_module.cuGraphClone(graph))
    twin = ok(driver_module.cuGraphNodeFindInClone(node, clone))
    assert int(twin) != int(node)
    params = memset_params(driver_module, buffer, 2)
    ok(driver_module.cuGraphMemsetNodeSetParams(node, params))
    launch(driver_module, clone, stream)
    assert words(driver_module, buffer) == [1]
    ok(driver_module.cuGraphDestroy(clone))


def test_a_child_is_a_copy_that_the_node_owns(driver_module, graph, stream, buffer):
    inner = ok(driver_module.cuGraphCreate(0))
    node = fill_node(driver_module, inner, buffer, 1)
    child = ok(driver_module.cuGraphAddChildGraphNode(graph, None, 0, inner))
    ok(driver_module.cuGraphMemsetNodeSetParams(node, memset_params(driver_module, buffer, 9)))
    ok(driver_module.cuGraphDestroy(inner))
    embedded = ok(driver_module.cuGraphChildGraphNodeGetGraph(child))
    assert kinds(driver_module, embedded) == [2]
    launch(driver_module, graph, stream)
    assert words(driver_module, buffer) == [1]


def test_changes_of_an_embedded_graph_are_seen_by_the_next_instantiation(
    driver_module, graph, stream, buffer
):
    inner = ok(driver_module.cuGraphCreate(0))
    fill_node(driver_module, inner, buffer, 1)
    child = ok(driver_module.cuGraphAddChildGraphNode(graph, None, 0, inner))
    ok(driver_module.cuGraphDestroy(inner))
    embedded = ok(driver_module.cuGraphChildGraphNodeGetGraph(child))
    (node,) = nodes(driver_module, embedded)
    ok(driver_module.cuGraphMemsetNodeSetParams(node, memset_params(driver_module, buffer, 3)))
    launch(driver_module, graph, stream)
    assert words(driver_module, buffer) == [3]


def test_a_dot_file_names_every_node(driver_module, graph, tmp_path, buffer):
    first = fill_node(driver_module, graph, buffer, 1)
    empty(driver_module, graph, first)
    path = tmp_path / "graph.dot"
    ok(driver_module.cuGraphDebugDotPrint(graph, str(path).encode(), 0))
    text = path.read_text()
    assert text.startswith("digraph dot {")
    assert text.count(" -> ") == 1
    with pytest.raises(TypeError):
        driver_module.cuGraphDebugDotPrint(graph, str(path), 0)
