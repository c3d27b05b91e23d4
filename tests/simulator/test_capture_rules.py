"""What the driver allows and forbids while a stream captures. Uses nothing a device lacks."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from .helpers import (
    ACTIVE,
    GLOBAL,
    INVALIDATED,
    NONE,
    RELAXED,
    THREAD_LOCAL,
    begin,
    code,
    fill,
    kinds,
    launch,
    mode,
    nodes,
    ok,
    status,
    words,
)

MODES = [GLOBAL, THREAD_LOCAL, RELAXED]


def in_thread(work: Any) -> Any:
    """Run something on another thread and hand its result or exception back."""
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append((True, work()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    good, value = outcome[0]
    if not good:
        raise value
    return value


# ---------------------------------------------------------------- the plain life of a capture


@pytest.mark.parametrize("number", MODES)
def test_captured_work_runs_at_launch_and_not_before(driver_module, stream, buffer, number):
    begin(driver_module, stream, number)
    assert status(driver_module, stream) == ACTIVE
    fill(driver_module, stream, buffer, 7)
    graph = ok(driver_module.cuStreamEndCapture(stream))
    assert status(driver_module, stream) == NONE
    assert words(driver_module, buffer) == [0]
    launch(driver_module, graph, stream)
    assert words(driver_module, buffer) == [7]
    ok(driver_module.cuGraphDestroy(graph))


def test_an_empty_capture_is_legal(driver_module, stream):
    begin(driver_module, stream)
    graph = ok(driver_module.cuStreamEndCapture(stream))
    assert nodes(driver_module, graph) == []
    launch(driver_module, graph, stream)
    ok(driver_module.cuGraphDestroy(graph))


def test_work_on_one_stream_becomes_a_chain(driver_module, stream, buffer):
    begin(driver_module, stream)
    for value in range(3):
        fill(driver_module, stream, buffer, value)
    graph = ok(driver_module.cuStreamEndCapture(stream))
    *_, count = ok(driver_module.cuGraphGetEdges(graph, 0))
    assert count == 2
    launch(driver_module, graph, stream)
    assert words(driver_module, buffer) == [2]
    ok(driver_module.cuGraphDestroy(graph))


def test_every_capture_has_an_id_of_its_own(driver_module, new_stream):
    seen = set()
    for _ in range(3):
        one = new_stream()
        begin(driver_module, one)
        seen.add(int(ok(driver_module.cuStreamGetCaptureInfo(one))[1]))
        ok(driver_module.cuGraphDestroy(ok(driver_module.cuStreamEndCapture(one))))
    assert len(seen) == 3


def test_the_info_of_a_stream_that_captures_nothing_says_so(driver_module, stream):
    state, *_, count = ok(driver_module.cuStreamGetCaptureInfo(stream))
    assert (int(state), count) == (NONE, 0)


def test_work_on_another_stream_runs_at_once_during_a_capture(driver_module, new_stream, buffer):
    capturing, other = new_stream(), new_stream()
    begin(driver_module, capturing, GLOBAL)
    fill(driver_module, other, buffer, 3)
    graph = ok(driver_module.cuStreamEndCapture(capturing))
    ok(driver_module.cuStreamSynchronize(other))
    assert words(driver_module, buffer) == [3]
    assert kinds(driver_module, graph) == []
    ok(driver_module.cuGraphDestroy(graph))


# ---------------------------------------------------------------- begin and end


def test_a_capturing_stream_cannot_begin_again_and_goes_on(driver_module, stream):
    begin(driver_module, stream)
    answer = driver_module.cuStreamBeginCapture(stream, mode(driver_module, RELAXED))
    assert code(answer) == 401
    assert status(driver_module, stream) == ACTIVE


@pytest.mark.parametrize("handle", [0, 1])
def test_the_legacy_stream_cannot_capture(driver_module, handle):
    assert code(driver_module.cuStreamBeginCapture(handle, mode(driver_module, RELAXED))) == 900


def test_ending_what_does_not_capture_is_an_illegal_state(driver_module, stream):
    assert driver_module.cuStreamEndCapture(stream)[1:] == (None,)
    assert code(driver_module.cuStreamEndCapture(stream)) == 401


@pytest.mark.parametrize("number", [GLOBAL, THREAD_LOCAL])
def test_only_the_thread_that_began_may_end(driver_module, stream, number):
    begin(driver_module, stream, number)
    assert in_thread(lambda: code(driver_module.cuStreamEndCapture(stream))) == 908
    assert status(driver_module, stream) == ACTIVE
    ok(driver_module.cuGraphDestroy(ok(driver_module.cuStreamEndCapture(stream))))


def test_a_relaxed_capture_ends_on_any_thread(driver_module, stream):
    begin(driver_module, stream, RELAXED)
    graph = in_thread(lambda: ok(driver_module.cuStreamEndCapture(stream)))
    ok(driver_module.cuGraphDestroy(graph))


def test_a_fork_cannot_end_the_capture(driver_module, new_stream, buffer):
    origin, side = new_stream(), new_stream()
    event = ok(driver_module.cuEventCreate(2))
    begin(driver_module, origin)
    ok(driver_module.cuEventRecord(event, origin))
    ok(driver_module.cuStreamWaitEvent(side, event, 0))
    assert code(driver_module.cuStreamEndCapture(side)) == 903
    driver_module.cuStreamEndCapture(origin)
    ok(driver_module.cuEventDestroy(event))


# ---------------------------------------------------------------- invalidation


def test_an_invalidated_capture_stays_until_it_is_ended(driver_module, stream, buffer):
    begin(driver_module, stream)
    assert code(driver_module.cuStreamSynchronize(stream)) == 900
    assert status(driver_module, stream) == INVALIDATED
    assert int(ok(driver_module.cuStreamGetCaptureInfo(stream))[0]) == INVALIDATED
    assert code(driver_module.cuMemsetD32Async(buffer, 1, 1, stream)) == 901
    answer = driver_module.cuStreamEndCapture(stream)
    assert (code(answer), answer[1]) == (901, None)
    assert status(driver_module, stream) == NONE


def test_the_next_capture_after_an_invalidated_one_works(driver_module, stream, buffer):
    begin(driver_module, stream)
    driver_module.cuStreamSynchronize(stream)
    driver_module.cuStreamEndCapture(stream)
    begin(driver_module, stream)
    fill(driver_module, stream, buffer, 4)
    graph = ok(driver_module.cuStreamEndCapture(stream))
    launch(driver_module, graph, stream)
    assert words(driver_module, buffer) == [4]
    ok(driver_module.cuGraphDestroy(graph))


@pytest.mark.parametrize("number", MODES)
@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuStreamQuery"])
def test_a_capturing_stream_cannot_be_waited_for(driver_module, stream, number, call):
    begin(driver_module, stream, number)
    assert code(getattr(driver_module, call)(stream)) == 900
    assert code(driver_module.cuStreamEndCapture(stream)) == 901


@pytest.mark.parametrize("number", MODES)
def test_a_context_with_a_capture_cannot_be_waited_for(driver_module, stream, number):
    begin(driver_module, stream, number)
    assert code(driver_module.cuCtxSynchronize()) == 900
    assert code(driver_module.cuStreamEndCapture(stream)) == 901


@pytest.mark.parametrize("number", MODES)
def test_a_graph_cannot_be_launched_into_a_capture(driver_module, new_stream, number):
    stream = new_stream()
    empty = ok(driver_module.cuGraphCreate(0))
    executable = ok(driver_module.cuGraphInstantiate(empty, 0))
    begin(driver_module, stream, number)
    assert code(driver_module.cuGraphLaunch(executable, stream)) == 900
    assert status(driver_module, stream) == INVALIDATED
    assert code(driver_module.cuStreamEndCapture(stream)) == 901
    ok(driver_module.cuGraphExecDestroy(executable))
    ok(driver_module.cuGraphDestroy(empty))


# ---------------------------------------------------------------- potentially unsafe calls


def allocate(driver: Any) -> int:
    """Allocate and free; the code of the allocation."""
    answer = driver.cuMemAlloc(64)
    if code(answer) == 0:
        ok(driver.cuMemFree(answer[1]))
    return code(answer)


UNSAFE = {
    "allocate": lambda driver, event, other: driver.cuMemAlloc(64),
    "allocate pinned": lambda driver, event, other: driver.cuMemAllocHost(64),
    "query an event": lambda driver, event, other: driver.cuEventQuery(event),
    "wait for an event": lambda driver, event, other: driver.cuEventSynchronize(event),
}


@pytest.mark.parametrize("unsafe", UNSAFE)
@pytest.mark.parametrize("number", [GLOBAL, THREAD_LOCAL])
def test_an_unsafe_call_kills_a_capture_of_its_thread(driver_module, new_stream, number, unsafe):
    stream, other = new_stream(), new_stream()
    event = ok(driver_module.cuEventCreate(2))
    begin(driver_module, stream, number)
    assert code(UNSAFE[unsafe](driver_module, event, other)) == 900
    assert status(driver_module, stream) == INVALIDATED
    assert code(driver_module.cuStreamEndCapture(stream)) == 901
    ok(driver_module.cuEventDestroy(event))


def test_an_unsafe_call_is_fine_in_a_relaxed_capture(driver_module, stream):
    begin(driver_module, stream, RELAXED)
    assert allocate(driver_module) == 0
    assert status(driver_module, stream) == ACTIVE


def test_an_unsafe_call_of_another_thread_kills_a_global_capture(driver_module, stream):
    begin(driver_module, stream, GLOBAL)
    assert in_thread(lambda: code(driver_module.cuMemAlloc(64))) == 900
    assert code(driver_module.cuStreamEndCapture(stream)) == 901


@pytest.mark.parametrize("number", [THREAD_LOCAL, RELAXED])
def test_an_unsafe_call_of_another_thread_spares_other_captures(driver_module, stream, number):
    begin(driver_module, stream, number)
    assert in_thread(lambda: allocate(driver_module)) == 0
    assert status(driver_module, stream) == ACTIVE


def test_a_relaxed_thread_harms_no_capture(driver_module, stream):
    begin(driver_module, stream, GLOBAL)
    previous = ok(driver_module.cuThreadExchangeStreamCaptureMode(mode(driver_module, RELAXED)))
    assert int(previous) == GLOBAL
    assert allocate(driver_module) == 0
    assert int(ok(driver_module.cuThreadExchangeStreamCaptureMode(previous))) == RELAXED
    assert status(driver_module, stream) == ACTIVE


def test_the_mode_of_a_thread_is_its_own(driver_module, stream):
    ok(driver_module.cuThreadExchangeStreamCaptureMode(mode(driver_module, RELAXED)))

    def other() -> int:
        return int(ok(driver_module.cuThreadExchangeStreamCaptureMode(mode(driver_module, 1))))

    assert in_thread(other) == GLOBAL
    ok(driver_module.cuThreadExchangeStreamCaptureMode(mode(driver_module, GLOBAL)))


def test_a_thread_local_thread_ignores_captures_of_others(driver_module, stream):
    begin(driver_module, stream, GLOBAL)

    def other() -> int:
        ok(driver_module.cuThreadExchangeStreamCaptureMode(mode(driver_module, THREAD_LOCAL)))
        return allocate(driver_module)

    assert in_thread(other) == 0
    assert status(driver_module, stream) == ACTIVE


def test_a_relaxed_thread_still_cannot_wait_for_its_capture(driver_module, stream):
    begin(driver_module, stream, GLOBAL)
    ok(driver_module.cuThreadExchangeStreamCaptureMode(mode(driver_module, RELAXED)))
    assert code(driver_module.cuStreamSynchronize(stream)) == 900
    ok(driver_module.cuThreadExchangeStreamCaptureMode(mode(driver_module, GLOBAL)))
    assert code(driver_module.cuStreamEndCapture(stream)) == 901


def test_a_synchronous_copy_kills_a_capture(driver_module, stream, buffer):
    begin(driver_module, stream)
    assert code(driver_module.cuMemcpyDtoD(buffer, buffer + 64, 4)) == 900
    assert code(driver_module.cuStreamEndCapture(stream)) == 901


# ---------------------------------------------------------------- the legacy stream


def test_the_legacy_stream_cannot_be_used_while_a_blocking_stream_captures(
    driver_module, new_stream, buffer
):
    blocking = new_stream(0)
    begin(driver_module, blocking, RELAXED)
    assert code(driver_module.cuMemsetD32Async(buffer, 1, 1, 0)) == 906
    assert code(driver_module.cuStreamEndCapture(blocking)) == 901


def test_asking_the_legacy_stream_for_its_status_harms_nothing(driver_module, new_stream):
    blocking = new_stream(0)
    begin(driver_module, blocking, RELAXED)
    assert code(driver_module.cuStreamIsCapturing(0)) == 906
    assert code(driver_module.cuStreamGetCaptureInfo(0)) == 906
    assert status(driver_module, blocking) == ACTIVE


def test_the_legacy_stream_is_free_while_a_non_blocking_stream_captures(
    driver_module, stream, buffer
):
    begin(driver_module, stream, RELAXED)
    fill(driver_module, 0, buffer, 5)
    assert status(driver_module, stream) == ACTIVE


def test_a_synchronous_fill_is_an_implicit_dependency_on_a_blocking_capture(
    driver_module, new_stream, buffer
):
    blocking = new_stream(0)
    begin(driver_module, blocking, RELAXED)
    assert code(driver_module.cuMemsetD32(buffer, 1, 1)) == 906
    assert code(driver_module.cuStreamEndCapture(blocking)) == 901
