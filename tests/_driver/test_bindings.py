"""One shape of the calls on 12.9 and 13.x, checked calls, and which driver answers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from breakable_cuda_graphs import CUDAError, ProcessError
from breakable_cuda_graphs._driver import bindings, process
from breakable_cuda_graphs._driver.bindings import Driver, types
from breakable_cuda_graphs.simulator import SimulatedDriver, SimulatedKernel


@pytest.fixture(params=["13", "12.9"])
def driver(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A driver of each shape with a context; nothing may be misused."""
    module = SimulatedDriver(1, request.param)
    made = Driver(module, simulated=True)
    made.cuCtxSetCurrent(made.cuDevicePrimaryCtxRetain(0))
    yield made
    assert module.findings == []


@pytest.fixture
def stream(driver: Any) -> Iterator[Any]:
    made = driver.cuStreamCreate(1)
    yield made
    driver.cuStreamDestroy(made)


RELAXED = types.CUstreamCaptureMode(2)


def memset(driver: Any, stream: Any, address: Any) -> None:
    driver.cuMemsetD32Async(address, 1, 1, stream)


# ---------------------------------------------------------------- checked calls


def test_a_checked_call_gives_nothing_one_value_or_a_tuple(driver, stream):
    assert driver.cuStreamSynchronize(stream) is None
    assert isinstance(driver.cuGraphCreate(0), types.CUgraph)
    free, total = driver.cuMemGetInfo()
    assert 0 < free <= total


def test_a_failed_call_names_itself_the_code_and_the_drivers_sentence(driver):
    with pytest.raises(CUDAError, match="cuStreamSynchronize") as info:
        driver.cuStreamSynchronize(types.CUstream(0x1234))
    assert info.value.call == "cuStreamSynchronize"
    assert info.value.code == 400
    assert info.value.name == "CUDA_ERROR_INVALID_HANDLE"
    sentence = driver.module.cuGetErrorString(types.CUresult(400))[1].decode()
    assert sentence in str(info.value)


def test_a_code_that_the_bindings_do_not_know_is_told_as_a_number(driver):
    error = driver.error("cuNew", 98765)
    assert error.code == 98765
    assert "98765" in str(error)


def test_a_function_that_is_missing_says_so(driver):
    with pytest.raises(CUDAError, match="too old") as info:
        driver.cuNoSuchFunction(1)
    assert info.value.call == "cuNoSuchFunction"
    assert not driver.has("cuNoSuchFunction")
    assert driver.has("cuGraphCreate")


def test_a_function_that_only_the_driver_lacks_says_so_too():
    old = Driver(SimulatedDriver(1, driver_version=13000), simulated=True)
    with pytest.raises(CUDAError, match="doctor"):
        old.cuFuncGetParamCount(SimulatedKernel(print).handle)


def test_the_end_of_the_stack_is_no_missing_function(driver, monkeypatch):
    def deep(*_: object) -> None:
        raise RecursionError

    monkeypatch.setattr(driver.module, "cuCtxGetCurrent", deep)
    with pytest.raises(RecursionError):
        Driver(driver.module, simulated=True).cuCtxGetCurrent()


def test_a_checked_call_is_made_once_and_other_names_are_none(driver):
    assert driver.cuCtxGetCurrent is driver.cuCtxGetCurrent
    assert driver.cuCtxGetCurrent.__name__ == "cuCtxGetCurrent"
    with pytest.raises(AttributeError):
        _ = driver.nonsense


# ---------------------------------------------------------------- one shape


def test_capture_info_in_each_state(driver, stream):
    address = driver.cuMemAlloc(16)
    idle = driver.capture_info(stream)
    assert (idle.status, idle.id, idle.graph, idle.dependencies) == (0, 0, None, [])
    driver.cuStreamBeginCapture(stream, RELAXED)
    memset(driver, stream, address)
    active = driver.capture_info(stream)
    assert active.status == 1
    assert active.id > 0
    assert int(active.graph)
    assert len(active.dependencies) == len(active.edges) == 1
    driver.module.cuStreamSynchronize(stream)
    lost = driver.capture_info(stream)
    assert (lost.status, lost.graph, lost.dependencies) == (2, None, [])
    assert int(driver.module.cuStreamEndCapture(stream)[0]) == 901
    driver.cuMemFree(address)


@pytest.mark.parametrize("replace", [True, False])
def test_capture_dependencies_are_replaced_or_added_to(driver, stream, replace):
    driver.cuStreamBeginCapture(stream, RELAXED)
    info = driver.capture_info(stream)
    one = driver.cuGraphAddEmptyNode(info.graph, None, 0)
    two = driver.cuGraphAddEmptyNode(info.graph, None, 0)
    driver.update_capture_dependencies(stream, [one])
    driver.update_capture_dependencies(stream, [two], replace=replace)
    now = {int(node) for node in driver.capture_info(stream).dependencies}
    assert now == ({int(two)} if replace else {int(one), int(two)})
    driver.update_capture_dependencies(stream, [])
    assert driver.capture_info(stream).dependencies == []
    driver.cuGraphDestroy(driver.cuStreamEndCapture(stream))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 40])
def test_nodes_come_in_order_however_many(driver, count):
    graph = driver.cuGraphCreate(0)
    made = [int(driver.cuGraphAddEmptyNode(graph, None, 0)) for _ in range(count)]
    assert [int(node) for node in driver.graph_nodes(graph)] == made
    driver.cuGraphDestroy(graph)


def test_edges_are_read_added_and_removed(driver):
    graph = driver.cuGraphCreate(0)
    one, two, three = (driver.cuGraphAddEmptyNode(graph, None, 0) for _ in range(3))
    assert driver.graph_edges(graph) == []
    assert driver.node_dependencies(three) == []
    driver.add_dependencies(graph, [one, two], [three, three])
    edges = driver.graph_edges(graph)
    pairs = {(int(source), int(target)) for source, target, _ in edges}
    assert pairs == {(int(one), int(three)), (int(two), int(three))}
    assert {int(data.type) for _, _, data in edges} == {0}
    assert {int(node) for node in driver.node_dependencies(three)} == {int(one), int(two)}
    assert [int(node) for node in driver.node_dependents(one)] == [int(three)]
    driver.remove_dependencies(graph, [one], [three])
    assert [int(node) for node in driver.node_dependencies(three)] == [int(two)]
    driver.cuGraphDestroy(graph)


def test_a_node_of_any_kind_is_added_from_params(driver):
    graph = driver.cuGraphCreate(0)
    first = driver.cuGraphAddEmptyNode(graph, None, 0)
    params = types.CUgraphNodeParams()
    params.type = types.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY
    node = driver.add_node(graph, [first], params)
    assert [int(each) for each in driver.node_dependencies(node)] == [int(first)]
    assert int(driver.add_node(graph, [], params))
    driver.cuGraphDestroy(graph)


# ---------------------------------------------------------------- which driver


def test_the_driver_in_use_is_switched_and_comes_back():
    mine = Driver(SimulatedDriver(1), simulated=True)
    before = bindings.use(mine)
    try:
        assert bindings.current() is mine
        assert bindings.started()
    finally:
        assert bindings.use(before) is mine


def test_a_simulated_driver_may_be_asked_for_after_a_fork(monkeypatch):
    mine = Driver(SimulatedDriver(1), simulated=True)
    before = bindings.use(mine)
    monkeypatch.setattr(process, "_driver_used_in_epoch", process.epoch - 1)
    try:
        assert bindings.current() is mine
        mine.simulated = False
        with pytest.raises(ProcessError, match="spawn"):
            bindings.current()
    finally:
        bindings.use(before)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_variable_chooses_the_simulator_and_an_import_starts_nothing():
    code = (
        "import sys, breakable_cuda_graphs as b\n"
        "from breakable_cuda_graphs._driver import bindings\n"
        "assert not bindings.started() and 'torch' not in sys.modules\n"
        "assert bindings.current().simulated\n"
    )
    done = run(code, BREAKABLE_CUDA_GRAPHS_SIMULATOR="1")
    assert done.returncode == 0, done.stderr


def test_without_a_driver_the_error_says_how_to_choose_the_simulator():
    code = "from breakable_cuda_graphs._driver import bindings; bindings.current()"
    done = run(code, BREAKABLE_CUDA_GRAPHS_SIMULATOR="0", CUDA_VISIBLE_DEVICES="")
    if done.returncode == 0:
        pytest.skip("there is a driver here")
    assert "BREAKABLE_CUDA_GRAPHS_SIMULATOR=1" in done.stderr


def test_the_version_is_numbers():
    version = bindings.binding_version()
    assert version >= (12, 9)
    assert all(isinstance(part, int) for part in version)
