"""The two shapes of the bindings, and functions that a driver is too old for."""

from __future__ import annotations

from typing import Any

import pytest

from breakable_cuda_graphs._driver import bindings
from breakable_cuda_graphs.simulator import SimulatedDriver, SimulatedKernel
from raw_calls import begin, code, fill, kernel_params, ok

NOTHING = SimulatedKernel(lambda: None)


@pytest.fixture
def old() -> Any:
    """A driver in the shape of 12.9."""
    driver = SimulatedDriver(1, "12.9")
    ok(driver.cuInit(0))
    return driver


def two_nodes(driver: Any, *, programmatic: bool) -> tuple[Any, Any, Any]:
    graph = ok(driver.cuGraphCreate(0))
    params = kernel_params(driver, NOTHING)
    one, two = (ok(driver.cuGraphAddKernelNode(graph, None, 0, params)) for _ in range(2))
    data = driver.CUgraphEdgeData()
    if programmatic:
        data.type, data.from_port = 1, 1
    ok(driver.cuGraphAddDependencies_v2(graph, [one], [two], [data], 1))
    return graph, one, two


def test_the_version_follows_the_shape(old):
    assert ok(old.cuDriverGetVersion()) == 12090
    with pytest.raises(ValueError, match="shape"):
        SimulatedDriver(1, "11.8")


def test_bare_names_of_129_have_no_edge_data(old):
    graph, one, two = two_nodes(old, programmatic=False)
    assert len(old.cuGraphGetEdges(graph, 1)) == 4
    assert len(old.cuGraphGetEdges_v2(graph, 1)) == 5
    assert len(old.cuGraphNodeGetDependencies(two, 1)) == 3
    assert len(old.cuGraphNodeGetDependencies_v2(two, 1)) == 4
    assert len(old.cuGraphNodeGetDependentNodes(one, 1)) == 3
    ok(old.cuGraphRemoveDependencies(graph, [one], [two], 1))
    ok(old.cuGraphAddDependencies(graph, [one], [two], 1))


def test_bare_names_of_129_refuse_to_lose_edge_data(old):
    graph, _, two = two_nodes(old, programmatic=True)
    assert code(old.cuGraphGetEdges(graph, 1)) == 402
    assert code(old.cuGraphNodeGetDependencies(two, 1)) == 402
    *_, data, count = ok(old.cuGraphGetEdges_v2(graph, 1))
    assert (data[0].type, count) == (1, 1)


def test_capture_calls_of_129_have_both_forms(old):
    stream = ok(old.cuStreamCreate(1))
    address = ok(old.cuMemAlloc(64))
    begin(old, stream)
    fill(old, stream, address, 1)
    assert len(old.cuStreamGetCaptureInfo(stream)) == 6
    assert len(old.cuStreamGetCaptureInfo_v3(stream)) == 7
    ok(old.cuStreamUpdateCaptureDependencies(stream, None, 0, 1))
    ok(old.cuStreamUpdateCaptureDependencies_v2(stream, None, None, 0, 1))
    params = old.CUgraphNodeParams()
    params.type = old.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY
    graph = ok(old.cuStreamEndCapture(stream))
    ok(old.cuGraphAddNode(graph, None, 0, params))
    ok(old.cuGraphAddNode_v2(graph, None, None, 0, params))


def test_names_of_one_shape_are_unknown_to_the_other(old):
    new = SimulatedDriver(1)
    assert hasattr(old, "cuStreamGetCaptureInfo_v3")
    assert not hasattr(new, "cuStreamGetCaptureInfo_v3")
    assert hasattr(new, "cuGraphNodeGetParams")
    assert not hasattr(old, "cuGraphNodeGetParams")


def test_a_function_that_the_driver_is_too_old_for_raises():
    old_driver = SimulatedDriver(1)
    ok(old_driver.cuInit(0))
    graph = ok(old_driver.cuGraphCreate(0))
    with pytest.raises(RuntimeError, match="not found"):
        old_driver.cuGraphGetId(graph)
    new_driver = SimulatedDriver(1, driver_version=13020)
    ok(new_driver.cuInit(0))
    graph = ok(new_driver.cuGraphCreate(0))
    assert ok(new_driver.cuGraphGetId(graph)) > 0
    node = ok(new_driver.cuGraphAddEmptyNode(graph, None, 0))
    assert int(ok(new_driver.cuGraphNodeGetParams(node)).type) == 5
    assert ok(new_driver.cuGraphNodeGetLocalId(node)) == 0


@pytest.mark.parametrize("shape", ["13", "12.9"])
def test_the_checked_driver_has_one_shape_over_both(shape):
    driver = bindings.Driver(SimulatedDriver(1, shape), simulated=True)
    stream = driver.cuStreamCreate(1)
    begin(driver.module, stream)
    info = driver.capture_info(stream)
    assert (info.status, info.dependencies) == (1, [])
    first = driver.cuGraphAddEmptyNode(info.graph, None, 0)
    second = driver.cuGraphAddEmptyNode(info.graph, [first], 1)
    driver.update_capture_dependencies(stream, [second])
    assert [int(node) for node in driver.capture_info(stream).dependencies] == [int(second)]
    graph = driver.cuStreamEndCapture(stream)
    ((source, target, _),) = driver.graph_edges(graph)
    assert (int(source), int(target)) == (int(first), int(second))
    assert [int(node) for node in driver.node_dependencies(second)] == [int(first)]
    driver.cuGraphDestroy(graph)
    driver.cuStreamDestroy(stream)
