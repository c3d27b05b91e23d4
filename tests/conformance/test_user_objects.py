"""User objects: the destructor runs once, when the last reference has gone.

It may run on another thread and a little later, so `becomes` waits.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raw_calls import code, ok

Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture
def destroyed() -> list[int]:
    """The pointers that destructors have been called with."""
    return []


@pytest.fixture
def new_object(driver: Any, destroyed: list[int]) -> Iterator[Callable[[], Any]]:
    """Makes a user object with one reference, the caller's."""
    destructor = Destructor(lambda pointer: destroyed.append(pointer))
    address = ctypes.cast(destructor, ctypes.c_void_p).value

    def make(pointer: int = 77) -> Any:
        return ok(driver.cuUserObjectCreate(pointer, driver.CUhostFn(address), 1, 1))

    yield make
    del destructor


def becomes(destroyed: list[int], expected: list[int]) -> bool:
    """Whether the destructors have run as expected, or do so soon."""
    return soon(lambda: destroyed == expected)


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return met


def test_the_last_release_destroys(driver, new_object, destroyed):
    thing = new_object(5)
    ok(driver.cuUserObjectRetain(thing, 1))
    ok(driver.cuUserObjectRelease(thing, 1))
    assert destroyed == []
    ok(driver.cuUserObjectRelease(thing, 1))
    assert becomes(destroyed, [5])


def test_a_graph_holds_a_moved_reference(driver, new_object, destroyed):
    graph = ok(driver.cuGraphCreate(0))
    ok(driver.cuGraphRetainUserObject(graph, new_object(), 1, 1))
    assert destroyed == []
    ok(driver.cuGraphDestroy(graph))
    assert becomes(destroyed, [77])


def test_copies_of_a_graph_hold_references_too(driver, new_object, destroyed):
    graph, outer = ok(driver.cuGraphCreate(0)), ok(driver.cuGraphCreate(0))
    ok(driver.cuGraphRetainUserObject(graph, new_object(), 1, 1))
    clone = ok(driver.cuGraphClone(graph))
    ok(driver.cuGraphAddChildGraphNode(outer, None, 0, graph))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    for release, thing in (
        (driver.cuGraphDestroy, graph),
        (driver.cuGraphDestroy, clone),
        (driver.cuGraphDestroy, outer),
    ):
        ok(release(thing))
        assert destroyed == []
    ok(driver.cuGraphExecDestroy(executable))
    assert becomes(destroyed, [77])


def test_a_graph_can_give_its_reference_back(driver, new_object, destroyed):
    graph = ok(driver.cuGraphCreate(0))
    thing = new_object()
    ok(driver.cuGraphRetainUserObject(graph, thing, 1, 1))
    ok(driver.cuGraphReleaseUserObject(graph, thing, 1))
    assert becomes(destroyed, [77])
    ok(driver.cuGraphDestroy(graph))


def test_an_update_exchanges_the_references_of_an_executable(driver, new_object, destroyed):
    one, two = ok(driver.cuGraphCreate(0)), ok(driver.cuGraphCreate(0))
    ok(driver.cuGraphRetainUserObject(one, new_object(1), 1, 1))
    ok(driver.cuGraphRetainUserObject(two, new_object(2), 1, 1))
    executable = ok(driver.cuGraphInstantiate(one, 0))
    ok(driver.cuGraphDestroy(one))
    ok(driver.cuGraphExecUpdate(executable, two))
    assert becomes(destroyed, [1])
    ok(driver.cuGraphDestroy(two))
    assert becomes(destroyed, [1])
    ok(driver.cuGraphExecDestroy(executable))
    assert becomes(destroyed, [1, 2])


def test_a_c_function_can_be_the_destructor(driver):
    libc = ctypes.CDLL(None)
    semaphore = ctypes.create_string_buffer(64)
    assert libc.sem_init(semaphore, 0, 0) == 0
    post = ctypes.cast(libc.sem_post, ctypes.c_void_p).value
    graph = ok(driver.cuGraphCreate(0))
    thing = ok(driver.cuUserObjectCreate(ctypes.addressof(semaphore), driver.CUhostFn(post), 1, 1))
    ok(driver.cuGraphRetainUserObject(graph, thing, 1, 1))
    assert libc.sem_trywait(semaphore) != 0
    ok(driver.cuGraphDestroy(graph))
    assert soon(lambda: libc.sem_trywait(semaphore) == 0)


def test_flags_and_counts_are_checked(driver):
    function = driver.CUhostFn(16)
    assert code(driver.cuUserObjectCreate(0, function, 1, 0)) == 1
    assert code(driver.cuUserObjectCreate(0, function, 0, 1)) == 1
