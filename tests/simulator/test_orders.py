"""Executables run in a random order that their edges allow; what a device does is in conformance/."""

from __future__ import annotations

from typing import Any

from breakable_cuda_graphs.simulator import SimulatedDriver
from raw_calls import here, memset_params, ok, words


def fill_node(driver: Any, graph: Any, address: int, value: int, *after: Any) -> Any:
    params = memset_params(driver, address, value)
    return ok(
        driver.cuGraphAddMemsetNode(graph, list(after) or None, len(after), params, here(driver))
    )


def run(driver: Any, executable: Any, stream: Any) -> None:
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))


def order_of_two(seed: int, *, edge: bool) -> list[int]:
    """The last writer of one word, over ten launches of two fills."""
    driver = SimulatedDriver(seed)
    ok(driver.cuInit(0))
    stream = ok(driver.cuStreamCreate(1))
    buffer = int(ok(driver.cuMemAlloc(64)))
    graph = ok(driver.cuGraphCreate(0))
    first = fill_node(driver, graph, buffer, 1)
    fill_node(driver, graph, buffer, 2, *([first] if edge else []))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    seen = []
    for _ in range(10):
        run(driver, executable, stream)
        seen += words(driver, buffer)
    return seen


def test_a_missing_edge_shows():
    assert set(order_of_two(1, edge=False)) == {1, 2}


def test_an_edge_is_kept_in_every_order():
    assert all(set(order_of_two(seed, edge=True)) == {2} for seed in range(5))


def test_a_seed_repeats_its_orders():
    assert order_of_two(7, edge=False) == order_of_two(7, edge=False)
    assert order_of_two(7, edge=False) != order_of_two(8, edge=False)


def test_a_missing_edge_into_a_child_graph_shows():
    driver = SimulatedDriver(3)
    ok(driver.cuInit(0))
    stream = ok(driver.cuStreamCreate(1))
    buffer = int(ok(driver.cuMemAlloc(64)))
    inner, graph = ok(driver.cuGraphCreate(0)), ok(driver.cuGraphCreate(0))
    first = fill_node(driver, inner, buffer + 4, 1)
    fill_node(driver, inner, buffer, 1, first)
    ok(driver.cuGraphAddChildGraphNode(graph, None, 0, inner))
    fill_node(driver, graph, buffer, 2)
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    seen = set()
    for _ in range(20):
        run(driver, executable, stream)
        seen |= set(words(driver, buffer))
    assert seen == {1, 2}
