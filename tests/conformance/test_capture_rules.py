"""What the driver allows and forbids while a stream captures."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from raw_calls import (
    ACTIVE,
    GLOBAL,
    INVALIDATED,
    NONE,
    RELAXED,
    THREAD_LOCAL,
    begin,
    code,
    fill,
    here,
    kinds,
    launch,
    mode,
    nodes,
    ok,
    status,
    words,
)

MODES = [GLOBAL, THREAD_LOCAL, RELAXED]


def in_thread(driver: Any, work: Any) -> Any:
    """Run something on another thread, in the same context, and hand back what became of it."""
    outcome: list[Any] = []
    context = here(driver)

    def body() -> None:
        try:
            ok(driver.cuCtxSetCurrent(context))
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
def test_captured_work_runs_at_launch_and_not_before(driver, stream, buffer, number):
    begin(driver, stream, number)
    assert status(driver, stream) == ACTIVE
    fill(driver, stream, buffer, 7)
    graph = ok(driver.cuStreamEndCapture(stream))
    assert status(driver, stream) == NONE
    assert words(driver, buffer) == [0]
    launch(driver, graph, stream)
    assert words(driver, buffer) == [7]
    ok(driver.cuGraphDestroy(graph))


def test_an_empty_capture_is_legal(driver, stream):
    begin(driver, stream)
    graph = ok(driver.cuStreamEndCapture(stream))
    assert nodes(driver, graph) == []
    launch(driver, graph, stream)
    ok(driver.cuGraphDestroy(graph))


def test_work_on_one_stream_becomes_a_chain(driver, stream, buffer):
    begin(driver, stream)
    for value in range(3):
        fill(driver, stream, buffer, value)
    graph = ok(driver.cuStreamEndCapture(stream))
    *_, count = ok(driver.cuGraphGetEdges(graph, 0))
    assert count == 2
    launch(driver, graph, stream)
    assert words(driver, buffer) == [2]
    ok(driver.cuGraphDestroy(graph))


def test_every_capture_has_an_id_of_its_own(driver, new_stream):
    seen = set()
    for _ in range(3):
        one = new_stream()
        begin(driver, one)
        seen.add(int(ok(driver.cuStreamGetCaptureInfo(one))[1]))
        ok(driver.cuGraphDestroy(ok(driver.cuStreamEndCapture(one))))
    assert len(seen) == 3


def test_the_info_of_a_stream_that_captures_nothing_says_so(driver, stream):
    state, *_, count = ok(driver.cuStreamGetCaptureInfo(stream))
    assert (int(state), count) == (NONE, 0)


def test_work_on_another_stream_runs_at_once_during_a_capture(driver, new_stream, buffer):
    capturing, other = new_stream(), new_stream()
    begin(driver, capturing, GLOBAL)
    fill(driver, other, buffer, 3)
    graph = ok(driver.cuStreamEndCapture(capturing))
    ok(driver.cuStreamSynchronize(other))
    assert words(driver, buffer) == [3]
    assert kinds(driver, graph) == []
    ok(driver.cuGraphDestroy(graph))


# ---------------------------------------------------------------- begin and end


def test_a_capturing_stream_cannot_begin_again_and_goes_on(driver, stream):
    begin(driver, stream)
    answer = driver.cuStreamBeginCapture(stream, mode(driver, RELAXED))
    assert code(answer) == 401
    assert status(driver, stream) == ACTIVE


@pytest.mark.parametrize("handle", [0, 1])
def test_the_legacy_stream_cannot_capture(driver, handle):
    assert code(driver.cuStreamBeginCapture(handle, mode(driver, RELAXED))) == 900


def test_ending_what_does_not_capture_is_an_illegal_state(driver, stream):
    assert driver.cuStreamEndCapture(stream)[1:] == (None,)
    assert code(driver.cuStreamEndCapture(stream)) == 401


@pytest.mark.parametrize("number", [GLOBAL, THREAD_LOCAL])
def test_an_end_by_another_thread_is_an_error_and_an_end(driver, stream, number):
    begin(driver, stream, number)
    assert in_thread(driver, lambda: code(driver.cuStreamEndCapture(stream))) == 908
    assert status(driver, stream) == NONE
    assert code(driver.cuStreamEndCapture(stream)) == 401


def test_an_invalidated_capture_is_ended_by_any_thread(driver, stream):
    begin(driver, stream, GLOBAL)
    driver.cuStreamSynchronize(stream)
    assert in_thread(driver, lambda: code(driver.cuStreamEndCapture(stream))) == 901
    assert status(driver, stream) == NONE


def test_a_relaxed_capture_ends_on_any_thread(driver, stream):
    begin(driver, stream, RELAXED)
    graph = in_thread(driver, lambda: ok(driver.cuStreamEndCapture(stream)))
    ok(driver.cuGraphDestroy(graph))


def test_a_fork_cannot_end_the_capture(driver, new_stream, buffer):
    origin, side = new_stream(), new_stream()
    event = ok(driver.cuEventCreate(2))
    begin(driver, origin)
    ok(driver.cuEventRecord(event, origin))
    ok(driver.cuStreamWaitEvent(side, event, 0))
    assert code(driver.cuStreamEndCapture(side)) == 903
    driver.cuStreamEndCapture(origin)
    ok(driver.cuEventDestroy(event))


# ---------------------------------------------------------------- invalidation


def test_an_invalidated_capture_stays_until_it_is_ended(driver, stream, buffer):
    begin(driver, stream)
    assert code(driver.cuStreamSynchronize(stream)) == 900
    assert status(driver, stream) == INVALIDATED
    assert int(ok(driver.cuStreamGetCaptureInfo(stream))[0]) == INVALIDATED
    assert code(driver.cuMemsetD32Async(buffer, 1, 1, stream)) == 901
    answer = driver.cuStreamEndCapture(stream)
    assert (code(answer), answer[1]) == (901, None)
    assert status(driver, stream) == NONE


def test_the_next_capture_after_an_invalidated_one_works(driver, stream, buffer):
    begin(driver, stream)
    driver.cuStreamSynchronize(stream)
    driver.cuStreamEndCapture(stream)
    begin(driver, stream)
    fill(driver, stream, buffer, 4)
    graph = ok(driver.cuStreamEndCapture(stream))
    launch(driver, graph, stream)
    assert words(driver, buffer) == [4]
    ok(driver.cuGraphDestroy(graph))


@pytest.mark.parametrize("number", MODES)
@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuStreamQuery"])
def test_a_capturing_stream_cannot_be_waited_for(driver, stream, number, call):
    begin(driver, stream, number)
    assert code(getattr(driver, call)(stream)) == 900
    assert code(driver.cuStreamEndCapture(stream)) == 901


@pytest.mark.parametrize("number", MODES)
def test_a_context_with_a_capture_cannot_be_waited_for(driver, stream, number):
    begin(driver, stream, number)
    assert code(driver.cuCtxSynchronize()) == 900
    assert code(driver.cuStreamEndCapture(stream)) == 901


@pytest.mark.parametrize("number", MODES)
def test_a_graph_cannot_be_launched_into_a_capture(driver, new_stream, number):
    stream = new_stream()
    empty = ok(driver.cuGraphCreate(0))
    executable = ok(driver.cuGraphInstantiate(empty, 0))
    begin(driver, stream, number)
    assert code(driver.cuGraphLaunch(executable, stream)) == 900
    assert status(driver, stream) == INVALIDATED
    assert code(driver.cuStreamEndCapture(stream)) == 901
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(empty))


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
def test_an_unsafe_call_kills_a_capture_of_its_thread(driver, new_stream, number, unsafe):
    stream, other = new_stream(), new_stream()
    event = ok(driver.cuEventCreate(2))
    begin(driver, stream, number)
    assert code(UNSAFE[unsafe](driver, event, other)) == 900
    assert status(driver, stream) == INVALIDATED
    assert code(driver.cuStreamEndCapture(stream)) == 901
    ok(driver.cuEventDestroy(event))


def test_an_unsafe_call_is_fine_in_a_relaxed_capture(driver, stream):
    begin(driver, stream, RELAXED)
    assert allocate(driver) == 0
    assert status(driver, stream) == ACTIVE


def test_an_unsafe_call_of_another_thread_kills_a_global_capture(driver, stream):
    begin(driver, stream, GLOBAL)
    assert in_thread(driver, lambda: code(driver.cuMemAlloc(64))) == 900
    assert code(driver.cuStreamEndCapture(stream)) == 901


@pytest.mark.parametrize("number", [THREAD_LOCAL, RELAXED])
def test_an_unsafe_call_of_another_thread_spares_other_captures(driver, stream, number):
    begin(driver, stream, number)
    assert in_thread(driver, lambda: allocate(driver)) == 0
    assert status(driver, stream) == ACTIVE


def test_a_relaxed_thread_harms_no_capture(driver, stream):
    begin(driver, stream, GLOBAL)
    previous = ok(driver.cuThreadExchangeStreamCaptureMode(mode(driver, RELAXED)))
    assert int(previous) == GLOBAL
    assert allocate(driver) == 0
    assert int(ok(driver.cuThreadExchangeStreamCaptureMode(previous))) == RELAXED
    assert status(driver, stream) == ACTIVE


def test_the_mode_of_a_thread_is_its_own(driver, stream):
    ok(driver.cuThreadExchangeStreamCaptureMode(mode(driver, RELAXED)))

    def other() -> int:
        return int(ok(driver.cuThreadExchangeStreamCaptureMode(mode(driver, 1))))

    assert in_thread(driver, other) == GLOBAL
    ok(driver.cuThreadExchangeStreamCaptureMode(mode(driver, GLOBAL)))


def test_a_thread_local_thread_ignores_captures_of_others(driver, stream):
    begin(driver, stream, GLOBAL)

    def other() -> int:
        ok(driver.cuThreadExchangeStreamCaptureMode(mode(driver, THREAD_LOCAL)))
        return allocate(driver)

    assert in_thread(driver, other) == 0
    assert status(driver, stream) == ACTIVE


def test_a_relaxed_thread_still_cannot_wait_for_its_capture(driver, stream):
    begin(driver, stream, GLOBAL)
    ok(driver.cuThreadExchangeStreamCaptureMode(mode(driver, RELAXED)))
    assert code(driver.cuStreamSynchronize(stream)) == 900
    ok(driver.cuThreadExchangeStreamCaptureMode(mode(driver, GLOBAL)))
    assert code(driver.cuStreamEndCapture(stream)) == 901


# ---------------------------------------------------------------- the legacy stream


def test_the_legacy_stream_cannot_be_used_while_a_blocking_stream_captures(
    driver, new_stream, buffer
):
    blocking = new_stream(0)
    begin(driver, blocking, RELAXED)
    assert code(driver.cuMemsetD32Async(buffer, 1, 1, 0)) == 906
    assert code(driver.cuStreamEndCapture(blocking)) == 901


def test_asking_the_legacy_stream_for_its_status_harms_nothing(driver, new_stream):
    blocking = new_stream(0)
    begin(driver, blocking, RELAXED)
    assert code(driver.cuStreamIsCapturing(0)) == 906
    assert code(driver.cuStreamGetCaptureInfo(0)) == 906
    assert status(driver, blocking) == ACTIVE


def test_the_legacy_stream_is_free_while_a_non_blocking_stream_captures(driver, stream, buffer):
    begin(driver, stream, RELAXED)
    fill(driver, 0, buffer, 5)
    assert status(driver, stream) == ACTIVE


def test_a_synchronous_fill_is_an_implicit_dependency_on_a_blocking_capture(
    driver, new_stream, buffer
):
    blocking = new_stream(0)
    begin(driver, blocking, RELAXED)
    assert code(driver.cuMemsetD32(buffer, 1, 1)) == 906
    assert code(driver.cuStreamEndCapture(blocking)) == 901
