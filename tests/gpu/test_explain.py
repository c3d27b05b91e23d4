"""`explain` on a device: what CUDA, torch's allocator and the libraries refuse, found at its line.

The line that has to be found is the one with `# here` in the function. Each proposal is captured and
compared with eager runs.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from breakable_cuda_graphs import (
    CUDAGraphSequence,
    breakable_graph,
    explain,
    force_no_graph,
    no_graph,
)

from .helpers import dev

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


def here(function: Callable[..., Any]) -> int:
    lines, first = inspect.getsourcelines(function)
    (place,) = (number for number, line in enumerate(lines, first) if "# here" in line)
    return place


def assert_found(report: Any, kind: str, function: Callable[..., Any]) -> Any:
    (finding,) = report.findings
    assert (finding.kind, finding.line) == (kind, here(function)), str(report)
    return finding


def inside(function: Callable[..., Any]) -> Callable[..., Any]:
    """A step that has the function in its middle."""

    def step(x: Any) -> Any:
        hidden = x * 2
        result = function(hidden)
        return hidden + 1 if result is None else hidden + result

    return step


# ---------------------------------------------------------------- one of each kind


def gate(t: Any) -> None:
    if t.sum().item() > 0:  # here
        t.mul_(2)
    else:
        t.mul_(-3)


def keep_positive(t: Any) -> Any:
    return t[t > 0].sum()  # here


def count_positive(t: Any) -> None:
    t.add_((t > 0).nonzero().shape[0])  # here


def show(t: Any) -> None:
    str(t)  # here


def to_list(t: Any) -> None:
    t.mul_(max(t.tolist()))  # here


def to_cpu(t: Any) -> None:
    t.add_(float(t.to("cpu").max()))  # here


def wait(t: Any) -> None:
    t.mul_(2)
    torch.cuda.synchronize()  # here


def wait_for_the_stream(t: Any) -> None:
    t.mul_(2)
    torch.cuda.current_stream().synchronize()  # here


def wait_for_an_event(t: Any) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()  # here


def add_a_constant(t: Any) -> None:
    t.add_(torch.tensor([1.0] * t.numel(), device="cuda"))  # here


def add_from_the_host(t: Any) -> None:
    t.add_(torch.ones(t.numel()).to("cuda"))  # here


HOST = torch.ones(64)


def copy_from_the_host(t: Any) -> None:
    t.copy_(HOST, non_blocking=True)  # here


class Cache:
    def __init__(self) -> None:
        self.whole = dev(1)

    def grow(self, t: Any) -> None:
        self.whole = torch.cat([self.whole, t])  # here


SIMPLE = [
    ("host read", gate),
    ("host read", keep_positive),
    ("host read", count_positive),
    ("host read", show),
    ("host read", to_list),
    ("host read", to_cpu),
    ("sync", wait),
    ("sync", wait_for_the_stream),
    ("sync", wait_for_an_event),
    ("pageable copy", add_a_constant),
    ("pageable copy", add_from_the_host),
    ("pageable copy", copy_from_the_host),
]


@pytest.mark.parametrize(
    ("kind", "function"), SIMPLE, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_blocker_is_found_at_its_line_and_its_mark_captures_and_equals_eager(
    kind: str, function: Callable[..., Any]
) -> None:
    report = explain(inside(function), dev(3), check=True)
    assert_found(report, kind, function)
    (mark,) = report.marks
    assert mark.function == function.__qualname__
    assert report.check, str(report)
    assert report.check.segments == 3


def test_memory_that_grows_is_found() -> None:
    cache = Cache()
    report = explain(inside(cache.grow), dev(3))
    assert {(f.kind, f.line) for f in report.findings} == {("memory", here(Cache.grow))}


def test_a_generator_that_the_capture_does_not_know_is_found() -> None:
    generator = torch.Generator("cuda")

    def add_noise(t: Any) -> None:
        t.add_(torch.rand(t.shape, device="cuda", generator=generator))  # here

    report = explain(inside(add_noise), dev(3), check=True)
    assert_found(report, "generator", add_noise)
    assert report.check, str(report)


def test_streams_outside_of_the_capture_are_found() -> None:
    side = torch.cuda.Stream()

    def strays(t: Any) -> None:
        with torch.cuda.stream(side):
            t.mul_(2)  # here

    def goes_to_the_default_stream(t: Any) -> None:
        with torch.cuda.stream(torch.cuda.default_stream()):
            t.mul_(2)  # here

    def forks(t: Any) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            t.mul_(2)  # here

    for function in (strays, goes_to_the_default_stream, forks):
        assert_found(explain(inside(function), dev(3)), "stream", function)
        torch.cuda.synchronize()


def test_forked_work_that_is_joined_is_not_found_and_captures() -> None:
    side = torch.cuda.Stream()

    def forks(t: Any) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            t.mul_(2)
        torch.cuda.current_stream().wait_stream(side)

    report = explain(inside(forks), dev(3), check=True)
    assert report.findings == (), str(report)
    assert report.check, str(report)


def test_a_graph_of_torch_is_found() -> None:
    graph, static = torch.cuda.CUDAGraph(), dev(1)
    with torch.cuda.graph(graph):
        static.mul_(2)

    def replays(t: Any) -> None:
        graph.replay()  # here
        t.add_(static)

    assert_found(explain(inside(replays), dev(3)), "graph", replays)


def test_a_host_callback_of_the_bindings_is_found() -> None:
    import ctypes

    from cuda.bindings import driver

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    address = ctypes.cast(callback, ctypes.c_void_p).value

    def calls_back(t: Any) -> None:
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        driver.cuLaunchHostFunc(stream, driver.CUhostFn(address), 0)  # here

    assert_found(explain(inside(calls_back), dev(3)), "callback", calls_back)
    torch.cuda.synchronize()


COLLECTIVE = """
import warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from breakable_cuda_graphs import explain
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
def reduces(t):
    dist.all_reduce(t)
def step(x):
    h = x * 2
    reduces(h)
    return h
x = torch.ones(8, device="cuda")
step(x)
report = explain(step, x)
print([(f.kind, f.function) for f in report.findings])
dist.destroy_process_group()
"""


def test_a_collective_of_nccl_is_found() -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    done = subprocess.run(
        [sys.executable, "-c", COLLECTIVE], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "[('collective', 'reduces')]" in done.stdout


# ---------------------------------------------------------------- no false ones


class Block(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        self.norm = torch.nn.LayerNorm(64)
        self.feed = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)
        )
        self.conv = torch.nn.Conv1d(64, 64, 3, padding=1)
        self.dropout = torch.nn.Dropout(0.25)

    def forward(self, x: Any) -> Any:
        scale = torch.tensor(0.5)  # a number of the host, which goes along by value
        y, _ = self.attention(x, x, x, need_weights=False)
        y = torch.where(y > 0, y, torch.zeros_like(y)) * scale
        y = self.conv(y.transpose(1, 2)).transpose(1, 2)
        return self.dropout(self.feed(self.norm(x + y)))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_clean_model_shows_nothing_and_captures(training: bool, autocast: bool) -> None:
    model, x = Block().cuda().train(training), torch.randn(2, 16, 64, device="cuda")

    def forward(x: Any) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            return model(x)

    with torch.set_grad_enabled(training):
        report = explain(forward, x, check=True)
    assert report.findings == (), str(report)
    assert report.check, str(report)


def test_code_that_goes_another_way_in_a_capture_goes_it_in_the_watched_run_too() -> None:
    def step(x: Any) -> Any:
        if not torch.cuda.is_current_stream_capturing():
            x.sum().item()
        return x * 2

    asks = torch.cuda.is_current_stream_capturing
    report = explain(step, dev(3), check=True)
    assert report.findings == (), str(report)
    assert report.check, str(report)
    assert torch.cuda.is_current_stream_capturing is asks
    assert not asks()


def test_a_training_step_shows_nothing() -> None:
    model, x = Block().cuda(), torch.randn(2, 16, 64, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step()  # the optimizer makes its state at its first step
    report = explain(step)
    assert report.findings == (), str(report)


def test_what_waits_inside_of_an_operator_is_found_too() -> None:
    square = torch.eye(8, device="cuda") * 2

    def inverts(t: Any) -> None:
        t[:8].add_(torch.linalg.inv(square).sum(0))  # here

    report = explain(inside(inverts), dev(3))
    assert_found(report, "host read", inverts)


def test_breaks_in_backward_are_captured_in_the_relaxed_mode() -> None:
    class Clip(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
        @staticmethod
        def forward(ctx: Any, t: Any) -> Any:
            return t.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return clipped(grad)

    def clipped(grad: Any) -> Any:
        return grad / grad.abs().max().item()  # here

    weight = torch.full((64,), 2.0, device="cuda", requires_grad=True)
    weight.grad = torch.zeros_like(weight)

    def step(x: Any) -> Any:
        weight.grad.zero_()
        (Clip.apply(weight * x)).sum().backward()
        return weight.grad * 1

    report = explain(step, dev(3), check=True)
    assert_found(report, "host read", clipped)
    assert [mark.function.rpartition(".")[2] for mark in report.marks] == ["clipped"]
    assert report.check, str(report)


# ---------------------------------------------------------------- a sequence


def test_a_sequence_says_what_draws_and_what_is_joined() -> None:
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        x.add_(1)
        force_no_graph()
        x.mul_(2)
        gate_of_break(x)
        y = torch.rand(64, device="cuda") + x
    seq.replay()
    page = seq.explain()
    assert "by torch" in page
    assert "2 segments in one launch" in page
    assert "segment 4 draws random numbers: seed and offset are written for it" in page
    assert "inside another capture it is refused: its segments draw random numbers" in page
    assert y.shape == (64,)


gate_of_break = no_graph(gate)


# ---------------------------------------------------------------- what it leaves behind


def test_everything_is_put_back_after_an_error() -> None:
    wait, mode = torch.cuda.synchronize, torch.cuda.get_sync_debug_mode()
    record, shown = torch.cuda.Event.record, warnings.showwarning

    def fails(x: Any) -> None:
        x.sum().item()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        explain(fails, dev(1))
    assert torch.cuda.synchronize is wait
    assert torch.cuda.Event.record is record
    assert torch.cuda.get_sync_debug_mode() == mode
    assert warnings.showwarning is shown


def test_the_marked_function_is_clean() -> None:
    report = explain(inside(no_graph(gate)), dev(3), check=True)
    assert report.findings == (), str(report)
    assert report.check, str(report)


def test_the_message_of_a_failed_capture_points_here() -> None:
    with pytest.raises(RuntimeError) as info, breakable_graph(CUDAGraphSequence()):
        dev(1).sum().item()
    assert any("explain(" in note for note in info.value.__notes__)
