"""Grad, inference and autocast modes are noted, entered and put back exactly."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs.frameworks.pytorch import modes  # noqa: E402

SETTINGS: dict[str, Any] = {
    "plain": list,
    "no grad": lambda: [torch.no_grad()],
    "inference": lambda: [torch.inference_mode()],
    "autocast": lambda: [torch.autocast("cpu", dtype=torch.bfloat16)],
    "half": lambda: [torch.autocast("cpu", dtype=torch.float16)],
    "no cache": lambda: [torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)],
    "both": lambda: [torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16)],
    "off again": lambda: [torch.autocast("cpu"), torch.autocast("cpu", enabled=False)],
}


def inside(name: str, work: Any) -> Any:
    with ExitStack() as stack:
        for mode in SETTINGS[name]():
            stack.enter_context(mode)
        return work()


def effect() -> tuple[Any, ...]:
    """What a break would notice: the type of a product, and whether it has a history."""
    weight = torch.ones(2, 2, requires_grad=True)
    product = weight @ weight
    return product.dtype, product.requires_grad, product.is_inference()


@pytest.mark.parametrize(("noted", "outside"), list(itertools.product(SETTINGS, SETTINGS)))
def test_noted_modes_are_entered_anywhere_and_the_callers_come_back(noted, outside):
    wanted = inside(noted, modes.current)
    wanted_effect = inside(noted, effect)

    def work() -> None:
        before, before_effect = modes.current(), effect()
        with modes.entered(wanted):
            assert modes.current() == wanted
            assert effect() == wanted_effect
        assert modes.current() == before
        assert effect() == before_effect

    inside(outside, work)


def test_the_callers_modes_come_back_after_an_error():
    wanted = inside("both", modes.current)
    before = modes.current()
    with pytest.raises(ValueError, match="mine"), modes.entered(wanted):
        raise ValueError("mine")
    assert modes.current() == before


def test_modes_are_plain_values_that_compare():
    assert modes.current() == modes.current()
    seen = [inside(name, modes.current) for name in SETTINGS if name != "off again"]
    assert len(set(seen)) == len(seen)
    assert hash(seen[0])


def test_autocast_that_is_off_is_noted_as_no_autocast():
    assert inside("off again", modes.current) == inside("plain", modes.current)


def test_the_weight_cache_can_be_cleared_anywhere():
    modes.clear_weight_cache()
    with torch.autocast("cpu"):
        modes.clear_weight_cache()
