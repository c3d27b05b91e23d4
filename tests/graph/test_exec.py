"""Executables are edited partly, checked first, all or nothing; and whole, with a reason if not."""

from __future__ import annotations

import gc
import struct
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from breakable_cuda_graphs import CaptureError, Graph, GraphExec, UpdateError
from breakable_cuda_graphs.graph.node import Node
from breakable_cuda_graphs.simulator import SimulatedKernel
from graphs import UNTOUCHED, N, array, f32, i32, launch_scale, scale, scale_kernel


@pytest.fixture
def stream(device: Any) -> Iterator[Any]:
    """A stream of the user's."""
    made = device.driver.cuStreamCreate(1)[1]
    yield made
    device.driver.cuStreamDestroy(made)


class Scene:
    """y = 0; y = x * 2; z = y."""

    def __init__(self) -> None:
        self.x, self.y, self.z = array(1), array(), array()
        self.graph = Graph()
        self.fill = self.graph.memset(self.y, 0, self.y.nbytes)
        self.kernel = scale(self.graph, self.y, self.x, 2.0, after=self.fill)
        self.copy = self.graph.memcpy(self.z, self.y, self.z.nbytes, after=self.kernel)
        self.exec: GraphExec = self.graph.instantiate()

    def check(self, right: float, what: str = "the result") -> None:
        self.z[:] = UNTOUCHED
        self.exec.launch()
        assert (self.z == right).all(), f"{what}: {self.z}"


@pytest.fixture
def scene(device: Any) -> Iterator[Scene]:
    made = Scene()
    yield made
    made.exec.close()
    made.graph.close()


# ---------------------------------------------------------------- one node


def test_an_edit_is_partial_and_adds_up(scene: Scene) -> None:
    other = array(10)
    scene.exec.update(scene.kernel, args={2: f32(3)})
    scene.check(3)
    scene.exec.update(scene.kernel, args={1: other})
    scene.check(30)
    scene.exec.update(scene.kernel, grid=(1, 1, 1), block=4)
    scene.check(30)
    scene.exec.update(scene.kernel, args={2: f32(4), 1: scene.x})
    scene.check(4)


def test_an_edit_does_not_reach_the_graph_nor_other_executables(scene: Scene) -> None:
    other = scene.graph.instantiate()
    scene.exec.update(scene.kernel, args={2: f32(3)})
    assert scene.graph.nodes[1].args[2].as_float32() == 2.0
    scene.check(3)
    scene.z[:] = UNTOUCHED
    other.launch()
    assert (scene.z == 2).all()
    other.update(scene.kernel, args={2: f32(8)})
    scene.check(3)
    other.close()


def test_an_executable_starts_from_the_template_as_it_is_then(scene: Scene) -> None:
    scene.graph.update(scene.kernel, args={2: f32(6)})
    scene.check(2, "made before")
    with scene.graph.instantiate() as later:
        later.launch()
        assert (scene.z == 6).all()
        later.update(scene.kernel, grid=1)
        later.launch()
        assert (scene.z == 6).all(), "a partial edit starts from what the executable does"


def test_two_values_of_one_node_do_not_undo_each_other(scene: Scene) -> None:
    early, late = scene.graph.nodes[1], scene.graph.nodes[1]
    other = array(10)
    scene.exec.update(late, args={2: f32(3)})
    scene.exec.update(early, args={1: other})
    scene.check(30)


def test_copies_and_fills_are_edited(scene: Scene) -> None:
    other, target = array(8), array()
    scene.exec.update(scene.copy, src=other)
    scene.check(8)
    scene.exec.update(scene.copy, dst=target, nbytes=8)
    scene.check(UNTOUCHED, "the former target")
    assert target.tolist() == [8, 8] + [UNTOUCHED] * (N - 2)
    scene.exec.disable(scene.kernel)
    scene.exec.update(scene.copy, src=scene.y, dst=scene.z, nbytes=scene.z.nbytes)
    scene.exec.update(scene.fill, value=f32(5))
    scene.check(5)
    scene.exec.update(scene.fill, value=0, dst=scene.y, nbytes=16)
    scene.y[:] = 7
    scene.z[:] = UNTOUCHED
    scene.exec.launch()
    assert scene.z.tolist() == [0] * 4 + [7] * 4


def test_another_kernel_with_its_arguments(scene: Scene) -> None:
    values: list[float] = []
    kernel = SimulatedKernel(values.append, [scale_kernel().parameters[2]], name="note")
    scene.exec.update(scene.kernel, fn=kernel, args=[f32(1.5)])
    scene.exec.launch()
    assert values == [1.5]


def test_everything_from_a_node_of_another_graph(scene: Scene) -> None:
    other = Graph()
    node = scale(other, scene.y, scene.x, 11.0)
    scene.exec.update(scene.kernel, from_node=node)
    scene.check(11)
    with pytest.raises(UpdateError, match="another kind"):
        scene.exec.update(scene.kernel, from_node=other.join())
    with pytest.raises(TypeError, match="grid"):
        scene.exec.update(scene.kernel, from_node=node, grid=1)


def test_a_disabled_node_is_skipped_and_keeps_edits(scene: Scene) -> None:
    assert scene.exec.is_enabled(scene.copy)
    scene.exec.disable(scene.copy)
    assert not scene.exec.is_enabled(scene.copy)
    scene.check(UNTOUCHED)
    scene.exec.update(scene.kernel, args={2: f32(4)})
    scene.exec.enable(scene.copy)
    scene.check(4)
    with pytest.raises(UpdateError, match="only kernels"):
        scene.exec.disable(scene.graph.join())


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a double for a float": ({"args": {2: numpy.float64(5)}}, "args[2]"),
    "a short for an int": ({"args": {3: numpy.int16(5)}}, "args[3]"),
    "an argument that is not there": ({"args": {4: f32(5)}}, "args[4]"),
    "a tensor for a float": ({"args": {2: array()}}, "args[2]"),
    "a good one beside a bad one": ({"args": {2: f32(5), 3: numpy.float64(5)}}, "args[3]"),
    "an empty grid": ({"grid": (0, 1, 1)}, "grid"),
    "a block that is too large": ({"block": (4096, 1, 1)}, "block"),
    "negative shared memory": ({"shared_bytes": -1}, "shared_bytes"),
    "what only copies have": ({"src": 0}, "src"),
    "a kernel without its arguments": ({"fn": scale_kernel()}, "args"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_edit_names_node_and_field_and_changes_nothing(scene: Scene, kind: str) -> None:
    changes, field = BAD[kind]
    with pytest.raises(UpdateError, match="scale") as caught:
        scene.exec.update(scene.kernel, **changes)
    assert caught.value.node == scene.kernel
    assert caught.value.field == field
    assert "Nothing was changed" in str(caught.value)
    scene.check(2)
    scene.exec.update(scene.kernel, args={2: f32(3)})
    scene.check(3)


def test_a_size_error_names_both_sizes(scene: Scene) -> None:
    with pytest.raises(UpdateError, match=r"argument 2.*4 bytes.*8 bytes"):
        scene.exec.update(scene.kernel, args={2: numpy.float64(5)})


@pytest.mark.parametrize("value", [5, 5.0, "five", None, object()])
def test_values_without_a_size_are_a_type_error(scene: Scene, value: Any) -> None:
    with pytest.raises(TypeError):
        scene.exec.update(scene.kernel, args={2: value})
    scene.check(2)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"value": 1 << 40}, "value"),
        ({"value": -1}, "value"),
        ({"grid": (1, 1, 1)}, "grid"),
        ({"nbytes": 0}, "nbytes"),
        ({"value": f32(1), "nbytes": 6}, "nbytes"),
    ],
)
def test_a_bad_edit_of_a_fill(scene: Scene, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UpdateError, match="memset") as caught:
        scene.exec.update(scene.fill, **changes)
    assert caught.value.field == field
    scene.check(2)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"src": array(n=4)}, "src"),
        ({"nbytes": 0}, "nbytes"),
        ({"value": 3}, "value"),
        ({"src": 0}, "src"),
    ],
)
def test_a_bad_edit_of_a_copy(scene: Scene, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UpdateError, match="memcpy") as caught:
        scene.exec.update(scene.copy, **changes)
    assert caught.value.field == field
    scene.check(2)


def test_copies_in_more_dimensions_are_not_edited(device: Any) -> None:
    source, target = numpy.ones((4, 8), "u1"), numpy.zeros((4, 8), "u1")
    graph = Graph()
    node = graph.memcpy(target, source, (3, 2), src_pitch=8, dst_pitch=8)
    with graph.instantiate() as execution, pytest.raises(UpdateError, match="one dimension"):
        execution.update(node, src=target)


def test_words_of_memory_are_edited_but_stay_the_same_operations(device: Any) -> None:
    word, other, graph = numpy.zeros(2, "u4"), numpy.zeros(2, "u4"), Graph()
    node = graph.batch_mem_op(
        [("write", word, numpy.uint32(1)), ("wait_eq", word, numpy.uint32(1))]
    )
    with graph.instantiate() as execution:
        execution.update(
            node,
            operations=[("write", other, numpy.uint32(5)), ("wait_geq", other, numpy.uint32(4))],
        )
        execution.launch()
        assert (word[0], other[0]) == (0, 5)
        for wrong in (
            [("write", word, numpy.uint32(1))],
            [("wait_eq", word, numpy.uint32(1)), ("write", word, numpy.uint32(1))],
            [("write", word, numpy.uint64(1)), ("wait_eq", word, numpy.uint32(1))],
        ):
            with pytest.raises(UpdateError, match="number of operations") as caught:
                execution.update(node, operations=wrong)
            assert (caught.value.node, caught.value.field) == (node, "operations")
        with pytest.raises(UpdateError, match="jump") as caught:
            execution.update(node, operations=[("jump", word, numpy.uint32(1))])
        assert caught.value.field == "operations[0]"
        with pytest.raises(TypeError, match=r"operations\[0\]"):
            execution.update(node, operations=[("write", word, 1)])
        execution.launch()
        assert (word[0], other[0]) == (0, 5)


def test_a_host_node_is_given_another_function(device: Any) -> None:
    called: list[str] = []
    graph = Graph()
    node = graph.host(lambda: called.append("first"))
    with graph.instantiate() as execution:
        execution.launch()
        execution.update(node, fn=lambda: called.append("second"))
        execution.launch()
        with pytest.raises(TypeError, match="fn"):
            execution.update(node, fn=5)
        graph.update(node, fn=lambda: called.append("third"))
        execution.launch()
    with graph.instantiate() as execution:
        execution.launch()
    assert called == ["first", "second", "second", "third"]


def test_a_template_takes_everything_from_a_node_too(device: Any) -> None:
    graph, other, x, y = Graph(), Graph(), array(1), array()
    node = scale(graph, y, x, 2.0)
    changed = graph.update(node, from_node=scale(other, y, x, 7.0))
    assert changed.args[2].as_float32() == 7.0
    with pytest.raises(UpdateError, match="another kind"):
        graph.update(node, from_node=other.join())
    with pytest.raises(TypeError, match="from_node"):
        graph.update(node, from_node=3)
    with graph.instantiate() as execution:
        execution.launch()
    assert (y == 7).all()


def test_a_copy_stays_with_its_kind_of_memory(device: Any) -> None:
    driver, target = device.driver, array()
    address = int(driver.cuMemAlloc(64)[1])
    pinned = int(driver.cuMemAllocHost(64)[1])
    graph = Graph()
    node = graph.memcpy(target, address, 32)
    with graph.instantiate() as execution:
        for wrong in (target, pinned):
            with pytest.raises(UpdateError, match="kind of memory") as caught:
                execution.update(node, src=wrong)
            assert caught.value.field == "src"
    driver.cuMemFree(address)
    driver.cuMemFreeHost(pinned)


def test_foreign_nodes_are_refused_before_the_driver_hears(scene: Scene) -> None:
    stranger = Scene()
    for call in (
        lambda: scene.exec.update(stranger.kernel, args={2: f32(5)}),
        lambda: scene.exec.disable(stranger.kernel),
        lambda: scene.exec.enable(stranger.kernel),
        lambda: scene.exec.is_enabled(stranger.kernel),
        lambda: scene.exec.capture_update(stranger.kernel).__enter__(),
    ):
        with pytest.raises(UpdateError, match="another graph") as caught:
            call()
        assert caught.value.node == stranger.kernel
    scene.check(2)
    stranger.check(2)
    stranger.exec.close()


def test_a_removed_node_can_no_longer_be_edited_and_still_runs(scene: Scene) -> None:
    scene.graph.remove(scene.copy)
    with pytest.raises(UpdateError, match="removed"):
        scene.exec.update(scene.copy, nbytes=4)
    scene.check(2)


def test_a_closed_executable_refuses_everything(scene: Scene) -> None:
    scene.exec.close()
    scene.exec.close()
    for call in (
        scene.exec.launch,
        lambda: scene.exec.update(scene.kernel, grid=1),
        lambda: scene.exec.disable(scene.kernel),
        lambda: scene.exec.update_from(scene.graph),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_launch_into_a_capture_is_refused_and_the_capture_lives(
    scene: Scene, stream: Any
) -> None:
    graph = Graph()
    with graph.capture(stream) as part, pytest.raises(RuntimeError, match="unharmed"):
        scene.exec.launch(stream)
    assert part.nodes == ()


def test_arrays_of_edits_are_kept_until_they_are_replaced(scene: Scene) -> None:
    class Array:
        def __init__(self) -> None:
            self.data = array(3)
            self.__array_interface__ = self.data.__array_interface__

    one = Array()
    alive = weakref.ref(one)
    scene.exec.update(scene.kernel, args={1: one})
    del one
    gc.collect()
    assert alive() is not None
    scene.check(6)
    scene.exec.update(scene.kernel, args={1: scene.x})
    gc.collect()
    assert alive() is None, "no launch reads it any more"


# ---------------------------------------------------------------- one captured operation


def test_a_node_takes_the_parameters_of_a_captured_operation(
    scene: Scene, device: Any, stream: Any
) -> None:
    kernel = scale_kernel(name="captured")
    with scene.exec.capture_update(scene.kernel, stream) as given:
        assert int(given) == int(stream)
        launch_scale(device.driver, kernel, stream, scene.y, scene.x, 13.0)
    scene.check(13)
    scene.exec.update(scene.kernel, args={2: f32(14)})
    scene.check(14)


def test_capture_update_wants_just_one_operation_of_the_kind(
    scene: Scene, device: Any, stream: Any
) -> None:
    kernel = scale_kernel()

    def capture(count: int, fill: bool = False) -> None:
        with scene.exec.capture_update(scene.kernel, stream):
            for _ in range(count):
                launch_scale(device.driver, kernel, stream, scene.y, scene.x, 13.0)
            if fill:
                device.driver.cuMemsetD32Async(scene.y.ctypes.data, 0, N, stream)

    for args in ((0,), (2,), (1, True)):
        with pytest.raises(UpdateError, match="just one operation"):
            capture(*args)
    with pytest.raises(UpdateError, match="another kind"):
        capture(0, True)
    with (
        pytest.raises(CaptureError),
        scene.exec.capture_update(scene.kernel, stream),
    ):
        device.driver.cuStreamSynchronize(stream)
    scene.check(2)


# ---------------------------------------------------------------- whole graphs


def like(scene: Scene, factor: float, source: Any = None) -> Graph:
    graph = Graph()
    fill = graph.memset(scene.y, 0, scene.y.nbytes)
    kernel = scale(graph, scene.y, scene.x if source is None else source, factor, after=fill)
    graph.memcpy(scene.z, scene.y, scene.z.nbytes, after=kernel)
    return graph


def test_an_update_from_a_graph_takes_all_parameters(scene: Scene) -> None:
    for factor in (3.0, 4.0):
        scene.exec.update_from(like(scene, factor))
        scene.check(factor)
    scene.exec.update(scene.kernel, grid=1)
    scene.check(4)


def test_an_update_from_a_graph_keeps_its_arrays_and_what_is_disabled(scene: Scene) -> None:
    scene.exec.disable(scene.copy)
    other = like(scene, 3.0, array(100))
    scene.exec.update_from(other)
    other.close()
    del other
    gc.collect()
    scene.check(UNTOUCHED)
    scene.exec.enable(scene.copy)
    scene.check(300)


def refusals() -> dict[str, tuple[Any, str, str, str]]:
    """A way to spoil a graph -> what is then told: label, field, and the driver's reason."""

    def more(scene: Scene, graph: Graph) -> None:
        graph.join()

    def fewer(scene: Scene, graph: Graph) -> None:
        graph.remove(graph.nodes[-1])

    def edge(scene: Scene, graph: Graph) -> None:
        fill, kernel, _ = graph.nodes
        graph.unlink(fill, kernel)

    return {
        "a node too many": (more, "empty", "topology", "TOPOLOGY"),
        "a node too few": (fewer, "memcpy", "topology", "TOPOLOGY"),
        "an edge missing": (edge, "memcpy", "edges", "TOPOLOGY"),
    }


@pytest.mark.parametrize("kind", refusals())
def test_a_refused_update_names_node_and_field(scene: Scene, kind: str) -> None:
    spoil, label, field, reason = refusals()[kind]
    other = like(scene, 5.0)
    spoil(scene, other)
    with pytest.raises(UpdateError, match="topology") as caught:
        scene.exec.update_from(other)
    error = caught.value
    assert isinstance(error.node, Node)
    assert error.node.label == label
    assert error.field == field
    assert reason in error.name
    assert error.code == 910
    assert error.changes
    scene.check(2)
    scene.exec.update_from(like(scene, 9.0))
    scene.check(9)


def test_a_refused_update_for_a_node_of_another_kind(scene: Scene) -> None:
    other = Graph()
    fill = other.memset(scene.y, 0, scene.y.nbytes)
    copy = other.memcpy(scene.y, scene.x, 4, after=fill)
    other.memcpy(scene.z, scene.y, scene.z.nbytes, after=copy)
    with pytest.raises(UpdateError, match="type") as caught:
        scene.exec.update_from(other)
    assert caught.value.node == copy
    assert caught.value.field == "kind"
    scene.check(2)


def test_a_parameter_that_may_not_change_is_named(device: Any) -> None:
    target = numpy.zeros((4, 8), "u1")

    def filled(rows: int) -> Graph:
        graph = Graph()
        graph.memset(target, 5, (3, rows), pitch=8)
        return graph

    with filled(2).instantiate() as execution:
        with pytest.raises(UpdateError, match="parameter") as caught:
            execution.update_from(filled(3))
        assert caught.value.field == "nbytes"
        assert caught.value.node is not None


def test_what_an_executable_keeps_for_good_is_named(device: Any) -> None:
    x, y, kernel = array(1), array(), scale_kernel()

    def launched(**attributes: Any) -> Graph:
        graph = Graph()
        scale(graph, y, x, 2.0, kernel=kernel, **attributes)
        return graph

    def choosing(bodies: int) -> Graph:
        graph = Graph()
        for body in graph.switch(numpy.zeros(1, "i4"), bodies).bodies:
            body.memset(y, 0, 16)
        return graph

    def writing(value: Any) -> Graph:
        graph = Graph()
        graph.batch_mem_op([("write", numpy.zeros(1, "u8"), value)])
        return graph

    for before, after, field in (
        (launched(), launched(cooperative=True), "attrs.cooperative"),
        (launched(priority=0), launched(priority=-2), "attrs.priority"),
        (choosing(2), choosing(3), "bodies"),
        (writing(numpy.uint32(1)), writing(numpy.uint64(1)), "operations[0].nbytes"),
    ):
        with before.instantiate() as execution:
            with pytest.raises(UpdateError) as caught:
                execution.update_from(after)
            assert caught.value.field == field
            assert caught.value.node is not None


def test_of_several_differences_the_one_that_may_not_be_is_named(device: Any) -> None:
    def filled(rows: int) -> Graph:
        graph = Graph()
        graph.memset(numpy.zeros((4, 8), "u1"), rows, (3, rows), pitch=8)
        return graph

    with filled(2).instantiate() as execution:
        with pytest.raises(UpdateError) as caught:
            execution.update_from(filled(3))
        assert {change.field for change in caught.value.changes} == {"dst", "value", "nbytes"}
        assert caught.value.field == "nbytes"


def test_a_kernel_of_another_context_is_named(device: Any) -> None:
    x, y = array(1), array()
    stranger = scale_kernel(context=12345)
    graph, other = Graph(), Graph()
    node = scale(graph, y, x, 2.0)
    theirs = scale(other, y, x, 2.0, kernel=stranger)
    with graph.instantiate() as execution:
        with pytest.raises(UpdateError, match="function") as caught:
            execution.update_from(other)
        assert (caught.value.node, caught.value.field) == (theirs, "fn")
        with pytest.raises(UpdateError) as caught:
            execution.update(node, fn=stranger, args=node.args)
        assert (caught.value.node, caught.value.field) == (node, "fn")
        execution.launch()
        assert (y == 2).all()


def test_cluster_dimensions_are_refused_before_the_driver_hears(scene: Scene) -> None:
    def clustered(size: int) -> Graph:
        graph = Graph()
        scale(graph, scene.y, scene.x, 5.0, cluster=(size, 1, 1), grid=(4, 1, 1))
        return graph

    with clustered(2).instantiate() as execution:
        with pytest.raises(UpdateError, match="cluster") as caught:
            execution.update_from(clustered(4))
        assert caught.value.field == "attrs.cluster"


def test_bytes_of_an_argument_can_be_given(scene: Scene) -> None:
    scene.exec.update(scene.kernel, args={2: struct.pack("<f", 3.0)})
    scene.check(3)
    scene.exec.update(scene.kernel, args={2: scene.kernel.args[2]})
    scene.check(2)
    scene.exec.update(scene.kernel, args=(scene.y, scene.x, f32(5), i32(N)))
    scene.check(5)
