"""The graph of a segment shows what will run, and its `exec` edits what really runs it."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest

from breakable_cuda_graphs import (
    CUDAGraphSequence,
    EagerSegment,
    Graph,
    GraphSegment,
    ReplayError,
    UpdateError,
    annotate,
    breakable_graph,
    force_no_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import bindings
from breakable_cuda_graphs.frameworks.raw import RawSession
from breakable_cuda_graphs.graph.nodes import KernelNode
from breakable_cuda_graphs.sequence import append
from graphs import UNTOUCHED, N, array, f32, launch_scale, scale, scale_kernel

torch: Any = pytest.importorskip("torch")

from breakable_cuda_graphs.simulator import tensors  # noqa: E402  (needs torch)


@no_graph
def add_one(t: Any) -> None:
    t += 1


class Scene:
    """y = x * 2; a break adds one; z = y * 3, by a kernel whose arguments are known."""

    def __init__(self, device: Any, x: Any = None) -> None:
        self.device, self.kernel = device, scale_kernel()
        self.x = array(1) if x is None else x
        self.y, self.z, self.seq = array(), array(), CUDAGraphSequence()
        self.capture()

    def capture(self, between: Any = add_one) -> None:
        stream = int(getattr(self.seq.stream, "handle", self.seq.stream))
        with breakable_graph(self.seq):
            launch_scale(self.device.driver, self.kernel, stream, self.y, self.x, 2.0)
            between(self.y)
            launch_scale(self.device.driver, self.kernel, stream, self.z, self.y, 3.0)
        found = [s for s in self.seq.segments if isinstance(s, GraphSegment) and not s.is_empty]
        self.first, self.second = ((s, s.graph.nodes[0]) for s in found)

    def check(self, right: float) -> None:
        self.z[:] = UNTOUCHED
        self.seq.replay()
        assert (self.z == right).all(), self.z


def edit(pair: Any, **changes: Any) -> None:
    segment, node = pair
    segment.exec.update(node, **changes)


def told(pair: Any) -> tuple[float, Any]:
    """What the node says of its factor and its grid now."""
    (node,) = pair[0].graph.nodes
    return node.args[2].as_float32(), node.grid


@pytest.fixture
def scene(device: Any) -> Scene:
    return Scene(device)


def test_edits_reach_the_next_replay_and_are_told(device: Any) -> None:
    scene = Scene(device)
    scene.check(9)
    edit(scene.first, args={2: f32(10)})
    scene.check(33)
    assert told(scene.first) == (10.0, (1, 1, 1))
    assert told(scene.second) == (3.0, (1, 1, 1))
    edit(scene.second, args={2: f32(1)})
    scene.check(11)
    scene.seq.reset()


def test_an_edit_before_the_first_replay(device: Any) -> None:
    scene = Scene(device)
    edit(scene.second, args={2: f32(5)})
    scene.check(15)
    scene.seq.reset()


def test_a_disabled_node_says_so(device: Any) -> None:
    scene = Scene(device)
    segment, node = scene.second
    segment.exec.disable(node)
    scene.check(UNTOUCHED)
    assert not segment.graph.nodes[0].enabled
    assert "disabled" in str(segment.graph)
    edit(scene.second, args={2: f32(5)})
    segment.exec.enable(node)
    scene.check(15)
    scene.seq.reset()


def test_a_refused_edit_is_not_told(device: Any) -> None:
    scene = Scene(device)
    for _ in range(3):
        with pytest.raises(UpdateError):
            edit(scene.first, args={2: f32(5)}, grid=(0, 1, 1))
        assert told(scene.first) == (2.0, (1, 1, 1))
        scene.check(9)
    scene.seq.reset()


def test_the_graph_of_a_segment_cannot_be_built_on(device: Any) -> None:
    scene = Scene(device)
    segment, node = scene.first
    for change in (
        lambda: segment.graph.join(),
        lambda: segment.graph.remove(node),
        lambda: segment.graph.update(node, grid=2),
        lambda: segment.graph.capture(),
    ):
        with pytest.raises(RuntimeError, match="belongs to a sequence"):
            change()
    segment.graph.close()
    segment.exec.close()
    scene.check(9)
    scene.seq.reset()


def test_a_second_executable_starts_from_the_template(device: Any) -> None:
    scene = Scene(device)
    segment, node = scene.second
    edit(scene.second, args={2: f32(10)})
    with segment.graph.instantiate() as extra:
        scene.y[:] = 1
        extra.launch()
        assert (scene.z == 3).all()
        extra.update(node, args={2: f32(7)})
        scene.y[:] = 1
        extra.launch()
        assert (scene.z == 7).all()
    scene.check(30)
    scene.seq.reset()


def test_after_a_reset_everything_is_refused_or_a_copy(device: Any) -> None:
    scene = Scene(device)
    segment, node = scene.first
    args, execution, graph = node.args, segment.exec, segment.graph
    scene.seq.reset()
    assert args[2].as_float32() == 2.0
    assert node.name == "scale"
    for use in (
        lambda: execution.update(node, grid=1), lambda: graph.nodes, lambda: segment.graph.edges,
        lambda: segment.exec.disable(node), lambda: execution.launch(),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"closed|reset"):
            use()
    scene.capture()
    with pytest.raises(UpdateError, match="another graph"):
        scene.first[0].exec.update(node, args={2: f32(100)})
    scene.check(9)
    edit(scene.first, args={2: f32(5)})
    scene.check(18)
    scene.seq.reset()


def test_sequences_of_the_same_code_do_not_share_edits(device: Any) -> None:
    scene = Scene(device)
    twin = Scene(device, scene.x)
    edit(scene.first, args={2: f32(10)})
    twin.check(9)
    scene.check(33)
    assert told(twin.first) == (2.0, (1, 1, 1))
    scene.seq.reset()
    twin.seq.reset()


def test_segments_without_work_have_an_empty_graph(device: Any) -> None:
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        add_one(array())
    first, last = seq.segments[0], seq.segments[-1]
    assert first.graph.nodes == () == last.graph.edges
    with pytest.raises(RuntimeError, match="nothing was captured"):
        first.exec.launch()


# ---------------------------------------------------------------- segments whose launches are prepared


class Preparing:
    """What a framework launches a segment by where it has to do something before (torch's draws)."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.launches, self.is_closed = driver, 0, False

    def launch(self, executable: Any) -> None:
        self.launches += 1
        stream = bindings.types.CUstream(tensors.current_stream())
        self.driver.cuGraphLaunch(executable, stream)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


@pytest.fixture
def prepared(device: Any, monkeypatch: pytest.MonkeyPatch) -> list[Preparing]:
    """Each segment with work in it is launched by one of these."""
    made: list[Preparing] = []
    end = RawSession.end

    def ending(session: Any, survey: Any) -> Any:
        captured = end(session, survey)
        if survey is not None and survey.kinds:
            made.append(Preparing(session.driver))
            captured.runner = made[-1]
        return captured

    monkeypatch.setattr(RawSession, "end", ending)
    return made


def test_a_segment_that_draws_is_launched_alone_and_by_what_prepares_it(
    device: Any, prepared: list[Preparing]
) -> None:
    scene = Scene(device)
    scene.seq.reset()
    assert [each.is_closed for each in prepared] == [True, True]
    prepared.clear()
    scene.capture(between=lambda y: force_no_graph())
    scene.check(6)
    edit(scene.second, args={2: f32(5)})
    scene.check(10)
    assert [each.launches for each in prepared] == [2, 2]
    with breakable_graph(scene.seq):
        force_no_graph()
    edit(scene.first, args={2: f32(3)})
    scene.check(15)
    scene.seq.ranges = "record_function"
    scene.check(15)
    assert [each.launches for each in prepared] == [4, 4]
    page = scene.seq.explain()
    assert "segment 0: 1 node, draws random numbers, edited" in page
    assert "segment 2 draws random numbers: seed and offset are written for it" in page
    report = scene.seq.profile(3, 1)
    assert [row.launches for row in report.rows if row.kind == "graph"] == [1, 1]
    assert [each.launches for each in prepared] == [4 + report.replays] * 2
    scene.seq.reset()
    assert [each.is_closed for each in prepared] == [True, True]


def test_the_graph_of_a_segment_that_draws_runs_nowhere_else(
    device: Any, prepared: list[Preparing]
) -> None:
    """Its numbers would be the same each time, or those of memory that has gone."""
    scene, other = Scene(device), Scene(device)
    segment, _ = scene.first
    with Graph() as outer:
        with pytest.raises(RuntimeError, match="only its sequence can replay it"):
            outer.child(segment.graph)
        assert outer.nodes == ()
    for use in (
        segment.graph.instantiate,
        lambda: other.first[0].exec.update_from(segment.graph),
    ):
        with pytest.raises(RuntimeError, match="only its sequence can replay it"):
            use()
    with pytest.raises(ReplayError, match="draws random numbers"):
        segment.exec.launch()
    with pytest.raises(ReplayError, match="random numbers"), breakable_graph(CUDAGraphSequence()):
        scene.seq.replay()
    edit(scene.first, args={2: f32(7)})
    segment.exec.update_from(segment.graph)
    scene.check(9)
    scene.seq.reset()
    other.seq.reset()


# ---------------------------------------------------------------- fused segments


def fused(device: Any) -> Scene:
    scene = Scene(device)
    scene.seq.reset()
    scene.capture(between=lambda y: force_no_graph())
    assert scene.first[0]._executable is scene.second[0]._executable
    return scene


def test_an_edit_lands_in_a_fused_launch(device: Any) -> None:
    scene = fused(device)
    scene.check(6)
    edit(scene.first, args={2: f32(10)})
    scene.check(30)
    edit(scene.second, args={2: f32(2)})
    scene.check(20)
    assert told(scene.first) == (10.0, (1, 1, 1))
    scene.first[0].exec.disable(scene.first[1])
    scene.y[:] = 7
    scene.check(14)
    scene.seq.reset()


def test_edits_survive_another_joining(device: Any) -> None:
    """A later block joins its first segment to those before it: a new executable takes over."""
    scene = fused(device)
    edit(scene.first, args={2: f32(10)})
    scene.second[0].exec.disable(scene.second[1])
    stream, out = int(scene.seq.stream.handle), array()
    with breakable_graph(scene.seq):
        launch_scale(device.driver, scene.kernel, stream, out, scene.y, 1.0)
    scene.z[:] = 5
    scene.seq.replay()
    assert (out == 10).all()
    assert (scene.z == 5).all()
    scene.second[0].exec.enable(scene.second[1])
    scene.check(30)
    edit(scene.first, args={2: f32(3)})
    scene.check(9)
    scene.seq.reset()


def test_a_fused_segment_takes_over_a_whole_graph(device: Any) -> None:
    scene = fused(device)
    other = Graph()
    scale(other, scene.y, scene.x, 8.0, kernel=scene.kernel)
    scene.first[0].exec.update_from(other)
    scene.check(24)
    assert told(scene.first) == (8.0, (1, 1, 1))
    more = Graph()
    scale(more, scene.y, scene.x, 8.0, kernel=scene.kernel)
    more.join()
    with pytest.raises(UpdateError) as caught:
        scene.first[0].exec.update_from(more)
    assert caught.value.field == "topology"
    scene.check(24)
    scene.seq.reset()


def test_a_fused_segment_is_not_launched_alone(device: Any) -> None:
    scene = fused(device)
    with pytest.raises(RuntimeError, match="Replay the sequence"):
        scene.first[0].exec.launch()
    scene.seq.reset()


def test_a_copy_in_another_capture_has_the_edits(device: Any) -> None:
    scene = fused(device)
    edit(scene.first, args={2: f32(10)})
    scene.second[0].exec.disable(scene.second[1])
    for pair, expected in ((scene.first, 10.0), (scene.second, None)):
        clone = pair[0]._edited()
        nodes = device.driver.cuGraphGetNodes(clone.value, 8)
        graph = Graph()
        child = device.driver.cuGraphAddChildGraphNode(graph._template.value, None, 0, clone.value)
        assert int(child[0]) == 0
        (node,) = graph.nodes
        (inside,) = node.graph.nodes
        if expected is None:
            assert inside.kind == "empty"
        else:
            assert inside.args[2].as_float32() == expected
        assert nodes[2] == 1
    scene.seq.reset()


# ---------------------------------------------------------------- graphs built by hand


def test_a_graph_built_by_hand_runs_in_a_sequence(device: Any) -> None:
    scene = Scene(device)
    graph, out = Graph(), array()
    node = scale(graph, out, scene.z, 2.0, kernel=scene.kernel)
    segment = append.append(scene.seq, graph)
    assert scene.seq.segments[-1] is segment
    scene.check(9)
    assert (out == 18).all()
    segment.exec.update(node, args={2: f32(5)})
    scene.check(9)
    assert (out == 45).all()
    assert graph.nodes[0].args[2].as_float32() == 5.0
    with pytest.raises(RuntimeError, match="belongs to a sequence"):
        graph.join()
    with pytest.raises(RuntimeError, match="belongs to a sequence"):
        append.append(CUDAGraphSequence(), graph)
    graph.close()
    scene.check(9)
    scene.seq.reset()


def test_a_graph_that_cannot_be_placed_leaves_the_sequence_as_it_was(device: Any) -> None:
    scene = Scene(device)
    graph = Graph()
    a, b = graph.join(), graph.join()
    graph.link(a, b)
    graph.link(b, a)
    with pytest.raises(RuntimeError):
        append.append(scene.seq, graph)
    with pytest.raises(TypeError):
        append.append(scene.seq, "graph")
    scene.check(9)
    scene.seq.reset()


# ---------------------------------------------------------------- whose memory, and who captured it


def test_addresses_are_told_by_whose_they_are(device: Any) -> None:
    x, seq = torch.ones(4), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        add_one(y)
        y.mul_(3)
    for segment in seq.segments:
        if isinstance(segment, GraphSegment):
            segment.belong(seq)
    node = seq.segments[0].graph.nodes[0]
    words = {address.value: address.what for address in node.addresses}
    assert "input" in words[x.data_ptr()]
    assert "[4]" in words[x.data_ptr()]
    assert words[y.data_ptr()] == "break argument 0 of add_one"
    seq.reset()


def test_scopes_label_what_is_captured_inside(device: Any) -> None:
    x, seq = torch.ones(4), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        with annotate("model"):
            y.add_(1)
            with annotate("layer 3"):
                y.mul_(2)
                add_one(y)
                y.mul_(3)
            y.sub_(1)
        y.add_(5)
    first, last = seq.segments[0].graph.nodes, seq.segments[2].graph.nodes
    assert [node.scope for node in first] == ["", "model", "model/layer 3"]
    assert [node.scope for node in last] == ["model/layer 3", "model", ""]
    assert "[model/layer 3]" in str(seq.segments[2].graph)
    seq.reset()


def test_scopes_outside_of_captures_do_nothing(device: Any) -> None:
    with annotate("nothing"):
        assert torch.ones(2).sum() == 2


def test_scopes_label_a_part_of_a_graph(device: Any) -> None:
    graph, x = Graph(), torch.ones(4)
    with graph.capture() as part:
        y = x * 2
        with annotate("inner"):
            y.add_(1)
    assert [node.scope for node in part.nodes] == ["", "inner"]
    assert [node.scope for node in graph.nodes] == ["", "inner"]


def test_lines_are_kept_where_that_was_asked_for(device: Any) -> None:
    from breakable_cuda_graphs.capture import open_blocks
    from breakable_cuda_graphs.capture.stacks import StackRecorder

    x, seq = torch.ones(4), CUDAGraphSequence()
    with breakable_graph(seq):
        recorder = StackRecorder(open_blocks.open_blocks[0].page)
        recorder.start()
        y = x * 2  # the first line
        step(y)
        recorder.stop()
    first, second = seq.segments[0].graph.nodes
    assert first.stack[-1].endswith("in test_lines_are_kept_where_that_was_asked_for")
    assert "test_segments.py:" in first.stack[-1]
    assert second.stack[-1].endswith("in step")
    assert "test_segments.py:" in str(seq.segments[0].graph)
    seq.reset()


def step(y: Any) -> None:
    y.add_(1)


def test_a_sequence_has_a_page(device: Any) -> None:
    from breakable_cuda_graphs.sequence.show import sequence_page

    scene = Scene(device)
    page = sequence_page(scene.seq)
    assert "break add_one" in page
    assert page.count("scale") == 2
    kinds = [type(segment) for segment in scene.seq.segments]
    assert kinds == [GraphSegment, EagerSegment, GraphSegment]
    assert isinstance(scene.first[1], KernelNode)
    assert ctypes.sizeof(ctypes.c_float) * N == scene.x.nbytes
    scene.seq.reset()


def test_a_tracer_that_the_body_sets_stays(device):
    """A debugger that is started inside of a block is not switched off by the end of it."""

    def trace(*_: Any) -> None: ...

    seq, before = CUDAGraphSequence(), sys.gettrace()
    try:
        with breakable_graph(seq, record_stacks=True):
            sys.settrace(trace)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
