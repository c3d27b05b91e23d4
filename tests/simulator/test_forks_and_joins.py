"""How a capture spreads over streams and comes together again. Uses nothing a device lacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .helpers import (
    ACTIVE,
    INVALIDATED,
    NONE,
    RELAXED,
    begin,
    code,
    edges,
    fill,
    kinds,
    launch,
    mode,
    nodes,
    ok,
    status,
    words,
)


@pytest.fixture
def events(driver_module: Any) -> Iterator[list[Any]]:
    """A few events without timing."""
    made = [ok(driver_module.cuEventCreate(2)) for _ in range(3)]
    yield made
    for event in made:
        ok(driver_module.cuEventDestroy(event))


def wait(driver: Any, waiting: Any, for_stream: Any, event: Any) -> None:
    """`waiting` waits for all that `for_stream` has been given."""
    ok(driver.cuEventRecord(event, for_stream))
    ok(driver.cuStreamWaitEvent(waiting, event, 0))


def info(driver: Any, stream: Any) -> tuple[int, int, Any, list[Any]]:
    """(status, id, graph, dependencies)."""
    state, identity, graph, dependencies, _, count = ok(driver.cuStreamGetCaptureInfo(stream))
    return int(state), int(identity), graph, list(dependencies)[:count]


# ---------------------------------------------------------------- forks and joins


def test_waiting_for_a_captured_event_brings_a_stream_into_the_capture(
    driver_module, new_stream, events
):
    origin, side = new_stream(), new_stream()
    begin(driver_module, origin)
    wait(driver_module, side, origin, events[0])
    assert status(driver_module, side) == ACTIVE
    assert info(driver_module, side)[1] == info(driver_module, origin)[1]
    wait(driver_module, origin, side, events[1])
    graph = ok(driver_module.cuStreamEndCapture(origin))
    assert status(driver_module, side) == NONE
    ok(driver_module.cuGraphDestroy(graph))


def test_a_diamond_has_the_edges_of_its_events(driver_module, new_stream, events, buffer):
    origin, side = new_stream(), new_stream()
    begin(driver_module, origin)
    fill(driver_module, origin, buffer, 1)
    wait(driver_module, side, origin, events[0])
    fill(driver_module, origin, buffer + 4, 2)
    fill(driver_module, side, buffer + 8, 3)
    wait(driver_module, origin, side, events[1])
    fill(driver_module, origin, buffer + 12, 4)
    graph = ok(driver_module.cuStreamEndCapture(origin))
    assert edges(driver_module, graph) == {(0, 1), (0, 2), (1, 3), (2, 3)}
    launch(driver_module, graph, origin)
    assert words(driver_module, buffer, 4) == [1, 2, 3, 4]
    ok(driver_module.cuGraphDestroy(graph))


def test_an_event_means_the_work_before_its_record(driver_module, new_stream, events, buffer):
    origin, side = new_stream(), new_stream()
    begin(driver_module, origin)
    fill(driver_module, origin, buffer, 1)
    ok(driver_module.cuEventRecord(events[0], origin))
    fill(driver_module, origin, buffer, 2)
    ok(driver_module.cuStreamWaitEvent(side, events[0], 0))
    assert len(info(driver_module, side)[3]) == 1
    fill(driver_module, side, buffer + 4, 3)
    wait(driver_module, origin, side, events[1])
    graph = ok(driver_module.cuStreamEndCapture(origin))
    assert edges(driver_module, graph) == {(0, 1), (0, 2)}
    ok(driver_module.cuGraphDestroy(graph))


@pytest.mark.parametrize("work_on_side", [True, False])
def test_an_unjoined_stream_matters_if_it_did_work(
    driver_module, new_stream, events, buffer, work_on_side
):
    origin, side = new_stream(), new_stream()
    begin(driver_module, origin)
    fill(driver_module, origin, buffer, 1)
    wait(driver_module, side, origin, events[0])
    if work_on_side:
        fill(driver_module, side, buffer + 4, 1)
    answer = driver_module.cuStreamEndCapture(origin)
    assert code(answer) == (904 if work_on_side else 0)
    assert status(driver_module, origin) == status(driver_module, side) == NONE
    if not work_on_side:
        ok(driver_module.cuGraphDestroy(answer[1]))


def test_after_unjoined_work_the_next_capture_works(driver_module, new_stream, events, buffer):
    origin, side = new_stream(), new_stream()
    begin(driver_module, origin)
    wait(driver_module, side, origin, events[0])
    fill(driver_module, side, buffer, 1)
    assert code(driver_module.cuStreamEndCapture(origin)) == 904
    begin(driver_module, origin)
    fill(driver_module, origin, buffer, 9)
    graph = ok(driver_module.cuStreamEndCapture(origin))
    launch(driver_module, graph, origin)
    assert words(driver_module, buffer) == [9]
    ok(driver_module.cuGraphDestroy(graph))


def test_an_invalidated_capture_takes_its_forks_with_it(driver_module, new_stream, events):
    origin, side = new_stream(), new_stream()
    begin(driver_module, origin)
    wait(driver_module, side, origin, events[0])
    assert code(driver_module.cuStreamSynchronize(side)) == 900
    assert status(driver_module, origin) == INVALIDATED
    assert code(driver_module.cuStreamEndCapture(origin)) == 901
    assert status(driver_module, side) == NONE


# ---------------------------------------------------------------- crossings


def test_two_captures_cannot_wait_for_each_other(driver_module, new_stream, events):
    one, two = new_stream(), new_stream()
    begin(driver_module, one)
    begin(driver_module, two)
    ok(driver_module.cuEventRecord(events[0], one))
    assert code(driver_module.cuStreamWaitEvent(two, events[0], 0)) == 902
    assert code(driver_module.cuStreamEndCapture(two)) == 901
    assert code(driver_module.cuStreamEndCapture(one)) == 901


def test_a_capture_cannot_wait_for_uncaptured_work(driver_module, new_stream, events, buffer):
    capturing, other = new_stream(), new_stream()
    fill(driver_module, other, buffer, 1)
    ok(driver_module.cuEventRecord(events[0], other))
    begin(driver_module, capturing)
    assert code(driver_module.cuStreamWaitEvent(capturing, events[0], 0)) == 905
    assert code(driver_module.cuStreamEndCapture(capturing)) == 901


def test_waiting_for_an_event_that_was_never_recorded_does_nothing(driver_module, stream, events):
    begin(driver_module, stream)
    ok(driver_module.cuStreamWaitEvent(stream, events[0], 0))
    assert info(driver_module, stream)[3] == []
    ok(driver_module.cuGraphDestroy(ok(driver_module.cuStreamEndCapture(stream))))


@pytest.mark.parametrize("call", ["cuEventQuery", "cuEventSynchronize"])
def test_a_captured_event_cannot_be_asked(driver_module, stream, events, call):
    begin(driver_module, stream, RELAXED)
    ok(driver_module.cuEventRecord(events[0], stream))
    assert code(getattr(driver_module, call)(events[0])) == 907
    assert code(driver_module.cuStreamEndCapture(stream)) == 901


def test_an_event_of_a_past_capture_stays_unusable_until_it_is_recorded_again(
    driver_module, new_stream, events
):
    stream, other = new_stream(), new_stream()
    begin(driver_module, stream)
    ok(driver_module.cuEventRecord(events[0], stream))
    ok(driver_module.cuGraphDestroy(ok(driver_module.cuStreamEndCapture(stream))))
    assert code(driver_module.cuEventQuery(events[0])) == 907
    assert code(driver_module.cuStreamWaitEvent(other, events[0], 0)) == 907
    ok(driver_module.cuEventRecord(events[0], stream))
    ok(driver_module.cuEventSynchronize(events[0]))
    ok(driver_module.cuStreamWaitEvent(other, events[0], 0))


# ---------------------------------------------------------------- dependencies by hand


def test_the_dependencies_of_the_next_node_can_be_read_and_replaced(driver_module, stream, buffer):
    begin(driver_module, stream)
    fill(driver_module, stream, buffer, 1)
    _, _, graph, dependencies = info(driver_module, stream)
    empty = ok(driver_module.cuGraphAddEmptyNode(graph, dependencies, 1))
    ok(driver_module.cuStreamUpdateCaptureDependencies(stream, [empty], None, 1, 1))
    fill(driver_module, stream, buffer, 2)
    captured = ok(driver_module.cuStreamEndCapture(stream))
    assert int(captured) == int(graph)
    assert edges(driver_module, captured) == {(0, 1), (1, 2)}
    ok(driver_module.cuGraphDestroy(captured))


def test_dependencies_can_be_added(driver_module, stream, buffer):
    begin(driver_module, stream)
    fill(driver_module, stream, buffer, 1)
    graph = info(driver_module, stream)[2]
    empty = ok(driver_module.cuGraphAddEmptyNode(graph, None, 0))
    ok(driver_module.cuStreamUpdateCaptureDependencies(stream, [empty], None, 1, 0))
    assert len(info(driver_module, stream)[3]) == 2
    fill(driver_module, stream, buffer, 2)
    captured = ok(driver_module.cuStreamEndCapture(stream))
    assert edges(driver_module, captured) == {(0, 2), (1, 2)}
    ok(driver_module.cuGraphDestroy(captured))


def test_nodes_let_go_by_hand_are_not_unjoined(driver_module, stream, buffer):
    begin(driver_module, stream)
    fill(driver_module, stream, buffer, 1)
    ok(driver_module.cuStreamUpdateCaptureDependencies(stream, None, None, 0, 1))
    fill(driver_module, stream, buffer + 4, 2)
    graph = ok(driver_module.cuStreamEndCapture(stream))
    assert edges(driver_module, graph) == set()
    ok(driver_module.cuGraphDestroy(graph))


def test_a_fork_from_nodes_that_were_let_go_needs_no_join(
    driver_module, new_stream, events, buffer
):
    origin, side = new_stream(), new_stream()
    begin(driver_module, origin)
    fill(driver_module, origin, buffer, 1)
    wait(driver_module, side, origin, events[0])
    ok(driver_module.cuStreamUpdateCaptureDependencies(origin, None, None, 0, 1))
    fill(driver_module, origin, buffer + 4, 2)
    graph = ok(driver_module.cuStreamEndCapture(origin))
    assert edges(driver_module, graph) == set()
    ok(driver_module.cuGraphDestroy(graph))


def test_a_node_added_by_hand_needs_no_join(driver_module, new_stream, events, buffer):
    """As NCCL captures: a stream of its own comes in with nothing to wait for, waits for an event
    and records it again by a node that nobody joins."""
    origin, own = new_stream(), new_stream()
    begin(driver_module, origin)
    fill(driver_module, origin, buffer, 1)
    wait(driver_module, own, origin, events[0])
    ok(driver_module.cuStreamUpdateCaptureDependencies(own, None, None, 0, 1))
    ok(driver_module.cuStreamWaitEvent(own, events[1], 1))
    ok(driver_module.cuEventRecord(events[2], own))
    ok(driver_module.cuStreamWaitEvent(origin, events[2], 0))
    fill(driver_module, origin, buffer + 4, 2)
    _, _, graph, before = info(driver_module, origin)
    record = ok(driver_module.cuGraphAddEventRecordNode(graph, before, len(before), events[1]))
    ok(driver_module.cuStreamUpdateCaptureDependencies(own, [record], None, 1, 1))
    captured = ok(driver_module.cuStreamEndCapture(origin))
    assert edges(driver_module, captured) == {(0, 2), (1, 2), (2, 3)}
    launch(driver_module, captured, origin)
    assert words(driver_module, buffer, 2) == [1, 2]
    ok(driver_module.cuGraphDestroy(captured))


def test_only_a_capturing_stream_has_dependencies_to_change(driver_module, stream):
    answer = driver_module.cuStreamUpdateCaptureDependencies(stream, None, None, 0, 1)
    assert code(answer) == 401


def test_a_child_graph_can_be_put_into_an_open_capture(driver_module, stream, buffer):
    begin(driver_module, stream)
    fill(driver_module, stream, buffer, 5)
    inner = ok(driver_module.cuStreamEndCapture(stream))
    begin(driver_module, stream)
    fill(driver_module, stream, buffer, 1)
    _, _, graph, dependencies = info(driver_module, stream)
    child = ok(driver_module.cuGraphAddChildGraphNode(graph, dependencies, 1, inner))
    ok(driver_module.cuStreamUpdateCaptureDependencies(stream, [child], None, 1, 1))
    outer = ok(driver_module.cuStreamEndCapture(stream))
    assert kinds(driver_module, outer) == [2, 4]
    ok(driver_module.cuGraphDestroy(inner))
    launch(driver_module, outer, stream)
    assert words(driver_module, buffer) == [5]
    ok(driver_module.cuGraphDestroy(outer))


# ---------------------------------------------------------------- into a given graph


def test_a_capture_can_go_on_in_a_given_graph(driver_module, stream, buffer):
    begin(driver_module, stream)
    fill(driver_module, stream, buffer, 1)
    graph = ok(driver_module.cuStreamEndCapture(stream))
    last = nodes(driver_module, graph)
    ok(
        driver_module.cuStreamBeginCaptureToGraph(
            stream, graph, last, None, 1, mode(driver_module, RELAXED)
        )
    )
    fill(driver_module, stream, buffer, 2)
    assert int(ok(driver_module.cuStreamEndCapture(stream))) == int(graph)
    assert edges(driver_module, graph) == {(0, 1)}
    launch(driver_module, graph, stream)
    assert words(driver_module, buffer) == [2]
    ok(driver_module.cuGraphDestroy(graph))


def test_dependencies_have_to_be_nodes_of_the_given_graph(driver_module, stream):
    graph, other = ok(driver_module.cuGraphCreate(0)), ok(driver_module.cuGraphCreate(0))
    stranger = ok(driver_module.cuGraphAddEmptyNode(other, None, 0))
    answer = driver_module.cuStreamBeginCaptureToGraph(
        stream, graph, [stranger], None, 1, mode(driver_module, RELAXED)
    )
    assert code(answer) == 1
    assert status(driver_module, stream) == NONE
    for each in (graph, other):
        ok(driver_module.cuGraphDestroy(each))


def test_a_graph_that_is_captured_into_cannot_be_instantiated(driver_module, stream):
    graph = ok(driver_module.cuGraphCreate(0))
    ok(
        driver_module.cuStreamBeginCaptureToGraph(
            stream, graph, None, None, 0, mode(driver_module, RELAXED)
        )
    )
    assert code(driver_module.cuGraphInstantiate(graph, 0)) != 0
    ok(driver_module.cuStreamEndCapture(stream))
    ok(driver_module.cuGraphExecDestroy(ok(driver_module.cuGraphInstantiate(graph, 0))))
    ok(driver_module.cuGraphDestroy(graph))


# ---------------------------------------------------------------- events as nodes


def test_external_records_and_waits_become_nodes(driver_module, stream, events):
    begin(driver_module, stream)
    ok(driver_module.cuEventRecordWithFlags(events[0], stream, 1))
    ok(driver_module.cuStreamWaitEvent(stream, events[1], 1))
    graph = ok(driver_module.cuStreamEndCapture(stream))
    assert kinds(driver_module, graph) == [7, 6]
    record, waiting = nodes(driver_module, graph)
    assert int(ok(driver_module.cuGraphEventRecordNodeGetEvent(record))) == int(events[0])
    assert int(ok(driver_module.cuGraphEventWaitNodeGetEvent(waiting))) == int(events[1])
    launch(driver_module, graph, stream)
    ok(driver_module.cuEventQuery(events[0]))
    ok(driver_module.cuGraphDestroy(graph))


def test_external_flags_mean_nothing_outside_a_capture(driver_module, stream, events):
    assert code(driver_module.cuStreamWaitEvent(stream, events[0], 1)) == 1
    assert code(driver_module.cuEventRecordWithFlags(events[0], stream, 1)) == 1
