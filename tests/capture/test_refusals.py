"""What a segment must not hold, and what a block has missed: told before any replay."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from breakable_cuda_graphs import (
    CaptureError,
    CUDAGraphSequence,
    EscapedWorkWarning,
    Graph,
    breakable_graph,
    force_no_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import bindings, contexts
from breakable_cuda_graphs._driver.bindings import types
from breakable_cuda_graphs.frameworks import choose, raw
from helping import a_stream, capture, settle

BYTES = 64


@pytest.fixture
def driver(bare_device: Any, monkeypatch: Any) -> Any:
    """A simulated driver, with the raw framework in use; nothing is left behind."""
    made = bindings.current()
    made.cuCtxSetCurrent(types.CUcontext(contexts.primary(made, 0)))
    framework = raw.RawFramework(made, contexts.primary(made, 0))
    monkeypatch.setattr(choose, "framework_for", lambda driver, stream: framework)
    yield made
    settle()
    assert bare_device.leaks() == []


@pytest.fixture
def stream(driver: Any) -> Any:
    with a_stream() as made:
        yield made
        settle()


@no_graph
def nothing() -> None:
    """A break."""


# ---------------------------------------------------------------- stream-ordered memory


@pytest.mark.parametrize("border", [nothing, force_no_graph])
def test_an_allocation_that_crosses_a_border_is_refused(driver, stream, border):
    with pytest.raises(CaptureError, match="stream-ordered allocation") as caught:
        with breakable_graph(CUDAGraphSequence(), stream=stream):
            driver.cuMemAllocAsync(BYTES, stream)
            border()
    assert f"{BYTES} bytes" in str(caught.value)
    assert caught.value.segment == 0


def test_an_allocation_that_is_freed_in_its_segment_works(driver, stream):
    out = int(driver.cuMemAlloc(BYTES))
    seq = CUDAGraphSequence()
    with breakable_graph(seq, stream=stream):
        nothing()
        pointer = driver.cuMemAllocAsync(BYTES, stream)
        driver.cuMemsetD8Async(pointer, 7, BYTES, stream)
        driver.cuMemcpyDtoDAsync(out, pointer, BYTES, stream)
        driver.cuMemFreeAsync(pointer, stream)
        nothing()
    for _ in range(3):
        seq.replay(stream)
        assert ctypes.string_at(out, BYTES) == b"\7" * BYTES
        driver.cuMemsetD8(out, 0, BYTES)
    seq.reset()
    driver.cuMemFree(out)


def test_the_last_segment_may_leave_its_memory_to_the_next_launch(driver, stream):
    seq = CUDAGraphSequence()
    with breakable_graph(seq, stream=stream):
        nothing()
        pointer = driver.cuMemAllocAsync(BYTES, stream)
        driver.cuMemsetD8Async(pointer, 7, BYTES, stream)
    for _ in range(3):
        seq.replay(stream)
    assert ctypes.string_at(int(pointer), BYTES) == b"\7" * BYTES
    driver.cuMemFreeAsync(pointer, stream)
    seq.reset()


# ---------------------------------------------------------------- copies from the host


@pytest.mark.parametrize("word", ["reads", "writes"])
def test_a_copy_of_ordinary_host_memory_is_refused(driver, stream, word):
    host = (ctypes.c_char * BYTES)()
    address, x = ctypes.addressof(host), int(driver.cuMemAlloc(BYTES))
    with pytest.raises(CaptureError, match="pageable") as caught:
        with breakable_graph(CUDAGraphSequence(), stream=stream):
            nothing()
            if word == "reads":
                driver.cuMemcpyHtoDAsync(x, address, BYTES, stream)
            else:
                driver.cuMemcpyDtoHAsync(address, x, BYTES, stream)
    assert f"{word} {BYTES} bytes" in str(caught.value)
    assert hex(address) in str(caught.value)
    assert caught.value.segment == 2
    driver.cuMemFree(x)


def test_a_graph_captures_no_copy_of_ordinary_host_memory_either(driver, stream):
    host, x = (ctypes.c_char * BYTES)(), int(driver.cuMemAlloc(BYTES))
    with Graph() as graph:
        with pytest.raises(CaptureError, match="pageable"), graph.capture(stream):
            driver.cuMemcpyHtoDAsync(x, ctypes.addressof(host), BYTES, stream)
        assert len(graph) == 0
    driver.cuMemFree(x)


def test_a_copy_of_pinned_memory_and_one_in_a_break_work(driver, stream):
    host, seen = (ctypes.c_char * BYTES)(), []
    pinned, x = int(driver.cuMemAllocHost(BYTES)), int(driver.cuMemAlloc(BYTES))

    @no_graph
    def read() -> None:
        driver.cuMemcpyDtoHAsync(ctypes.addressof(host), x, BYTES, stream)
        driver.cuStreamSynchronize(stream)
        seen.append(host.raw[0])

    seq = CUDAGraphSequence()
    with breakable_graph(seq, stream=stream):
        driver.cuMemcpyHtoDAsync(x, pinned, BYTES, stream)
        read()
    for value in (3, 4):
        ctypes.memset(pinned, value, BYTES)
        seq.replay(stream)
    assert seen[1:] == [3, 4]
    seq.reset()
    driver.cuMemFreeHost(pinned)
    driver.cuMemFree(x)


def test_on_the_simulated_device_tensors_on_the_cpu_are_device_memory(device):
    torch = pytest.importorskip("torch")
    from breakable_cuda_graphs.simulator import tensors

    x, y = torch.arange(16.0), torch.zeros(16)

    def body() -> None:
        stream = types.CUstream(tensors.current_stream())
        bindings.current().cuMemcpyDtoDAsync(y.data_ptr(), x.data_ptr(), BYTES, stream)

    seq, _ = capture(body)
    seq.replay()
    assert torch.equal(x, y)


# ---------------------------------------------------------------- work that escapes


def test_a_block_into_which_nothing_went_says_so(driver, stream):
    x = int(driver.cuMemAlloc(BYTES))
    with pytest.warns(EscapedWorkWarning, match="nothing was captured") as caught:
        with breakable_graph(CUDAGraphSequence()):
            driver.cuMemsetD8Async(x, 1, BYTES, stream)  # not the block's
    assert caught[0].filename == __file__
    with breakable_graph(CUDAGraphSequence()):
        nothing()
    driver.cuMemFree(x)
