"""The programs that every fault is put into: one for each thing that the library does.

The hard problem: a program has to know by itself whether it went right, on a sequence that has seen
anything before. So each makes its own data, captures, replays, and compares with eager code; and it
tells when its captures are over, since until then a failure must not have moved the generators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from breakable_cuda_graphs import (
    CUDAGraphSequence,
    Graph,
    GraphSegment,
    annotate,
    breakable_graph,
    capture_if,
    capture_while,
    force_no_graph,
    is_in_breakable_graph,
    no_graph,
)
from graphs import N, array, f32, launch_scale, scale, scale_kernel
from helping import Boom, forked, in_thread


class Stage:
    """Where a program runs: the device, a stream of the user's, and how far the program has come."""

    def __init__(self, device: Any, side: Any) -> None:
        self.device, self.side = device, side
        self.has_captured = False


Program = Callable[[Stage, CUDAGraphSequence], None]


@no_graph
def bump(t: Any) -> None:
    t.add_(1)


@no_graph(outputs="static")
def parts(t: Any) -> dict[str, Any]:
    return {"double": t * 2, "same": t, "sum": t.sum()}


@no_graph
def fail(t: Any) -> None:
    raise Boom(f"in a break at {t.shape}")


# ---------------------------------------------------------------- bodies: tensors in, a tensor out


def plain(x: Any, side: Any) -> Any:
    return (x * 2 + 1).relu()


def with_breaks(x: Any, side: Any) -> Any:
    y = x * 2
    bump(y)
    y = y + 1
    bump(y)
    bump(y)
    return y * 3


def with_a_side_stream(x: Any, side: Any) -> Any:
    y = x * 2
    with forked(side):
        z = y + 4
    bump(y)
    return y + z


def with_static_outputs(x: Any, side: Any) -> Any:
    out = parts(x + 0)
    return out["double"] + out["same"] * out["sum"]


def with_a_break_in_a_break(x: Any, side: Any) -> Any:
    @no_graph
    def outer(t: Any) -> None:
        bump(t)
        t.mul_(2)

    y = x + 1
    outer(y)
    return y - 5


def forced(x: Any, side: Any) -> Any:
    y = x * 2
    force_no_graph()
    y = y + 1
    force_no_graph()
    force_no_graph()
    bump(y)
    force_no_graph()
    return y * 3


def failing(x: Any, side: Any) -> Any:
    y = x * 2
    bump(y)
    y = y + 1
    raise Boom("in a segment")


def failing_in_a_break(x: Any, side: Any) -> Any:
    y = x * 2
    fail(y)
    return y


def bit_of_everything(x: Any, side: Any) -> Any:
    """As short as can be: each line that it runs in the library is a run of an interrupt."""
    y = parts(x + 1)["double"]
    force_no_graph()
    return y * 2


def replayed(body: Callable[[Any, Any], Any], **options: Any) -> Program:
    """Capture a body and compare two replays with eager runs of the same."""

    def program(stage: Stage, seq: CUDAGraphSequence) -> None:
        x = torch.zeros(4)
        with breakable_graph(seq, **options):
            y = body(x, stage.side)
        stage.has_captured = True
        compare(seq, x, y, lambda: body(x.clone(), stage.side))

    return program


def compare(seq: Any, x: Any, y: Any, eager: Callable[[], Any], stream: Any = None) -> None:
    for value in (1.0, -2.0):
        x.copy_(torch.arange(4) + value)
        wanted = eager()
        y.fill_(float("nan"))
        seq.replay(stream)
        assert y.tolist() == wanted.tolist(), f"replayed {y.tolist()}, not {wanted.tolist()}"


# ---------------------------------------------------------------- programs with more than one capture


def two_blocks(stage: Stage, seq: CUDAGraphSequence) -> None:
    """The second block joins its first segment to the last one of the first block."""
    x = torch.zeros(4)
    with breakable_graph(seq):
        y = x * 2
    with breakable_graph(seq):
        z = y + 1
        bump(z)
    stage.has_captured = True
    compare(seq, x, z, lambda: x * 2 + 2)


def shared_pool(stage: Stage, seq: CUDAGraphSequence) -> None:
    other = CUDAGraphSequence(pool=seq.pool())
    x = torch.zeros(4)
    with breakable_graph(seq):
        y = x * 2
        bump(y)
    with breakable_graph(other):
        z = y * 3
        bump(z)
    stage.has_captured = True
    for value in (1.0, 5.0):
        x.fill_(value)
        seq.replay()
        other.replay(stage.side)
        assert z.tolist() == [(value * 2 + 1) * 3 + 1] * 4


def inside_another_block(stage: Stage, seq: CUDAGraphSequence) -> None:
    """A sequence with a break, replayed in a block: its break becomes one of the block."""
    inner, x = CUDAGraphSequence(), torch.zeros(4)
    with breakable_graph(inner):
        y = x * 2
        bump(y)
        y = y * 3
    with breakable_graph(seq):
        x.add_(1)
        inner.replay()
        z = y + 5
    stage.has_captured = True
    for value in (1.0, -2.0):
        x.fill_(value)
        seq.replay()
        assert z.tolist() == [((value + 1) * 2 + 1) * 3 + 5] * 4


def inside_a_foreign_capture(stage: Stage, seq: CUDAGraphSequence) -> None:
    """A sequence without breaks, replayed in somebody else's capture, becomes part of that."""
    x, graph = torch.zeros(4), Graph()
    with breakable_graph(seq):
        y = x * 2 + 1
    with graph.capture(stage.side):
        seq.replay(stage.side)
    stage.has_captured = True
    with graph.instantiate() as execution:
        for value in (1.0, -2.0):
            x.fill_(value)
            execution.launch(stage.side)
            assert y.tolist() == [value * 2 + 1] * 4
    graph.close()


def on_two_streams(stage: Stage, seq: CUDAGraphSequence) -> None:
    x = torch.zeros(4)
    with breakable_graph(seq, stream=stage.side):
        y = with_breaks(x, stage.side)
    stage.has_captured = True
    compare(seq, x, y, lambda: with_breaks(x.clone(), None))
    compare(seq, x, y, lambda: with_breaks(x.clone(), None), stage.side)


# ---------------------------------------------------------------- graphs, edits, conditions


class Scaled:
    """y = x * 2; a border; z = y * 3, by a kernel whose arguments are known."""

    def __init__(self, stage: Stage, seq: CUDAGraphSequence, border: Callable[[], None]) -> None:
        self.x, self.y, self.z, self.seq = array(1), array(), array(), seq
        self.kernel, driver = scale_kernel(), stage.device.driver
        stream = int(seq.stream.handle)
        with breakable_graph(seq):
            launch_scale(driver, self.kernel, stream, self.y, self.x, 2.0)
            border()
            launch_scale(driver, self.kernel, stream, self.z, self.y, 3.0)
        stage.has_captured = True
        found = [s for s in seq.segments if isinstance(s, GraphSegment) and not s.is_empty]
        self.first, self.second = found[0], found[-1]

    def check(self, right: float) -> None:
        self.z[:] = -9
        self.seq.replay()
        assert (self.z == right).all(), f"{self.z[0]}, not {right}"


@no_graph
def nothing() -> None:
    pass


def edited(stage: Stage, seq: CUDAGraphSequence) -> None:
    scaled = Scaled(stage, seq, nothing)
    first, second = scaled.first, scaled.second
    first.exec.update(first.graph.nodes[0], args={2: f32(10)})
    scaled.check(30)
    second.exec.disable(second.graph.nodes[0])
    scaled.check(-9)
    second.exec.enable(second.graph.nodes[0])
    with second.exec.capture_update(second.graph.nodes[0]) as stream:
        handle = getattr(stream, "handle", stream)
        launch_scale(stage.device.driver, scaled.kernel, handle, scaled.z, scaled.y, 7.0)
    scaled.check(70)


def edited_and_joined(stage: Stage, seq: CUDAGraphSequence) -> None:
    """Edits of joined segments, and a graph placed behind them: all are joined anew."""
    scaled, graph, out = Scaled(stage, seq, force_no_graph), Graph(), array()
    assert scaled.first._executable is scaled.second._executable
    scaled.first.exec.update(scaled.first.graph.nodes[0], args={2: f32(10)})
    node = scale(graph, out, scaled.z, 2.0, kernel=scaled.kernel)
    before, length = scaled.first._executable, len(seq)
    try:
        placed = seq.append(graph)
    except BaseException:
        if len(seq) == length:  # an interrupt may come when it is done
            assert scaled.first._executable is before is scaled.second._executable, "half placed"
        scaled.check(30)  # the sequence goes on, with it or as it was
        raise
    scaled.check(30)
    assert (out == 60).all()
    placed.exec.update(node, args={2: f32(1)})
    scaled.check(30)
    assert (out == 30).all()


def rebound(stage: Stage, seq: CUDAGraphSequence) -> None:
    x, w, z = (torch.full((N,), value) for value in (1.0, 10.0, 0.0))
    with breakable_graph(seq):
        y = x * 2
        mix(y, w)
        torch.mul(y, 3, out=z)
    stage.has_captured = True
    x2, w2 = torch.full((N,), 2.0), torch.full((N,), 20.0)
    try:
        seq.rebind({x: x2, w: w2})
    except BaseException:
        seq.replay()  # everywhere or nowhere
        assert z.tolist() == [36.0] * N
        raise
    seq.replay()
    assert z.tolist() == [72.0] * N


@no_graph
def mix(t: Any, w: Any) -> None:
    t.add_(w)


def conditional(stage: Stage, seq: CUDAGraphSequence) -> None:
    x, flag, going = torch.ones(4), torch.tensor(1), torch.tensor(True)
    with breakable_graph(seq):
        y = x * 2
        capture_if(flag, lambda: bump_plainly(y, 10), lambda: bump_plainly(y, 20))
        capture_while(going, lambda: double(y, going))
    stage.has_captured = True
    for value in (1, 0):
        flag.fill_(value)
        going.fill_(True)
        seq.replay()
        expected = torch.full((4,), 12.0 if value else 22.0)
        while expected[0] < 50:
            expected.mul_(2)
        assert y.tolist() == expected.tolist()


def bump_plainly(t: Any, number: float) -> None:
    t.add_(number)


def double(t: Any, going: Any) -> None:
    t.mul_(2)
    going.copy_(t[0] < 50)


def built_by_hand(stage: Stage, seq: CUDAGraphSequence) -> None:
    """No sequence: a graph, a capture into it, an executable and its edits."""
    x, y, z, graph, kernel = array(1), array(), array(), Graph(), scale_kernel()
    first = scale(graph, y, x, 2.0, kernel=kernel)
    with graph.capture(stage.side, after=first) as part:
        launch_scale(stage.device.driver, kernel, int(part.stream), z, y, 3.0)
    graph.memset(array(), 0, 4, after=part.frontier)
    stage.has_captured = True
    with graph.instantiate() as execution:
        execution.launch(stage.side)
        assert (z == 6).all()
        execution.update(first, args={2: f32(5)})
        execution.disable(part.nodes[0])
        execution.launch(stage.side)
        assert (y == 5).all()
        assert (z == 6).all()
    graph.close()


# ---------------------------------------------------------------- what torch adds


def random_numbers(stage: Stage, seq: CUDAGraphSequence) -> None:
    x = torch.zeros(4)
    before = torch.get_rng_state()
    with breakable_graph(seq):
        y = x + torch.rand(4)
        bump(y)
        y = y * torch.rand(4)
    stage.has_captured = True
    assert torch.equal(torch.get_rng_state(), before), "a capture draws nothing"
    for seed in (1, 2):
        torch.manual_seed(seed)
        wanted = (torch.rand(4) + 1) * torch.rand(4)
        torch.manual_seed(seed)
        seq.replay()
        assert y.tolist() == wanted.tolist()


@no_graph(outputs="static")
def triple(t: Any) -> Any:
    return t * 3


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Any) -> Any:
        return triple(t)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return triple(g)


def autograd(stage: Stage, seq: CUDAGraphSequence) -> None:
    w = torch.ones(2, requires_grad=True)
    with breakable_graph(seq, capture_error_mode="relaxed"):
        grad = torch.autograd.grad((Triple.apply(w * 2) * w).sum(), w)[0]
    stage.has_captured = True
    for value in (1.0, 4.0):
        with torch.no_grad():
            w.fill_(value)
        seq.replay()
        assert grad.tolist() == [12 * value] * 2


def annotated(stage: Stage, seq: CUDAGraphSequence) -> None:
    x = torch.zeros(4)
    with breakable_graph(seq, record_stacks=True), annotate("all"):
        y = x * 2
        bump(y)
        y = y + 1
    stage.has_captured = True
    assert seq.segments[0].graph.nodes[0].scopes == ("all",)
    compare(seq, x, y, lambda: x * 2 + 2)


def after_a_thread_has_ended(stage: Stage, seq: CUDAGraphSequence) -> None:
    """In a block that it never left: this thread has to end it."""
    kept = breakable_graph(CUDAGraphSequence())

    def lose() -> None:
        kept.__enter__()
        bump(torch.ones(2) * 2)

    try:
        in_thread(lose)
        replayed(plain)(stage, seq)
    finally:
        is_in_breakable_graph()  # what kept this thread from ending it is tried again


PROGRAMS: dict[str, Program] = {
    "no break": replayed(plain),
    "breaks": replayed(with_breaks),
    "breaks, owned inputs": replayed(with_breaks, keep_inputs=True),
    "side stream": replayed(with_a_side_stream),
    "static outputs": replayed(with_static_outputs),
    "break in a break": replayed(with_a_break_in_a_break),
    "forced": replayed(forced),
    "two blocks": two_blocks,
    "shared pool": shared_pool,
    "nested": inside_another_block,
    "foreign capture": inside_a_foreign_capture,
    "two streams": on_two_streams,
    "edit": edited,
    "edit, joined": edited_and_joined,
    "rebind": rebound,
    "conditional": conditional,
    "built by hand": built_by_hand,
    "random numbers": random_numbers,
    "autograd": autograd,
    "annotated": annotated,
    "lost thread": after_a_thread_has_ended,
    "failing": replayed(failing),
    "failing in a break": replayed(failing_in_a_break),
}

#: Those that fail by themselves; what they raise is the user's.
FAILING = ("failing", "failing in a break")
