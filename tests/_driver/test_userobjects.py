"""Objects live as long as the graph that needs them, its clones and its executables; no longer."""

from __future__ import annotations

import weakref

import pytest

from breakable_cuda_graphs import CUDAError
from breakable_cuda_graphs._driver import bindings, userobjects


class Thing:
    pass


@pytest.fixture
def driver(driver):
    userobjects.sweep()
    return driver


def test_a_thing_lives_until_graph_clone_and_executable_are_gone(driver, bare_device):
    graph = driver.cuGraphCreate(0)
    thing = Thing()
    alive = weakref.ref(thing)
    userobjects.hold(driver, graph, thing)
    del thing
    clone = driver.cuGraphClone(graph)
    executable = driver.cuGraphInstantiate(clone, 0)
    for destroy in (
        lambda: driver.cuGraphDestroy(graph),
        lambda: driver.cuGraphDestroy(clone),
        lambda: driver.cuGraphExecDestroy(executable),
    ):
        userobjects.sweep()
        assert alive() is not None
        destroy()
    assert alive() is not None, "it may only be let go by a later call"
    userobjects.sweep()
    assert alive() is None
    assert userobjects.held() == 0
    assert bare_device.leaks() == []


def test_several_things_go_one_by_one(driver):
    graphs = [driver.cuGraphCreate(0) for _ in range(3)]
    things = [Thing() for _ in graphs]
    alive = [weakref.ref(thing) for thing in things]
    for graph, thing in zip(graphs, things, strict=True):
        userobjects.hold(driver, graph, thing)
    del things, thing
    driver.cuGraphDestroy(graphs[1])
    userobjects.sweep()
    assert [ref() is None for ref in alive] == [False, True, False]
    driver.cuGraphDestroy(graphs[0])
    driver.cuGraphDestroy(graphs[2])
    userobjects.sweep()
    assert userobjects.held() == 0


def test_a_driver_that_refuses_holds_nothing(driver, bare_device, monkeypatch):
    monkeypatch.setattr(
        driver, "cuUserObjectCreate", lambda *_: (_ for _ in ()).throw(CUDAError()), raising=False
    )
    graph = driver.cuGraphCreate(0)
    with pytest.raises(CUDAError):
        userobjects.hold(driver, graph, Thing())
    assert userobjects.held() == 0
    driver.cuGraphDestroy(graph)


def test_a_graph_that_cannot_retain_gives_all_back(driver, bare_device, monkeypatch):
    monkeypatch.setattr(userobjects, "_held", [])
    with pytest.raises(CUDAError, match="Retain"):
        userobjects.hold(driver, bindings.types.CUgraph(0x10), Thing())
    userobjects.sweep()
    assert bare_device.leaks() == []
    assert userobjects.held() == 0
