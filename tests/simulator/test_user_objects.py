"""User objects: the destructor runs once, when the last reference has gone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .helpers import code, ok

Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture
def destroyed() -> list[int]:
    """The pointers that destructors have been called with."""
    return []


@pytest.fixture
def new_object(driver_module: Any, destroyed: list[int]) -> Iterator[Callable[[], Any]]:
    """Makes a user object with one reference, the caller's."""
    destructor = Destructor(lambda pointer: destroyed.append(pointer))
    address = ctypes.cast(destructor, ctypes.c_void_p).value

    def make(pointer: int = 77) -> Any:
        return ok(driver_module.cuUserObjectCreate(pointer, driver_module.CUhostFn(address), 1, 1))

    yield make
    del destructor


def test_the_last_release_destroys(driver_module, new_object, destroyed):
    thing = new_object(5)
    ok(driver_module.cuUserObjectRetain(thing, 1))
    ok(driver_module.cuUserObjectRelease(thing, 1))
    assert destroyed == []
    ok(driver_module.cuUserObjectRelease(thing, 1))
    assert destroyed == [5]


def test_a_graph_holds_a_moved_reference(driver_module, new_object, destroyed):
    graph = ok(driver_module.cuGraphCreate(0))
    ok(driver_module.cuGraphRetainUserObject(graph, new_object(), 1, 1))
    assert driver_module.leaks() == [f"graph {int(graph):#x} was not released"]
    ok(driver_module.cuGraphDestroy(graph))
    assert destroyed == [77]


def test_copies_of_a_graph_hold_references_too(driver_module, new_object, destroyed):
    graph, outer = ok(driver_module.cuGraphCreate(0)), ok(driver_module.cuGraphCreate(0))
    ok(driver_module.cuGraphRetainUserObject(graph, new_object(), 1, 1))
    clone = ok(driver_module.cuGraphClone(graph))
    ok(driver_module.cuGraphAddChildGraphNode(outer, None, 0, graph))
    executable = ok(driver_module.cuGraphInstantiate(graph, 0))
    for release, thing in (
        (driver_module.cuGraphDestroy, graph),
        (driver_module.cuGraphDestroy, clone),
        (driver_module.cuGraphDestroy, outer),
    ):
        ok(release(thing))
        assert destroyed == []
    ok(driver_module.cuGraphExecDestroy(executable))
    assert destroyed == [77]


def test_a_graph_can_give_its_reference_back(driver_module, new_object, destroyed):
    graph = ok(driver_module.cuGraphCreate(0))
    thing = new_object()
    ok(driver_module.cuGraphRetainUserObject(graph, thing, 1, 1))
    assert code(driver_module.cuGraphReleaseUserObject(graph, thing, 2)) == 1
    ok(driver_module.cuGraphReleaseUserObject(graph, thing, 1))
    assert destroyed == [77]
    ok(driver_module.cuGraphDestroy(graph))


def test_what_is_not_owned_cannot_be_moved(driver_module, new_object, destroyed):
    graph = ok(driver_module.cuGraphCreate(0))
    thing = new_object()
    ok(driver_module.cuGraphRetainUserObject(graph, thing, 1, 1))
    assert code(driver_module.cuGraphRetainUserObject(graph, thing, 1, 1)) == 1
    ok(driver_module.cuGraphDestroy(graph))
    assert destroyed == [77]


def test_an_update_exchanges_the_references_of_an_executable(driver_module, new_object, destroyed):
    one, two = ok(driver_module.cuGraphCreate(0)), ok(driver_module.cuGraphCreate(0))
    ok(driver_module.cuGraphRetainUserObject(one, new_object(1), 1, 1))
    ok(driver_module.cuGraphRetainUserObject(two, new_object(2), 1, 1))
    executable = ok(driver_module.cuGraphInstantiate(one, 0))
    ok(driver_module.cuGraphDestroy(one))
    ok(driver_module.cuGraphExecUpdate(executable, two))
    assert destroyed == [1]
    ok(driver_module.cuGraphDestroy(two))
    assert destroyed == [1]
    ok(driver_module.cuGraphExecDestroy(executable))
    assert destroyed == [1, 2]


def test_a_c_function_can_be_the_destructor(driver_module):
    libc = ctypes.CDLL(None)
    semaphore = ctypes.create_string_buffer(64)
    assert libc.sem_init(semaphore, 0, 0) == 0
    post = ctypes.cast(libc.sem_post, ctypes.c_void_p).value
    graph = ok(driver_module.cuGraphCreate(0))
    thing = ok(
        driver_module.cuUserObjectCreate(
            ctypes.addressof(semaphore), driver_module.CUhostFn(post), 1, 1
        )
    )
    ok(driver_module.cuGraphRetainUserObject(graph, thing, 1, 1))
    assert libc.sem_trywait(semaphore) != 0
    ok(driver_module.cuGraphDestroy(graph))
    assert libc.sem_trywait(semaphore) == 0


def test_flags_and_counts_are_checked(driver_module):
    function = driver_module.CUhostFn(16)
    assert code(driver_module.cuUserObjectCreate(0, function, 1, 0)) == 1
    assert code(driver_module.cuUserObjectCreate(0, function, 0, 1)) == 1
