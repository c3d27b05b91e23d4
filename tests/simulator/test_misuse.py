"""Misuse is written down in a sentence, and answered with a code instead of a crash."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from typing import Any

import pytest

from breakable_cuda_graphs.simulator import SimulatedKernel
from breakable_cuda_graphs.simulator.world import World
from raw_calls import (
    GLOBAL,
    RELAXED,
    begin,
    code,
    fill,
    here,
    kernel_params,
    launch_kernel,
    memset_params,
    mode,
    ok,
    words,
)

Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def new_graph(driver: Any) -> Any:
    return ok(driver.cuGraphCreate(0))


def new_exec(driver: Any) -> Any:
    return ok(driver.cuGraphInstantiate(new_graph(driver), 0))


KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "graph": (new_graph, "cuGraphDestroy"),
    "executable": (new_exec, "cuGraphExecDestroy"),
    "stream": (lambda driver: ok(driver.cuStreamCreate(1)), "cuStreamDestroy"),
    "event": (lambda driver: ok(driver.cuEventCreate(2)), "cuEventDestroy"),
    "device memory": (lambda driver: ok(driver.cuMemAlloc(64)), "cuMemFree"),
}


def finding(driver: Any) -> str:
    """The one sentence that has been written down."""
    (sentence,) = driver.findings
    return str(sentence)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_release_is_found(misused_driver, kind):
    make, release = KINDS[kind]
    handle = make(misused_driver)
    ok(getattr(misused_driver, release)(handle))
    assert code(getattr(misused_driver, release)(handle)) != 0
    assert "a second time" in finding(misused_driver)
    assert kind in finding(misused_driver)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_released_is_a_leak(misused_driver, kind):
    make, release = KINDS[kind]
    assert misused_driver.leaks() == []
    handle = make(misused_driver)
    assert any(line.startswith(kind) for line in misused_driver.leaks())
    ok(getattr(misused_driver, release)(handle))
    assert not any(line.startswith(kind) for line in misused_driver.leaks())


USES: dict[str, Callable[[Any, Any], Any]] = {
    "graph": lambda driver, handle: driver.cuGraphGetNodes(handle, 0),
    "executable": lambda driver, handle: driver.cuGraphLaunch(handle, 0),
    "stream": lambda driver, handle: driver.cuStreamSynchronize(handle),
    "event": lambda driver, handle: driver.cuEventQuery(handle),
    "device memory": lambda driver, handle: driver.cuMemsetD32(handle, 0, 1),
}


@pytest.mark.parametrize("kind", USES)
def test_a_use_after_the_release_is_found(misused_driver, kind):
    make, release = KINDS[kind]
    handle = make(misused_driver)
    ok(getattr(misused_driver, release)(handle))
    assert code(USES[kind](misused_driver, handle)) != 0
    assert "after" in finding(misused_driver)


def test_a_node_of_a_destroyed_graph_is_found(misused_driver):
    graph = new_graph(misused_driver)
    node = ok(misused_driver.cuGraphAddEmptyNode(graph, None, 0))
    ok(misused_driver.cuGraphDestroy(graph))
    assert code(misused_driver.cuGraphNodeGetType(node)) == 1
    assert "cuGraphDestroy" in finding(misused_driver)


def test_a_graph_handle_from_a_failed_capture_dangles(misused_driver):
    stream = ok(misused_driver.cuStreamCreate(1))
    begin(misused_driver, stream)
    graph = ok(misused_driver.cuStreamGetCaptureInfo(stream))[2]
    misused_driver.cuStreamSynchronize(stream)
    misused_driver.cuStreamEndCapture(stream)
    assert code(misused_driver.cuGraphDestroy(graph)) == 1
    assert "cuStreamEndCapture" in finding(misused_driver)


def test_a_failed_capture_into_a_body_is_found_and_nothing_crashes(misused_driver):
    driver, graph = misused_driver, new_graph(misused_driver)
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = ok(driver.cuGraphConditionalHandleCreate(graph, here(driver), 1, 1))
    params.conditional.size, params.conditional.ctx = 1, here(driver)
    ok(driver.cuGraphAddNode(graph, None, None, 0, params))
    body = driver.CUgraph(int(params.conditional.phGraph_out[0]))
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuStreamBeginCaptureToGraph(stream, body, None, None, 0, mode(driver, RELAXED)))
    driver.cuStreamSynchronize(stream)
    assert code(driver.cuStreamEndCapture(stream)) == 901
    assert "frees it under that node" in finding(driver)
    ok(driver.cuGraphDestroy(graph))


@pytest.mark.parametrize("borrowed", ["child", "captured"])
def test_a_borrowed_graph_is_not_the_callers_to_destroy(misused_driver, borrowed):
    if borrowed == "child":
        outer = new_graph(misused_driver)
        node = ok(
            misused_driver.cuGraphAddChildGraphNode(outer, None, 0, new_graph(misused_driver))
        )
        graph = ok(misused_driver.cuGraphChildGraphNodeGetGraph(node))
    else:
        stream = ok(misused_driver.cuStreamCreate(1))
        begin(misused_driver, stream, RELAXED)
        graph = ok(misused_driver.cuStreamGetCaptureInfo(stream))[2]
    assert code(misused_driver.cuGraphDestroy(graph)) == 1
    assert "not the caller's" in finding(misused_driver)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "device memory"])
def test_a_release_inside_an_open_capture_is_found(misused_driver, kind):
    make, release = KINDS[kind]
    handle = make(misused_driver)
    stream = ok(misused_driver.cuStreamCreate(1))
    begin(misused_driver, stream, GLOBAL)
    getattr(misused_driver, release)(handle)
    assert "inside an open capture" in finding(misused_driver)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("relaxed", ["capture", "thread"])
def test_a_relaxed_release_inside_an_open_capture_is_fine(misused_driver, kind, relaxed):
    make, release = KINDS[kind]
    handle = make(misused_driver)
    stream = ok(misused_driver.cuStreamCreate(1))
    begin(misused_driver, stream, RELAXED if relaxed == "capture" else GLOBAL)
    if relaxed == "thread":
        ok(misused_driver.cuThreadExchangeStreamCaptureMode(mode(misused_driver, RELAXED)))
    ok(getattr(misused_driver, release)(handle))
    assert misused_driver.findings == []
    assert int(ok(misused_driver.cuStreamIsCapturing(stream))) == 1


def test_destroying_a_capturing_stream_is_found(misused_driver):
    stream = ok(misused_driver.cuStreamCreate(1))
    begin(misused_driver, stream, RELAXED)
    ok(misused_driver.cuStreamDestroy(stream))
    assert "is capturing" in finding(misused_driver)


def test_a_kernel_on_released_memory_is_found(misused_driver):
    stream = ok(misused_driver.cuStreamCreate(1))
    address = int(ok(misused_driver.cuMemAlloc(64)))
    touched = []
    kernel = SimulatedKernel(touched.append, (ctypes.c_void_p,), name="reader")
    begin(misused_driver, stream)
    launch_kernel(misused_driver, kernel, stream, address + 8)
    graph = ok(misused_driver.cuStreamEndCapture(stream))
    executable = ok(misused_driver.cuGraphInstantiate(graph, 0))
    ok(misused_driver.cuGraphLaunch(executable, stream))
    ok(misused_driver.cuMemFree(address))
    assert code(misused_driver.cuGraphLaunch(executable, stream)) == 700
    assert touched == [address + 8]
    assert "kernel reader uses device memory" in finding(misused_driver)


def test_released_memory_is_poisoned_and_kept(misused_driver):
    address = int(ok(misused_driver.cuMemAlloc(64)))
    ok(misused_driver.cuMemsetD32(address, 0, 16))
    ok(misused_driver.cuMemFree(address))
    assert ctypes.string_at(address, 64) == b"\xa5" * 64


def test_a_copy_past_the_end_is_found(misused_driver):
    address = int(ok(misused_driver.cuMemAlloc(64)))
    target = (ctypes.c_uint8 * 128)()
    assert code(misused_driver.cuMemcpyDtoH(ctypes.addressof(target), address, 128)) == 700
    assert "past the end" in finding(misused_driver)


def test_an_edit_through_a_removed_node_is_found(misused_driver):
    address = int(ok(misused_driver.cuMemAlloc(64)))
    graph = new_graph(misused_driver)
    params = memset_params(misused_driver, address, 1)
    node = ok(misused_driver.cuGraphAddMemsetNode(graph, None, 0, params, 0))
    executable = ok(misused_driver.cuGraphInstantiate(graph, 0))
    ok(misused_driver.cuGraphDestroyNode(node))
    answer = misused_driver.cuGraphExecMemsetNodeSetParams(executable, node, params, 0)
    assert code(answer) == 1
    assert "used node" in finding(misused_driver)


# ---------------------------------------------------------------- foreign code


def test_a_failing_kernel_fails_its_launch(misused_driver):
    def body() -> None:
        raise ZeroDivisionError("no")

    stream = ok(misused_driver.cuStreamCreate(1))
    kernel = SimulatedKernel(body, name="broken")
    answer = misused_driver.cuLaunchKernel(kernel.handle, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0)
    assert code(answer) == 719
    assert finding(misused_driver) == "kernel broken raised ZeroDivisionError: no"


def test_a_driver_call_from_a_host_callback_is_found(misused_driver):
    codes = []
    callback = Callback(lambda _: codes.append(code(misused_driver.cuMemGetInfo())))
    address = ctypes.cast(callback, ctypes.c_void_p).value
    ok(misused_driver.cuLaunchHostFunc(0, misused_driver.CUhostFn(address), 0))
    assert codes == [800]
    assert "from inside a host callback" in finding(misused_driver)


def test_a_captured_host_function_of_the_bindings_runs_once(misused_driver):
    seen = []
    callback = Callback(seen.append)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    stream = ok(misused_driver.cuStreamCreate(1))
    begin(misused_driver, stream)
    ok(misused_driver.cuLaunchHostFunc(stream, misused_driver.CUhostFn(address), 5))
    graph = ok(misused_driver.cuStreamEndCapture(stream))
    executable = ok(misused_driver.cuGraphInstantiate(graph, 0))
    ok(misused_driver.cuGraphLaunch(executable, stream))
    assert (seen, misused_driver.findings) == ([5], [])
    assert code(misused_driver.cuGraphLaunch(executable, stream)) == 719
    assert "a second time" in finding(misused_driver)


def test_a_host_node_made_by_hand_runs_each_time(driver_module, stream):
    seen = []
    callback = Callback(seen.append)
    params = driver_module.CUDA_HOST_NODE_PARAMS()
    params.fn = driver_module.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value)
    params.userData = 3
    graph = new_graph(driver_module)
    ok(driver_module.cuGraphAddHostNode(graph, None, 0, params))
    executable = ok(driver_module.cuGraphInstantiate(graph, 0))
    for _ in range(2):
        ok(driver_module.cuGraphLaunch(executable, stream))
    assert seen == [3, 3]
    ok(driver_module.cuGraphExecDestroy(executable))
    ok(driver_module.cuGraphDestroy(graph))


def test_an_endless_while_node_is_found(misused_driver, monkeypatch):
    monkeypatch.setattr("breakable_cuda_graphs.simulator.execs._MOST_ROUNDS", 10)
    graph = new_graph(misused_driver)
    context = here(misused_driver)
    handle = ok(misused_driver.cuGraphConditionalHandleCreate(graph, context, 1, 1))
    params = misused_driver.CUgraphNodeParams()
    params.type = misused_driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle, params.conditional.size = handle, 1
    params.conditional.ctx = context
    params.conditional.type = misused_driver.CUgraphConditionalNodeType(1)
    ok(misused_driver.cuGraphAddNode(graph, None, None, 0, params))
    executable = ok(misused_driver.cuGraphInstantiate(graph, 0))
    assert code(misused_driver.cuGraphLaunch(executable, 0)) == 719
    assert "never cleared" in finding(misused_driver)


# ---------------------------------------------------------------- forks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process")
def test_calls_in_a_forked_child_are_found_by_the_parent(misused_driver):
    stream = ok(misused_driver.cuStreamCreate(1))
    child = os.fork()
    if child == 0:
        answer = code(misused_driver.cuStreamDestroy(stream))
        os._exit(0 if answer == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "cuStreamDestroy was called in a forked child" in finding(misused_driver)
    ok(misused_driver.cuStreamDestroy(stream))


def test_a_clean_program_has_no_findings_and_no_leaks(misused_driver):
    driver = misused_driver
    stream, address = ok(driver.cuStreamCreate(1)), int(ok(driver.cuMemAlloc(64)))
    begin(driver, stream)
    fill(driver, stream, address, 1)
    graph = ok(driver.cuStreamEndCapture(stream))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphLaunch(executable, stream))
    assert words(driver, address) == [1]
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(graph))
    ok(driver.cuMemFree(address))
    ok(driver.cuStreamDestroy(stream))
    assert (driver.findings, driver.leaks()) == ([], [])


def test_an_unknown_kernel_is_refused(driver_module):
    kernel = SimulatedKernel(lambda: None)
    params = kernel_params(driver_module, kernel)
    params.func = driver_module.CUfunction(16)
    graph = new_graph(driver_module)
    assert code(driver_module.cuGraphAddKernelNode(graph, None, 0, params)) == 400
    ok(driver_module.cuGraphDestroy(graph))


def test_the_collector_does_not_come_while_a_thread_plays_the_device() -> None:
    """A finalizer would call the driver from inside a kernel; the device has no collector."""
    world, seen = World(13000), []

    def kernel() -> None:
        world.run_foreign("an inner kernel", lambda: seen.append(gc.isenabled()))
        seen.append(gc.isenabled())

    assert gc.isenabled()
    assert world.run_foreign("a kernel", kernel) == 0
    assert seen == [False, False]
    assert gc.isenabled()
    gc.disable()
    try:
        world.run_foreign("a kernel", kernel)
        assert not gc.isenabled()
    finally:
        gc.enable()
