"""Devices, contexts, streams, events, errors."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from breakable_cuda_graphs.simulator import SimulatedDriver
from raw_calls import code, ok


def test_nothing_works_before_initialisation():
    driver = SimulatedDriver(1)
    assert ok(driver.cuDriverGetVersion()) == 13000
    assert code(driver.cuDeviceGetCount()) == 3
    assert driver.cuStreamCreate(0)[1:] == (None,)
    ok(driver.cuInit(0))
    assert ok(driver.cuDeviceGetCount()) == 1


def test_an_answer_has_the_result_first_and_nothing_else_after_a_failure(driver_module):
    answer = driver_module.cuEventRecord(driver_module.CUevent(16), driver_module.CUstream(0))
    assert len(answer) == 1
    assert answer[0] == driver_module.CUresult.CUDA_ERROR_INVALID_HANDLE
    answer = driver_module.cuDeviceGet(7)
    assert (int(answer[0]), answer[1]) == (101, None)


def test_errors_have_names_and_sentences_as_bytes(driver_module):
    error = driver_module.CUresult(900)
    assert ok(driver_module.cuGetErrorName(error)) == b"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert (
        ok(driver_module.cuGetErrorString(error))
        == b"operation not permitted when stream is capturing"
    )


def test_without_the_runtime_a_thread_needs_a_context():
    driver = SimulatedDriver(1, runtime=False)
    ok(driver.cuInit(0))
    assert int(ok(driver.cuCtxGetCurrent())) == 0
    assert code(driver.cuStreamCreate(0)) == 201
    context = ok(driver.cuDevicePrimaryCtxRetain(0))
    ok(driver.cuCtxPushCurrent(context))
    stream = ok(driver.cuStreamCreate(0))
    assert int(ok(driver.cuStreamGetCtx(stream))) == int(context)
    ok(driver.cuStreamDestroy(stream))
    assert int(ok(driver.cuCtxPopCurrent())) == int(context)
    assert code(driver.cuStreamCreate(0)) == 201


def test_the_runtime_makes_the_primary_context_current():
    driver = SimulatedDriver(1)
    ok(driver.cuInit(0))
    assert ok(driver.cuDevicePrimaryCtxGetState(0)) == (0, 0)
    ok(driver.cuStreamDestroy(ok(driver.cuStreamCreate(0))))
    assert ok(driver.cuDevicePrimaryCtxGetState(0)) == (0, 1)


def test_each_thread_has_its_own_stack_of_contexts(driver_module):
    mine = ok(driver_module.cuCtxGetCurrent())
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(int(ok(driver_module.cuCtxGetCurrent()))))
    thread.start()
    thread.join()
    assert seen == [0]
    assert int(mine) != 0


def test_devices_have_contexts_of_their_own():
    driver = SimulatedDriver(1, devices=2)
    ok(driver.cuInit(0))
    one, two = (ok(driver.cuDevicePrimaryCtxRetain(n)) for n in range(2))
    assert int(one) != int(two)
    ok(driver.cuCtxSetCurrent(two))
    assert int(ok(driver.cuCtxGetDevice())) == 1
    name = ok(driver.cuDeviceGetName(64, 1))
    assert (len(name), name.rstrip(b"\0")) == (64, b"Simulated device 1")
    stream = ok(driver.cuStreamCreate(1))
    assert int(ok(driver.cuStreamGetDevice(stream))) == 1
    ok(driver.cuCtxSetCurrent(one))
    event = ok(driver.cuEventCreate(2))
    assert code(driver.cuEventRecord(event, stream)) == 400


def test_a_released_primary_context_is_gone(misused_driver):
    context = ok(misused_driver.cuCtxGetCurrent())
    ok(misused_driver.cuDevicePrimaryCtxRelease(0))
    assert code(misused_driver.cuStreamCreate(0)) == 709
    assert code(misused_driver.cuCtxSetCurrent(context)) == 201


def test_a_use_of_a_stream_of_a_destroyed_context_is_found(misused_driver):
    """A device crashes; its events are another matter, which is in conformance/."""
    context = ok(misused_driver.cuCtxCreate(None, 0, 0))
    stream = ok(misused_driver.cuStreamCreate(1))
    ok(misused_driver.cuCtxDestroy(context))
    assert code(misused_driver.cuStreamSynchronize(stream)) == 709
    assert "after its context was destroyed" in misused_driver.findings[0]
    ok(misused_driver.cuStreamDestroy(stream))


def test_a_synchronise_of_one_context_spares_captures_in_another(driver_module, stream):
    ok(driver_module.cuStreamBeginCapture(stream, driver_module.CUstreamCaptureMode(2)))
    other = ok(driver_module.cuCtxCreate(None, 0, 0))
    ok(driver_module.cuCtxSynchronize())
    ok(driver_module.cuCtxDestroy(other))
    assert int(ok(driver_module.cuStreamIsCapturing(stream))) == 1


@pytest.mark.parametrize(("flags", "priority"), [(0, 0), (1, -5)])
def test_a_stream_remembers_how_it_was_made(driver_module, flags, priority):
    stream = ok(driver_module.cuStreamCreateWithPriority(flags, priority))
    assert ok(driver_module.cuStreamGetFlags(stream)) == flags
    assert ok(driver_module.cuStreamGetPriority(stream)) == priority
    ok(driver_module.cuStreamQuery(stream))
    ok(driver_module.cuStreamDestroy(stream))


def test_priorities_are_clamped(driver_module):
    least, greatest = ok(driver_module.cuCtxGetStreamPriorityRange())
    for asked, got in ((5, least), (-100, greatest)):
        stream = ok(driver_module.cuStreamCreateWithPriority(0, asked))
        assert ok(driver_module.cuStreamGetPriority(stream)) == got
        ok(driver_module.cuStreamDestroy(stream))


def test_stream_ids_are_unique(driver_module, new_stream):
    made = [new_stream() for _ in range(3)]
    assert len({ok(driver_module.cuStreamGetId(stream)) for stream in made}) == 3


def test_events_measure_time(driver_module, stream):
    start, end = (ok(driver_module.cuEventCreate(0)) for _ in range(2))
    assert code(driver_module.cuEventElapsedTime(start, end)) == 400  # not recorded
    ok(driver_module.cuEventRecord(start, stream))
    ok(driver_module.cuEventRecord(end, stream))
    ok(driver_module.cuEventSynchronize(end))
    assert ok(driver_module.cuEventElapsedTime(start, end)) >= 0
    for event in (start, end):
        ok(driver_module.cuEventDestroy(event))


def test_events_without_timing_measure_nothing(driver_module, stream):
    start, end = (ok(driver_module.cuEventCreate(2)) for _ in range(2))
    for event in (start, end):
        ok(driver_module.cuEventRecord(event, stream))
    assert code(driver_module.cuEventElapsedTime(start, end)) == 400
    for event in (start, end):
        ok(driver_module.cuEventDestroy(event))


def test_types_are_the_bindings_own_and_their_functions_are_out_of_reach(driver_module: Any):
    from cuda.bindings import driver as bindings

    assert driver_module.CUresult is bindings.CUresult
    assert driver_module.CU_STREAM_LEGACY == bindings.CU_STREAM_LEGACY
    with pytest.raises(AttributeError):
        driver_module.cuTexObjectCreate  # noqa: B018
