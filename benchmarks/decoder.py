"""A decoder end to end; the hard problem is to compare like with like when the work has a host.

The break is attention over a cache whose length only the host knows: `cache[:, :, :length]`. A
whole graph cannot follow that length; it is captured at the very length that is timed, so it is
the bound, not a choice. Meta's package knows no results of breaks: there the break writes into a
buffer, and for a fair pair ours is also timed so, beside the way that ours offers
(`outputs="static"`).

The model is transformers' Llama code with random weights: embedding, layers, norm and head are
called as `LlamaModel` does, without its masks, which ask the host for lengths.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import rivals
from .harness import Call, Case, by_rival, finished, interleave, ratio, spread
from .progress import Progress
from .record import Report, Settings

QUESTION = (
    "Tokens a second of a Llama-like decoder with attention as the break: a decode step at "
    "several batch sizes, and prefill at several lengths."
)
LABELS = {
    "ours-static": 'breakable_cuda_graphs, outputs="static"',
    "ours-buffer": "breakable_cuda_graphs, break writes into a buffer",
    "meta-buffer": "Meta 0.1.0, break writes into a buffer",
    "whole": "one torch.cuda.graph, its length fixed",
}
TOLERANCE = 2e-2  # bf16; eager itself is measured against eager and noted


@dataclass(frozen=True)
class Shape:
    """A step of `tokens` new tokens a sequence after `past` old ones."""

    name: str
    batch: int
    tokens: int
    past: int


SHAPES = (
    Shape("decode, batch 1", 1, 1, 512),
    Shape("decode, batch 8", 8, 1, 512),
    Shape("decode, batch 64", 64, 1, 512),
    Shape("prefill, 128 tokens", 1, 128, 0),
    Shape("prefill, 512 tokens", 1, 512, 0),
    Shape("prefill, 2048 tokens", 1, 2048, 0),
)
QUICK_SHAPES = (Shape("decode, batch 1", 1, 1, 64), Shape("prefill, 128 tokens", 1, 128, 0))


@dataclass(frozen=True)
class Size:
    layers: int = 16
    hidden: int = 2048
    intermediate: int = 5632
    heads: int = 16
    vocabulary: int = 32000


QUICK_SIZE = Size(layers=4, hidden=1024, intermediate=2816, heads=8, vocabulary=8000)


def run(settings: Settings, report: Report, progress: Progress) -> None:
    with torch.no_grad():
        measure(settings, report, progress)


def measure(settings: Settings, report: Report, progress: Progress) -> None:
    report.labels.update(rivals.LABELS | LABELS)
    size = settings.pick(Size(), QUICK_SIZE)
    shapes: Sequence[Shape] = settings.pick(SHAPES, QUICK_SHAPES)
    model = llama(size, "cuda")
    apis = [rivals.ours(), *rivals.meta(settings, report)]
    sync = torch.cuda.current_stream().synchronize
    cases, keep = [], []
    for index, shape in enumerate(shapes):
        step = Step(model, shape)
        keep.append(step)
        report.checks.append(f"{shape.name}: {noise(step)}")
        for rival, make in makers(step, apis).items():
            with rivals.tolerated(report, rival):
                call, output = make()
                error = check(rival, step, call, output)
                report.checks.append(f"{shape.name}, {rival}: relative error {error:.1e}")
                cases.append(Case(rival, index, finished(call, sync, 4)))
    rounds = settings.pick(20, 5)
    progress.begin("decoder", rounds)
    interleave(cases, rounds, progress.tick)
    write(report, shapes, cases)


# --- the model ----------------------------------------------------------------------------------


def llama(size: Size, device: str) -> Any:
    """A `LlamaForCausalLM` with random bf16 weights."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=4096,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    return model.to(torch.bfloat16).eval()


class HostLengthCache:
    """Keys and values in fixed buffers, filled up to a length that only the host knows.

    It has the one method that transformers' attention calls."""

    def __init__(self, model: Any, batch: int, capacity: int) -> None:
        config = model.config
        width = config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, batch, config.num_key_value_heads, capacity, width)
        self.keys = torch.randn(shape, device=model.device, dtype=model.dtype)
        self.values = torch.randn(shape, device=model.device, dtype=model.dtype)
        self.length = 0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end].copy_(keys)
        self.values[layer, :, :, self.length : end].copy_(values)
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


Attention = Callable[..., Any]


class Step:
    """One step of the model for one shape, from static token ids to logits."""

    def __init__(self, model: Any, shape: Shape) -> None:
        self.model, self.shape = model, shape
        device = model.device
        self.ids = torch.zeros(shape.batch, shape.tokens, dtype=torch.long, device=device)
        self.positions = torch.arange(shape.past, shape.past + shape.tokens, device=device)[None]
        self.cache = HostLengthCache(model, shape.batch, shape.past + shape.tokens)
        self.cache.length = shape.past
        self.kept: list[torch.Tensor] = []  # buffers that captured breaks write into
        self.fill()

    def fill(self) -> None:
        self.ids.random_(0, self.model.config.vocab_size)

    def __call__(self) -> torch.Tensor:
        inner = self.model.model
        hidden = inner.embed_tokens(self.ids)
        rotary = inner.rotary_emb(hidden, position_ids=self.positions)
        for layer in inner.layers:
            hidden = layer(
                hidden,
                attention_mask=None,
                position_embeddings=rotary,
                past_key_values=self.cache,
            )
        logits: torch.Tensor = self.model.lm_head(inner.norm(hidden)[:, -1:])
        return logits

    def buffers(self) -> list[torch.Tensor]:
        shape = (self.shape.batch, self.shape.tokens, self.model.config.hidden_size)
        made = [
            torch.empty(shape, device=self.model.device, dtype=self.model.dtype)
            for _ in self.model.model.layers
        ]
        self.kept += made
        return made


class BreakingAttention(torch.nn.Module):  # type: ignore[misc]
    """Stands where a layer's attention stood and calls it through a break."""

    def __init__(self, attention: torch.nn.Module, through: Attention) -> None:
        super().__init__()
        self.attention, self.through = attention, through

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        past_key_values: HostLengthCache,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        result = self.through(self.attention, hidden_states, position_embeddings, past_key_values)
        return result, None


@contextmanager
def attention_through(model: Any, through: Sequence[Attention]) -> Iterator[None]:
    """For the time of a capture, each layer's attention goes through its own break."""
    layers = model.model.layers
    originals = [layer.self_attn for layer in layers]
    try:
        for layer, original, call in zip(layers, originals, through, strict=True):
            layer.self_attn = BreakingAttention(original, call)
        yield
    finally:
        for layer, original in zip(layers, originals, strict=True):
            layer.self_attn = original


def attend(
    attention: Any,
    hidden: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    cache: HostLengthCache,
) -> torch.Tensor:
    """The break's body: transformers' own attention, on as much of the cache as is filled."""
    result: torch.Tensor = attention(
        hidden_states=hidden,
        position_embeddings=rotary,
        attention_mask=None,
        past_key_values=cache,
    )[0]
    return result


def returning_breaks(api: rivals.Breakable, step: Step) -> list[Attention]:
    through = api.no_graph(attend, outputs="static")
    return [through] * len(step.model.model.layers)


def writing_breaks(api: rivals.Breakable, step: Step) -> list[Attention]:
    """The same for a library without results: the break writes into a buffer of its layer."""

    def write(out: torch.Tensor, *arguments: Any) -> None:
        out.copy_(attend(*arguments))

    through = api.no_graph(write)

    def into(out: torch.Tensor) -> Attention:
        def call(*arguments: Any) -> torch.Tensor:
            through(out, *arguments)
            return out

        return call

    return [into(buffer) for buffer in step.buffers()]


# --- the rivals ---------------------------------------------------------------------------------


Made = tuple[Call, list[torch.Tensor]]
"""A call, and a list that holds the logits after it."""


def makers(step: Step, apis: Sequence[rivals.Breakable]) -> dict[str, Callable[[], Made]]:
    found: dict[str, Callable[[], Made]] = {
        "eager": partial(eagerly, step),
        "whole": partial(whole, step),
    }
    for api in apis:
        if api.is_ours:
            found["ours-static"] = partial(broken, api, step, returning_breaks)
        found[f"{api.key}-buffer"] = partial(broken, api, step, writing_breaks)
    return found


def eagerly(step: Step) -> Made:
    output = [step()]

    def call() -> None:
        output[0] = step()

    return call, output


def whole(step: Step) -> Made:
    rivals.warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    return graph.replay, [logits]


def broken(
    api: rivals.Breakable,
    step: Step,
    breaks: Callable[[rivals.Breakable, Step], Sequence[Attention]],
) -> Made:
    sequence = api.sequence()
    stream, options = api.stream_for(sequence)
    rivals.warm_up(step, stream)
    with (
        attention_through(step.model, breaks(api, step)),
        api.block(sequence, **options),
    ):
        logits = step()
    return sequence.replay, [logits]


def noise(step: Step) -> str:
    first, second = step().clone(), step()
    return f"eager against eager, relative error {relative_error(second, first):.1e}"


def check(rival: str, step: Step, call: Call, output: list[torch.Tensor]) -> float:
    """New token ids, a poisoned output: what comes back is eager's, but for bf16's rounding."""
    step.fill()
    wanted = step().clone()
    output[0].fill_(float("nan"))
    call()
    torch.cuda.synchronize()
    error = relative_error(output[0], wanted)
    if not error < TOLERANCE:
        raise AssertionError(f"{step.shape.name}, {rival}: relative error {error}")
    return error


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


# --- what was found -----------------------------------------------------------------------------


def write(report: Report, shapes: Sequence[Shape], cases: Sequence[Case]) -> None:
    names = {float(index): shape.name for index, shape in enumerate(shapes)}
    table = by_rival(cases)
    eager = {size: spread(samples).median for size, samples in table["eager"].items()}
    report.plot("steps", "Time of a step", x="", y="time, eager = 1", bars=True)
    report.add_cases("steps", cases, names=names, per=eager)
    for index, shape in enumerate(shapes):
        tokens = shape.batch * shape.tokens
        for rival, sizes in table.items():
            rates = [tokens / sample * 1e6 for sample in sizes[index]]
            report.figure("tokens a second", shape.name, rival, spread(rates), "tokens/s")
        for rival, sizes in table.items():
            value = ratio(sizes[index], table["whole"][index])
            report.figure("time against the whole graph", shape.name, rival, value, "x")
        here = table["ours-buffer"][index]
        theirs = table.get("meta-buffer")
        report.aim(
            f"{shape.name}: Meta's time relative to ours",
            ratio(theirs[index], here) if theirs else None,
            at_least=1.0,
        )
        report.aim(
            f"{shape.name}: time relative to the whole graph",
            ratio(here, table["whole"][index]),
            at_most=1.05,
        )
