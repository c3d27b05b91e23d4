"""A diffusion sampler; the hard problem is a break so short that everything else has to be free.

Between two denoising steps the host decides on the noise level and writes two numbers to the device,
as samplers do whose schedule depends on what is asked for. Nothing waits for the device there, so a
broken graph can be as fast as a whole one, if launches and breaks cost nothing. The whole graph has
the schedule baked in: it is the bound, not a choice.

The denoiser is transformers' ViT code with random weights: its blocks over patches of a latent
image, with a projection in front and behind.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import rivals
from .harness import Call, Case, by_rival, finished, interleave, ratio, spread
from .progress import Progress
from .record import Report, Settings

QUESTION = (
    "Denoising steps a second of a diffusion sampler over a stack of transformer blocks, with the "
    "host's schedule between the steps as the break."
)
LABELS = {"whole": "one torch.cuda.graph, its schedule fixed"}
BATCHES = (1, 4, 16)
QUICK_BATCHES = (1,)
SIGMA_MAX, SIGMA_MIN, RHO = 80.0, 0.002, 7.0  # the schedule of Karras et al. 2022, equation 5
TOLERANCE = 2e-2  # bf16

Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Size:
    steps: int = 8
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    tokens: int = 256
    channels: int = 16


QUICK_SIZE = Size(steps=4, layers=4, hidden=384, heads=6)


def run(settings: Settings, report: Report, progress: Progress) -> None:
    report.labels.update(rivals.LABELS | LABELS)
    size = settings.pick(Size(), QUICK_SIZE)
    with torch.no_grad():
        cases = prepare(size, settings, report)
        rounds = settings.pick(20, 5)
        progress.begin("diffusion", rounds)
        interleave(cases, rounds, progress.tick)
    write(report, size, cases)


def prepare(size: Size, settings: Settings, report: Report) -> list[Case]:
    """A case for each rival and batch whose latents are eager's."""
    denoiser = Denoiser(size).to("cuda", torch.bfloat16)
    sync = torch.cuda.current_stream().synchronize
    cases = []
    for batch in settings.pick(BATCHES, QUICK_BATCHES):
        for rival, make in makers(denoiser, batch, settings, report).items():
            with rivals.tolerated(report, rival):
                sampler, call = make()
                error = check(rival, sampler, call)
                report.checks.append(f"batch {batch}, {rival}: relative error {error:.1e}")
                cases.append(Case(rival, batch, finished(partial(_kept, sampler, call), sync, 2)))
    return cases


def _kept(sampler: Sampler, call: Call) -> None:
    """Graphs know a sampler's tensors by address only: whoever calls them keeps it."""
    call()


# --- the model ----------------------------------------------------------------------------------


class Denoiser(torch.nn.Module):  # type: ignore[misc]
    """From noisy latents and the noise level to the latents' direction."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        vit: Any = importlib.import_module("transformers.models.vit.modeling_vit")
        config = importlib.import_module("transformers").ViTConfig(
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=4 * size.hidden,
            attn_implementation="sdpa",
        )
        self.size = size
        self.inward = torch.nn.Linear(size.channels, size.hidden)
        self.positions = torch.nn.Parameter(torch.randn(size.tokens, size.hidden) * 0.02)
        self.level = torch.nn.Linear(size.hidden, size.hidden)
        frequencies = torch.exp(-math.log(1e4) * torch.arange(size.hidden // 2) / size.hidden * 2)
        self.register_buffer("frequencies", frequencies)
        self.blocks = torch.nn.ModuleList(vit.ViTLayer(config) for _ in range(size.layers))
        self.outward = torch.nn.Linear(size.hidden, size.channels)

    def forward(self, latents: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        angles = sigma.log() * 0.25 * self.frequencies
        level = self.level(torch.cat([angles.cos(), angles.sin()]))
        hidden = self.inward(latents / (sigma * sigma + 1).sqrt()) + self.positions + level
        for block in self.blocks:
            hidden = block(hidden)
        result: torch.Tensor = self.outward(hidden)
        return result


class Sampler:
    """Some denoising steps from static noise; `decorate` marks the host's part as a break."""

    def __init__(self, denoiser: Denoiser, batch: int, decorate: Decorate) -> None:
        self.denoiser, size = denoiser, denoiser.size
        self.noise = torch.empty(
            batch, size.tokens, size.channels, device="cuda", dtype=torch.bfloat16
        )
        self.sigma, self.stride = (
            torch.ones((), device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        self.latents = torch.empty_like(self.noise)
        self.schedule = decorate(self._schedule)
        self.fill()

    def fill(self) -> None:
        self.noise.normal_()

    def _schedule(self, step: int) -> None:
        """The host's part: the noise level of a step, and how far it goes."""
        last = self.denoiser.size.steps
        now, then = level_of(step, last), level_of(step + 1, last)
        self.sigma.fill_(now)
        self.stride.fill_((then - now) / now)

    def __call__(self) -> None:
        latents = self.noise * SIGMA_MAX
        for step in range(self.denoiser.size.steps):
            self.schedule(step)
            latents = latents + self.stride * (latents - self.denoiser(latents, self.sigma))
        self.latents.copy_(latents)


def level_of(step: int, steps: int) -> float:
    """The noise level before a step; none is left behind the last."""
    if step == steps:
        return 0.0
    high, low = SIGMA_MAX ** (1 / RHO), SIGMA_MIN ** (1 / RHO)
    part: float = (high + step / max(1, steps - 1) * (low - high)) ** RHO
    return part


# --- the rivals ---------------------------------------------------------------------------------

Made = tuple[Sampler, Call]


def makers(
    denoiser: Denoiser, batch: int, settings: Settings, report: Report
) -> dict[str, Callable[[], Made]]:
    found: dict[str, Callable[[], Made]] = {
        "eager": partial(eagerly, denoiser, batch),
        "whole": partial(whole, denoiser, batch),
    }
    for api in [rivals.ours(), *rivals.meta(settings, report)]:
        found[api.key] = partial(broken, api, denoiser, batch)
    return found


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def eagerly(denoiser: Denoiser, batch: int) -> Made:
    sampler = Sampler(denoiser, batch, as_it_is)
    rivals.warm_up(sampler)
    return sampler, sampler


def whole(denoiser: Denoiser, batch: int) -> Made:
    sampler = Sampler(denoiser, batch, as_it_is)
    rivals.warm_up(sampler)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler()
    return sampler, graph.replay


def broken(api: rivals.Breakable, denoiser: Denoiser, batch: int) -> Made:
    sampler = Sampler(denoiser, batch, api.no_graph)
    sequence = api.sequence()
    stream, options = api.stream_for(sequence)
    rivals.warm_up(sampler, stream)
    with api.block(sequence, **options):
        sampler()
    return sampler, sequence.replay


def check(rival: str, sampler: Sampler, call: Call) -> float:
    """New noise, a poisoned result: what comes back is eager's, but for bf16's rounding."""
    sampler.fill()
    eager = Sampler(sampler.denoiser, len(sampler.noise), as_it_is)
    eager.noise.copy_(sampler.noise)
    eager()
    sampler.latents.fill_(float("nan"))
    call()
    torch.cuda.synchronize()
    wanted = eager.latents.double()
    error = float((sampler.latents.double() - wanted).norm() / wanted.norm())
    if not error < TOLERANCE:
        raise AssertionError(f"{rival}: relative error {error}")
    return error


# --- what was found -----------------------------------------------------------------------------


def write(report: Report, size: Size, cases: list[Case]) -> None:
    table = by_rival(cases)
    names = {case.size: f"batch {case.size:g}" for case in cases}
    eager = {batch: spread(samples).median for batch, samples in table["eager"].items()}
    report.plot("steps", "Time of a sampling", x="", y="time, eager = 1", bars=True)
    report.add_cases("steps", cases, names=names, per=eager)
    for batch, name in names.items():
        for rival, sizes in table.items():
            rates = [size.steps / sample * 1e6 for sample in sizes[batch]]
            report.figure("denoising steps a second", name, rival, spread(rates), "steps/s")
        for rival, sizes in table.items():
            value = ratio(sizes[batch], table["whole"][batch])
            report.figure("time against the whole graph", name, rival, value, "x")
        theirs = table.get("meta")
        report.aim(
            f"{name}: Meta's time relative to ours",
            ratio(theirs[batch], table["ours"][batch]) if theirs else None,
            at_least=1.0,
        )
        report.aim(
            f"{name}: time relative to the whole graph",
            ratio(table["ours"][batch], table["whole"][batch]),
            at_most=1.05,
        )
