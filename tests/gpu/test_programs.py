"""Programs put together at random give what they give eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, force_no_graph, no_graph

from .helpers import MODES, busy, check_replays, dev, torch

pytestmark = pytest.mark.gpu


@no_graph
def branch(t: Any) -> None:
    if t.sum().item() > 0:
        t.div_(2)
    else:
        t.add_(8)


@no_graph
def mix(target: Any, *, table: dict[str, Any]) -> None:
    target[::2].add_(table["view"][1::2])


def on_a_side_stream(y: Any) -> Any:
    main, side = torch.cuda.current_stream(), SIDE[0]
    side.wait_stream(main)
    with torch.cuda.stream(side):
        busy(0.05)
        z = y + 4
    y = y * 0.5
    main.wait_stream(side)
    return y + z


def with_break(act: Callable[[Any], None]) -> Callable[[Any], Any]:
    def step(y: Any) -> Any:
        act(y)
        return y

    return step


def forced(y: Any) -> Any:
    force_no_graph()
    return y


STEPS: dict[str, Callable[[Any], Any]] = {
    "work": lambda y: (y * 0.5 + 1).clamp(-100, 100),
    "work in place": lambda y: y.mul_(0.5).sub_(3),
    "temporaries": lambda y: y + y.repeat(1024).view(1024, 64)[7] * 0.25,
    "side stream": on_a_side_stream,
    "branch": with_break(branch),
    "views": with_break(lambda y: mix(y, table={"view": y.flip(0)})),
    "reversed": lambda y: y.flip(0).contiguous(),
    "forced": forced,
}
SIDE = [None]


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    program=st.lists(st.sampled_from(sorted(STEPS)), max_size=12),
    mode=st.sampled_from(MODES),
    blocks=st.integers(1, 2),
)
def test_any_program_replays_to_what_it_gives_eagerly(
    program: list[str], mode: str, blocks: int
) -> None:
    SIDE[0] = SIDE[0] or torch.cuda.Stream()
    x, seq = dev(1), CUDAGraphSequence()

    def run(y: Any, steps: list[str]) -> Any:
        for name in steps:
            y = STEPS[name](y)
        return y

    cut = len(program) // blocks
    with breakable_graph(seq, capture_error_mode=mode):
        out = run(x.clone(), program[:cut])
    if blocks == 2:
        with breakable_graph(seq, capture_error_mode=mode):
            out = run(out, program[cut:]).clone()
    breaks = sum(name in ("branch", "views", "forced") for name in program)
    assert len(seq) == 2 * breaks + blocks
    check_replays(seq, x, out, lambda t: run(t, program), values=(1.0, -4.0, 30.0))
