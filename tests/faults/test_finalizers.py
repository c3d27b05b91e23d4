"""Finalizers where there is no memory left, and releases that fail: nothing is lost that can be kept.

The hard problem: what a finalizer raises is only reported, and it is not called again. So a finalizer
does one thing, to append what was prepared before, and asks for no memory.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
_testcapi: Any = pytest.importorskip("_testcapi", reason="the interpreter has no _testcapi")

from breakable_cuda_graphs import (  # noqa: E402
    CUDAGraphSequence,
    Graph,
    breakable_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import (  # noqa: E402
    bindings,
    release,
)
from breakable_cuda_graphs._driver.handles import (  # noqa: E402
    EventHandle,
    GraphHandle,
    StreamHandle,
)
from faults.injecting import unraisable  # noqa: E402
from helping import settle, watched_driver  # noqa: E402


@pytest.mark.parametrize("kind", [StreamHandle, EventHandle, GraphHandle])
@pytest.mark.parametrize("first", range(6))
def test_a_handle_that_dies_without_memory_is_still_released(
    device: Any, kind: Any, first: int
) -> None:
    """Every allocation from the `first` on fails while the finalizer runs."""
    settle()
    driver = bindings.current()
    before = device.leaks()
    for _ in range(3):  # the queue has had its memory before
        kind.create(driver)
    settle()
    holder = [kind.create(driver)]
    with unraisable() as unraised:
        _testcapi.set_nomemory(first, 0)
        try:
            holder.clear()
        finally:
            _testcapi.remove_mem_hooks()
    assert unraised == []
    assert release.pending() == 1
    settle()
    assert device.leaks() == before


@pytest.mark.parametrize("first", range(0, 40, 3))
def test_a_sequence_that_dies_without_memory_loses_no_handle(device: Any, first: int) -> None:
    """What a finalizer cannot do is done by those of what it held; the error is only reported."""

    @no_graph
    def nothing(t: Any) -> None:
        pass

    x = torch.ones(2)

    def made() -> Any:
        with breakable_graph(seq := CUDAGraphSequence(), keep_inputs=True):
            nothing(x * 2)
            x + 1
        seq.replay()
        return seq

    made()
    settle()
    before = device.leaks()
    holder = [made()]
    with unraisable():
        _testcapi.set_nomemory(first, first + 1)
        try:
            holder.clear()
        except MemoryError:
            pass
        finally:
            _testcapi.remove_mem_hooks()
    settle()
    assert device.leaks() == before
    assert device.findings == []


def test_a_release_that_fails_is_told_and_not_tried_again(device: Any, caplog: Any) -> None:
    with watched_driver(device) as driver:
        calls = []

        def answer(place: int, name: str, go: Any) -> Any:
            if name == "cuGraphDestroy":
                calls.append(name)
                go()
                raise MemoryError("mine")
            return go()

        GraphHandle.create(bindings.current())
        driver.answer = answer
        settle()
        driver.answer = None
        settle()
    assert calls == ["cuGraphDestroy"]
    assert "mine" in caplog.text
    assert caplog.records[-1].exc_info is None, "a record keeps what the frames hold"


def test_an_interrupted_release_is_done_by_the_next(device: Any) -> None:
    done = []

    def interrupted() -> None:
        done.append(len(done))
        if len(done) == 1:
            raise KeyboardInterrupt

    release.later(0 + release.process.epoch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        release.drain()
    assert release.pending() == 1
    release.drain()
    assert done == [0, 1]
    assert release.pending() == 0


def test_executables_closed_by_two_threads_are_destroyed_once(device: Any) -> None:
    from helping import together

    graph = Graph()
    graph.join()
    execution = graph.instantiate()
    handle = execution._target.handle
    together([handle.close] * 4)
    assert device.findings == []
    execution.close()
    graph.close()
    gc.collect()
