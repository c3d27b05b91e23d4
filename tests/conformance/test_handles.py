"""Null handles, odd values and other contexts: the errors that a driver survives."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from raw_calls import RELAXED, code, here, mode, ok

#: call -> arguments -> code; S stands for a live stream, C for the current context.
NULLS: list[tuple[str, tuple[Any, ...], int]] = [
    ("cuGraphDestroy", (0,), 1),
    ("cuGraphExecDestroy", (0,), 1),
    ("cuEventDestroy", (0,), 400),
    ("cuStreamDestroy", (0,), 400),
    ("cuGraphGetNodes", (0, 0), 1),
    ("cuGraphGetEdges", (0, 0), 1),
    ("cuGraphGetRootNodes", (0, 0), 1),
    ("cuGraphNodeGetType", (0,), 1),
    ("cuGraphClone", (0,), 1),
    ("cuGraphInstantiate", (0, 0), 1),
    ("cuGraphLaunch", (0, "S"), 1),
    ("cuGraphUpload", (0, "S"), 1),
    ("cuEventQuery", (0,), 400),
    ("cuEventSynchronize", (0,), 400),
    ("cuEventRecord", (0, "S"), 400),
    ("cuStreamWaitEvent", ("S", 0, 0), 400),
    ("cuGraphAddEmptyNode", (0, None, 0), 1),
    ("cuGraphDestroyNode", (0,), 1),
    ("cuGraphNodeGetDependencies", (0, 0), 1),
    ("cuGraphNodeGetDependentNodes", (0, 0), 1),
    ("cuGraphKernelNodeGetParams", (0,), 1),
    ("cuGraphMemcpyNodeGetParams", (0,), 1),
    ("cuGraphMemsetNodeGetParams", (0,), 1),
    ("cuGraphHostNodeGetParams", (0,), 1),
    ("cuGraphChildGraphNodeGetGraph", (0,), 1),
    ("cuGraphExecUpdate", (0, 0), 1),
    ("cuGraphNodeSetEnabled", (0, 0, 1), 1),
    ("cuGraphNodeGetEnabled", (0, 0), 1),
    ("cuGraphExecGetFlags", (0,), 1),
    ("cuGraphNodeFindInClone", (0, 0), 1),
    ("cuGraphAddChildGraphNode", (0, None, 0, 0), 1),
    ("cuGraphAddEventRecordNode", (0, None, 0, 0), 1),
    ("cuUserObjectRelease", (0, 1), 1),
    ("cuUserObjectRetain", (0, 1), 1),
    ("cuGraphRetainUserObject", (0, 0, 1, 0), 1),
    ("cuStreamUpdateCaptureDependencies", (0, None, None, 0, 1), 401),
    ("cuFuncGetName", (0,), 1),
    ("cuKernelGetName", (0,), 1),
    ("cuFuncGetParamInfo", (0, 0), 1),
    ("cuKernelGetFunction", (0,), 400),
    ("cuMemFree", (0,), 0),
    ("cuMemFreeHost", (0,), 0),
    ("cuMemAlloc", (0,), 1),
    ("cuMemAllocHost", (0,), 0),
    ("cuCtxDestroy", (0,), 1),
    ("cuCtxPushCurrent", (0,), 1),
    ("cuGraphDebugDotPrint", (0, b"/tmp/none.dot", 0), 1),
    ("cuGraphCreate", (1,), 1),
    ("cuStreamCreate", (2,), 1),
    ("cuEventCreate", (64,), 1),
    ("cuEventCreate", (4,), 1),
    ("cuMemcpyAsync", (0, 0, 0, "S"), 0),
    ("cuMemcpyDtoDAsync", (0, 0, 4, "S"), 1),
    ("cuMemsetD32Async", (0, 1, 1, "S"), 1),
    ("cuMemsetD32Async", (0, 1, 0, "S"), 0),
    ("cuStreamGetFlags", (0,), 0),
    ("cuStreamGetId", (0,), 0),
    ("cuStreamGetPriority", (0,), 0),
    ("cuStreamIsCapturing", (0,), 0),
    ("cuStreamIsCapturing", (2,), 0),
    ("cuStreamEndCapture", (0,), 401),
    ("cuStreamEndCapture", (2,), 401),
    ("cuDeviceGet", (99,), 101),
    ("cuDevicePrimaryCtxRetain", (99,), 101),
    ("cuCtxGetId", (0,), 0),
]


@pytest.mark.parametrize(
    ("name", "given", "expected"), NULLS, ids=[f"{each[0]}-{each[1][0]}" for each in NULLS]
)
def test_null_handles_and_odd_values_have_their_codes(driver, stream, name, given, expected):
    values = [stream if value == "S" else value for value in given]
    answer = getattr(driver, name)(*values)
    assert code(answer) == expected
    if expected:
        assert set(answer[1:]) <= {None}, "after a failure there are no outputs"


def test_a_capture_needs_a_graph_to_go_to(driver, stream):
    begin = driver.cuStreamBeginCaptureToGraph
    assert code(begin(stream, 0, None, None, 0, mode(driver, RELAXED))) == 1


def test_errors_have_names_and_sentences_as_bytes(driver):
    error = driver.CUresult(900)
    assert ok(driver.cuGetErrorName(error)) == b"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    sentence = b"operation not permitted when stream is capturing"
    assert ok(driver.cuGetErrorString(error)) == sentence


# ---------------------------------------------------------------- streams and events


@pytest.mark.parametrize(
    ("flags", "asked", "got"), [(0, 0, 0), (1, -5, -5), (1, -100, -5), (0, 5, 0)]
)
def test_a_stream_remembers_its_flags_and_its_clamped_priority(driver, flags, asked, got):
    stream = ok(driver.cuStreamCreateWithPriority(flags, asked))
    assert ok(driver.cuStreamGetFlags(stream)) == flags
    assert ok(driver.cuStreamGetPriority(stream)) == got
    ok(driver.cuStreamDestroy(stream))


def test_a_stream_has_an_id_and_a_context(driver, new_stream):
    made = [new_stream() for _ in range(3)]
    assert len({ok(driver.cuStreamGetId(stream)) for stream in made}) == 3
    assert int(ok(driver.cuStreamGetCtx(made[0]))) == int(here(driver))


def test_the_legacy_stream_has_two_names_and_each_thread_a_stream_of_its_own(driver):
    assert ok(driver.cuStreamGetId(0)) == ok(driver.cuStreamGetId(1))
    mine, context, theirs = ok(driver.cuStreamGetId(2)), here(driver), []

    def other() -> None:
        ok(driver.cuCtxSetCurrent(context))
        theirs.append(ok(driver.cuStreamGetId(2)))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert theirs[0] != mine


def test_a_threads_own_stream_can_capture(driver):
    ok(driver.cuStreamBeginCapture(2, mode(driver, RELAXED)))
    assert int(ok(driver.cuStreamIsCapturing(2))) == 1
    ok(driver.cuGraphDestroy(ok(driver.cuStreamEndCapture(2))))
    assert int(ok(driver.cuStreamIsCapturing(2))) == 0


def test_an_event_that_was_never_recorded_is_complete_and_measures_nothing(driver, stream):
    start, end = (ok(driver.cuEventCreate(0)) for _ in range(2))
    ok(driver.cuEventQuery(start))
    ok(driver.cuEventSynchronize(start))
    assert code(driver.cuEventElapsedTime(start, end)) == 400
    ok(driver.cuEventRecord(start, stream))
    assert code(driver.cuEventElapsedTime(start, end)) == 400
    for event in (start, end):
        ok(driver.cuEventDestroy(event))


def test_two_records_measure_time_either_way(driver, stream):
    start, end = (ok(driver.cuEventCreate(0)) for _ in range(2))
    for event in (start, end):
        ok(driver.cuEventRecord(event, stream))
    ok(driver.cuEventSynchronize(end))
    assert ok(driver.cuEventElapsedTime(start, end)) >= 0
    ok(driver.cuEventElapsedTime(end, start))
    for event in (start, end):
        ok(driver.cuEventDestroy(event))


def test_events_without_timing_measure_nothing(driver, stream, events):
    for event in events[:2]:
        ok(driver.cuEventRecord(event, stream))
    assert code(driver.cuEventElapsedTime(*events[:2])) == 400


# ---------------------------------------------------------------- contexts


@pytest.fixture
def other_context(driver: Any) -> Any:
    """A second context of the same device, not current."""
    mine = here(driver)
    made = ok(driver.cuCtxCreate(None, 0, 0))
    ok(driver.cuCtxSetCurrent(mine))
    yield made
    ok(driver.cuCtxDestroy(made))


#: What needs a current context, and what does not; S a stream, E an event, G a graph.
WITHOUT_CONTEXT = {
    ("cuStreamCreate", 1): 201,
    ("cuEventCreate", 2): 201,
    ("cuMemAlloc", 64): 201,
    ("cuMemGetInfo",): 201,
    ("cuCtxSynchronize",): 201,
    ("cuCtxGetDevice",): 201,
    ("cuCtxPopCurrent",): 201,
    ("cuStreamIsCapturing", 0): 201,
    ("cuStreamQuery", 0): 201,
    ("cuGraphInstantiate", "G", 0): 201,
    ("cuStreamQuery", "S"): 0,
    ("cuStreamSynchronize", "S"): 0,
    ("cuStreamIsCapturing", "S"): 0,
    ("cuStreamGetCaptureInfo", "S"): 0,
    ("cuStreamGetFlags", "S"): 0,
    ("cuStreamGetCtx", "S"): 0,
    ("cuEventQuery", "E"): 0,
    ("cuEventSynchronize", "E"): 0,
    ("cuEventRecord", "E", "S"): 0,
    ("cuStreamWaitEvent", "S", "E", 0): 0,
    ("cuGraphGetNodes", "G", 0): 0,
}


@pytest.mark.parametrize("call", WITHOUT_CONTEXT, ids=lambda call: "-".join(map(str, call)))
def test_a_new_thread_has_no_context_and_some_calls_need_none(driver, stream, events, graph, call):
    name, *given = call
    things = {"S": stream, "E": events[0], "G": graph}
    seen: list[int] = []

    def other() -> None:
        seen.append(int(ok(driver.cuCtxGetCurrent())))
        seen.append(code(getattr(driver, name)(*(things.get(each, each) for each in given))))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [0, WITHOUT_CONTEXT[call]]


def test_destroying_the_current_context_uncovers_the_one_below(driver):
    mine = here(driver)
    made = ok(driver.cuCtxCreate(None, 0, 0))
    assert int(here(driver)) == int(made)
    ok(driver.cuCtxDestroy(made))
    assert int(here(driver)) == int(mine)


@pytest.mark.parametrize("call", ["cuEventQuery", "cuEventSynchronize"])
def test_an_event_of_a_destroyed_context_says_so(driver, call):
    context = ok(driver.cuCtxCreate(None, 0, 0))
    event = ok(driver.cuEventCreate(2))
    ok(driver.cuCtxDestroy(context))
    assert code(getattr(driver, call)(event)) == 709


def test_an_event_of_a_destroyed_context_is_neither_recorded_nor_measured(driver, stream):
    context = ok(driver.cuCtxCreate(None, 0, 0))
    event = ok(driver.cuEventCreate(0))
    ok(driver.cuCtxDestroy(context))
    assert code(driver.cuEventRecord(event, stream)) == 709
    assert code(driver.cuStreamWaitEvent(stream, event, 0)) == 709
    assert code(driver.cuEventElapsedTime(event, event)) == 709
    assert code(driver.cuEventDestroy(event)) == 709


def test_a_synchronise_of_one_context_spares_captures_in_another(driver, stream):
    mine = here(driver)
    ok(driver.cuStreamBeginCapture(stream, mode(driver, RELAXED)))
    other = ok(driver.cuCtxCreate(None, 0, 0))
    ok(driver.cuCtxSynchronize())
    ok(driver.cuCtxDestroy(other))
    ok(driver.cuCtxSetCurrent(mine))
    assert int(ok(driver.cuStreamIsCapturing(stream))) == 1


def test_the_legacy_stream_of_one_context_spares_captures_in_another(driver, new_stream):
    mine, blocking = here(driver), new_stream(0)
    ok(driver.cuStreamBeginCapture(blocking, mode(driver, RELAXED)))
    other = ok(driver.cuCtxCreate(None, 0, 0))
    memory = ok(driver.cuMemAlloc(64))
    ok(driver.cuMemsetD32Async(memory, 1, 1, 0))
    ok(driver.cuStreamSynchronize(0))
    ok(driver.cuMemFree(memory))
    ok(driver.cuCtxDestroy(other))
    ok(driver.cuCtxSetCurrent(mine))
    assert int(ok(driver.cuStreamIsCapturing(blocking))) == 1


def test_a_capture_spreads_to_another_context_by_events(driver, new_stream, events, other_context):
    mine, stream = here(driver), new_stream()
    ok(driver.cuCtxSetCurrent(other_context))
    side, back = ok(driver.cuStreamCreate(1)), ok(driver.cuEventCreate(2))
    memory = ok(driver.cuMemAlloc(64))
    ok(driver.cuCtxSetCurrent(mine))
    ok(driver.cuStreamBeginCapture(stream, mode(driver, RELAXED)))
    ok(driver.cuEventRecord(events[0], stream))
    ok(driver.cuStreamWaitEvent(side, events[0], 0))
    assert int(ok(driver.cuStreamIsCapturing(side))) == 1
    ok(driver.cuCtxSetCurrent(other_context))
    ok(driver.cuMemsetD32Async(memory, 1, 1, side))
    ok(driver.cuEventRecord(back, side))
    ok(driver.cuCtxSetCurrent(mine))
    ok(driver.cuStreamWaitEvent(stream, back, 0))
    assert code(driver.cuEventRecord(back, stream)) == 400, "an event of another context"
    ok(driver.cuGraphDestroy(ok(driver.cuStreamEndCapture(stream))))
    ok(driver.cuMemFree(memory))
    ok(driver.cuEventDestroy(back))
    ok(driver.cuStreamDestroy(side))
