"""Begin, end and look: the end of a capture is an answer, never an exception."""

from __future__ import annotations

import pytest

from breakable_cuda_graphs import CUDAError
from breakable_cuda_graphs._driver import bindings, enums, stream_capture
from breakable_cuda_graphs._driver.stream_capture import Status
from helping import in_thread, wait


@pytest.fixture
def stream(driver):
    made = driver.cuStreamCreate(1)
    yield made
    driver.cuStreamDestroy(made)


@pytest.mark.parametrize("mode", stream_capture.MODES)
def test_a_capture_begins_and_ends_with_a_graph_of_ours(driver, stream, mode, bare_device):
    assert stream_capture.status(driver, stream) is Status.NONE
    stream_capture.begin(driver, stream, mode)
    assert stream_capture.status(driver, stream) is Status.ACTIVE
    code, graph, _ = stream_capture.end(driver, stream)
    assert code == 0
    assert stream_capture.status(driver, stream) is Status.NONE
    graph.close()


def test_an_invalidated_capture_answers_901(driver, stream):
    stream_capture.begin(driver, stream, "global")
    driver.module.cuStreamSynchronize(stream)
    assert stream_capture.status(driver, stream) is Status.INVALIDATED
    assert stream_capture.end(driver, stream) == (enums.CAPTURE_INVALIDATED, None, True)
    assert stream_capture.status(driver, stream) is Status.NONE


def test_unjoined_work_answers_904(driver, stream):
    side, address = driver.cuStreamCreate(1), driver.cuMemAlloc(16)
    stream_capture.begin(driver, stream, "relaxed")
    wait(side, stream)
    driver.cuMemsetD32Async(address, 1, 1, side)
    assert stream_capture.end(driver, stream) == (enums.CAPTURE_UNJOINED, None, True)
    driver.cuMemFree(address)
    driver.cuStreamDestroy(side)


def test_another_thread_gets_no_graph_and_ends_the_capture(driver, stream):
    stream_capture.begin(driver, stream, "thread_local")
    ended = in_thread(lambda: stream_capture.end(driver, stream))
    assert ended == (908, None, True)
    assert stream_capture.status(driver, stream) is Status.NONE


def test_nothing_to_end_is_an_answer_too(driver, stream):
    ended = stream_capture.end(driver, stream)
    assert ended.graph is None
    assert ended.code == 401


def test_a_capture_that_cannot_begin_raises(driver, stream):
    stream_capture.begin(driver, stream, "relaxed")
    with pytest.raises(CUDAError, match="cuStreamBeginCapture"):
        stream_capture.begin(driver, stream, "relaxed")
    stream_capture.end(driver, stream).graph.close()


def test_the_legacy_stream_beside_a_blocking_capture_counts_as_not_capturing(driver):
    blocking = driver.cuStreamCreate(0)
    stream_capture.begin(driver, blocking, "relaxed")
    assert int(driver.module.cuStreamIsCapturing(0)[0]) == 906
    assert stream_capture.status(driver, bindings.types.CUstream(0)) is Status.NONE
    assert stream_capture.status(driver, blocking) is Status.ACTIVE
    stream_capture.end(driver, blocking).graph.close()
    driver.cuStreamDestroy(blocking)


def test_only_the_answer_of_the_legacy_stream_means_no_capture(driver, stream, monkeypatch):
    stream_capture.begin(driver, stream, "global")
    blocking = driver.cuStreamCreate(0)
    legacy = bindings.types.CUstream(0)
    assert stream_capture.status(driver, legacy) is Status.NONE
    for code in (1, 400, 700, 999):
        refuse = (bindings.types.CUresult(code), None)
        monkeypatch.setattr(driver.module, "cuStreamIsCapturing", lambda stream, r=refuse: r)
        with pytest.raises(CUDAError, match="cuStreamIsCapturing") as info:
            stream_capture.status(driver, stream)
        assert info.value.code == code
    monkeypatch.undo()
    stream_capture.discard(driver, stream)
    stream_capture.discard(driver, stream)  # nothing is left to end
    assert stream_capture.status(driver, stream) is Status.NONE
    stream_capture.begin(driver, blocking, "global")  # one that the legacy stream waits for
    assert int(driver.module.cuStreamIsCapturing(legacy)[0]) == enums.CAPTURE_IMPLICIT
    assert stream_capture.status(driver, legacy) is Status.NONE
    stream_capture.discard(driver, blocking)
    driver.cuStreamDestroy(blocking)
