"""Programs that nobody wrote: random graphs, random forks, several threads."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from breakable_cuda_graphs.simulator import SimulatedDriver, SimulatedKernel
from raw_calls import THREAD_LOCAL, begin, edges, kernel_params, launch_kernel, ok, words

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from tallies import examples, tally


def logger() -> tuple[list[int], SimulatedKernel]:
    """A kernel that notes its argument, and its notes."""
    log: list[int] = []
    return log, SimulatedKernel(log.append, (ctypes.c_uint32,), name="note")


def fresh(seed: int) -> Any:
    driver = SimulatedDriver(seed)
    ok(driver.cuInit(0))
    return driver


dags = st.integers(2, 9).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.sets(
            st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda e: e[0] < e[1])
        ),
    )
)


@examples(800)
@given(dags, st.integers(0, 1000), st.data())
def test_every_order_keeps_every_edge_and_runs_every_node_once(dag, seed, data):
    tally("programs of the bare driver")["graphs"] += 1
    count, wanted = dag
    nested = data.draw(st.booleans())
    log, note = logger()
    driver = fresh(seed)
    graph = ok(driver.cuGraphCreate(0))
    made = [
        ok(driver.cuGraphAddKernelNode(graph, None, 0, kernel_params(driver, note, place)))
        for place in range(count)
    ]
    for source, target in sorted(wanted):
        ok(driver.cuGraphAddDependencies(graph, [made[source]], [made[target]], None, 1))
    if nested:
        outer = ok(driver.cuGraphCreate(0))
        ok(driver.cuGraphAddChildGraphNode(outer, None, 0, graph))
        graph = outer
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    for _ in range(3):
        log.clear()
        ok(driver.cuGraphLaunch(executable, 0))
        assert sorted(log) == list(range(count))
        assert all(log.index(source) < log.index(target) for source, target in wanted)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("work"), st.integers(0, 2)),
        st.tuples(st.just("wait"), st.integers(0, 2), st.integers(0, 2)),
    ),
    max_size=14,
)


@examples(1000)
@given(steps, st.integers(0, 1000))
def test_a_captured_program_has_the_orders_of_its_streams_and_events(program, seed):
    """Replays the program against a model: what each stream has to wait for."""
    tally("programs of the bare driver")["captures"] += 1
    log, note = logger()
    driver = fresh(seed)
    streams = [ok(driver.cuStreamCreate(1)) for _ in range(3)]
    event = ok(driver.cuEventCreate(2))
    before: list[set[int] | None] = [set(), None, None]  # None: not in the capture yet
    needs: dict[int, set[int]] = {}
    begin(driver, streams[0], THREAD_LOCAL)
    for step in program:
        if step[0] == "work" and before[step[1]] is not None:
            number = len(needs)
            launch_kernel(driver, note, streams[step[1]], number)
            needs[number] = set(before[step[1]] or ())
            before[step[1]] = {number, *needs[number]}
        elif step[0] == "wait" and before[step[2]] is not None:
            _wait(driver, streams[step[1]], streams[step[2]], event)
            before[step[1]] = (before[step[1]] or set()) | (before[step[2]] or set())
    for side in (1, 2):
        if before[side] is not None:
            _wait(driver, streams[0], streams[side], event)
    graph = ok(driver.cuStreamEndCapture(streams[0]))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    for _ in range(3):
        log.clear()
        ok(driver.cuGraphLaunch(executable, streams[0]))
        assert sorted(log) == sorted(needs)
        for number, earlier in needs.items():
            assert all(log.index(each) < log.index(number) for each in earlier)
    assert driver.findings == []
    assert all(source < target for source, target in edges(driver, graph))


def _wait(driver: Any, waiting: Any, waited: Any, event: Any) -> None:
    ok(driver.cuEventRecord(event, waited))
    ok(driver.cuStreamWaitEvent(waiting, event, 0))


def test_threads_capture_and_launch_side_by_side():
    driver = fresh(1)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            stream = ok(driver.cuStreamCreate(1))
            address = int(buffers[number])
            for value in range(20):
                begin(driver, stream, THREAD_LOCAL)
                ok(driver.cuMemsetD32Async(address, value, 4, stream))
                graph = ok(driver.cuStreamEndCapture(stream))
                executable = ok(driver.cuGraphInstantiate(graph, 0))
                ok(driver.cuGraphLaunch(executable, stream))
                found = (ctypes.c_uint32 * 4).from_address(address)
                assert list(found) == [value] * 4
                ok(driver.cuGraphExecDestroy(executable))
                ok(driver.cuGraphDestroy(graph))
            ok(driver.cuStreamDestroy(stream))
        except BaseException as error:
            failures.append(error)

    buffers = [ok(driver.cuMemAlloc(64)) for _ in range(6)]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for buffer in buffers:
        assert words(driver, buffer) == [19]
        ok(driver.cuMemFree(buffer))
    assert (driver.findings, driver.leaks()) == ([], [])


def test_a_kernel_may_wait_for_another_thread_that_calls_the_driver():
    """Work runs outside the driver's lock, as on a device."""
    driver = fresh(1)
    entered, done = threading.Event(), threading.Event()
    kernel = SimulatedKernel(lambda: (entered.set(), done.wait(10)))

    def other() -> None:
        entered.wait(10)
        ok(driver.cuEventDestroy(ok(driver.cuEventCreate(2))))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    launch_kernel(driver, kernel, 0)
    thread.join()
    assert done.is_set()
