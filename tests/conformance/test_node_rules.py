"""What parameters nodes and executables take, kind by kind, and what can be switched off."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from raw_calls import (
    code,
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

DEVICE, HOST, UNIFIED = 2, 1, 4


@pytest.fixture
def pinned(driver: Any) -> Any:
    address = ok(driver.cuMemAllocHost(256))
    yield int(address)
    ok(driver.cuMemFreeHost(address))


def fill_params(driver: Any, buffer: int, **fields: int) -> Any:
    """A fill of one word of the buffer, with other fields as they are given."""
    given = {"at": 0, "value": 1, "elementSize": 4, "width": 1, "height": 1, "pitch": 0, **fields}
    params = driver.CUDA_MEMSET_NODE_PARAMS()
    at = given.pop("at")
    params.dst = driver.CUdeviceptr(given.pop("dst", buffer + at))
    for name, value in given.items():
        setattr(params, name, value)
    return params


def copy_params(
    driver: Any, to: int, source: int, size: int = 4, to_kind: int = DEVICE,
    source_kind: int = DEVICE, **fields: int,
) -> Any:  # fmt: skip
    """A copy, with other fields as they are given."""
    params = memcpy_params(driver, to, source, size)
    params.dstMemoryType = driver.CUmemorytype(to_kind)
    params.srcMemoryType = driver.CUmemorytype(source_kind)
    if to_kind == HOST:
        params.dstHost = to
    if source_kind == HOST:
        params.srcHost = source
    for name, value in fields.items():
        setattr(params, name, value)
    return params


# ---------------------------------------------------------------- templates

FILLS = {
    "three-byte elements": ({"elementSize": 3}, 1),
    "eight-byte elements": ({"elementSize": 8}, 1),
    "no width": ({"width": 0}, 1),
    "no height": ({"height": 0}, 1),
    "null": ({"dst": 0}, 1),
    "words off their alignment": ({"at": 2}, 1),
    "halves off their alignment": ({"at": 1, "elementSize": 2}, 1),
    "bytes anywhere": ({"at": 1, "elementSize": 1}, 0),
    "a pitch below the width": ({"height": 2, "pitch": 2}, 1),
    "no pitch for two rows": ({"height": 2}, 1),
    "a pitch that breaks the alignment": ({"height": 2, "pitch": 6}, 1),
    "two rows": ({"height": 2, "pitch": 8}, 0),
    "a value larger than its element": ({"elementSize": 1, "value": 0x1234}, 0),
    "far beyond the memory": ({"width": 1 << 20}, 1),
}


@pytest.mark.parametrize("name", FILLS)
def test_fill_nodes_are_checked(driver, graph, buffer, name):
    fields, expected = FILLS[name]
    params = fill_params(driver, buffer, **fields)
    assert code(driver.cuGraphAddMemsetNode(graph, None, 0, params, here(driver))) == expected


COPIES = {
    "nothing": ({"WidthInBytes": 0}, 1),
    "no rows": ({"Height": 0}, 1),
    "no slices": ({"Depth": 0}, 1),
    "pitches below the width": (
        {"WidthInBytes": 8, "Height": 2, "srcPitch": 4, "dstPitch": 4}, 1
    ),
    "two rows": ({"Height": 2, "srcPitch": 16, "dstPitch": 16}, 0),
    "far beyond the memory": ({"WidthInBytes": 1 << 20}, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_copy_nodes_are_checked(driver, graph, buffer, name):
    fields, expected = COPIES[name]
    params = copy_params(driver, buffer, buffer + 256, **fields)
    assert code(driver.cuGraphAddMemcpyNode(graph, None, 0, params, here(driver))) == expected


def test_a_copy_needs_two_ends(driver, graph, buffer):
    params = copy_params(driver, 0, buffer)
    assert code(driver.cuGraphAddMemcpyNode(graph, None, 0, params, here(driver))) == 1
    unset = driver.CUDA_MEMCPY3D()
    unset.WidthInBytes, unset.Height, unset.Depth = 4, 1, 1
    assert code(driver.cuGraphAddMemcpyNode(graph, None, 0, unset, here(driver))) == 1


@pytest.mark.parametrize(
    "kinds", [(DEVICE, HOST), (UNIFIED, UNIFIED), (HOST, HOST), (HOST, DEVICE)]
)
def test_copies_connect_all_kinds_of_memory(driver, graph, buffer, pinned, kinds):
    ends = [pinned if kind == HOST else buffer for kind in kinds]
    params = copy_params(driver, ends[0], ends[1] + 64, 4, *kinds)
    assert code(driver.cuGraphAddMemcpyNode(graph, None, 0, params, here(driver))) == 0


def test_copies_may_read_pageable_memory(driver, graph, stream, buffer):
    host = (ctypes.c_uint32 * 1)(7)
    params = copy_params(driver, buffer, ctypes.addressof(host), 4, DEVICE, HOST)
    node = ok(driver.cuGraphAddMemcpyNode(graph, None, 0, params, here(driver)))
    found = ok(driver.cuGraphMemcpyNodeGetParams(node))
    assert (int(found.srcMemoryType), int(found.dstMemoryType)) == (HOST, DEVICE)
    assert (int(found.srcHost), int(found.dstDevice)) == (ctypes.addressof(host), buffer)
    host[0] = 9
    launch(driver, graph, stream)
    assert words(driver, buffer) == [9]


def test_fill_parameters_are_read_back_as_they_were(driver, graph, buffer):
    params = fill_params(driver, buffer, value=0x1234, elementSize=1, width=3, pitch=77)
    node = ok(driver.cuGraphAddMemsetNode(graph, None, 0, params, here(driver)))
    found = ok(driver.cuGraphMemsetNodeGetParams(node))
    assert (found.value, found.elementSize, found.width, found.height, found.pitch) == (
        0x1234, 1, 3, 1, 77,
    )  # fmt: skip


def test_null_contexts_mean_the_current_one_for_copies_and_fills(driver, graph, buffer):
    ok(driver.cuGraphAddMemsetNode(graph, None, 0, memset_params(driver, buffer, 1), 0))
    params = copy_params(driver, buffer, buffer + 64)
    ok(driver.cuGraphAddMemcpyNode(graph, None, 0, params, 0))


# ---------------------------------------------------------------- executables

FILL_EDITS = {
    "value": ({"value": 3}, 0),
    "place": ({"at": 64}, 0),
    "wider": ({"width": 8}, 0),
    "narrower": ({"width": 1}, 0),
    "bytes": ({"elementSize": 1, "width": 4}, 0),
    "taller": ({"height": 2, "pitch": 64}, 1),
    "misaligned": ({"at": 2}, 1),
    "null": ({"dst": 0}, 1),
    "no width": ({"width": 0}, 1),
}


@pytest.mark.parametrize("name", FILL_EDITS)
def test_what_of_a_fill_may_change_in_an_executable(driver, graph, instantiate, buffer, name):
    fields, expected = FILL_EDITS[name]
    node = ok(
        driver.cuGraphAddMemsetNode(
            graph, None, 0, fill_params(driver, buffer, width=4), here(driver)
        )
    )
    params = fill_params(driver, buffer, **{"width": 4, **fields})
    setter = driver.cuGraphExecMemsetNodeSetParams
    assert code(setter(instantiate(graph), node, params, here(driver))) == expected


TALL_EDITS = {
    "the same": ({}, 0),
    "place": ({"at": 512}, 0),
    "wider": ({"width": 8}, 1),
    "taller": ({"height": 3}, 1),
    "pitch": ({"pitch": 128}, 1),
    "one row": ({"height": 1}, 1),
}


@pytest.mark.parametrize("name", TALL_EDITS)
def test_what_of_a_tall_fill_may_change_in_an_executable(driver, graph, instantiate, buffer, name):
    fields, expected = TALL_EDITS[name]
    tall = {"width": 4, "height": 2, "pitch": 64}
    params = fill_params(driver, buffer, **tall)
    node = ok(driver.cuGraphAddMemsetNode(graph, None, 0, params, here(driver)))
    params = fill_params(driver, buffer, **{**tall, **fields})
    setter = driver.cuGraphExecMemsetNodeSetParams
    assert code(setter(instantiate(graph), node, params, here(driver))) == expected


#: Kinds of memory before -> kinds after, and the code of the edit.
COPY_EDITS = {
    (DEVICE, DEVICE): [
        ((DEVICE, DEVICE), 0), ((DEVICE, HOST), 1), ((UNIFIED, UNIFIED), 1), ((HOST, DEVICE), 1),
    ],
    (DEVICE, HOST): [((DEVICE, HOST), 0), ((UNIFIED, UNIFIED), 1), ((DEVICE, DEVICE), 1)],
    (UNIFIED, UNIFIED): [((UNIFIED, UNIFIED), 0), ((DEVICE, DEVICE), 1)],
}  # fmt: skip


@pytest.mark.parametrize("before", COPY_EDITS)
def test_the_kinds_of_memory_of_a_copy_may_not_change(
    driver, graph, instantiate, buffer, pinned, before
):
    def params(kinds: tuple[int, int], at: int) -> Any:
        ends = [pinned if kind == HOST else buffer for kind in kinds]
        return copy_params(driver, ends[0] + at, ends[1] + 128, 4, *kinds)

    node = ok(driver.cuGraphAddMemcpyNode(graph, None, 0, params(before, 0), here(driver)))
    executable = instantiate(graph)
    for after, expected in COPY_EDITS[before]:
        setter = driver.cuGraphExecMemcpyNodeSetParams
        assert code(setter(executable, node, params(after, 64), here(driver))) == expected


def test_a_copy_may_grow_but_not_vanish(driver, graph, instantiate, buffer):
    params = copy_params(driver, buffer, buffer + 256)
    node = ok(driver.cuGraphAddMemcpyNode(graph, None, 0, params, here(driver)))
    executable, setter = instantiate(graph), driver.cuGraphExecMemcpyNodeSetParams
    for size, expected in ((64, 0), (0, 1)):
        params = copy_params(driver, buffer, buffer + 256, size)
        assert code(setter(executable, node, params, here(driver))) == expected


def test_an_edit_is_for_a_node_of_its_kind(driver, graph, instantiate, buffer):
    empty = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    params = memset_params(driver, buffer, 1)
    fill = ok(driver.cuGraphAddMemsetNode(graph, None, 0, params, here(driver)))
    executable = instantiate(graph)
    setter = driver.cuGraphExecMemsetNodeSetParams
    assert code(setter(executable, empty, params, here(driver))) == 1
    copy = copy_params(driver, buffer, buffer + 64)
    assert code(driver.cuGraphExecMemcpyNodeSetParams(executable, fill, copy, here(driver))) == 1


def test_a_node_of_a_clone_addresses_nothing(driver, graph, instantiate, buffer):
    params = memset_params(driver, buffer, 1)
    node = ok(driver.cuGraphAddMemsetNode(graph, None, 0, params, here(driver)))
    clone = ok(driver.cuGraphClone(graph))
    twin = ok(driver.cuGraphNodeFindInClone(node, clone))
    setter = driver.cuGraphExecMemsetNodeSetParams
    assert code(setter(instantiate(graph), twin, params, here(driver))) == 1
    ok(driver.cuGraphDestroy(clone))


def test_an_executable_keeps_a_node_that_its_template_has_lost(
    driver, graph, instantiate, stream, buffer
):
    first = memset_params(driver, buffer, 6)
    gone = ok(driver.cuGraphAddMemsetNode(graph, None, 0, first, here(driver)))
    second = memset_params(driver, buffer + 4, 7)
    ok(driver.cuGraphAddMemsetNode(graph, None, 0, second, here(driver)))
    executable = instantiate(graph)
    ok(driver.cuGraphDestroyNode(gone))
    ok(driver.cuGraphLaunch(executable, stream))
    assert words(driver, buffer, 2) == [6, 7]


def test_a_node_in_a_child_is_edited_by_its_handle_in_the_embedded_graph(
    driver, graph, new_graph, instantiate, stream, buffer
):
    inner = new_graph()
    params = memset_params(driver, buffer, 1)
    outside = ok(driver.cuGraphAddMemsetNode(inner, None, 0, params, here(driver)))
    child = ok(driver.cuGraphAddChildGraphNode(graph, None, 0, inner))
    (node,) = nodes(driver, ok(driver.cuGraphChildGraphNodeGetGraph(child)))
    executable, setter = instantiate(graph), driver.cuGraphExecMemsetNodeSetParams
    assert code(setter(executable, outside, params, here(driver))) == 1
    params = memset_params(driver, buffer, 3)
    ok(setter(executable, node, params, here(driver)))
    ok(driver.cuGraphLaunch(executable, stream))
    assert words(driver, buffer) == [3]


def test_the_generic_setters_do_the_same(driver, graph, instantiate, buffer):
    params = memset_params(driver, buffer, 1)
    node = ok(driver.cuGraphAddMemsetNode(graph, None, 0, params, here(driver)))
    executable = instantiate(graph)
    generic = driver.CUgraphNodeParams()
    generic.type = driver.CUgraphNodeType(2)
    generic.memset.dst, generic.memset.value = driver.CUdeviceptr(buffer), 9
    generic.memset.elementSize, generic.memset.width, generic.memset.height = 4, 1, 1
    for context in (here(driver), driver.CUcontext(0)):
        generic.memset.ctx = context
        ok(driver.cuGraphNodeSetParams(node, generic))
        ok(driver.cuGraphExecNodeSetParams(executable, node, generic))
    assert ok(driver.cuGraphMemsetNodeGetParams(node)).value == 9
    other = driver.CUgraphNodeParams()
    other.type = driver.CUgraphNodeType(5)
    assert code(driver.cuGraphNodeSetParams(node, other)) == 1
    assert code(driver.cuGraphExecNodeSetParams(executable, node, other)) == 1


# ---------------------------------------------------------------- switching off


def host_params(driver: Any) -> Any:
    params = driver.CUDA_HOST_NODE_PARAMS()
    params.fn = driver.CUhostFn(ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value)
    return params


def every_kind(driver: Any, kernels: Any, graph: Any, inner: Any, event: Any, buffer: int) -> Any:
    """One node of each kind, by name."""
    ok(driver.cuGraphAddEmptyNode(inner, None, 0))
    copy = copy_params(driver, buffer, buffer + 64)
    return {
        "kernel": driver.cuGraphAddKernelNode(
            graph, None, 0, kernel_params(driver, kernels.nothing)
        ),
        "copy": driver.cuGraphAddMemcpyNode(graph, None, 0, copy, here(driver)),
        "fill": driver.cuGraphAddMemsetNode(
            graph, None, 0, memset_params(driver, buffer, 1), here(driver)
        ),
        "empty": driver.cuGraphAddEmptyNode(graph, None, 0),
        "host": driver.cuGraphAddHostNode(graph, None, 0, host_params(driver)),
        "record": driver.cuGraphAddEventRecordNode(graph, None, 0, event),
        "child": driver.cuGraphAddChildGraphNode(graph, None, 0, inner),
    }


def test_kernels_copies_and_fills_can_be_switched_off_and_nothing_else(
    driver, kernels, graph, new_graph, instantiate, events, buffer
):
    made = every_kind(driver, kernels, graph, new_graph(), events[0], buffer)
    executable = instantiate(graph)
    for name, answer in made.items():
        expected = 0 if name in ("kernel", "copy", "fill") else 1
        node = ok(answer)
        assert code(driver.cuGraphNodeSetEnabled(executable, node, 0)) == expected, name
        told = driver.cuGraphNodeGetEnabled(executable, node)
        assert (code(told), told[1]) == ((0, 0) if expected == 0 else (1, None)), name


def test_an_edit_keeps_a_node_switched_off_and_any_number_switches_it_on(
    driver, graph, instantiate, buffer
):
    params = memset_params(driver, buffer, 1)
    node = ok(driver.cuGraphAddMemsetNode(graph, None, 0, params, here(driver)))
    executable = instantiate(graph)
    ok(driver.cuGraphNodeSetEnabled(executable, node, 0))
    ok(driver.cuGraphExecMemsetNodeSetParams(executable, node, params, here(driver)))
    assert ok(driver.cuGraphNodeGetEnabled(executable, node)) == 0
    ok(driver.cuGraphNodeSetEnabled(executable, node, 5))
    assert ok(driver.cuGraphNodeGetEnabled(executable, node)) == 1


def test_an_update_keeps_a_node_switched_off(driver, graph, new_graph, instantiate, buffer):
    params = memset_params(driver, buffer, 1)
    node = ok(driver.cuGraphAddMemsetNode(graph, None, 0, params, here(driver)))
    executable, other = instantiate(graph), new_graph()
    ok(driver.cuGraphNodeSetEnabled(executable, node, 0))
    ok(driver.cuGraphAddMemsetNode(other, None, 0, params, here(driver)))
    ok(driver.cuGraphExecUpdate(executable, other))
    assert ok(driver.cuGraphNodeGetEnabled(executable, node)) == 0


# ---------------------------------------------------------------- whole graphs

DEVICE_LAUNCH = {"kernel": 0, "fill": 0, "empty": 1, "host": 1}


@pytest.mark.parametrize("kind", DEVICE_LAUNCH)
def test_graphs_for_launches_by_the_device_hold_few_kinds(
    driver, kernels, graph, new_graph, events, buffer, kind
):
    made = new_graph()
    node = every_kind(driver, kernels, made, new_graph(), events[0], buffer)[kind]
    for other in nodes(driver, made):
        if int(other) != int(ok(node)):
            ok(driver.cuGraphDestroyNode(other))
    params = driver.CUDA_GRAPH_INSTANTIATE_PARAMS()
    params.flags = 4
    answer = driver.cuGraphInstantiateWithParams(made, params)
    assert code(answer) == DEVICE_LAUNCH[kind]
    assert int(params.result_out) == (3 if DEVICE_LAUNCH[kind] else 0)
    assert (int(params.hErrNode_out) != 0) == bool(DEVICE_LAUNCH[kind])
    if not code(answer):
        ok(driver.cuGraphExecDestroy(answer[1]))


def test_an_empty_graph_is_not_for_launches_by_the_device(driver, graph):
    params = driver.CUDA_GRAPH_INSTANTIATE_PARAMS()
    params.flags = 4
    assert code(driver.cuGraphInstantiateWithParams(graph, params)) == 1


def test_an_embedded_graph_can_grow_and_be_cloned(driver, graph, new_graph, buffer):
    inner = new_graph()
    params = memset_params(driver, buffer, 1)
    node = ok(driver.cuGraphAddMemsetNode(inner, None, 0, params, here(driver)))
    child = ok(driver.cuGraphAddChildGraphNode(graph, None, 0, inner))
    embedded = ok(driver.cuGraphChildGraphNodeGetGraph(child))
    ok(driver.cuGraphAddEmptyNode(embedded, None, 0))
    assert (kinds(driver, embedded), kinds(driver, inner)) == ([2, 5], [2])
    ok(driver.cuGraphNodeFindInClone(node, embedded))
    ok(driver.cuGraphDestroy(ok(driver.cuGraphClone(embedded))))


def test_a_clone_knows_the_nodes_that_it_was_made_of_and_no_others(driver, graph, new_graph):
    node = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    clone, other = ok(driver.cuGraphClone(graph)), new_graph()
    late = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    find = driver.cuGraphNodeFindInClone
    twin = ok(find(node, clone))
    assert [code(find(*each)) for each in ((node, other), (late, clone), (twin, clone))] == [
        1,
        1,
        1,
    ]
    ok(driver.cuGraphDestroyNode(twin))
    assert code(find(node, clone)) == 1
    ok(driver.cuGraphDestroy(clone))


def moved(driver: Any, outer: Any, inner: Any) -> tuple[Any, ...]:
    """Add a child that takes the graph itself, and no copy."""
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType(4)
    params.graph.graph = inner
    params.graph.ownership = driver.CUgraphChildGraphNodeOwnership(1)
    return driver.cuGraphAddNode(outer, None, None, 0, params)  # type: ignore[no-any-return]


def test_a_moved_child_is_the_graph_itself_and_moves_once(driver, graph, new_graph):
    inner = ok(driver.cuGraphCreate(0))
    ok(driver.cuGraphAddEmptyNode(inner, None, 0))
    node = ok(moved(driver, graph, inner))
    assert int(ok(driver.cuGraphChildGraphNodeGetGraph(node))) == int(inner)
    assert code(moved(driver, new_graph(), inner)) == 801


def test_a_graph_that_was_instantiated_can_be_moved(driver, graph, instantiate):
    inner = ok(driver.cuGraphCreate(0))
    ok(driver.cuGraphAddEmptyNode(inner, None, 0))
    instantiate(inner)
    ok(moved(driver, graph, inner))


def test_lists_are_as_long_as_they_were_asked_for(driver, graph):
    first = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    ok(driver.cuGraphAddEmptyNode(graph, [first], 1))
    for asked, found in ((0, 2), (1, 1), (2, 2), (5, 2)):
        handles, count = ok(driver.cuGraphGetNodes(graph, asked))
        assert count == found
        assert [int(each) != 0 for each in handles or ()] == [True] * min(asked, 2) + [False] * max(
            asked - 2, 0
        )


def test_a_cycle_has_no_roots_and_can_be_cloned(driver, graph):
    a, b = (ok(driver.cuGraphAddEmptyNode(graph, None, 0)) for _ in range(2))
    for source, target in ((a, b), (b, a)):
        ok(driver.cuGraphAddDependencies(graph, [source], [target], None, 1))
    assert ok(driver.cuGraphGetRootNodes(graph, 0))[1] == 0
    ok(driver.cuGraphDestroy(ok(driver.cuGraphClone(graph))))


def test_a_cycle_in_a_child_is_found(driver, graph, new_graph):
    inner = new_graph()
    a, b = (ok(driver.cuGraphAddEmptyNode(inner, None, 0)) for _ in range(2))
    for source, target in ((a, b), (b, a)):
        ok(driver.cuGraphAddDependencies(inner, [source], [target], None, 1))
    ok(driver.cuGraphAddChildGraphNode(graph, None, 0, inner))
    params = driver.CUDA_GRAPH_INSTANTIATE_PARAMS()
    assert code(driver.cuGraphInstantiateWithParams(graph, params)) == 1
    assert int(params.result_out) == 2
