"""One suite, two drivers: every rule here holds on a device, and so it has to hold on the simulator.

    pytest tests/conformance            the simulated driver, in the shapes of both binding majors
    pytest tests/conformance -m gpu     the bindings' own module and a device

The hard problem: the rules must be the same code, or the two halves drift apart. So a test asks for
`driver`, a module like `cuda.bindings.driver` in the 13.x shape, and does not know which one it got;
kernels come from `kernels`, by name. Where the device answers something else, the simulator is wrong.

A rule may do only what a device survives: null handles are fine, dangling ones are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from breakable_cuda_graphs._driver.bindings import types
from breakable_cuda_graphs.simulator import SimulatedDriver
from raw_calls import code, nodes, ok

from .kernels import Kernels
from .shapes import In13Shape

REAL = "device"
DRIVERS = [
    pytest.param("simulator", id="simulator"),
    pytest.param("simulator 12.9", id="simulator-12.9"),
    pytest.param(REAL, id=REAL, marks=pytest.mark.gpu),
]

# ---------------------------------------------------------------- drivers


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An initialised driver with the primary context of device 0 current on this thread.

    On the simulator nothing may have been misused, unless the rule is marked `misuse`.
    """
    request.node.user_properties.append(("conformance", request.param))
    made = In13Shape(_module(request.param))
    with_runtime = ok(made.cuDevicePrimaryCtxRetain(0))
    ok(made.cuCtxSetCurrent(with_runtime))
    yield made
    _leave_as_found(made)
    if made.is_simulated:
        misused = request.node.get_closest_marker("misuse") is not None
        assert bool(made.module.findings) == misused, made.module.findings


def _module(name: str) -> Any:
    if name == REAL:
        module: Any = types
    else:  # a bare driver: no runtime makes a context current by itself
        module = SimulatedDriver(1, "12.9" if "12.9" in name else "13", runtime=False)
    ok(module.cuInit(0))
    return module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a device its half is skipped, one line a file."""
    missing = _why_no_device()
    for item in items:
        if (
            missing
            and getattr(item, "callspec", None)
            and item.callspec.params.get("driver") == REAL
        ):
            item.add_marker(pytest.mark.skip(f"needs a CUDA device ({missing})"))


def _why_no_device() -> str:
    try:
        number = code(types.cuInit(0))
    except RuntimeError:
        return "there is no libcuda"
    return f"cuInit answered {number}" if number else ""


def _leave_as_found(driver: Any) -> None:
    """No capture mode was left exchanged, and the context still works."""
    exchange = driver.cuThreadExchangeStreamCaptureMode
    assert int(ok(exchange(driver.CUstreamCaptureMode(0)))) == 0, (
        "a capture mode was left exchanged"
    )
    assert code(driver.cuCtxSynchronize()) == 0, "the context is broken, or a capture is open"


@pytest.fixture
def kernels(driver: Any) -> Kernels:
    """The kernels of `kernels.py`, compiled for the device or as Python callables."""
    return Kernels.of(driver)


# ---------------------------------------------------------------- things to work with


@pytest.fixture
def new_stream(driver: Any) -> Iterator[Callable[..., Any]]:
    """Makes streams, non-blocking ones unless told otherwise; ends what they still capture."""
    made = []

    def make(flags: int = 1) -> Any:
        made.append(ok(driver.cuStreamCreate(flags)))
        return made[-1]

    yield make
    for stream in made:
        answer = driver.cuStreamEndCapture(stream)
        if code(answer) == 0:
            ok(driver.cuGraphDestroy(answer[1]))
    for stream in made:
        assert int(ok(driver.cuStreamIsCapturing(stream))) == 0
        ok(driver.cuStreamDestroy(stream))


@pytest.fixture
def stream(new_stream: Callable[..., Any]) -> Any:
    """A non-blocking stream."""
    return new_stream()


@pytest.fixture
def events(driver: Any) -> Iterator[list[Any]]:
    """A few events without timing."""
    made = [ok(driver.cuEventCreate(2)) for _ in range(3)]
    yield made
    for event in made:
        ok(driver.cuEventDestroy(event))


@pytest.fixture
def new_graph(driver: Any) -> Iterator[Callable[[], Any]]:
    """Makes empty graphs."""
    made = []

    def make() -> Any:
        made.append(ok(driver.cuGraphCreate(0)))
        return made[-1]

    yield make
    for graph in made:
        ok(driver.cuGraphDestroy(graph))


@pytest.fixture
def graph(new_graph: Callable[[], Any]) -> Any:
    """An empty graph."""
    return new_graph()


@pytest.fixture
def instantiate(driver: Any) -> Iterator[Callable[..., Any]]:
    """Instantiates, and destroys at the end."""
    made = []

    def make(graph: Any, flags: int = 0) -> Any:
        made.append(ok(driver.cuGraphInstantiate(graph, flags)))
        return made[-1]

    yield make
    for executable in made:
        ok(driver.cuGraphExecDestroy(executable))


@pytest.fixture
def buffer(driver: Any) -> Iterator[int]:
    """1 KiB of device memory, zeroed."""
    address = ok(driver.cuMemAlloc(1024))
    ok(driver.cuMemsetD32(address, 0, 256))
    ok(driver.cuCtxSynchronize())
    yield int(address)
    ok(driver.cuMemFree(address))


@pytest.fixture
def captured(driver: Any, stream: Any) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Captures what a function does on `stream`, in relaxed mode; gives the graph."""
    made = []

    def capture(work: Callable[[], Any]) -> Any:
        ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode(2)))
        work()
        made.append(ok(driver.cuStreamEndCapture(stream)))
        return made[-1]

    yield capture
    for graph in made:
        ok(driver.cuGraphDestroy(graph))


@pytest.fixture
def only_node(driver: Any) -> Callable[[Any], Any]:
    """The one node of a graph."""

    def find(graph: Any) -> Any:
        (node,) = nodes(driver, graph)
        return node

    return find


# ---------------------------------------------------------------- the count

_outcomes: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "misuse: the simulator notes a finding besides its answer")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = dict(report.user_properties).get("conformance")
    if name is None or (report.when != "call" and report.passed):
        return
    rule = report.nodeid.partition("[")[0]
    _outcomes[str(name)][rule].append(report.outcome)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _outcomes:
        return
    rules = {rule for found in _outcomes.values() for rule in found}
    terminalreporter.write_line(f"conformance: {len(rules)} rules; {_count()}")


def _count() -> str:
    """For each driver: how many rules held, and how many did not or do not apply."""
    parts = []
    for name, found in _outcomes.items():
        held = sum(set(outcomes) == {"passed"} for outcomes in found.values())
        broken = sum("failed" in outcomes for outcomes in found.values())
        parts.append(
            f"{name}: {held} hold, {broken} broken, {len(found) - held - broken} do not apply"
        )
    return "; ".join(parts)
