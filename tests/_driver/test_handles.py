"""Each handle has one owner, is given back once, and never by a finalizer itself."""

from __future__ import annotations

import pytest

from breakable_cuda_graphs import CUDAError, ProcessError
from breakable_cuda_graphs._driver import process, release
from breakable_cuda_graphs._driver.handles import (
    EventHandle,
    ExecHandle,
    GraphHandle,
    GraphView,
    StreamHandle,
)

KINDS = [StreamHandle, EventHandle, GraphHandle]


@pytest.mark.parametrize("kind", KINDS)
def test_closing_gives_the_handle_back_once(driver, bare_device, kind):
    owner = kind.create(driver)
    assert int(owner) == int(owner.value) > 0
    assert hex(int(owner)) in repr(owner)
    assert len(bare_device.leaks()) == 1
    owner.close()
    owner.close()
    assert owner.closed
    assert bare_device.leaks() == []
    assert "closed" in repr(owner)
    with pytest.raises(RuntimeError, match="closed"):
        _ = owner.value


@pytest.mark.parametrize("kind", KINDS)
def test_a_finalizer_only_queues(driver, bare_device, kind):
    before = release.pending()
    owner = kind.create(driver)
    del owner
    assert release.pending() == before + 1
    assert len(bare_device.driver.leaks()) == 1
    release.drain()
    assert bare_device.leaks() == []


def test_a_detached_handle_is_somebody_elses(driver, bare_device):
    owner = StreamHandle.create(driver)
    value = owner.detach()
    assert owner.closed
    owner.close()
    del owner
    release.drain()
    assert len(bare_device.leaks()) == 1
    driver.cuStreamDestroy(value)


def test_an_executable_keeps_its_graph(driver, bare_device):
    graph = GraphHandle.create(driver)
    executable = ExecHandle.instantiate(graph)
    del graph
    release.drain()
    assert len([line for line in bare_device.leaks() if "graph" in line]) == 1
    del executable
    release.drain()
    release.drain()
    assert bare_device.leaks() == []


def test_what_went_with_its_context_is_not_destroyed(driver, bare_device):
    graph = GraphHandle.create(driver)
    executable = ExecHandle.instantiate(graph, is_lost=lambda: True)
    value = executable.value
    executable.close()
    assert [line for line in bare_device.leaks() if "exec" in line]
    driver.cuGraphExecDestroy(value)
    graph.close()


def test_a_failing_destruction_does_not_raise(driver, monkeypatch):
    owner = StreamHandle.create(driver)
    value = owner.value
    monkeypatch.setattr(type(driver.module), "cuStreamDestroy", lambda self, stream: (700,))
    owner.close()
    monkeypatch.undo()
    driver.cuStreamDestroy(value)


def test_a_handle_of_the_parent_is_refused_and_left_alone(driver, bare_device, monkeypatch):
    owner = StreamHandle.create(driver)
    value = owner.value
    monkeypatch.setattr(process, "epoch", process.epoch + 1)
    with pytest.raises(ProcessError, match="this stream belongs"):
        _ = owner.value
    owner.close()
    assert len(bare_device.leaks()) == 1
    monkeypatch.undo()
    driver.cuStreamDestroy(value)


def test_a_view_closes_nothing(driver, bare_device):
    graph = GraphHandle.create(driver)
    view = GraphView(driver, graph.value)
    view.close()
    assert len(bare_device.leaks()) == 1
    graph.close()


def test_a_driver_that_refuses_makes_no_owner(driver, bare_device, monkeypatch):
    monkeypatch.setattr(type(driver.module), "cuEventCreate", lambda self, flags: (2, None))
    with pytest.raises(CUDAError, match="cuEventCreate"):
        EventHandle.create(driver)
    assert bare_device.leaks() == []
