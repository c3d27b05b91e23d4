"""A replay inside another capture: it becomes part of it, or is refused while that is still whole."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import (  # noqa: E402
    CUDAGraphSequence,
    ReplayError,
    breakable_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import (  # noqa: E402
    bindings,
    user_objects,
)
from breakable_cuda_graphs.simulator import tensors  # noqa: E402
from helping import a_stream, capture, kinds, settle  # noqa: E402


@no_graph
def bump(t: Any) -> None:
    t.add_(1)


class Foreign:
    """A capture of somebody else, on a stream, by the driver alone."""

    def __init__(self, stream: Any) -> None:
        self.driver, self.stream = bindings.current(), stream

    def __enter__(self) -> Foreign:
        mode = bindings.types.CUstreamCaptureMode(2)
        self.driver.cuStreamBeginCapture(self.stream, mode)
        return self

    def __exit__(self, *_: Any) -> None:
        self.graph = self.driver.cuStreamEndCapture(self.stream)

    def launch(self) -> None:
        executable = self.driver.cuGraphInstantiate(self.graph, 0)
        self.driver.cuGraphLaunch(executable, self.stream)
        self.driver.cuGraphExecDestroy(executable)

    def close(self) -> None:
        self.driver.cuGraphDestroy(self.graph)


def test_a_sequence_without_breaks_is_embedded_as_child_nodes(device):
    x = torch.ones(2)
    seq, y = capture(lambda: x + 1)
    capture(lambda: y.mul_(3), seq)
    with a_stream() as stream:
        with Foreign(stream) as outer:
            seq.replay(stream)
            seq.replay(stream)
        x.fill_(4)
        outer.launch()
        assert y.tolist() == [15, 15]
        outer.close()


def test_the_outer_graph_holds_what_it_needs_until_it_is_gone(device):
    x = torch.ones(2)
    seq, y = capture(lambda: x + 1, keep_inputs=True)
    memory = weakref.ref(y.untyped_storage())
    with a_stream() as stream:
        with Foreign(stream) as outer:
            seq.replay(stream)
        seq.reset()
        del seq, y
        settle()
        assert memory() is not None
        assert user_objects.held() == 1
        outer.launch()
        outer.close()
    settle()
    assert user_objects.held() == 0
    del outer
    settle()
    assert memory() is None


def test_a_sequence_with_breaks_is_refused_unharmed(device):
    x = torch.ones(2)
    seq, y = capture(lambda: bump(x) or x * 2)
    with a_stream() as stream:
        with Foreign(stream) as outer:
            with pytest.raises(ReplayError, match="it has breaks"):
                seq.replay(stream)
            with tensors.stream(stream), pytest.raises(ReplayError, match="unharmed"):
                seq.replay()
        outer.close()
    seq.replay()
    assert y.tolist() == [6, 6]


def test_under_another_block_its_breaks_become_breaks_of_that(device):
    x, out = torch.ones(2), torch.zeros(2)

    def inner_body() -> Any:
        y = x * 2
        bump(y)
        return y * 3

    inner, y = capture(inner_body)
    outer = CUDAGraphSequence()
    with breakable_graph(outer):
        x.add_(1)
        inner.replay()
        out.copy_(y)
    assert kinds(outer) == "geg"
    x.fill_(4)
    outer.replay()
    assert out.tolist() == [33, 33]


def test_static_outputs_of_an_embedded_sequence_are_filled(device):
    x, out = torch.ones(2), torch.zeros(2)

    @no_graph(outputs="static")
    def double(t: Any) -> Any:
        return t * 2

    inner, y = capture(lambda: double(x + 0) + 1)
    outer, _ = capture(lambda: inner.replay() or out.copy_(y))
    for value in (3.0, 5.0):
        x.fill_(value)
        outer.replay()
        assert out.tolist() == [value * 2 + 1] * 2


def test_the_outer_sequence_keeps_an_inner_one_that_is_dropped(device):
    x, out = torch.ones(2), torch.zeros(2)
    inner, y = capture(lambda: x + 1)
    outer, _ = capture(lambda: inner.replay() or out.copy_(y))
    inner.reset()
    del inner, y
    settle()
    x.fill_(6)
    outer.replay()
    assert out.tolist() == [7, 7]


def test_in_a_break_of_another_capture_it_just_runs(device):
    x = torch.ones(2)
    inner, y = capture(lambda: bump(x) or x * 2)
    outer, _ = capture(lambda: no_graph(lambda: inner.replay())())
    x.fill_(0)
    outer.replay()
    assert y.tolist() == [2, 2]


def test_an_empty_sequence_embeds_nothing(device):
    seq = CUDAGraphSequence()
    outer, _ = capture(seq.replay)
    assert kinds(outer) == "-"


def test_a_stale_sequence_is_not_embedded(device):
    from breakable_cuda_graphs import StaleInputError

    x = torch.ones(2)
    inner, _ = capture(lambda: x + 1)
    del x
    y = torch.ones(2)

    def body() -> Any:
        with pytest.raises(StaleInputError):
            inner.replay()
        return y * 2

    outer, z = capture(body)
    outer.replay()
    assert z.tolist() == [2, 2]
