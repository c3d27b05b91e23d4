"""How a capture spreads over streams and comes together again."""

from __future__ import annotations

from typing import Any

import pytest

from raw_calls import (
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


def wait(driver: Any, waiting: Any, for_stream: Any, event: Any) -> None:
    """`waiting` waits for all that `for_stream` has been given."""
    ok(driver.cuEventRecord(event, for_stream))
    ok(driver.cuStreamWaitEvent(waiting, event, 0))


def info(driver: Any, stream: Any) -> tuple[int, int, Any, list[Any]]:
    """(status, id, graph, dependencies)."""
    state, identity, graph, dependencies, _, count = ok(driver.cuStreamGetCaptureInfo(stream))
    return int(state), int(identity), graph, list(dependencies)[:count]


# ---------------------------------------------------------------- forks and joins


def test_waiting_for_a_captured_event_brings_a_stream_into_the_capture(driver, new_stream, events):
    origin, side = new_stream(), new_stream()
    begin(driver, origin)
    wait(driver, side, origin, events[0])
    assert status(driver, side) == ACTIVE
    assert info(driver, side)[1] == info(driver, origin)[1]
    wait(driver, origin, side, events[1])
    graph = ok(driver.cuStreamEndCapture(origin))
    assert status(driver, side) == NONE
    ok(driver.cuGraphDestroy(graph))


def test_a_diamond_has_the_edges_of_its_events(driver, new_stream, events, buffer):
    origin, side = new_stream(), new_stream()
    begin(driver, origin)
    fill(driver, origin, buffer, 1)
    wait(driver, side, origin, events[0])
    fill(driver, origin, buffer + 4, 2)
    fill(driver, side, buffer + 8, 3)
    wait(driver, origin, side, events[1])
    fill(driver, origin, buffer + 12, 4)
    graph = ok(driver.cuStreamEndCapture(origin))
    assert edges(driver, graph) == {(0, 1), (0, 2), (1, 3), (2, 3)}
    launch(driver, graph, origin)
    assert words(driver, buffer, 4) == [1, 2, 3, 4]
    ok(driver.cuGraphDestroy(graph))


def test_an_event_means_the_work_before_its_record(driver, new_stream, events, buffer):
    origin, side = new_stream(), new_stream()
    begin(driver, origin)
    fill(driver, origin, buffer, 1)
    ok(driver.cuEventRecord(events[0], origin))
    fill(driver, origin, buffer, 2)
    ok(driver.cuStreamWaitEvent(side, events[0], 0))
    assert len(info(driver, side)[3]) == 1
    fill(driver, side, buffer + 4, 3)
    wait(driver, origin, side, events[1])
    graph = ok(driver.cuStreamEndCapture(origin))
    assert edges(driver, graph) == {(0, 1), (0, 2)}
    ok(driver.cuGraphDestroy(graph))


@pytest.mark.parametrize("work_on_side", [True, False])
def test_an_unjoined_stream_matters_if_it_did_work(
    driver, new_stream, events, buffer, work_on_side
):
    origin, side = new_stream(), new_stream()
    begin(driver, origin)
    fill(driver, origin, buffer, 1)
    wait(driver, side, origin, events[0])
    if work_on_side:
        fill(driver, side, buffer + 4, 1)
    answer = driver.cuStreamEndCapture(origin)
    assert code(answer) == (904 if work_on_side else 0)
    assert status(driver, origin) == status(driver, side) == NONE
    if not work_on_side:
        ok(driver.cuGraphDestroy(answer[1]))


def test_after_unjoined_work_the_next_capture_works(driver, new_stream, events, buffer):
    origin, side = new_stream(), new_stream()
    begin(driver, origin)
    wait(driver, side, origin, events[0])
    fill(driver, side, buffer, 1)
    assert code(driver.cuStreamEndCapture(origin)) == 904
    begin(driver, origin)
    fill(driver, origin, buffer, 9)
    graph = ok(driver.cuStreamEndCapture(origin))
    launch(driver, graph, origin)
    assert words(driver, buffer) == [9]
    ok(driver.cuGraphDestroy(graph))


def test_an_invalidated_capture_takes_its_forks_with_it(driver, new_stream, events):
    origin, side = new_stream(), new_stream()
    begin(driver, origin)
    wait(driver, side, origin, events[0])
    assert code(driver.cuStreamSynchronize(side)) == 900
    assert status(driver, origin) == INVALIDATED
    assert code(driver.cuStreamEndCapture(origin)) == 901
    assert status(driver, side) == NONE


# ---------------------------------------------------------------- crossings


def test_two_captures_cannot_wait_for_each_other(driver, new_stream, events):
    one, two = new_stream(), new_stream()
    begin(driver, one)
    begin(driver, two)
    ok(driver.cuEventRecord(events[0], one))
    assert code(driver.cuStreamWaitEvent(two, events[0], 0)) == 902
    assert code(driver.cuStreamEndCapture(two)) == 901
    assert code(driver.cuStreamEndCapture(one)) == 901


def test_a_capture_cannot_wait_for_uncaptured_work(driver, new_stream, events, buffer):
    capturing, other = new_stream(), new_stream()
    fill(driver, other, buffer, 1)
    ok(driver.cuEventRecord(events[0], other))
    begin(driver, capturing)
    assert code(driver.cuStreamWaitEvent(capturing, events[0], 0)) == 905
    assert code(driver.cuStreamEndCapture(capturing)) == 901


def test_waiting_for_an_event_that_was_never_recorded_does_nothing(driver, stream, events):
    begin(driver, stream)
    ok(driver.cuStreamWaitEvent(stream, events[0], 0))
    assert info(driver, stream)[3] == []
    ok(driver.cuGraphDestroy(ok(driver.cuStreamEndCapture(stream))))


@pytest.mark.parametrize("call", ["cuEventQuery", "cuEventSynchronize"])
def test_a_captured_event_cannot_be_asked(driver, stream, events, call):
    begin(driver, stream, RELAXED)
    ok(driver.cuEventRecord(events[0], stream))
    assert code(getattr(driver, call)(events[0])) == 907
    assert code(driver.cuStreamEndCapture(stream)) == 901


def test_an_event_of_a_past_capture_stays_unusable_until_it_is_recorded_again(
    driver, new_stream, events
):
    stream, other = new_stream(), new_stream()
    begin(driver, stream)
    ok(driver.cuEventRecord(events[0], stream))
    ok(driver.cuGraphDestroy(ok(driver.cuStreamEndCapture(stream))))
    assert code(driver.cuEventQuery(events[0])) == 1
    assert code(driver.cuEventSynchronize(events[0])) == 1
    assert code(driver.cuStreamWaitEvent(other, events[0], 0)) == 1
    ok(driver.cuEventRecord(events[0], stream))
    ok(driver.cuEventSynchronize(events[0]))
    ok(driver.cuStreamWaitEvent(other, events[0], 0))


# ---------------------------------------------------------------- dependencies by hand


def test_the_dependencies_of_the_next_node_can_be_read_and_replaced(driver, stream, buffer):
    begin(driver, stream)
    fill(driver, stream, buffer, 1)
    _, _, graph, dependencies = info(driver, stream)
    empty = ok(driver.cuGraphAddEmptyNode(graph, dependencies, 1))
    ok(driver.cuStreamUpdateCaptureDependencies(stream, [empty], None, 1, 1))
    fill(driver, stream, buffer, 2)
    captured = ok(driver.cuStreamEndCapture(stream))
    assert int(captured) == int(graph)
    assert edges(driver, captured) == {(0, 1), (1, 2)}
    ok(driver.cuGraphDestroy(captured))


def test_dependencies_can_be_added(driver, stream, buffer):
    begin(driver, stream)
    fill(driver, stream, buffer, 1)
    graph = info(driver, stream)[2]
    empty = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    ok(driver.cuStreamUpdateCaptureDependencies(stream, [empty], None, 1, 0))
    assert len(info(driver, stream)[3]) == 2
    fill(driver, stream, buffer, 2)
    captured = ok(driver.cuStreamEndCapture(stream))
    assert edges(driver, captured) == {(0, 2), (1, 2)}
    ok(driver.cuGraphDestroy(captured))


def test_nodes_let_go_by_hand_are_not_unjoined(driver, stream, buffer):
    begin(driver, stream)
    fill(driver, stream, buffer, 1)
    ok(driver.cuStreamUpdateCaptureDependencies(stream, None, None, 0, 1))
    fill(driver, stream, buffer + 4, 2)
    graph = ok(driver.cuStreamEndCapture(stream))
    assert edges(driver, graph) == set()
    ok(driver.cuGraphDestroy(graph))


def test_a_fork_from_nodes_that_were_let_go_needs_no_join(driver, new_stream, events, buffer):
    origin, side = new_stream(), new_stream()
    begin(driver, origin)
    fill(driver, origin, buffer, 1)
    wait(driver, side, origin, events[0])
    ok(driver.cuStreamUpdateCaptureDependencies(origin, None, None, 0, 1))
    fill(driver, origin, buffer + 4, 2)
    graph = ok(driver.cuStreamEndCapture(origin))
    assert edges(driver, graph) == set()
    ok(driver.cuGraphDestroy(graph))


def test_a_node_added_by_hand_needs_no_join(driver, new_stream, events, buffer):
    """As NCCL captures: a stream of its own comes in with nothing to wait for, waits for an event
    and records it again by a node that nobody joins."""
    origin, own = new_stream(), new_stream()
    begin(driver, origin)
    fill(driver, origin, buffer, 1)
    wait(driver, own, origin, events[0])
    ok(driver.cuStreamUpdateCaptureDependencies(own, None, None, 0, 1))
    ok(driver.cuStreamWaitEvent(own, events[1], 1))
    ok(driver.cuEventRecord(events[2], own))
    ok(driver.cuStreamWaitEvent(origin, events[2], 0))
    fill(driver, origin, buffer + 4, 2)
    _, _, graph, before = info(driver, origin)
    record = ok(driver.cuGraphAddEventRecordNode(graph, before, len(before), events[1]))
    ok(driver.cuStreamUpdateCaptureDependencies(own, [record], None, 1, 1))
    captured = ok(driver.cuStreamEndCapture(origin))
    assert edges(driver, captured) == {(0, 2), (1, 2), (2, 3)}
    launch(driver, captured, origin)
    assert words(driver, buffer, 2) == [1, 2]
    ok(driver.cuGraphDestroy(captured))


def test_only_a_capturing_stream_has_dependencies_to_change(driver, stream):
    answer = driver.cuStreamUpdateCaptureDependencies(stream, None, None, 0, 1)
    assert code(answer) == 401


def test_a_child_graph_can_be_put_into_an_open_capture(driver, stream, buffer):
    begin(driver, stream)
    fill(driver, stream, buffer, 5)
    inner = ok(driver.cuStreamEndCapture(stream))
    begin(driver, stream)
    fill(driver, stream, buffer, 1)
    _, _, graph, dependencies = info(driver, stream)
    child = ok(driver.cuGraphAddChildGraphNode(graph, dependencies, 1, inner))
    ok(driver.cuStreamUpdateCaptureDependencies(stream, [child], None, 1, 1))
    outer = ok(driver.cuStreamEndCapture(stream))
    assert kinds(driver, outer) == [2, 4]
    ok(driver.cuGraphDestroy(inner))
    launch(driver, outer, stream)
    assert words(driver, buffer) == [5]
    ok(driver.cuGraphDestroy(outer))


# ---------------------------------------------------------------- into a given graph


def test_a_capture_can_go_on_in_a_given_graph(driver, stream, buffer):
    begin(driver, stream)
    fill(driver, stream, buffer, 1)
    graph = ok(driver.cuStreamEndCapture(stream))
    last = nodes(driver, graph)
    ok(driver.cuStreamBeginCaptureToGraph(stream, graph, last, None, 1, mode(driver, RELAXED)))
    fill(driver, stream, buffer, 2)
    assert int(ok(driver.cuStreamEndCapture(stream))) == int(graph)
    assert edges(driver, graph) == {(0, 1)}
    launch(driver, graph, stream)
    assert words(driver, buffer) == [2]
    ok(driver.cuGraphDestroy(graph))


def test_dependencies_have_to_be_nodes_of_the_given_graph(driver, stream):
    graph, other = ok(driver.cuGraphCreate(0)), ok(driver.cuGraphCreate(0))
    stranger = ok(driver.cuGraphAddEmptyNode(other, None, 0))
    answer = driver.cuStreamBeginCaptureToGraph(
        stream, graph, [stranger], None, 1, mode(driver, RELAXED)
    )
    assert code(answer) == 1
    assert status(driver, stream) == NONE
    for each in (graph, other):
        ok(driver.cuGraphDestroy(each))


def test_a_graph_that_is_captured_into_can_be_cloned_and_instantiated(driver, stream):
    graph = ok(driver.cuGraphCreate(0))
    ok(driver.cuStreamBeginCaptureToGraph(stream, graph, None, None, 0, mode(driver, RELAXED)))
    ok(driver.cuGraphExecDestroy(ok(driver.cuGraphInstantiate(graph, 0))))
    ok(driver.cuGraphDestroy(ok(driver.cuGraphClone(graph))))
    ok(driver.cuStreamEndCapture(stream))
    ok(driver.cuGraphExecDestroy(ok(driver.cuGraphInstantiate(graph, 0))))
    ok(driver.cuGraphDestroy(graph))


# ---------------------------------------------------------------- events as nodes


def test_external_records_and_waits_become_nodes(driver, stream, events):
    begin(driver, stream)
    ok(driver.cuEventRecordWithFlags(events[0], stream, 1))
    ok(driver.cuStreamWaitEvent(stream, events[1], 1))
    graph = ok(driver.cuStreamEndCapture(stream))
    assert kinds(driver, graph) == [7, 6]
    record, waiting = nodes(driver, graph)
    assert int(ok(driver.cuGraphEventRecordNodeGetEvent(record))) == int(events[0])
    assert int(ok(driver.cuGraphEventWaitNodeGetEvent(waiting))) == int(events[1])
    launch(driver, graph, stream)
    ok(driver.cuEventQuery(events[0]))
    ok(driver.cuGraphDestroy(graph))


def test_external_flags_mean_nothing_outside_a_capture(driver, stream, events):
    assert code(driver.cuStreamWaitEvent(stream, events[0], 1)) == 401
    assert code(driver.cuEventRecordWithFlags(events[0], stream, 1)) == 401
    assert code(driver.cuStreamWaitEvent(stream, events[0], 4)) == 1
    assert code(driver.cuEventRecordWithFlags(events[0], stream, 4)) == 1
