"""A training step; the hard problem is that captured and eager training must stay the same.

Backward passes run on autograd's thread, gradients must lie where the capture saw them, and the
two host steps sit in the middle: `loss.item()` for the log before the backward pass, and gradient
clipping by a coefficient that Python computes after it. Every rival trains its own copy of the
network from the same start, and must reach eager's weights before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import rivals
from .harness import Call, Case, by_rival, finished, interleave, ratio, spread
from .progress import Progress
from .record import Report, Settings

QUESTION = (
    "Steps a second of a training step with `loss.item()` and gradient clipping by a host value "
    "as the breaks."
)
LABELS = {"whole": "one torch.cuda.graph, without the host's steps"}
LAYERS, WIDTH, CLASSES = 12, 1024, 100
BATCHES = (64, 1024)
QUICK_BATCHES = (64,)
STEPS_CHECKED = 4
TOLERANCE = 1e-3

Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]


def run(settings: Settings, report: Report, progress: Progress) -> None:
    report.labels.update(rivals.LABELS | LABELS)
    batches = settings.pick(BATCHES, QUICK_BATCHES)
    sync = torch.cuda.current_stream().synchronize
    cases, keep = [], []
    for batch in batches:
        reference = trained(Trainer(batch, lambda function: function))
        for rival, make in makers(batch, settings, report).items():
            with rivals.tolerated(report, rival):
                trainer, call = make()
                keep.append(trainer)  # graphs know its tensors by address only
                error = check(rival, trainer, call, reference)
                report.checks.append(f"batch {batch}, {rival}: relative error {error:.1e}")
                cases.append(Case(rival, batch, finished(call, sync, 4)))
    rounds = settings.pick(20, 5)
    progress.begin("training", rounds)
    interleave(cases, rounds, progress.tick)
    write(report, cases)


class Trainer:
    """A residual perceptron, its optimizer and data; `step()` is one step of training.

    `decorate` marks the two host steps as breaks (or leaves them as they are)."""

    def __init__(self, batch: int, decorate: Decorate, *, host: bool = True) -> None:
        torch.manual_seed(0)
        self.net = Residual().cuda()
        self.parameters = list(self.net.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-2, momentum=0.9, foreach=True)
        self.inputs = torch.randn(batch, WIDTH, device="cuda")
        self.targets = torch.randint(0, CLASSES, (batch,), device="cuda")
        self.scale = torch.ones((), device="cuda")
        self.start = [parameter.detach().clone() for parameter in self.parameters]
        self.loss = float("nan")
        self.host = host
        self.log = decorate(self._log)
        self.clip = decorate(self._clip)

    def _log(self, loss: torch.Tensor) -> None:
        self.loss = loss.item()

    def _clip(self, norm: torch.Tensor, scale: torch.Tensor) -> None:
        scale.fill_(min(1.0, 1.0 / (norm.item() + 1e-6)))

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        loss = torch.nn.functional.cross_entropy(self.net(self.inputs), self.targets)
        if self.host:
            self.log(loss.detach())
        loss.backward()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if self.host:
            self.clip(norm, self.scale)
        else:
            self.scale.copy_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        torch._foreach_mul_(gradients, self.scale)
        self.optimizer.step()

    def restart(self) -> None:
        """Back to the first weights, in place: captured graphs know the addresses."""
        with torch.no_grad():
            for parameter, start in zip(self.parameters, self.start, strict=True):
                parameter.copy_(start)
                self.optimizer.state[parameter]["momentum_buffer"].zero_()


class Residual(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        result: torch.Tensor = self.head(x)
        return result


Made = tuple[Trainer, Call]


def makers(batch: int, settings: Settings, report: Report) -> dict[str, Callable[[], Made]]:
    found: dict[str, Callable[[], Made]] = {
        "eager": partial(eagerly, batch),
        "whole": partial(whole, batch),
    }
    for api in [rivals.ours(), *rivals.meta(settings, report)]:
        found[api.key] = partial(broken, api, batch)
    return found


def eagerly(batch: int) -> Made:
    trainer = Trainer(batch, lambda function: function)
    rivals.warm_up(trainer.step)
    return trainer, trainer.step


def whole(batch: int) -> Made:
    trainer = Trainer(batch, lambda function: function, host=False)
    rivals.warm_up(trainer.step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trainer.step()
    return trainer, graph.replay


def broken(api: rivals.Breakable, batch: int) -> Made:
    trainer = Trainer(batch, api.no_graph)
    sequence = api.sequence()
    stream, options = api.stream_for(sequence)
    rivals.warm_up(trainer.step, stream)
    with api.block(sequence, **options):
        trainer.step()
    return trainer, sequence.replay


def trained(trainer: Trainer, call: Call | None = None) -> tuple[torch.Tensor, float]:
    """The weights after some steps from the start, and the last loss that the host saw."""
    if call is None:
        rivals.warm_up(trainer.step)
        call = trainer.step
    trainer.restart()
    for _ in range(STEPS_CHECKED):
        call()
    torch.cuda.synchronize()
    return torch.cat([p.detach().flatten() for p in trainer.parameters]), trainer.loss


def check(rival: str, trainer: Trainer, call: Call, reference: tuple[torch.Tensor, float]) -> float:
    wanted, wanted_loss = reference
    start = torch.cat([tensor.flatten() for tensor in trainer.start])
    got, loss = trained(trainer, call)
    # what training changed is compared, not the weights: they hardly move in a few steps
    error = float((got - wanted).norm() / (wanted - start).norm())
    if not error < TOLERANCE:
        raise AssertionError(f"{rival}: relative error of the update {error}")
    if trainer.host and not abs(loss - wanted_loss) < TOLERANCE * abs(wanted_loss):
        raise AssertionError(f"{rival}: the host saw the loss {loss}, not {wanted_loss}")
    return error


def write(report: Report, cases: list[Case]) -> None:
    table = by_rival(cases)
    names = {case.size: f"batch {case.size:g}" for case in cases}
    eager = {size: spread(samples).median for size, samples in table["eager"].items()}
    report.plot("steps", "Time of a training step", x="", y="time, eager = 1", bars=True)
    report.add_cases("steps", cases, names=names, per=eager)
    for batch in table["ours"]:
        for rival, sizes in table.items():
            rates = [1e6 / sample for sample in sizes[batch]]
            report.figure("steps a second", names[batch], rival, spread(rates), "steps/s")
            value = ratio(sizes[batch], table["eager"][batch])
            report.figure("time against eager", names[batch], rival, value, "x")
        report.aim(
            f"batch {batch:g}: Meta's time relative to ours",
            ratio(table["meta"][batch], table["ours"][batch]) if "meta" in table else None,
            at_least=1.0,
        )
