"""Captures in the corners: dependencies by hand, invalidated ones, what harms and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raw_calls import (
    ACTIVE,
    GLOBAL,
    INVALIDATED,
    NONE,
    RELAXED,
    THREAD_LOCAL,
    begin,
    code,
    edges,
    fill,
    kinds,
    mode,
    nodes,
    ok,
    status,
)


def wait(driver: Any, waiting: Any, for_stream: Any, event: Any) -> None:
    """`waiting` waits for all that `for_stream` has been given."""
    ok(driver.cuEventRecord(event, for_stream))
    ok(driver.cuStreamWaitEvent(waiting, event, 0))


def end(driver: Any, stream: Any) -> set[tuple[int, int]]:
    """End a capture that has to be good; the edges of its graph."""
    graph = ok(driver.cuStreamEndCapture(stream))
    found = edges(driver, graph)
    ok(driver.cuGraphDestroy(graph))
    return found


def dependencies(driver: Any, stream: Any) -> tuple[Any, list[Any]]:
    """(graph, what the next node waits for)."""
    _, _, graph, found, _, count = ok(driver.cuStreamGetCaptureInfo(stream))
    return graph, list(found or ())[:count]


# ---------------------------------------------------------------- info


def test_the_info_of_an_invalidated_capture_has_neither_id_nor_graph(driver, stream, buffer):
    begin(driver, stream)
    fill(driver, stream, buffer, 1)
    driver.cuStreamSynchronize(stream)
    state, identity, graph, *_, count = ok(driver.cuStreamGetCaptureInfo(stream))
    assert (int(state), int(identity), int(graph or 0), count) == (INVALIDATED, 0, 0, 0)
    driver.cuStreamEndCapture(stream)


def test_the_info_counts_what_the_next_node_waits_for(driver, stream, buffer):
    begin(driver, stream)
    assert dependencies(driver, stream)[1] == []
    fill(driver, stream, buffer, 1)
    assert len(dependencies(driver, stream)[1]) == 1
    end(driver, stream)


# ---------------------------------------------------------------- dependencies


def test_setting_dependencies_takes_duplicates_for_one(driver, stream, buffer):
    begin(driver, stream)
    fill(driver, stream, buffer, 1)
    graph, _ = dependencies(driver, stream)
    node = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    ok(driver.cuStreamUpdateCaptureDependencies(stream, [node, node], None, 2, 1))
    for _ in range(2):
        ok(driver.cuStreamUpdateCaptureDependencies(stream, [node], None, 1, 0))
    assert [int(each) for each in dependencies(driver, stream)[1]] == [int(node)]
    fill(driver, stream, buffer, 2)
    assert end(driver, stream) == {(1, 2)}


@pytest.mark.parametrize("what", ["a stranger", "null", "flags"])
def test_wrong_dependencies_are_refused_and_harm_nothing(driver, stream, graph, what):
    stranger = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    begin(driver, stream)
    node = driver.CUgraphNode(0) if what == "null" else stranger
    update = driver.cuStreamUpdateCaptureDependencies
    if what == "flags":
        assert code(update(stream, None, None, 0, 7)) == 1
    else:
        assert code(update(stream, [node], None, 1, 1)) == 1
    assert status(driver, stream) == ACTIVE
    end(driver, stream)


def test_a_capture_into_a_graph_takes_duplicates_for_one(driver, stream, graph, buffer):
    node = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    relaxed = mode(driver, RELAXED)
    ok(driver.cuStreamBeginCaptureToGraph(stream, graph, [node, node], None, 2, relaxed))
    fill(driver, stream, buffer, 1)
    ok(driver.cuStreamEndCapture(stream))
    assert edges(driver, graph) == {(0, 1)}


def test_a_graph_is_captured_into_once_at_a_time(driver, new_stream, graph):
    one, two = new_stream(), new_stream()
    relaxed = mode(driver, RELAXED)
    ok(driver.cuStreamBeginCaptureToGraph(one, graph, None, None, 0, relaxed))
    assert code(driver.cuStreamBeginCaptureToGraph(two, graph, None, None, 0, relaxed)) == 401
    ok(driver.cuStreamEndCapture(one))


def test_a_capture_into_a_graph_may_bring_nothing(driver, stream, graph):
    node = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    relaxed = mode(driver, RELAXED)
    ok(driver.cuStreamBeginCaptureToGraph(stream, graph, [node], None, 1, relaxed))
    assert [int(each) for each in dependencies(driver, stream)[1]] == [int(node)]
    ok(driver.cuStreamEndCapture(stream))
    assert len(nodes(driver, graph)) == 1


# ---------------------------------------------------------------- the graph of an open capture


def test_nodes_of_an_open_capture_cannot_be_removed_and_edges_can(driver, stream, buffer):
    begin(driver, stream)
    for value in range(2):
        fill(driver, stream, buffer, value)
    graph, _ = dependencies(driver, stream)
    free = ok(driver.cuGraphAddEmptyNode(graph, None, 0))
    assert code(driver.cuGraphDestroyNode(free)) == 401
    a, b, _ = nodes(driver, graph)
    ok(driver.cuGraphRemoveDependencies(graph, [a], [b], None, 1))
    ok(driver.cuGraphAddDependencies(graph, [a], [b], None, 1))
    assert end(driver, stream) == {(0, 1)}


def test_the_graph_of_an_open_capture_can_be_read_cloned_and_instantiated(
    driver, stream, buffer, tmp_path
):
    begin(driver, stream, RELAXED)
    fill(driver, stream, buffer, 1)
    graph, _ = dependencies(driver, stream)
    (node,) = nodes(driver, graph)
    params = ok(driver.cuGraphMemsetNodeGetParams(node))
    params.value = 5
    ok(driver.cuGraphMemsetNodeSetParams(node, params))
    ok(driver.cuGraphDebugDotPrint(graph, str(tmp_path / "open.dot").encode(), 0))
    ok(driver.cuGraphDestroy(ok(driver.cuGraphClone(graph))))
    ok(driver.cuGraphExecDestroy(ok(driver.cuGraphInstantiate(graph, 0))))
    assert status(driver, stream) == ACTIVE
    end(driver, stream)


# ---------------------------------------------------------------- forks


def test_a_stream_that_waits_for_itself_changes_nothing(driver, stream, events, buffer):
    begin(driver, stream)
    fill(driver, stream, buffer, 1)
    wait(driver, stream, stream, events[0])
    fill(driver, stream, buffer, 2)
    assert end(driver, stream) == {(0, 1)}


def test_an_event_that_was_recorded_again_elsewhere_no_longer_means_the_capture(
    driver, new_stream, events, buffer
):
    stream, side, other = new_stream(), new_stream(), new_stream()
    begin(driver, stream)
    fill(driver, stream, buffer, 1)
    ok(driver.cuEventRecord(events[0], stream))
    ok(driver.cuEventRecord(events[0], other))
    ok(driver.cuStreamWaitEvent(side, events[0], 0))
    assert status(driver, side) == NONE
    end(driver, stream)


def test_a_fork_may_go_on_after_it_was_joined(driver, new_stream, events, buffer):
    origin, side = new_stream(), new_stream()
    begin(driver, origin)
    fill(driver, origin, buffer, 1)
    wait(driver, side, origin, events[0])
    fill(driver, side, buffer + 4, 1)
    wait(driver, origin, side, events[1])
    fill(driver, origin, buffer, 2)
    fill(driver, side, buffer + 4, 2)
    wait(driver, origin, side, events[2])
    assert end(driver, origin) == {(0, 1), (0, 2), (1, 2), (1, 3)}


def test_work_behind_the_event_that_joined_is_unjoined(driver, new_stream, events, buffer):
    origin, side = new_stream(), new_stream()
    begin(driver, origin)
    wait(driver, side, origin, events[0])
    fill(driver, side, buffer, 1)
    ok(driver.cuEventRecord(events[1], side))
    fill(driver, side, buffer, 2)
    ok(driver.cuStreamWaitEvent(origin, events[1], 0))
    assert code(driver.cuStreamEndCapture(origin)) == 904


def test_a_join_may_go_by_way_of_another_fork(driver, new_stream, events, buffer):
    origin, one, two = (new_stream() for _ in range(3))
    begin(driver, origin)
    wait(driver, one, origin, events[0])
    fill(driver, one, buffer, 1)
    wait(driver, two, one, events[1])
    fill(driver, two, buffer, 2)
    wait(driver, origin, two, events[2])
    fill(driver, origin, buffer, 3)
    assert end(driver, origin) == {(0, 1), (1, 2)}


@pytest.mark.parametrize("flags", [0, 1])
def test_the_legacy_stream_cannot_be_a_fork(driver, new_stream, events, flags):
    stream = new_stream(flags)
    begin(driver, stream, RELAXED)
    ok(driver.cuEventRecord(events[0], stream))
    assert code(driver.cuStreamWaitEvent(0, events[0], 0)) == 906
    assert code(driver.cuStreamEndCapture(stream)) == 901


def test_a_fork_cannot_begin_a_capture(driver, new_stream, events):
    origin, side = new_stream(), new_stream()
    begin(driver, origin)
    wait(driver, side, origin, events[0])
    assert code(driver.cuStreamBeginCapture(side, mode(driver, RELAXED))) == 401
    assert status(driver, origin) == ACTIVE
    end(driver, origin)


# ---------------------------------------------------------------- crossings


@pytest.mark.parametrize("before", ["work", "finished", "own"])
def test_an_event_from_before_the_capture_is_outside_of_it(
    driver, new_stream, events, buffer, before
):
    stream, other = new_stream(), new_stream()
    source = stream if before == "own" else other
    if before == "work":
        fill(driver, source, buffer, 1)
    ok(driver.cuEventRecord(events[0], source))
    if before == "finished":
        ok(driver.cuCtxSynchronize())
    begin(driver, stream)
    assert code(driver.cuStreamWaitEvent(stream, events[0], 0)) == 905
    assert code(driver.cuStreamEndCapture(stream)) == 901


def test_an_event_of_an_invalidated_capture_means_nothing_to_others(driver, new_stream, events):
    stream, other = new_stream(), new_stream()
    begin(driver, stream, RELAXED)
    ok(driver.cuEventRecord(events[0], stream))
    driver.cuStreamSynchronize(stream)
    assert code(driver.cuStreamWaitEvent(other, events[0], 0)) == 1
    assert status(driver, other) == NONE
    assert code(driver.cuEventQuery(events[0])) == 1
    assert code(driver.cuStreamWaitEvent(stream, events[0], 0)) == 901
    driver.cuStreamEndCapture(stream)
    assert code(driver.cuEventQuery(events[0])) == 1


def test_an_event_of_a_past_capture_invalidates_a_capture_that_waits_for_it(
    driver, new_stream, events
):
    stream, other = new_stream(), new_stream()
    begin(driver, stream)
    ok(driver.cuEventRecord(events[0], stream))
    end(driver, stream)
    begin(driver, other)
    assert code(driver.cuStreamWaitEvent(other, events[0], 0)) == 1
    assert code(driver.cuStreamEndCapture(other)) == 901


# ---------------------------------------------------------------- work

Work = Callable[[Any, Any, Any, int], tuple[Any, ...]]

#: Refused (or nothing at all) without harm: (code, nodes in the graph).
HARMLESS: dict[str, tuple[Work, int, int]] = {
    "a misaligned fill": (lambda d, s, e, b: d.cuMemsetD32Async(b + 2, 1, 1, s), 1, 0),
    "a fill of nothing": (lambda d, s, e, b: d.cuMemsetD32Async(b, 1, 0, s), 0, 0),
    "a copy of nothing": (lambda d, s, e, b: d.cuMemcpyDtoDAsync(b, b + 64, 0, s), 0, 0),
    "a copy beyond the memory": (
        lambda d, s, e, b: d.cuMemcpyDtoDAsync(b + 1020, b, 1 << 20, s),
        1,
        0,
    ),
    "a copy to null": (lambda d, s, e, b: d.cuMemcpyDtoDAsync(0, b, 4, s), 1, 0),
    "a pitch below the width": (lambda d, s, e, b: d.cuMemsetD2D8Async(b, 2, 1, 4, 2, s), 1, 0),
    "an allocation of nothing": (lambda d, s, e, b: d.cuMemAllocAsync(0, s), 0, 0),
    "a free of null": (lambda d, s, e, b: d.cuMemFreeAsync(0, s), 0, 0),
    "a free of ordinary memory": (lambda d, s, e, b: d.cuMemFreeAsync(b, s), 1, 0),
    "a record of null": (lambda d, s, e, b: d.cuEventRecord(0, s), 400, 0),
    "a record with unknown flags": (lambda d, s, e, b: d.cuEventRecordWithFlags(e, s, 4), 1, 0),
    "a wait with unknown flags": (lambda d, s, e, b: d.cuStreamWaitEvent(s, e, 4), 1, 0),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_most_bad_work_is_refused_and_the_capture_goes_on(driver, stream, events, buffer, name):
    work, expected, count = HARMLESS[name]
    begin(driver, stream)
    assert code(work(driver, stream, events[0], buffer)) == expected
    assert status(driver, stream) == ACTIVE
    graph = ok(driver.cuStreamEndCapture(stream))
    assert len(kinds(driver, graph)) == count
    ok(driver.cuGraphDestroy(graph))


HARMFUL: dict[str, tuple[Work, int]] = {
    "a wait for null": (lambda d, s, e, b: d.cuStreamWaitEvent(s, 0, 0), 400),
    "a launch of null": (lambda d, s, e, b: d.cuGraphLaunch(0, s), 900),
    "a query": (lambda d, s, e, b: d.cuStreamQuery(s), 900),
    "a synchronise": (lambda d, s, e, b: d.cuStreamSynchronize(s), 900),
    "its flags": (lambda d, s, e, b: d.cuStreamGetFlags(s), 900),
}


@pytest.mark.parametrize("name", HARMFUL)
@pytest.mark.parametrize("number", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_some_calls_on_the_capturing_stream_end_it_in_every_mode(
    driver, stream, events, buffer, name, number
):
    call, expected = HARMFUL[name]
    begin(driver, stream, number)
    assert code(call(driver, stream, events[0], buffer)) == expected
    assert status(driver, stream) == INVALIDATED
    assert code(driver.cuStreamEndCapture(stream)) == 901


#: What a stream of an invalidated capture answers.
AFTERWARDS: dict[str, tuple[Work, int]] = {
    "a fill": (lambda d, s, e, b: d.cuMemsetD32Async(b, 1, 1, s), 901),
    "a copy": (lambda d, s, e, b: d.cuMemcpyDtoDAsync(b, b + 64, 4, s), 901),
    "an allocation": (lambda d, s, e, b: d.cuMemAllocAsync(64, s), 901),
    "a record": (lambda d, s, e, b: d.cuEventRecord(e, s), 901),
    "a wait": (lambda d, s, e, b: d.cuStreamWaitEvent(s, e, 0), 901),
    "an external record": (lambda d, s, e, b: d.cuEventRecordWithFlags(e, s, 1), 901),
    "an external wait": (lambda d, s, e, b: d.cuStreamWaitEvent(s, e, 1), 901),
    "dependencies": (
        lambda d, s, e, b: d.cuStreamUpdateCaptureDependencies(s, None, None, 0, 1), 901,
    ),
    "a query": (lambda d, s, e, b: d.cuStreamQuery(s), 900),
    "a synchronise": (lambda d, s, e, b: d.cuStreamSynchronize(s), 900),
    "a launch of null": (lambda d, s, e, b: d.cuGraphLaunch(0, s), 900),
    "its flags": (lambda d, s, e, b: d.cuStreamGetFlags(s), 900),
    "its id": (lambda d, s, e, b: d.cuStreamGetId(s), 900),
    "its priority": (lambda d, s, e, b: d.cuStreamGetPriority(s), 901),
    "its context": (lambda d, s, e, b: d.cuStreamGetCtx(s), 901),
    "another begin": (lambda d, s, e, b: d.cuStreamBeginCapture(s, mode(d, RELAXED)), 401),
    "the info": (lambda d, s, e, b: d.cuStreamGetCaptureInfo(s), 0),
    "the status": (lambda d, s, e, b: d.cuStreamIsCapturing(s), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", AFTERWARDS)
def test_a_stream_of_an_invalidated_capture_takes_nothing(driver, stream, events, buffer, name):
    call, expected = AFTERWARDS[name]
    begin(driver, stream, RELAXED)
    driver.cuStreamSynchronize(stream)
    assert code(call(driver, stream, events[0], buffer)) == expected
    assert code(driver.cuStreamEndCapture(stream)) == 901


# ---------------------------------------------------------------- streams that go


@pytest.mark.misuse
def test_a_capture_ends_with_the_stream_that_it_began_on(driver, new_stream, events, buffer):
    origin, side = ok(driver.cuStreamCreate(1)), new_stream()
    begin(driver, origin)
    fill(driver, origin, buffer, 1)
    wait(driver, side, origin, events[0])
    ok(driver.cuStreamDestroy(origin))
    assert status(driver, side) == NONE
    ok(driver.cuCtxSynchronize())
    assert code(driver.cuStreamEndCapture(side)) == 401


@pytest.mark.misuse
@pytest.mark.parametrize("work", [False, True])
def test_a_capture_outlives_a_fork_but_not_its_work(driver, stream, events, buffer, work):
    side = ok(driver.cuStreamCreate(1))
    begin(driver, stream, RELAXED)
    wait(driver, side, stream, events[0])
    if work:
        fill(driver, side, buffer, 1)
    ok(driver.cuStreamDestroy(side))
    assert status(driver, stream) == ACTIVE
    answer = driver.cuStreamEndCapture(stream)
    assert code(answer) == (904 if work else 0)
    if not work:
        ok(driver.cuGraphDestroy(answer[1]))


def test_an_event_may_go_while_its_capture_is_open(driver, stream):
    event = ok(driver.cuEventCreate(2))
    begin(driver, stream, RELAXED)
    ok(driver.cuEventRecord(event, stream))
    ok(driver.cuEventDestroy(event))
    assert status(driver, stream) == ACTIVE
    end(driver, stream)
