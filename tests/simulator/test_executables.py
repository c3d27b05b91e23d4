"""Executables: snapshots, launches, edits. Uses nothing a device lacks, but for the last part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from breakable_cuda_graphs.simulator import SimulatedDriver

from .helpers import code, fill, here, memcpy_params, memset_params, ok, words


@pytest.fixture
def graph(driver_module: Any) -> Iterator[Any]:
    """An empty graph."""
    made = ok(driver_module.cuGraphCreate(0))
    yield made
    ok(driver_module.cuGraphDestroy(made))


@pytest.fixture
def instantiate(driver_module: Any) -> Iterator[Any]:
    """Instantiates, and destroys at the end."""
    made = []

    def make(graph: Any, flags: int = 0) -> Any:
        made.append(ok(driver_module.cuGraphInstantiate(graph, flags)))
        return made[-1]

    yield make
    for executable in made:
        ok(driver_module.cuGraphExecDestroy(executable))


def fill_node(driver: Any, graph: Any, address: int, value: int, *after: Any) -> Any:
    params = memset_params(driver, address, value)
    return ok(
        driver.cuGraphAddMemsetNode(graph, list(after) or None, len(after), params, here(driver))
    )


def copy_node(driver: Any, graph: Any, target: int, source: int, size: int, *after: Any) -> Any:
    params = memcpy_params(driver, target, source, size)
    return ok(
        driver.cuGraphAddMemcpyNode(graph, list(after) or None, len(after), params, here(driver))
    )


def run(driver: Any, executable: Any, stream: Any) -> None:
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))


def test_an_executable_does_not_see_later_changes_of_its_template(
    driver_module, graph, instantiate, stream, buffer
):
    node = fill_node(driver_module, graph, buffer, 1)
    executable = instantiate(graph)
    ok(driver_module.cuGraphMemsetNodeSetParams(node, memset_params(driver_module, buffer, 2)))
    fill_node(driver_module, graph, buffer + 4, 2, node)
    run(driver_module, executable, stream)
    assert words(driver_module, buffer, 2) == [1, 0]


def test_an_executable_outlives_its_template(driver_module, instantiate, stream, buffer):
    graph = ok(driver_module.cuGraphCreate(0))
    fill_node(driver_module, graph, buffer, 1)
    executable = instantiate(graph)
    ok(driver_module.cuGraphDestroy(graph))
    run(driver_module, executable, stream)
    assert words(driver_module, buffer) == [1]


def test_an_edit_reaches_one_executable_only(driver_module, graph, instantiate, stream, buffer):
    node = fill_node(driver_module, graph, buffer, 1)
    one, two = instantiate(graph), instantiate(graph)
    params = memset_params(driver_module, buffer, 5)
    ok(driver_module.cuGraphExecMemsetNodeSetParams(one, node, params, here(driver_module)))
    run(driver_module, one, stream)
    assert words(driver_module, buffer) == [5]
    run(driver_module, two, stream)
    assert words(driver_module, buffer) == [1]
    assert ok(driver_module.cuGraphMemsetNodeGetParams(node)).value == 1


def test_a_node_of_another_graph_addresses_nothing(driver_module, graph, instantiate, buffer):
    fill_node(driver_module, graph, buffer, 1)
    executable = instantiate(graph)
    other = ok(driver_module.cuGraphCreate(0))
    stranger = fill_node(driver_module, other, buffer, 1)
    params = memset_params(driver_module, buffer, 5)
    answer = driver_module.cuGraphExecMemsetNodeSetParams(
        executable, stranger, params, here(driver_module)
    )
    assert code(answer) == 1
    ok(driver_module.cuGraphDestroy(other))


def test_a_node_added_after_instantiation_addresses_nothing(
    driver_module, graph, instantiate, buffer
):
    executable = instantiate(graph)
    late = fill_node(driver_module, graph, buffer, 1)
    params = memset_params(driver_module, buffer, 5)
    assert (
        code(
            driver_module.cuGraphExecMemsetNodeSetParams(
                executable, late, params, here(driver_module)
            )
        )
        == 1
    )


def test_a_copy_may_change_its_ends_and_its_length(
    driver_module, graph, instantiate, stream, buffer
):
    fill(driver_module, stream, buffer, 3, 4)
    node = copy_node(driver_module, graph, buffer + 64, buffer, 4)
    executable = instantiate(graph)
    params = memcpy_params(driver_module, buffer + 128, buffer, 16)
    ok(driver_module.cuGraphExecMemcpyNodeSetParams(executable, node, params, here(driver_module)))
    run(driver_module, executable, stream)
    assert words(driver_module, buffer + 64) == [0]
    assert words(driver_module, buffer + 128, 4) == [3] * 4


def test_a_copy_may_not_become_empty_or_change_the_kind_of_memory(
    driver_module, graph, instantiate, buffer
):
    node = copy_node(driver_module, graph, buffer + 64, buffer, 4)
    executable = instantiate(graph)
    setter = driver_module.cuGraphExecMemcpyNodeSetParams
    empty = memcpy_params(driver_module, buffer + 64, buffer, 0)
    assert code(setter(executable, node, empty, here(driver_module))) == 1
    pinned = int(ok(driver_module.cuMemAllocHost(64)))
    hosted = memcpy_params(driver_module, buffer + 64, buffer, 4)
    hosted.srcMemoryType = driver_module.CUmemorytype.CU_MEMORYTYPE_HOST
    hosted.srcHost = pinned
    assert code(setter(executable, node, hosted, here(driver_module))) == 1
    ok(driver_module.cuMemFreeHost(pinned))


def test_only_copies_of_one_dimension_can_be_edited(driver_module, graph, instantiate, buffer):
    params = memcpy_params(driver_module, buffer + 256, buffer, 4)
    params.Height, params.srcPitch, params.dstPitch = 2, 8, 8
    node = ok(driver_module.cuGraphAddMemcpyNode(graph, None, 0, params, here(driver_module)))
    executable = instantiate(graph)
    assert (
        code(
            driver_module.cuGraphExecMemcpyNodeSetParams(
                executable, node, params, here(driver_module)
            )
        )
        == 1
    )


def test_a_fill_may_change_value_place_and_width_but_not_its_height(
    driver_module, graph, instantiate, stream, buffer
):
    node = fill_node(driver_module, graph, buffer, 1)
    executable = instantiate(graph)
    setter = driver_module.cuGraphExecMemsetNodeSetParams
    ok(
        setter(
            executable, node, memset_params(driver_module, buffer + 8, 4, 2), here(driver_module)
        )
    )
    run(driver_module, executable, stream)
    assert words(driver_module, buffer, 4) == [0, 0, 4, 4]
    tall = memset_params(driver_module, buffer, 1)
    tall.height, tall.pitch = 2, 16
    assert code(setter(executable, node, tall, here(driver_module))) == 1


def test_a_disabled_node_does_nothing_and_keeps_its_parameters(
    driver_module, graph, instantiate, stream, buffer
):
    first = fill_node(driver_module, graph, buffer, 1)
    fill_node(driver_module, graph, buffer + 4, 2, first)
    executable = instantiate(graph)
    ok(driver_module.cuGraphNodeSetEnabled(executable, first, 0))
    assert ok(driver_module.cuGraphNodeGetEnabled(executable, first)) == 0
    run(driver_module, executable, stream)
    assert words(driver_module, buffer, 2) == [0, 2]
    ok(driver_module.cuGraphNodeSetEnabled(executable, first, 1))
    run(driver_module, executable, stream)
    assert words(driver_module, buffer, 2) == [1, 2]


def test_an_empty_node_cannot_be_disabled(driver_module, graph, instantiate):
    node = ok(driver_module.cuGraphAddEmptyNode(graph, None, 0))
    executable = instantiate(graph)
    assert code(driver_module.cuGraphNodeSetEnabled(executable, node, 0)) == 1


def test_flags_are_remembered_but_for_upload(driver_module, graph, stream):
    params = driver_module.CUDA_GRAPH_INSTANTIATE_PARAMS()
    params.flags, params.hUploadStream = 1 | 2 | 8, stream
    executable = ok(driver_module.cuGraphInstantiateWithParams(graph, params))
    assert int(params.result_out) == 0
    assert int(ok(driver_module.cuGraphExecGetFlags(executable))) == 1 | 8
    ok(driver_module.cuGraphUpload(executable, stream))
    ok(driver_module.cuGraphExecDestroy(executable))


def test_device_launch_excludes_automatic_freeing(driver_module, graph):
    assert code(driver_module.cuGraphInstantiate(graph, 1 | 4)) == 1


# ---------------------------------------------------------------- child graphs


def chain_of_child(driver: Any, graph: Any, buffer: int, value: int) -> tuple[Any, Any]:
    """A graph with one child that sets two words; returns (child node, the child's template)."""
    inner = ok(driver.cuGraphCreate(0))
    first = fill_node(driver, inner, buffer, value)
    fill_node(driver, inner, buffer + 4, value, first)
    return ok(driver.cuGraphAddChildGraphNode(graph, None, 0, inner)), inner


def test_a_child_takes_the_parameters_of_a_graph_of_the_same_shape(
    driver_module, graph, instantiate, stream, buffer
):
    child, inner = chain_of_child(driver_module, graph, buffer, 1)
    executable = instantiate(graph)
    spare = ok(driver_module.cuGraphCreate(0))
    _, other = chain_of_child(driver_module, spare, buffer + 64, 2)
    ok(driver_module.cuGraphExecChildGraphNodeSetParams(executable, child, other))
    run(driver_module, executable, stream)
    assert words(driver_module, buffer, 2) == [0, 0]
    assert words(driver_module, buffer + 64, 2) == [2, 2]
    for each in (inner, other, spare):
        ok(driver_module.cuGraphDestroy(each))


def test_a_child_of_another_shape_is_refused_and_changes_nothing(
    driver_module, graph, instantiate, stream, buffer
):
    child, inner = chain_of_child(driver_module, graph, buffer, 1)
    executable = instantiate(graph)
    other = ok(driver_module.cuGraphCreate(0))
    fill_node(driver_module, other, buffer + 64, 2)
    fill_node(driver_module, other, buffer + 68, 2)  # no edge
    answer = driver_module.cuGraphExecChildGraphNodeSetParams(executable, child, other)
    assert code(answer) == 1
    run(driver_module, executable, stream)
    assert words(driver_module, buffer, 2) == [1, 1]
    for each in (inner, other):
        ok(driver_module.cuGraphDestroy(each))


# ---------------------------------------------------------------- orders (simulator only)


def order_of_two(seed: int, *, edge: bool) -> list[int]:
    """The last writer of one word, over ten launches of two fills."""
    driver = SimulatedDriver(seed)
    ok(driver.cuInit(0))
    stream = ok(driver.cuStreamCreate(1))
    buffer = int(ok(driver.cuMemAlloc(64)))
    graph = ok(driver.cuGraphCreate(0))
    first = fill_node(driver, graph, buffer, 1)
    fill_node(driver, graph, buffer, 2, *([first] if edge else []))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    seen = []
    for _ in range(10):
        run(driver, executable, stream)
        seen += words(driver, buffer)
    return seen


def test_a_missing_edge_shows():
    assert set(order_of_two(1, edge=False)) == {1, 2}


def test_an_edge_is_kept_in_every_order():
    assert all(set(order_of_two(seed, edge=True)) == {2} for seed in range(5))


def test_a_seed_repeats_its_orders():
    assert order_of_two(7, edge=False) == order_of_two(7, edge=False)
    assert order_of_two(7, edge=False) != order_of_two(8, edge=False)


def test_a_missing_edge_into_a_child_graph_shows():
    driver = SimulatedDriver(3)
    ok(driver.cuInit(0))
    stream = ok(driver.cuStreamCreate(1))
    buffer = int(ok(driver.cuMemAlloc(64)))
    inner, graph = ok(driver.cuGraphCreate(0)), ok(driver.cuGraphCreate(0))
    first = fill_node(driver, inner, buffer + 4, 1)
    fill_node(driver, inner, buffer, 1, first)
    ok(driver.cuGraphAddChildGraphNode(graph, None, 0, inner))
    fill_node(driver, graph, buffer, 2)
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    seen = set()
    for _ in range(20):
        run(driver, executable, stream)
        seen |= set(words(driver, buffer))
    assert seen == {1, 2}
