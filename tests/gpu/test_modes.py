"""Grad, inference and autocast modes: those of the capture, whatever the caller's at replay."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from breakable_cuda_graphs import (
    CUDAGraphSequence,
    breakable_graph,
    is_in_breakable_graph,
    no_graph,
)

from .helpers import Boom, bump, check_replays, close, dev, same, torch

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def no_grad_and_autocast() -> Any:
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        yield


CONTEXTS = {
    "grad": lambda: torch.enable_grad(),
    "no grad": lambda: torch.no_grad(),
    "inference": lambda: torch.inference_mode(),
    "autocast to bfloat16": lambda: torch.autocast("cuda", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cuda", torch.float16),
    "no grad and autocast": no_grad_and_autocast,
}


def modes() -> Any:
    autocast = torch.is_autocast_enabled("cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.get_autocast_dtype("cuda") if autocast else None,
    )


@pytest.mark.parametrize("captured", CONTEXTS)
def test_a_break_runs_under_the_modes_of_its_capture_and_leaves_the_callers(captured: str) -> None:
    seen: list[Any] = []

    @no_graph
    def look(t: Any) -> None:
        seen.append(modes())

    seq = CUDAGraphSequence()
    with CONTEXTS[captured]():
        x = dev(1)
        wanted = modes()
        with breakable_graph(seq):
            y = x * 2
            look(y)
            z = y + 1
        assert modes() == wanted
    for replayed in CONTEXTS:
        with CONTEXTS[replayed]():
            callers = modes()
            seen.clear()
            seq.replay()
            assert modes() == callers, f"replayed under {replayed}"
            assert seen == [wanted], f"replayed under {replayed}"
    same(z, 3.0)


def test_breaks_of_one_sequence_may_have_different_modes() -> None:
    seen: list[Any] = []

    @no_graph
    def look(t: Any) -> None:
        seen.append(modes())

    x, seq, wanted = dev(1), CUDAGraphSequence(), []
    with breakable_graph(seq):
        y = x * 2
        for name in ("no grad", "autocast to bfloat16", "grad"):
            with CONTEXTS[name]():
                wanted.append(modes())
                look(y)
    assert seen == wanted
    seen.clear()
    with torch.no_grad():
        seq.replay()
    assert seen == wanted


@pytest.mark.parametrize("replayed", ["no grad", "inference", "autocast to float16"])
def test_a_break_that_raises_leaves_the_callers_modes(replayed: str) -> None:
    fail = False

    @no_graph
    def touchy(t: Any) -> None:
        if fail:
            raise Boom

    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        touchy(x + 1)
    fail = True
    with CONTEXTS[replayed]():
        callers = modes()
        with pytest.raises(Boom):
            seq.replay()
        assert modes() == callers


def product(x: Any, weight: Any) -> Any:
    with torch.no_grad():
        return (x @ weight.detach().bfloat16()).float()


@pytest.mark.parametrize("first_use", ["in a segment", "in a break"])
def test_the_autocast_cache_of_weights_does_not_cross_a_border(first_use: str) -> None:
    weight = (torch.randn(32, 32, device="cuda") / 6).requires_grad_()
    kept = torch.zeros(8, 32, device="cuda")

    @no_graph
    def use(t: Any, target: Any) -> None:
        target.copy_((t @ weight).detach())

    x, seq = torch.randn(8, 32, device="cuda"), CUDAGraphSequence()

    def body() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            if first_use == "in a segment":
                (x @ weight).detach()
            use(x, kept)
            return (x @ weight).detach().float()

    body()
    with breakable_graph(seq):
        out = body()
    for k in range(3):
        x.normal_()
        with torch.no_grad():
            weight.copy_(torch.randn_like(weight) * (k + 1))
        seq.replay()
        want = product(x.bfloat16(), weight)
        close(out, want, "the segment", tolerance=0.02)
        close(kept, want, "the break", tolerance=0.02)


def test_autocast_around_the_block_reaches_every_segment() -> None:
    weight, x = torch.randn(32, 32, device="cuda"), torch.randn(8, 32, device="cuda")
    seq = CUDAGraphSequence()
    with torch.autocast("cuda", torch.float16):
        x @ weight
        with breakable_graph(seq):
            first = x @ weight
            bump(first)
            second = x @ weight
    assert first.dtype == second.dtype == torch.float16
    x.normal_()
    seq.replay()
    close(second.float(), (x.half() @ weight.half()).float(), tolerance=0.02)
    close(first.float(), (x.half() @ weight.half()).float() + 1, tolerance=0.02)


def test_a_capture_in_inference_mode_replays_outside_it() -> None:
    seq = CUDAGraphSequence()
    x = dev(1)
    with torch.inference_mode(), breakable_graph(seq):
        y = x * 2
        bump(y)
        z = torch.zeros_like(x).copy_(y + 1)
    for k in range(3):
        x.fill_(k)
        seq.replay()
        with torch.inference_mode():
            same(z, 2.0 * k + 2)


def test_a_random_capture_in_inference_mode_replays_outside_it() -> None:
    seq = CUDAGraphSequence()
    with torch.inference_mode(), breakable_graph(seq):
        drawn = torch.rand(64, device="cuda")
        bump(drawn)
        again = torch.rand(64, device="cuda")
    torch.cuda.manual_seed(3)
    seq.replay()
    torch.cuda.manual_seed(3)
    with torch.inference_mode():
        same(drawn, torch.rand(64, device="cuda") + 1)
        same(again, torch.rand(64, device="cuda"))


def test_history_is_recorded_in_a_segment_and_used_after_a_break() -> None:
    x, seq, seen = dev(1).requires_grad_(), CUDAGraphSequence(), []

    @no_graph
    def look(t: Any) -> None:
        seen.append(t.requires_grad)

    def body() -> Any:
        y = x * 3
        if is_in_breakable_graph():
            look(y)
        return torch.autograd.grad((y * y).sum(), x)[0]

    body()
    with breakable_graph(seq):
        grad = body()
    with torch.no_grad():
        for k in range(3):
            x.fill_(k)
            seq.replay()
            same(grad, 18.0 * k)
    assert seen[-3:] == [False] * 3, "a break sees values, not history"


def test_a_break_may_use_a_captured_parameter_in_place_without_grad() -> None:
    weight, x, seq = dev(2).requires_grad_(), dev(1), CUDAGraphSequence()

    @no_graph
    def decay(w: Any) -> None:
        with torch.no_grad():
            w.mul_(0.5)

    with torch.no_grad(), breakable_graph(seq):
        y = x * weight
        decay(weight)
        z = y + weight
    with torch.no_grad():
        weight.fill_(8)
    check_replays(seq, x, z, lambda t: t * 8 + 4, values=(3.0,))
    check_replays(seq, x, z, lambda t: t * 4 + 2, values=(3.0,))
