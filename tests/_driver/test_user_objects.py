"""Objects live as long as the graph that needs them, its clones and its executables; no longer."""

from __future__ import annotations

import weakref

import pytest

from breakable_cuda_graphs import CUDAError
from breakable_cuda_graphs._driver import bindings, user_objects


class Thing:
    pass


@pytest.fixture
def driver(driver):
    user_objects.sweep()
    return driver


def test_a_thing_lives_until_graph_clone_and_executable_are_gone(driver, bare_device):
    graph = driver.cuGraphCreate(0)
    thing = Thing()
    alive = weakref.ref(thing)
    user_objects.hold(driver, graph, thing)
    del thing
    clone = driver.cuGraphClone(graph)
    executable = driver.cuGraphInstantiate(clone, 0)
    for destroy in (
        lambda: driver.cuGraphDestroy(graph),
        lambda: driver.cuGraphDestroy(clone),
        lambda: driver.cuGraphExecDestroy(executable),
    ):
        user_objects.sweep()
        assert alive() is not None
        destroy()
    assert alive() is not None, "it may only be let go by a later call"
    user_objects.sweep()
    assert alive() is None
    assert user_objects.held() == 0
    assert bare_device.leaks() == []


def test_several_things_go_one_by_one(driver):
    graphs = [driver.cuGraphCreate(0) for _ in range(3)]
    things = [Thing() for _ in graphs]
    alive = [weakref.ref(thing) for thing in things]
    for graph, thing in zip(graphs, things, strict=True):
        user_objects.hold(driver, graph, thing)
    del things, thing
    driver.cuGraphDestroy(graphs[1])
    user_objects.sweep()
    assert [ref() is None for ref in alive] == [False, True, False]
    driver.cuGraphDestroy(graphs[0])
    driver.cuGraphDestroy(graphs[2])
    user_objects.sweep()
    assert user_objects.held() == 0


def test_a_driver_that_refuses_holds_nothing(driver, bare_device, monkeypatch):
    monkeypatch.setattr(
        driver, "cuUserObjectCreate", lambda *_: (_ for _ in ()).throw(CUDAError()), raising=False
    )
    graph = driver.cuGraphCreate(0)
    with pytest.raises(CUDAError):
        user_objects.hold(driver, graph, Thing())
    assert user_objects.held() == 0
    driver.cuGraphDestroy(graph)


def test_a_graph_that_cannot_retain_gives_all_back(driver, bare_device, monkeypatch):
    monkeypatch.setattr(user_objects, "_held", [])
    with pytest.raises(CUDAError, match="Retain"):
        user_objects.hold(driver, bindings.types.CUgraph(0x10), Thing())
    user_objects.sweep()
    assert bare_device.leaks() == []
    assert user_objects.held() == 0
