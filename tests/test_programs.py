"""Programs put together at random: a replay gives what the eager code gives, for new inputs.

The hard problem: the eager run and the captured one must be the same code, so a program is a list of
steps over one state, and a break is simply a marked function of it. What a step does is written once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import (  # noqa: E402
    CUDAGraphSequence,
    breakable_graph,
    force_no_graph,
    no_graph,
)
from breakable_cuda_graphs.simulator import simulated_device  # noqa: E402
from helping import (  # noqa: E402
    MODES,
    Boom,
    a_stream,
    assert_nothing_left,
    assert_nothing_open,
    forked,
)

N = 6


class State:
    """What a program works on: an input, a parameter from before, and what was made on the way."""

    def __init__(self, values: list[float], side: Any) -> None:
        self.x = torch.tensor(values)
        self.table = torch.arange(float(N))
        self.made: list[Any] = []
        self.side = side

    @property
    def y(self) -> Any:
        return self.made[-1] if self.made else self.x

    def push(self, tensor: Any) -> None:
        self.made.append(tensor)


@no_graph
def bump(t: Any) -> None:
    t.add_(1)


@no_graph
def branch(t: Any) -> None:
    if t.sum().item() > 0:
        t.mul_(0.5)
    else:
        t.add_(3)


@no_graph
def nested(t: Any) -> None:
    bump(t)
    force_no_graph()
    branch(t)


@no_graph
def mix(target: Any, *, parts: dict[str, list[Any]]) -> None:
    target[::2].sub_(parts["views"][0][1::2])


@no_graph(outputs="static")
def split(t: Any) -> dict[str, Any]:
    return {"positive": t.clamp(min=0), "same": t, "rest": (t.clamp(max=0), 2.0)}


@no_graph(outputs="static")
def sorted_values(t: Any) -> Any:
    return torch.tensor(sorted(t.tolist()))


def use_split(state: State) -> None:
    out = split(state.y.clone())
    negative, factor = out["rest"]
    state.push(out["positive"] * factor + negative - out["same"] * 0.25)


def on_a_side_stream(state: State) -> None:
    with forked(state.side):
        z = state.y + 4
    y = state.y * 0.5
    with forked(state.side):
        z = z - y
    state.push(y + z)


def in_place_through_views(state: State) -> None:
    y = state.y.clone()
    y.view(2, 3).t()[1:].mul_(0.5)
    y[1:3] = y[3:5] * 0.5
    state.push(y)


def nothing_kept(state: State) -> None:
    for factor in (2, 3):
        state.y * factor
    state.push(state.y.repeat(50).view(50, N)[7] - 1)


def bumped(state: State) -> None:
    y = state.y.clone()
    bump(y)
    state.push(y)


STEPS: dict[str, Any] = {
    "work": lambda s: s.push((s.y * 0.5 + 1).clamp(-50, 50)),
    "in place": lambda s: s.push(s.y.clone().mul_(0.5).sub_(2)),
    "views": in_place_through_views,
    "temporaries": nothing_kept,
    "older tensor": lambda s: s.push(s.y + s.table.flip(0)),
    "writes an older tensor": lambda s: s.table.mul_(0.5).add_(s.y),
    "old result": lambda s: s.push(s.y + (s.made[0] if s.made else s.x) * 0.5),
    "reduction": lambda s: s.push(s.y - s.y.mean()),
    "bump": bumped,
    "bump the older": lambda s: bump(s.table),
    "branch": lambda s: (s.push(s.y.clone()), branch(s.y)),
    "nested": lambda s: (s.push(s.y.clone()), nested(s.y)),
    "mix": lambda s: (s.push(s.y.clone()), mix(s.y, parts={"views": [s.table.flip(0)]})),
    "split": use_split,
    "sorted": lambda s: s.push(sorted_values(s.y) * 2),
    "side stream": on_a_side_stream,
    "forced": lambda s: force_no_graph(),
}


class Block(NamedTuple):
    """One `with` block: its steps; a failing one raises at its end and leaves nothing."""

    steps: list[str]
    fails: bool
    mode: str
    keep_inputs: bool


class Life(NamedTuple):
    """What happens to one sequence: blocks, and after how many of them it is reset."""

    blocks: list[Block]
    reset_first: bool


BLOCKS = st.builds(
    Block,
    st.lists(st.sampled_from(sorted(STEPS)), max_size=7),
    st.integers(0, 5).map(lambda number: number == 0),
    st.sampled_from(MODES),
    st.booleans(),
)
LIVES = st.builds(Life, st.lists(BLOCKS, min_size=1, max_size=3), st.booleans())
INPUTS = st.lists(
    st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=N, max_size=N),
    min_size=1,
    max_size=3,
)


def run_steps(state: State, steps: list[str]) -> None:
    for name in steps:
        STEPS[name](state)


def capture_life(life: Life, seq: Any, state: State) -> None:
    """Capture a sequence's blocks; a block that fails is tried again without its failure."""
    if life.reset_first:
        with breakable_graph(seq):
            bump(state.x.clone())
        seq.reset()
        state.table.copy_(torch.arange(float(N)))
    for block in life.blocks:
        options = {"capture_error_mode": block.mode, "keep_inputs": block.keep_inputs}
        if block.fails:
            made, table = list(state.made), state.table.clone()
            with pytest.raises(Boom), breakable_graph(seq, **options):
                run_steps(state, block.steps)
                raise Boom
            state.made[:] = made
            state.table.copy_(table)
        with breakable_graph(seq, **options):
            run_steps(state, block.steps)


def check_replays(
    lives: list[Life], sequences: list[Any], states: list[State], inputs: Any
) -> None:
    """Replay all, one after the other, and compare with an eager run from the same beginnings."""
    for values in inputs:
        for life, seq, state in zip(lives, sequences, states, strict=True):
            eager = State(values, state.side)
            eager.table.copy_(state.table)
            state.x.copy_(torch.tensor(values))
            for tensor in state.made:
                tensor.fill_(float("nan"))
            for block in life.blocks:
                run_steps(eager, block.steps)
            seq.replay()
            assert len(eager.made) == len(state.made)
            for got, wanted in zip(state.made, eager.made, strict=True):
                assert torch.equal(got, wanted), (got, wanted)
            assert torch.equal(state.table, eager.table)
            assert torch.equal(state.x, eager.x)


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(LIVES, min_size=1, max_size=2), INPUTS, st.integers(0, 1 << 30), st.booleans())
def test_replays_give_what_eager_gives(quick_collector, lives, inputs, seed, share):
    with simulated_device(seed=seed) as device, a_stream() as side:
        sequences: list[Any] = []
        for _ in lives:
            pool = sequences[0].pool() if share and sequences else None
            sequences.append(CUDAGraphSequence(pool=pool))
        states = [State([1.0] * N, side) for _ in lives]
        for life, seq, state in zip(lives, sequences, states, strict=True):
            capture_life(life, seq, state)
        assert_nothing_open(device)
        check_replays(lives, sequences, states, inputs)
        assert_nothing_open(device)
        assert device.findings == []
        before = [line for line in device.leaks() if f"{int(side):#x}" in line]
        del sequences, states, seq, state, pool
        assert_nothing_left(device, besides=before)
