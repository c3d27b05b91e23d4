"""Pictures need no tools, are the same for the same work, and no edge in them runs through a box."""

from __future__ import annotations

import itertools
import random
from typing import Any
from xml.etree import ElementTree

import pytest

from breakable_cuda_graphs import CUDAGraphSequence, Graph, annotate, breakable_graph, no_graph
from breakable_cuda_graphs.graph.layout import Box, BoxLayout, Wire
from graphs import N, array, f32, scale, scale_kernel


def texts(svg: str) -> list[str]:
    """The words of a picture; fails on what is no XML."""
    root = ElementTree.fromstring(svg)
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def built(factor: float = 2.0, kernel: Any = None) -> Graph:
    graph, x, y = Graph(), array(1), array()
    fill = graph.memset(y, 0, y.nbytes)
    first = scale(graph, y, x, factor, after=fill, kernel=kernel)
    graph.memcpy(x, y, y.nbytes, after=first)
    return graph


def test_a_picture_shows_every_node_and_edge(device: Any) -> None:
    svg = built().to_svg()
    assert texts(svg) == ["fill 32 B with 0x0", "scale", "1 block of 8", "copy 32 B"]
    assert svg.count("marker-end") == 2
    assert "stroke-dasharray" not in svg


def test_the_same_work_gives_the_same_picture(device: Any) -> None:
    kernel = scale_kernel()
    one, other = built(kernel=kernel), built(kernel=kernel)
    assert one.to_svg() == other.to_svg()
    other.update(other.nodes[1], grid=2)
    assert one.to_svg() != other.to_svg()


def test_names_of_templates_are_escaped_and_shortened(device: Any) -> None:
    graph = Graph()
    name = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEEEEvi"
    scale(graph, array(), array(1), 1, kernel=scale_kernel(name=name))
    svg = graph.to_svg()
    shown = texts(svg)[0]
    assert len(shown) <= 44
    assert shown.startswith("void at::native::vec")
    assert "vectorized_elementwise_kernel&lt;4" in svg, "the whole name is in the tooltip"


def test_graphs_inside_are_drawn_inside(device: Any) -> None:
    graph, flag = Graph(), array(1, 1)
    child = graph.child(built())
    node = graph.if_(flag, orelse=True, after=child)
    node.body.memset(array(), f32(1), 4)
    shown = texts(graph.to_svg())
    assert shown[0] == "child"
    assert {"if", "body", "orelse", "fill 4 B with 0x3f800000"} <= set(shown)
    assert shown.count("scale") == 1


def test_a_disabled_node_is_dashed(device: Any) -> None:
    pytest.importorskip("torch")
    seq = CUDAGraphSequence()
    segment = seq.append(built())
    segment.exec.disable(segment.graph.nodes[0])
    assert segment.graph.to_svg().count("stroke-dasharray") == 1


def test_a_programmatic_edge_is_dashed_and_says_so(device: Any) -> None:
    graph, x, y = Graph(), array(1), array()
    graph.link(scale(graph, y, x, 1), scale(graph, x, y, 1), kind="programmatic")
    assert "<title>programmatic</title>" in graph.to_svg()


def test_a_sequence_is_drawn_with_its_breaks(device: Any) -> None:
    torch = pytest.importorskip("torch")

    @no_graph
    def clip(t: Any) -> None:
        t.clamp_(max=1)

    seq, x = CUDAGraphSequence(), torch.ones(N)
    assert texts(seq.to_svg()) == [repr(seq)]
    with breakable_graph(seq):
        y = x * 2
        with annotate("limits"):
            clip(y)
        y.add_(1)
    (line,) = [line for line in str(seq).splitlines() if line.startswith("1: break")]
    assert "[limits]" in line
    assert "test_svg.py:" in line, "where it was called"
    shown = texts(seq._repr_svg_())
    assert shown[:3] == ["0: graph", "aten::mul.Tensor", "1 block of 1"]
    assert shown[3] == "[limits]"
    assert shown[4].startswith("1: break ")
    assert shown[4].endswith("clip")
    assert shown[5:] == ["2: graph", "aten::add_.Tensor", "1 block of 1"]
    seq.reset()


def test_notebooks_get_text_and_a_picture(device: Any) -> None:
    graph = built()
    assert graph._repr_mimebundle_() == {"text/plain": str(graph), "image/svg+xml": graph.to_svg()}
    assert graph._repr_svg_() == graph.to_svg()


def test_a_long_graph_is_cut_and_says_so(device: Any) -> None:
    graph = Graph()
    node = graph.join()
    for _ in range(499):
        node = graph.join(node)
    assert texts(graph.to_svg())[-1] == "... and 300 more nodes"


def test_what_cannot_run_can_be_drawn(device: Any) -> None:
    graph = Graph()
    a, b = graph.join(), graph.join()
    graph.link(a, b)
    graph.link(b, a)
    assert texts(graph.to_svg()) == ["empty", "empty"]
    empty = Graph()
    assert texts(empty.to_svg()) == []
    empty.close()
    assert texts(empty.to_svg()) == ["<Graph closed>"]


# ---------------------------------------------------------------- layout


def random_layout(seed: int) -> BoxLayout:
    """Boxes of all sizes, with edges from earlier to later ones."""
    chosen = random.Random(seed)
    count = chosen.randint(2, 25)
    boxes = [
        Box(["x" * chosen.randint(1, 40)] * chosen.randint(1, 6), "#fff") for _ in range(count)
    ]
    pairs = itertools.combinations(range(count), 2)
    wires = [Wire(a, b) for a, b in pairs if chosen.random() < 2.5 / count]
    return BoxLayout(boxes, wires)


@pytest.mark.parametrize("seed", range(40))
def test_boxes_do_not_touch_and_edges_run_down_beside_them(seed: int) -> None:
    layout = random_layout(seed)
    for one, other in itertools.combinations(layout.boxes, 2):
        assert (
            one.x + one.width < other.x
            or other.x + other.width < one.x
            or one.y + one.height < other.y
            or other.y + other.height < one.y
        )
    for box in layout.boxes:
        assert box.x >= -0.01
        assert box.x + box.width <= layout.width + 0.01
        assert box.y + box.height <= layout.height + 0.01
    for wire in layout.wires:
        ends = (layout.boxes[wire.source], layout.boxes[wire.target])
        assert ends[0].y + ends[0].height < ends[1].y
        for x, y in points_along(wire):
            for box in layout.boxes:
                inside = box.x < x < box.x + box.width and box.y < y < box.y + box.height
                assert box in ends or not inside


def points_along(wire: Wire) -> list[tuple[float, float]]:
    """Points on the curves that are drawn: between two points, level in the middle."""
    found = []
    for (x0, y0), (x1, y1) in itertools.pairwise(wire.points):
        middle = (y0 + y1) / 2
        for step in range(21):
            t = step / 20
            weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
            x = weights[0] * x0 + weights[1] * x0 + weights[2] * x1 + weights[3] * x1
            y = weights[0] * y0 + (weights[1] + weights[2]) * middle + weights[3] * y1
            found.append((x, y))
    return found


def test_a_layout_is_the_same_each_time() -> None:
    def places(layout: BoxLayout) -> list[tuple[float, float]]:
        return [(box.x, box.y) for box in layout.boxes]

    assert places(random_layout(3)) == places(random_layout(3))
