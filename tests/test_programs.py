"""Programs put together at random: a replay gives what the eager code gives, for new inputs.

`programs.py` says what they are made of. Here they run on the simulated device; each leaves nothing
open, nothing misused and nothing kept. `BREAKABLE_CUDA_GRAPHS_PROGRAMS=20000` tries more of them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs.simulator import (  # noqa: E402
    simulated_device,
    tensors,
)
from helping import (  # noqa: E402
    assert_nothing_left,
    assert_nothing_open,
    drop_stream,
    forked,
    new_stream,
)
from programs import (  # noqa: E402
    PROGRAMS,
    STEPS,
    Capture,
    CaptureTogether,
    Program,
    Rebind,
    Replay,
    ReplayTogether,
    Starve,
    Trip,
    World,
    run_program,
)
from tallies import examples  # noqa: E402


class SimulatedMachine:
    """CPU tensors on the simulated device that is in use."""

    device = "cpu"

    def __init__(self) -> None:
        self._streams: list[Any] = []

    def new_stream(self) -> Any:
        self._streams.append(new_stream())
        return self._streams[-1]

    def forked(self, side: Any, *, join: bool = True) -> contextlib.AbstractContextManager[None]:
        return forked(side, join=join)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return tensors.stream(stream)

    def delay(self) -> None:
        """Nothing takes time here: a missing order shows in the order of the nodes."""

    def settle(self) -> None:
        """All work is done."""

    def close(self) -> None:
        """Give the streams back."""
        for stream in self._streams:
            drop_stream(stream)


def check(program: Program, seed: int) -> None:
    """Run a program on a simulated device; nothing may be left of it."""
    with simulated_device(seed=seed) as device:
        machine = SimulatedMachine()
        run_program(machine, program)
        assert_nothing_open(device)
        machine.close()
        if device.leaks():  # what is in cycles
            assert_nothing_left(device)


@pytest.mark.timeout(900)
@examples(600)
@given(PROGRAMS, st.integers(0, 1 << 30))
def test_replays_give_what_eager_gives(quick_collector, program, seed):
    check(program, seed)


VALUES = [number / 2 for number in range(6)]


@pytest.mark.parametrize("step", STEPS)
def test_every_step_alone_and_twice(quick_collector, step):
    """The small programs, so that a failure of a step is not first found in a long one."""
    blocks = [Capture(0, [step], "thread_local", False, None)] * 2
    ends = [Replay(0, VALUES, False), Rebind(0, "both"), Replay(0, VALUES, True), Starve(0)]
    check(Program(1, False, [*blocks, *ends]), seed=1)


def test_threads_replay_and_capture_at_once(quick_collector):
    steps = ["work", "side stream", "bump", "split", "mix"]
    actions = [CaptureTogether(steps, "relaxed"), ReplayTogether(VALUES)]
    check(Program(3, False, actions * 2), seed=1)


def test_a_program_that_differs_is_seen(monkeypatch):
    """The test of the tests: a step that does something else eagerly fails them."""
    calls: list[int] = []

    def fickle(state: Any) -> None:
        calls.append(1)
        state.push(state.y + len(calls))

    monkeypatch.setitem(STEPS, "fickle", fickle)
    with pytest.raises(AssertionError):
        check(Program(1, False, [Capture(0, ["fickle"], "global", False, None)]), seed=1)


def test_a_replay_that_is_left_out_is_seen(monkeypatch, quick_collector):
    monkeypatch.setattr("breakable_cuda_graphs.CUDAGraphSequence.replay", lambda self: None)
    with pytest.raises(AssertionError):
        check(Program(1, False, [Capture(0, ["work"], "global", False, None)]), seed=1)


def test_the_last_replay_of_a_world_is_always_made(quick_collector):
    with simulated_device(seed=1):
        machine = SimulatedMachine()
        world = World(machine, Program(1, False, []))
        world.run([Trip(0, VALUES)])
        machine.close()
