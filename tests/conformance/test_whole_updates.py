"""`cuGraphExecUpdate`: all changes or none, and why not."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from raw_calls import code, here, memcpy_params, memset_params, nodes, ok, words


def chain(driver: Any, graph: Any, buffer: int, value: int, length: int = 2) -> list[Any]:
    """Fills of successive words, each after the one before."""
    made: list[Any] = []
    for place in range(length):
        params = memset_params(driver, buffer + 4 * place, value)
        made.append(
            ok(
                driver.cuGraphAddMemsetNode(
                    graph, made[-1:] or None, len(made[-1:]), params, here(driver)
                )
            )
        )
    return made


def why(driver: Any, executable: Any, graph: Any) -> tuple[int, int, int, int]:
    """(code, result, error node, error-from node), read past the bindings as one has to."""
    _, address, _ = driver.cuGetProcAddress(b"cuGraphExecUpdate", 12000, 0)
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    info = driver.CUgraphExecUpdateResultInfo()
    number = call(int(address))(int(executable), int(graph), info.getPtr())
    return number, int(info.result), int(info.errorNode), int(info.errorFromNode)


@pytest.fixture
def executable(driver: Any, new_graph: Any, buffer: int) -> Iterator[Any]:
    """An executable of a chain of two fills."""
    graph = new_graph()
    chain(driver, graph, buffer, 1)
    made = ok(driver.cuGraphInstantiate(graph, 0))
    yield made
    ok(driver.cuGraphExecDestroy(made))


def run(driver: Any, executable: Any, stream: Any) -> None:
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))


def test_a_graph_of_the_same_shape_gives_its_parameters(
    driver, new_graph, executable, stream, buffer
):
    other = new_graph()
    chain(driver, other, buffer, 9)
    info = ok(driver.cuGraphExecUpdate(executable, other))
    assert int(info.result) == 0
    run(driver, executable, stream)
    assert words(driver, buffer, 2) == [9, 9]


def test_the_bindings_drop_the_reason_and_the_c_entry_keeps_it(
    driver, new_graph, executable, buffer
):
    other = new_graph()
    chain(driver, other, buffer, 9, length=3)
    answer = driver.cuGraphExecUpdate(executable, other)
    assert (code(answer), answer[1]) == (910, None)
    assert why(driver, executable, other) == (910, 2, 0, 0)


def test_a_missing_edge_is_a_changed_topology(driver, new_graph, executable, buffer):
    other = new_graph()
    first, second = chain(driver, other, buffer, 9)
    ok(driver.cuGraphRemoveDependencies(other, [first], [second], None, 1))
    assert why(driver, executable, other)[:3] == (910, 2, int(second))


def test_nodes_are_paired_by_their_edges_and_not_by_their_insertion(
    driver, new_graph, executable, stream, buffer
):
    other = new_graph()
    params = memset_params(driver, buffer, 9)
    last = ok(driver.cuGraphAddMemsetNode(other, None, 0, params, here(driver)))
    first = ok(driver.cuGraphAddMemsetNode(other, None, 0, params, here(driver)))
    ok(driver.cuGraphAddDependencies(other, [first], [last], None, 1))
    assert why(driver, executable, other)[:2] == (0, 0)
    run(driver, executable, stream)
    assert words(driver, buffer, 2) == [9, 0]


def test_an_edge_from_another_node_of_the_same_shape_changes_nothing(driver, new_graph, buffer):
    template, other = new_graph(), new_graph()
    for graph, source in ((template, 0), (other, 1)):
        made = [ok(driver.cuGraphAddEmptyNode(graph, None, 0)) for _ in range(3)]
        ok(driver.cuGraphAddDependencies(graph, [made[source]], [made[2]], None, 1))
    executable = ok(driver.cuGraphInstantiate(template, 0))
    assert why(driver, executable, other)[:2] == (0, 0)
    ok(driver.cuGraphExecDestroy(executable))


def test_another_kind_of_node_is_named(driver, new_graph, executable, buffer):
    other = new_graph()
    first = chain(driver, other, buffer, 9, length=1)
    changed = ok(
        driver.cuGraphAddMemcpyNode(
            other,
            first,
            1,
            memcpy_params(driver, buffer + 8, buffer, 4),
            here(driver),
        )
    )
    assert why(driver, executable, other)[:3] == (910, 3, int(changed))


def test_a_refused_update_changes_nothing(driver, new_graph, executable, stream, buffer):
    other = new_graph()
    first = chain(driver, other, buffer, 9, length=1)
    tall = memset_params(driver, buffer, 9)
    tall.height, tall.pitch = 2, 16
    changed = ok(driver.cuGraphAddMemsetNode(other, first, 1, tall, here(driver)))
    assert why(driver, executable, other)[:3] == (910, 5, int(changed))
    run(driver, executable, stream)
    assert words(driver, buffer, 2) == [1, 1]


def test_an_update_reaches_into_child_graphs(driver, new_graph, stream, buffer):
    inner, outer, other = new_graph(), new_graph(), new_graph()
    chain(driver, inner, buffer, 1)
    ok(driver.cuGraphAddChildGraphNode(outer, None, 0, inner))
    executable = ok(driver.cuGraphInstantiate(outer, 0))
    for node in nodes(driver, inner):
        params = memset_params(driver, buffer + 64, 6)
        ok(driver.cuGraphMemsetNodeSetParams(node, params))
    ok(driver.cuGraphAddChildGraphNode(other, None, 0, inner))
    ok(driver.cuGraphExecUpdate(executable, other))
    run(driver, executable, stream)
    assert words(driver, buffer + 64) == [6]
    ok(driver.cuGraphExecDestroy(executable))


def test_an_updated_executable_is_still_addressed_by_its_first_template(
    driver, new_graph, stream, buffer
):
    template, other = new_graph(), new_graph()
    first, _ = chain(driver, template, buffer, 1)
    executable = ok(driver.cuGraphInstantiate(template, 0))
    chain(driver, other, buffer, 9)
    ok(driver.cuGraphExecUpdate(executable, other))
    params = memset_params(driver, buffer, 3)
    ok(driver.cuGraphExecMemsetNodeSetParams(executable, first, params, here(driver)))
    run(driver, executable, stream)
    assert words(driver, buffer, 2) == [3, 9]
    ok(driver.cuGraphExecDestroy(executable))


def test_an_embedded_graph_cannot_be_instantiated_alone(driver, new_graph, buffer):
    inner, outer = new_graph(), new_graph()
    chain(driver, inner, buffer, 4)
    node = ok(driver.cuGraphAddChildGraphNode(outer, None, 0, inner))
    embedded = ok(driver.cuGraphChildGraphNodeGetGraph(node))
    assert code(driver.cuGraphInstantiate(embedded, 0)) == 801
