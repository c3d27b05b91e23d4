"""What `cuGraphExecUpdate` takes and why not, for every reason that can be made, and the same node by node.

CU_GRAPH_EXEC_UPDATE_ERROR (1) and FUNCTION_CHANGED (4, drivers before 11.2) cannot be made here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from raw_calls import code, here, kernel_params, memcpy_params, nodes, ok

from .test_whole_updates import why

FINE, TOPOLOGY, KIND, PARAMETERS, UNSUPPORTED, FUNCTION, ATTRIBUTES = 0, 2, 3, 5, 6, 7, 8

Build = Callable[["Builder"], Any]


class Builder(NamedTuple):
    """Adds nodes to one graph."""

    driver: Any
    kernels: Any
    graph: Any
    buffer: int
    pinned: int

    def _after(self, after: tuple[Any, ...]) -> tuple[Any, int]:
        return list(after) or None, len(after)

    def empty(self, *after: Any) -> Any:
        return ok(self.driver.cuGraphAddEmptyNode(self.graph, *self._after(after)))

    def kernel(self, name: str = "add", *after: Any, grid: int = 4) -> Any:
        values = () if name == "nothing" else (self.buffer, 1)
        params = kernel_params(self.driver, self.kernels.get(name), *values)
        params.gridDimX = grid
        return ok(self.driver.cuGraphAddKernelNode(self.graph, *self._after(after), params))

    def attribute(self, identity: int, change: Callable[[Any], None]) -> None:
        """A kernel node with an attribute."""
        value = self.driver.CUkernelNodeAttrValue()
        change(value)
        which = self.driver.CUkernelNodeAttrID(identity)
        ok(self.driver.cuGraphKernelNodeSetAttribute(self.kernel(), which, value))

    def fill(
        self, *after: Any, at: int = 0, value: int = 1, width: int = 1, size: int = 4,
        height: int = 1, pitch: int = 0, address: int = 0,
    ) -> Any:  # fmt: skip
        params = self.driver.CUDA_MEMSET_NODE_PARAMS()
        params.dst = self.driver.CUdeviceptr(address or self.buffer + at)
        params.value, params.elementSize, params.width = value, size, width
        params.height, params.pitch = height, pitch
        context = here(self.driver)
        return ok(
            self.driver.cuGraphAddMemsetNode(self.graph, *self._after(after), params, context)
        )

    def copy(self, to: int = 0, source: int = 64, kinds: str = "DD", rows: int = 1, size: int = 4):
        """Between the buffer and itself; kinds of the two ends: D device, H host, U unified."""
        params = memcpy_params(self.driver, self.buffer + to, self.buffer + source, size)
        kind = {"D": 2, "H": 1, "U": 4}
        params.dstMemoryType = self.driver.CUmemorytype(kind[kinds[0]])
        params.srcMemoryType = self.driver.CUmemorytype(kind[kinds[1]])
        if kinds[1] == "H":
            params.srcHost = self.pinned
        if rows > 1:
            params.Height, params.srcPitch, params.dstPitch = rows, 16, 16
        context = here(self.driver)
        return ok(self.driver.cuGraphAddMemcpyNode(self.graph, None, 0, params, context))

    def link(self, *pairs: tuple[int, int], data: Any = None) -> None:
        made = nodes(self.driver, self.graph)
        for source, target in pairs:
            edges = None if data is None else [data]
            ok(
                self.driver.cuGraphAddDependencies(
                    self.graph, [made[source]], [made[target]], edges, 1
                )
            )

    def empties(self, count: int, *pairs: tuple[int, int]) -> None:
        for _ in range(count):
            self.empty()
        self.link(*pairs)

    def programmatic(self) -> Any:
        data = self.driver.CUgraphEdgeData()
        data.type, data.from_port = 1, 1
        return data

    def child(self, build: Build) -> None:
        inner = ok(self.driver.cuGraphCreate(0))
        build(self._replace(graph=inner))
        ok(self.driver.cuGraphAddChildGraphNode(self.graph, None, 0, inner))
        ok(self.driver.cuGraphDestroy(inner))

    def conditional(self, build: Build, choice: int = 0, size: int = 1, default: int = 1) -> None:
        context = here(self.driver)
        create = self.driver.cuGraphConditionalHandleCreate
        params = self.driver.CUgraphNodeParams()
        params.type = self.driver.CUgraphNodeType(13)
        params.conditional.handle = ok(create(self.graph, context, default, 1))
        params.conditional.type = self.driver.CUgraphConditionalNodeType(choice)
        params.conditional.size, params.conditional.ctx = size, context
        ok(self.driver.cuGraphAddNode(self.graph, None, None, 0, params))
        for body in [int(each) for each in params.conditional.phGraph_out[:size]]:
            build(self._replace(graph=self.driver.CUgraph(body)))


def two_kernels(data: bool) -> Build:
    def build(b: Builder) -> None:
        b.kernel(), b.kernel()
        b.link((0, 1), data=b.programmatic() if data else None)

    return build


def cooperative(b: Builder) -> None:
    b.attribute(2, lambda value: setattr(value, "cooperative", 1))


def priority(number: int) -> Build:
    return lambda b: b.attribute(8, lambda value: setattr(value, "priority", number))


def clustered(size: int) -> Build:
    def change(value: Any) -> None:
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = size, 1, 1

    return lambda b: b.attribute(4, change)


class Case(NamedTuple):
    """Two graphs and what becomes of the update; `node` is the place of the error node, if any."""

    before: Build
    after: Build
    result: int = FINE
    node: int | None = None
    flags: int = 0


tall = {"height": 2, "pitch": 64}

CASES: dict[str, Case] = {
    "the same": Case(lambda b: b.kernel(), lambda b: b.kernel()),
    "another function": Case(lambda b: b.kernel(), lambda b: b.kernel("add_twice")),
    "a function with more parameters": Case(lambda b: b.kernel("nothing"), lambda b: b.kernel()),
    "another grid": Case(lambda b: b.kernel(), lambda b: b.kernel(grid=7)),
    "nothing to nothing": Case(lambda b: None, lambda b: None),
    # attributes
    "cooperative now": Case(lambda b: b.kernel(), cooperative, ATTRIBUTES, 0),
    "cooperative no more": Case(cooperative, lambda b: b.kernel(), ATTRIBUTES, 0),
    "cooperative both": Case(cooperative, cooperative),
    "another priority, not used": Case(lambda b: b.kernel(), priority(-3)),
    "another priority, used": Case(lambda b: b.kernel(), priority(-3), ATTRIBUTES, 0, 8),
    "one priority and another": Case(priority(-3), priority(-2), ATTRIBUTES, 0, 8),
    "the same priority": Case(priority(-3), priority(-3), flags=8),
    "clusters come unnoticed": Case(lambda b: b.kernel(), clustered(2)),
    "clusters change unnoticed": Case(clustered(2), clustered(4)),
    "clusters go unnoticed": Case(clustered(2), lambda b: b.kernel()),
    # topology
    "a node less": Case(lambda b: b.empties(2), lambda b: b.empties(1), TOPOLOGY),
    "a node more": Case(lambda b: b.empties(1), lambda b: b.empties(2), TOPOLOGY),
    "an edge less": Case(
        lambda b: b.empties(2, (0, 1)), lambda b: b.empties(2), TOPOLOGY, 0
    ),
    "an edge more": Case(lambda b: b.empties(2), lambda b: b.empties(2, (0, 1)), TOPOLOGY),
    "an edge the other way": Case(
        lambda b: b.empties(2, (0, 1)), lambda b: b.empties(2, (1, 0))
    ),
    "an edge between others": Case(
        lambda b: b.empties(3, (0, 2)), lambda b: b.empties(3, (1, 2))
    ),
    "edges in another order": Case(
        lambda b: b.empties(3, (0, 2), (1, 2)), lambda b: b.empties(3, (1, 2), (0, 2))
    ),
    "crossed edges": Case(
        lambda b: b.empties(4, (0, 2), (1, 3)), lambda b: b.empties(4, (0, 3), (1, 2))
    ),
    "a programmatic edge now": Case(two_kernels(False), two_kernels(True), TOPOLOGY, 1),
    "a programmatic edge no more": Case(two_kernels(True), two_kernels(False), TOPOLOGY, 1),
    "programmatic both": Case(two_kernels(True), two_kernels(True)),
    # kinds
    "another kind": Case(
        lambda b: b.empty(b.fill()), lambda b: b.kernel("add", b.fill()), KIND, 1
    ),
    "two kinds swapped": Case(
        lambda b: (b.fill(), b.empty()), lambda b: (b.empty(), b.fill()), KIND, 1
    ),
    # fills
    "value and place of a fill": Case(lambda b: b.fill(), lambda b: b.fill(at=8, value=7)),
    "a wider fill": Case(lambda b: b.fill(), lambda b: b.fill(width=8)),
    "a narrower fill": Case(lambda b: b.fill(width=8), lambda b: b.fill()),
    "smaller elements": Case(lambda b: b.fill(), lambda b: b.fill(size=1)),
    "larger elements": Case(lambda b: b.fill(size=1), lambda b: b.fill()),
    "a taller fill": Case(lambda b: b.fill(), lambda b: b.fill(**tall), PARAMETERS, 0),
    "a fill of one row again": Case(lambda b: b.fill(**tall), lambda b: b.fill(), PARAMETERS, 0),
    "a tall fill elsewhere": Case(
        lambda b: b.fill(**tall), lambda b: b.fill(at=512, value=9, **tall)
    ),
    "a wider tall fill": Case(
        lambda b: b.fill(**tall), lambda b: b.fill(width=4, **tall), PARAMETERS, 0
    ),
    "a tall fill of another pitch": Case(
        lambda b: b.fill(**tall), lambda b: b.fill(height=2, pitch=128), PARAMETERS, 0
    ),
    "a fill of pinned memory": Case(lambda b: b.fill(), lambda b: b.fill(address=b.pinned)),
    # copies
    "other ends and size": Case(lambda b: b.copy(), lambda b: b.copy(128, 256, size=16)),
    "from the host now": Case(lambda b: b.copy(), lambda b: b.copy(kinds="DH"), PARAMETERS, 0),
    "unified now": Case(lambda b: b.copy(), lambda b: b.copy(kinds="UU"), PARAMETERS, 0),
    "unified no more": Case(lambda b: b.copy(kinds="UU"), lambda b: b.copy(), PARAMETERS, 0),
    "two rows now": Case(lambda b: b.copy(), lambda b: b.copy(rows=2), PARAMETERS, 0),
    "one row again": Case(lambda b: b.copy(rows=2), lambda b: b.copy(), PARAMETERS, 0),
    "the same two rows": Case(lambda b: b.copy(rows=2), lambda b: b.copy(rows=2)),
    "two rows elsewhere": Case(
        lambda b: b.copy(rows=2), lambda b: b.copy(512, rows=2), PARAMETERS, 0
    ),
    # graphs inside
    "the same child": Case(
        lambda b: b.child(lambda c: c.fill()), lambda b: b.child(lambda c: c.fill(value=3))
    ),
    "a child with a node more": Case(
        lambda b: b.child(lambda c: c.empties(1)), lambda b: b.child(lambda c: c.empties(2)),
        TOPOLOGY,
    ),
    "the same body": Case(
        lambda b: b.conditional(lambda c: c.fill()), lambda b: b.conditional(lambda c: c.fill())
    ),
    "another default": Case(
        lambda b: b.conditional(lambda c: c.fill(), default=0),
        lambda b: b.conditional(lambda c: c.fill()),
    ),
    "a body with a node more": Case(
        lambda b: b.conditional(lambda c: c.empties(1)),
        lambda b: b.conditional(lambda c: c.empties(2)),
        TOPOLOGY,
    ),
    "another kind of conditional": Case(
        lambda b: b.conditional(lambda c: c.fill()),
        lambda b: b.conditional(lambda c: c.fill(), 1),
        UNSUPPORTED, 0,
    ),
    "more bodies": Case(
        lambda b: b.conditional(lambda c: c.fill()),
        lambda b: b.conditional(lambda c: c.fill(), size=2),
        UNSUPPORTED, 0,
    ),
    "more cases": Case(
        lambda b: b.conditional(lambda c: c.fill(), 2, 3),
        lambda b: b.conditional(lambda c: c.fill(), 2, 4),
        UNSUPPORTED, 0,
    ),
}  # fmt: skip

#: Cases whose error node is inside a child or a body.
INSIDE = {
    "a child whose fill is taller": Case(
        lambda b: b.child(lambda c: c.fill()), lambda b: b.child(lambda c: c.fill(**tall)),
        PARAMETERS,
    ),
    "a child of another kind": Case(
        lambda b: b.child(lambda c: c.fill()), lambda b: b.child(lambda c: c.empty()), KIND
    ),
    "a child with an edge less": Case(
        lambda b: b.child(lambda c: c.empties(2, (0, 1))),
        lambda b: b.child(lambda c: c.empties(2)),
        TOPOLOGY,
    ),
    "a body whose fill is taller": Case(
        lambda b: b.conditional(lambda c: c.fill()),
        lambda b: b.conditional(lambda c: c.fill(**tall)),
        PARAMETERS,
    ),
    "a body of another kind": Case(
        lambda b: b.conditional(lambda c: c.fill()),
        lambda b: b.conditional(lambda c: c.empty()),
        KIND,
    ),
}  # fmt: skip


@pytest.fixture
def pinned(driver: Any) -> Any:
    address = ok(driver.cuMemAllocHost(64))
    yield int(address)
    ok(driver.cuMemFreeHost(address))


@pytest.fixture
def update(driver, kernels, new_graph, instantiate, buffer, pinned) -> Any:
    """Makes both graphs and updates an executable of one with the other."""

    def run(case: Case) -> tuple[int, int, int, Any]:
        before, after = (Builder(driver, kernels, new_graph(), buffer, pinned) for _ in range(2))
        case.before(before), case.after(after)
        number, result, node, _ = why(driver, instantiate(before.graph, case.flags), after.graph)
        return number, result, node, after.graph

    return run


@pytest.mark.parametrize("name", CASES)
def test_an_update_has_its_reason_and_its_node(driver, update, name):
    case = CASES[name]
    number, result, node, graph = update(case)
    assert (number, result) == (910 if case.result else 0, case.result)
    places = [int(each) for each in nodes(driver, graph)]
    assert (places.index(node) if node else None) == case.node


@pytest.mark.parametrize("name", INSIDE)
def test_an_error_inside_names_a_node_inside(driver, update, name):
    case = INSIDE[name]
    number, result, node, graph = update(case)
    assert (number, result) == (910, case.result)
    assert node
    assert node not in [int(each) for each in nodes(driver, graph)]


def test_an_update_by_ones_own_template_is_fine(driver, graph, instantiate, buffer):
    params = memcpy_params(driver, buffer, buffer + 64, 4)
    ok(driver.cuGraphAddMemcpyNode(graph, None, 0, params, here(driver)))
    assert why(driver, instantiate(graph), graph)[:2] == (0, 0)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("new", [False, True])
def test_kernels_that_the_device_may_update_are_not_supported(
    driver, kernels, new_graph, instantiate, buffer, old, new
):
    def build(updatable: bool) -> Any:
        made = Builder(driver, kernels, new_graph(), buffer, 0)
        if updatable:
            made.attribute(13, lambda v: setattr(v.deviceUpdatableKernelNode, "deviceUpdatable", 1))
        else:
            made.kernel()
        return made.graph

    executable, other = instantiate(build(old)), build(new)
    assert why(driver, executable, other)[:2] == ((801, 0) if old or new else (0, 0))


def test_a_kernel_of_another_context_is_another_function(
    driver, kernels, new_graph, instantiate, buffer
):
    mine = here(driver)
    elsewhere = ok(driver.cuCtxCreate(None, 0, 0))
    ok(driver.cuCtxSetCurrent(mine))
    made = []
    for context in (mine, elsewhere):
        params = kernel_params(driver, kernels.add, buffer, 1)
        params.func, params.kern = driver.CUfunction(0), kernels.add.kernel_handle
        params.ctx = context
        graph = new_graph()
        ok(driver.cuGraphAddKernelNode(graph, None, 0, params))
        made.append((graph, params))
    (graph, _), (other, params) = made
    executable = instantiate(graph)
    assert why(driver, executable, other)[:3] == (910, FUNCTION, int(nodes(driver, other)[0]))
    (node,) = nodes(driver, graph)
    assert code(driver.cuGraphExecKernelNodeSetParams(executable, node, params)) == 1
    ok(driver.cuGraphDestroyNode(nodes(driver, other)[0]))
    ok(driver.cuCtxDestroy(elsewhere))


def test_an_alloc_graph_takes_its_own_parameters(driver, stream, instantiate, captured):
    graph = captured(
        lambda: ok(driver.cuMemFreeAsync(ok(driver.cuMemAllocAsync(64, stream)), stream))
    )
    assert why(driver, instantiate(graph), graph)[:2] == (0, 0)


def test_host_calls_and_events_may_change(driver, new_graph, instantiate, events):
    functions = [
        ctypes.cast(each, ctypes.c_void_p).value
        for each in (ctypes.CDLL(None).free, ctypes.CDLL(None).abs)
    ]
    made = []
    for function, event in zip(functions, events, strict=False):
        graph, params = new_graph(), driver.CUDA_HOST_NODE_PARAMS()
        params.fn = driver.CUhostFn(function)
        ok(driver.cuGraphAddHostNode(graph, None, 0, params))
        ok(driver.cuGraphAddEventRecordNode(graph, None, 0, event))
        ok(driver.cuGraphAddEventWaitNode(graph, None, 0, event))
        made.append(graph)
    assert why(driver, instantiate(made[0]), made[1])[:2] == (0, 0)
