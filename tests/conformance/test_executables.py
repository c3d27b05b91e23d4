"""Executables: snapshots, launches, edits."""

from __future__ import annotations

from typing import Any

import pytest

from raw_calls import code, fill, here, memcpy_params, memset_params, ok, words


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
    driver, graph, instantiate, stream, buffer
):
    node = fill_node(driver, graph, buffer, 1)
    executable = instantiate(graph)
    ok(driver.cuGraphMemsetNodeSetParams(node, memset_params(driver, buffer, 2)))
    fill_node(driver, graph, buffer + 4, 2, node)
    run(driver, executable, stream)
    assert words(driver, buffer, 2) == [1, 0]


def test_an_executable_outlives_its_template(driver, instantiate, stream, buffer):
    graph = ok(driver.cuGraphCreate(0))
    fill_node(driver, graph, buffer, 1)
    executable = instantiate(graph)
    ok(driver.cuGraphDestroy(graph))
    run(driver, executable, stream)
    assert words(driver, buffer) == [1]


def test_an_edit_reaches_one_executable_only(driver, graph, instantiate, stream, buffer):
    node = fill_node(driver, graph, buffer, 1)
    one, two = instantiate(graph), instantiate(graph)
    params = memset_params(driver, buffer, 5)
    ok(driver.cuGraphExecMemsetNodeSetParams(one, node, params, here(driver)))
    run(driver, one, stream)
    assert words(driver, buffer) == [5]
    run(driver, two, stream)
    assert words(driver, buffer) == [1]
    assert ok(driver.cuGraphMemsetNodeGetParams(node)).value == 1


def test_a_node_of_another_graph_addresses_nothing(driver, graph, instantiate, buffer):
    fill_node(driver, graph, buffer, 1)
    executable = instantiate(graph)
    other = ok(driver.cuGraphCreate(0))
    stranger = fill_node(driver, other, buffer, 1)
    params = memset_params(driver, buffer, 5)
    answer = driver.cuGraphExecMemsetNodeSetParams(executable, stranger, params, here(driver))
    assert code(answer) == 1
    ok(driver.cuGraphDestroy(other))


def test_a_node_added_after_instantiation_addresses_nothing(driver, graph, instantiate, buffer):
    executable = instantiate(graph)
    late = fill_node(driver, graph, buffer, 1)
    params = memset_params(driver, buffer, 5)
    assert code(driver.cuGraphExecMemsetNodeSetParams(executable, late, params, here(driver))) == 1


def test_a_copy_may_change_its_ends_and_its_length(driver, graph, instantiate, stream, buffer):
    fill(driver, stream, buffer, 3, 4)
    node = copy_node(driver, graph, buffer + 64, buffer, 4)
    executable = instantiate(graph)
    params = memcpy_params(driver, buffer + 128, buffer, 16)
    ok(driver.cuGraphExecMemcpyNodeSetParams(executable, node, params, here(driver)))
    run(driver, executable, stream)
    assert words(driver, buffer + 64) == [0]
    assert words(driver, buffer + 128, 4) == [3] * 4


def test_a_copy_may_not_become_empty_or_change_the_kind_of_memory(
    driver, graph, instantiate, buffer
):
    node = copy_node(driver, graph, buffer + 64, buffer, 4)
    executable = instantiate(graph)
    setter = driver.cuGraphExecMemcpyNodeSetParams
    empty = memcpy_params(driver, buffer + 64, buffer, 0)
    assert code(setter(executable, node, empty, here(driver))) == 1
    pinned = int(ok(driver.cuMemAllocHost(64)))
    hosted = memcpy_params(driver, buffer + 64, buffer, 4)
    hosted.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
    hosted.srcHost = pinned
    assert code(setter(executable, node, hosted, here(driver))) == 1
    ok(driver.cuMemFreeHost(pinned))


def test_a_copy_of_two_dimensions_takes_its_own_parameters_and_no_flat_ones(
    driver, graph, instantiate, buffer
):
    params = memcpy_params(driver, buffer + 256, buffer, 4)
    params.Height, params.srcPitch, params.dstPitch = 2, 8, 8
    node = ok(driver.cuGraphAddMemcpyNode(graph, None, 0, params, here(driver)))
    executable = instantiate(graph)
    setter = driver.cuGraphExecMemcpyNodeSetParams
    assert code(setter(executable, node, params, here(driver))) == 0
    flat = memcpy_params(driver, buffer + 256, buffer, 4)
    assert code(setter(executable, node, flat, here(driver))) == 1


def test_a_fill_may_change_value_place_and_width_but_not_its_height(
    driver, graph, instantiate, stream, buffer
):
    node = fill_node(driver, graph, buffer, 1)
    executable = instantiate(graph)
    setter = driver.cuGraphExecMemsetNodeSetParams
    ok(setter(executable, node, memset_params(driver, buffer + 8, 4, 2), here(driver)))
    run(driver, executable, stream)
    assert words(driver, buffer, 4) == [0, 0, 4, 4]
    tall = memset_params(driver, buffer, 1)
    tall.height, tall.pitch = 2, 16
    assert code(setter(executable, node, tall, here(driver))) == 1


def test_a_disabled_node_does_nothing_and_keeps_its_parameters(
    driver, graph, instantiate, stream, buffer
):
    first = fill_node(driver, graph, buffer, 1)
    fill_node(driver, graph, buffer + 4, 2, first)
    executable = instantiate(graph)
    ok(driver.cuGraphNodeSetEnabled(executable, first, 0))
    assert ok(driver.cuGraphNodeGetEnabled(executable, first)) == 0
    run(driver, executable, stream)
    assert words(driver, buffer, 2) == [0, 2]
    ok(driver.cuGraphNodeSetEnabled(executable, first, 1))
    run(driver, executable, stream)
    assert words(driver, buffer, 2) == [1, 2]


def test_an_empty_node_cannot_be_disabled(driver, graph, instantiate):
    node = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    executable = instantiate(graph)
    assert code(driver.cuGraphNodeSetEnabled(executable, node, 0)) == 1


def test_of_the_flags_automatic_freeing_is_told(driver, graph, instantiate, stream):
    for flags, told in ((0, 0), (1, 1), (8, 0), (9, 1)):
        assert int(ok(driver.cuGraphExecGetFlags(instantiate(graph, flags)))) == told
    params = driver.CUDA_GRAPH_INSTANTIATE_PARAMS()
    params.flags, params.hUploadStream = 1 | 2 | 8, stream
    executable = ok(driver.cuGraphInstantiateWithParams(graph, params))
    assert int(params.result_out) == 0
    assert int(ok(driver.cuGraphExecGetFlags(executable))) == 1
    ok(driver.cuGraphUpload(executable, stream))
    ok(driver.cuGraphExecDestroy(executable))


@pytest.mark.parametrize("flags", [2, 3, 16, 32])
def test_uploading_needs_a_stream_and_other_flags_are_unknown(driver, graph, flags):
    assert code(driver.cuGraphInstantiate(graph, flags)) == 1


def test_device_launch_excludes_automatic_freeing(driver, graph):
    assert code(driver.cuGraphInstantiate(graph, 1 | 4)) == 1


# ---------------------------------------------------------------- child graphs


def chain_of_child(driver: Any, graph: Any, buffer: int, value: int) -> tuple[Any, Any]:
    """A graph with one child that sets two words; returns (child node, the child's template)."""
    inner = ok(driver.cuGraphCreate(0))
    first = fill_node(driver, inner, buffer, value)
    fill_node(driver, inner, buffer + 4, value, first)
    return ok(driver.cuGraphAddChildGraphNode(graph, None, 0, inner)), inner


def test_a_child_takes_the_parameters_of_a_graph_of_the_same_shape(
    driver, graph, instantiate, stream, buffer
):
    child, inner = chain_of_child(driver, graph, buffer, 1)
    executable = instantiate(graph)
    spare = ok(driver.cuGraphCreate(0))
    _, other = chain_of_child(driver, spare, buffer + 64, 2)
    ok(driver.cuGraphExecChildGraphNodeSetParams(executable, child, other))
    run(driver, executable, stream)
    assert words(driver, buffer, 2) == [0, 0]
    assert words(driver, buffer + 64, 2) == [2, 2]
    for each in (inner, other, spare):
        ok(driver.cuGraphDestroy(each))


def test_a_child_of_another_shape_is_refused_and_changes_nothing(
    driver, graph, instantiate, stream, buffer
):
    child, inner = chain_of_child(driver, graph, buffer, 1)
    executable = instantiate(graph)
    other = ok(driver.cuGraphCreate(0))
    fill_node(driver, other, buffer + 64, 2)
    fill_node(driver, other, buffer + 68, 2)  # no edge
    answer = driver.cuGraphExecChildGraphNodeSetParams(executable, child, other)
    assert code(answer) == 910
    run(driver, executable, stream)
    assert words(driver, buffer, 2) == [1, 1]
    for each in (inner, other):
        ok(driver.cuGraphDestroy(each))
