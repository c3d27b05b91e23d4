"""Programs put together at random give on a GPU what they give eagerly.

They are those of `tests/programs.py`, which CPU tests run on the simulated device.
`BREAKABLE_CUDA_GRAPHS_PROGRAMS=5000` tries more of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given

from programs import (
    PROGRAMS,
    STEPS,
    Capture,
    Program,
    Rebind,
    Replay,
    Starve,
    run_program,
)
from tallies import examples

from .helpers import busy, torch

pytestmark = pytest.mark.gpu


class Gpu:
    """CUDA tensors on the current device; streams are given out anew to each program."""

    device = "cuda"

    def __init__(self) -> None:
        found: dict[int, Any] = {}
        while len(found) < 8:  # torch hands the same 32 streams out in turn
            stream = torch.cuda.Stream()
            found[stream.cuda_stream] = stream
        self._streams = list(found.values())
        self._next = 0
        torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")  # cuBLAS wants to be warm

    def begin(self) -> None:
        self._next = 0

    def new_stream(self) -> Any:
        self._next += 1
        return self._streams[(self._next - 1) % len(self._streams)]

    @contextlib.contextmanager
    def forked(self, side: Any, *, join: bool = True) -> Iterator[None]:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            yield
        if join:
            current.wait_stream(side)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return self.forked(stream)

    def delay(self) -> None:
        busy(0.02)

    def settle(self) -> None:
        torch.cuda.synchronize()


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return Gpu()


def check(machine: Gpu, program: Program) -> None:
    machine.begin()
    run_program(machine, program)


@examples(300)
@given(PROGRAMS)
def test_any_program_replays_to_what_it_gives_eagerly(gpu: Gpu, program: Program) -> None:
    check(gpu, program)


VALUES = [number / 2 for number in range(6)]


@pytest.mark.parametrize("step", STEPS)
def test_every_step_alone_and_twice(gpu: Gpu, step: str) -> None:
    blocks = [Capture(0, [step], "thread_local", False, None)] * 2
    ends = [Replay(0, VALUES, False), Rebind(0, "both"), Replay(0, VALUES, True), Starve(0)]
    check(gpu, Program(1, False, [*blocks, *ends]))
