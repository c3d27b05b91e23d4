"""`explain`: each way to break a capture is found at its line, a clean model shows none, marks cure.

The line that has to be found is the one with `# here` in the function.
"""

from __future__ import annotations

import gc
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from breakable_cuda_graphs import (
    CaptureError,
    CUDAGraphSequence,
    breakable_graph,
    explain,
    no_graph,
)
from breakable_cuda_graphs._driver import bindings
from breakable_cuda_graphs.explaining.report import (
    Explanation,
    Finding,
)
from helping import drop_stream, forked, in_thread, new_stream

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs.simulator import tensors  # noqa: E402  (needs torch)


def here(function: Callable[..., Any]) -> int:
    """The number of the line that is marked."""
    lines, first = inspect.getsourcelines(function)
    (place,) = (number for number, line in enumerate(lines, first) if "# here" in line)
    return place


def x_of(*values: float) -> Any:
    return torch.tensor(values or (1.0, -2.0, 3.0, -4.0))


def only(report: Explanation) -> Finding:
    (finding,) = report.findings
    return finding


def assert_found(report: Explanation, kind: str, function: Callable[..., Any]) -> Finding:
    """Just this one was found, of this kind, at the marked line of the function."""
    finding = only(report)
    assert (finding.kind, finding.line) == (kind, here(function)), str(report)
    assert finding.file == __file__
    assert finding.function == function.__qualname__
    assert finding.source in inspect.getsource(function)
    assert not report
    return finding


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
    print("now", t)  # here


def to_list(t: Any) -> None:
    t.mul_(max(t.tolist()))  # here


def to_cpu(t: Any) -> None:
    t.add_(float(t.cpu().numpy().max()))  # here


def wait(t: Any) -> None:
    t.mul_(2)
    torch.cpu.synchronize()  # here


def wait_by_the_driver(t: Any) -> None:
    t.mul_(2)
    bindings.current().cuStreamSynchronize(bindings.types.CUstream(0))  # here


def add_a_constant(t: Any) -> None:
    t.add_(torch.tensor([1.0, 2.0, 3.0, 4.0], device="cpu"))  # here


GENERATOR = torch.Generator()


def add_noise(t: Any) -> None:
    t.add_(torch.rand(t.shape, generator=GENERATOR))  # here


def call_back(t: Any) -> None:
    t.mul_(2)
    driver, current = bindings.current(), bindings.types.CUstream(tensors.current_stream())
    driver.cuLaunchHostFunc(current, bindings.types.CUhostFn(nothing_address()), 0)  # here


def nothing_address() -> int:
    import ctypes

    global _kept
    _kept = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    return ctypes.cast(_kept, ctypes.c_void_p).value or 0


class Cache:
    """Memory that grows from call to call, in three ways."""

    def __init__(self) -> None:
        self.whole = torch.zeros(4)
        self.parts: list[Any] = []

    def grow(self, t: Any) -> None:
        self.whole = torch.cat([self.whole, t])  # here

    def collect(self, t: Any) -> None:
        self.parts.append(t * 2)  # here

    def stretch(self, t: Any) -> None:
        self.whole.resize_(4096)  # here
        self.whole[:4].copy_(t)


def inside(function: Callable[..., Any]) -> Callable[..., Any]:
    """A step that has the function in its middle."""

    def step(x: Any) -> Any:
        hidden = x * 2
        result = function(hidden)
        return hidden + 1 if result is None else hidden + result

    return step


SIMPLE = [
    ("host read", gate),
    ("host read", keep_positive),
    ("host read", count_positive),
    ("host read", show),
    ("host read", to_list),
    ("host read", to_cpu),
    ("sync", wait),
    ("sync", wait_by_the_driver),
    ("pageable copy", add_a_constant),
    ("callback", call_back),
]


@pytest.mark.parametrize(
    ("kind", "function"), SIMPLE, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_blocker_is_found_at_its_line_and_its_function_is_to_be_marked(
    device: Any, kind: str, function: Callable[..., Any]
) -> None:
    report = explain(inside(function), x_of(), check=True)
    finding = assert_found(report, kind, function)
    (mark,) = report.marks
    assert mark.function == function.__qualname__
    assert mark.findings == (1,)
    assert mark.line == function.__code__.co_firstlineno
    assert mark.decorator in finding.advice
    assert report.unmarked == ()
    assert report.check, str(report)
    assert report.check.segments == 3
    assert "on changed ones" in report.check.text


@pytest.mark.parametrize("way", ["grow", "collect", "stretch"])
def test_memory_that_grows_from_call_to_call_is_found(device: Any, way: str) -> None:
    cache = Cache()
    report = explain(inside(getattr(cache, way)), x_of())
    found = assert_found_first(report, "memory", getattr(Cache, way))
    assert [mark.function for mark in report.marks] == [f"Cache.{way}"]
    assert "float32" in found.detail


def assert_found_first(report: Explanation, kind: str, function: Callable[..., Any]) -> Finding:
    """All that was found is at the marked line: memory is replaced and kept there at once."""
    assert {(f.kind, f.line) for f in report.findings} == {(kind, here(function))}, str(report)
    return report.findings[0]


def test_a_generator_that_the_capture_does_not_know_is_found(device: Any) -> None:
    report = explain(inside(add_noise), x_of(), check=True)
    finding = assert_found(report, "generator", add_noise)
    assert "generators=[generator]" in finding.advice
    assert report.marks == ()
    assert report.unmarked == ()
    assert report.check, str(report)
    assert report.check.segments == 1


@pytest.fixture
def side() -> Iterator[Any]:
    stream = new_stream()
    yield stream
    drop_stream(stream)


def test_work_on_a_stream_that_was_not_forked_is_found(device: Any, side: Any) -> None:
    def strays(t: Any) -> None:
        with tensors.stream(side):
            t.mul_(2)  # here

    finding = assert_found(explain(inside(strays), x_of()), "stream", strays)
    assert "not forked" in finding.detail


def test_work_on_the_default_stream_is_found(device: Any) -> None:
    def goes_astray(t: Any) -> None:
        with tensors.stream(0):
            t.mul_(2)  # here

    finding = assert_found(explain(inside(goes_astray), x_of()), "stream", goes_astray)
    assert "legacy default" in finding.detail


def test_forked_work_that_is_not_joined_is_found(device: Any, side: Any) -> None:
    def forks(t: Any) -> None:
        with forked(side, join=False):
            t.mul_(2)  # here

    finding = assert_found(explain(inside(forks), x_of()), "stream", forks)
    assert "not joined" in finding.detail


def test_forked_work_that_is_joined_is_not_found(device: Any, side: Any) -> None:
    other = new_stream()

    def forks(t: Any) -> None:
        with forked(side):
            t.mul_(2)
            with forked(other):  # forked from the fork, and joined to it
                t.add_(1)

    report = explain(inside(forks), x_of(), check=True)
    drop_stream(other)
    assert report, str(report)
    assert report.check, str(report)


def test_what_torch_compile_compiles_is_found_once(device: Any) -> None:
    compiled = torch.compile(lambda t: t * 3 + 1, backend="eager")

    def runs_compiled(t: Any) -> None:
        t.copy_(compiled(t))  # here

    finding = assert_found(explain(inside(runs_compiled), x_of()), "compile", runs_compiled)
    assert "once before the capture" in finding.advice
    again = explain(inside(runs_compiled), x_of())
    assert again, str(again)
    assert any("torch.compile" in note for note in again.notes)


def test_watching_does_not_make_torch_compile_compile_anew(device: Any) -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(1)
        return graph

    compiled = torch.compile(lambda t: t.sin() + 1, backend=backend)
    compiled(x_of())
    assert explain(compiled, x_of())
    compiled(x_of())
    assert len(calls) == 1


@pytest.fixture
def fake_triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with Triton's two hooks, and a kernel that compiles and tunes itself."""
    triton: Any = types.ModuleType("triton")

    class Autotuner:
        def _bench(self, *args: Any, config: Any, **meta: Any) -> float:
            return 1.0

        def run(self, t: Any) -> None:
            self._bench(t, config=None)
            t.mul_(2)

    class Kernel:
        name = "scale"

        def run(self, t: Any) -> None:
            if triton.knobs.runtime.jit_post_compile_hook is not None:
                triton.knobs.runtime.jit_post_compile_hook(fn=self, key="")
            t.mul_(2)

    triton.Autotuner, triton.Kernel = Autotuner, Kernel
    triton.runtime = types.SimpleNamespace(autotuner=types.SimpleNamespace(Autotuner=Autotuner))
    triton.knobs = types.SimpleNamespace(runtime=types.SimpleNamespace(jit_post_compile_hook=None))
    monkeypatch.setitem(sys.modules, "triton", triton)
    return triton


@pytest.mark.parametrize("way", ["Autotuner", "Kernel"])
def test_what_triton_compiles_and_tunes_is_found(device: Any, fake_triton: Any, way: str) -> None:
    kernel = getattr(fake_triton, way)()

    def launches(t: Any) -> None:
        run = kernel.run
        run(t)  # here

    report = explain(inside(launches), x_of())
    (finding,) = report.findings
    assert finding.kind == "compile"
    assert "Triton" in finding.operator
    assert fake_triton.knobs.runtime.jit_post_compile_hook is None
    assert fake_triton.Autotuner._bench.__qualname__.endswith("Autotuner._bench")


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_collective_is_found(device: Any, one_rank: None) -> None:
    def reduces(t: Any) -> None:
        torch.distributed.all_reduce(t)  # here

    finding = assert_found(explain(inside(reduces), x_of()), "collective", reduces)
    assert "allreduce" in finding.operator


# ---------------------------------------------------------------- no false ones


class Block(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """A transformer layer as people write it: masks, dropout, constants of the host, in-place work."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = torch.nn.LayerNorm(8)
        self.feed = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)
        )
        self.dropout = torch.nn.Dropout(0.25)
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, x: Any, cache: Any) -> Any:
        scale = torch.tensor(0.5)  # a number of the host, which goes along by value
        mask = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)
        y, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        cache[:, 1:3].copy_(y[:, 1:3])
        y = torch.where(y > 0, y, torch.zeros_like(y)) * scale + self.table[:8]
        return self.dropout(self.feed(self.norm(x + y)))


@pytest.mark.parametrize("training", [False, True])
def test_a_clean_model_shows_nothing_and_captures(device: Any, training: bool) -> None:
    model = Block().train(training)
    with torch.set_grad_enabled(training):
        report = explain(model, torch.randn(2, 4, 8), cache=torch.zeros(2, 4, 8), check=True)
    assert report.findings == (), str(report)
    assert report.check, str(report)
    assert report.check.segments == 1


def test_a_training_step_shows_nothing(device: Any) -> None:
    model, x = Block(), torch.randn(2, 4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=False)
        loss = model(x, torch.zeros(2, 4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert explain(step), str(explain(step))


def test_a_training_step_is_compared_from_equal_parameters(device: Any) -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def clip_gradients() -> None:
        if model.weight.grad.norm().item() > 0.01:
            model.weight.grad.mul_(0.5)

    def step(x: Any) -> Any:
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        clip_gradients()
        optimizer.step()
        return loss.detach()

    step(x)
    weight = model.weight.detach().clone()
    report = explain(step, x, check=True)
    assert [mark.function.rpartition(".")[2] for mark in report.marks] == ["clip_gradients"]
    assert report.check, str(report)
    assert "on changed ones" in report.check.text
    torch.testing.assert_close(model.weight.detach(), weight, rtol=0, atol=0)  # put back


def test_an_optimizer_that_torch_would_not_capture_is_found(device: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    optimizer = torch.optim.Adam([weight], capturable=False)
    optimizer.step()

    def updates() -> None:
        optimizer.step()  # here

    report = explain(lambda: updates())
    assert {each.line for each in report.findings} == {here(updates)}, str(report)
    (finding,) = (each for each in report.findings if each.kind == "optimizer")
    assert finding.operator == "Adam.step"
    assert "capturable=True" in finding.advice
    assert sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks == {}


def test_what_marked_functions_do_is_left_out(device: Any) -> None:
    report = explain(inside(no_graph(gate)), x_of(), check=True)
    assert report, str(report)
    assert report.check, str(report)


def test_what_a_closure_holds_is_not_kept_by_the_report(device: Any) -> None:
    """The functions of a stack close over tensors; they are told apart from what keeps those."""

    def step(x: Any) -> Any:
        mask = (x > 0) * 1.0

        def masked(t: Any) -> Any:
            return t * mask + torch.ones(4)

        return masked(x)

    report = explain(step, x_of())
    assert report.findings == (), str(report)


def test_lazy_state_is_found_at_the_first_call_only(device: Any) -> None:
    class Lazy:
        table: Any = None

        def __call__(self, x: Any) -> Any:
            if self.table is None:
                self.table = torch.arange(4.0) * 2
            return x + self.table

    lazy = Lazy()
    assert [finding.kind for finding in explain(lazy, x_of()).findings] == ["memory"]
    assert explain(lazy, x_of())


# ---------------------------------------------------------------- what is proposed


def largest(t: Any) -> float:
    return float(t.max().item())  # here


def scale_by_largest(t: Any) -> None:
    t.div_(largest(t))


def test_a_function_that_returns_a_number_is_not_marked_but_the_one_that_uses_it(
    device: Any,
) -> None:
    report = explain(inside(scale_by_largest), x_of(), check=True)
    assert_found(report, "host read", largest)
    assert [mark.function for mark in report.marks] == ["scale_by_largest"]
    assert report.check, str(report)


def test_what_only_the_function_itself_could_hold_is_said_to_be_moved(device: Any) -> None:
    def step(x: Any) -> Any:
        return x * largest(x)

    report = explain(step, x_of(), check=True)
    assert report.marks == ()
    assert report.unmarked == (1,)
    assert "returns plain Python values" in only(report).advice
    assert report.check is not None
    assert not report.check.captured
    assert "operation not permitted when stream is capturing" in report.check.text


def test_one_mark_is_enough_where_one_function_covers_the_others(device: Any) -> None:
    def outer(t: Any) -> None:
        gate(t)
        if t[0].item() > 100:
            t.zero_()

    report = explain(inside(outer), x_of(), check=True)
    assert [f.kind for f in report.findings] == ["host read"] * 2
    (mark,) = report.marks
    assert mark.function.endswith("outer")
    assert mark.findings == (1, 2)
    assert report.check, str(report)


def test_a_function_that_returns_history_is_not_marked(device: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(4))

    def chooses(t: Any) -> Any:
        return t * weight if t[0].item() > 0 else t + weight

    report = explain(inside(chooses), x_of())
    assert report.marks == ()
    assert "torch.autograd.Function" in only(report).advice


def test_methods_and_closures_and_decorated_functions_are_marked_for_the_trial(device: Any) -> None:
    class Model(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

        @torch.no_grad()
        def route(self, t: Any, *, by: float = 2.0) -> Any:
            self.seen += 1
            return t * by if t[0].item() > 0 else t - by

        def forward(self, x: Any) -> Any:
            def clip(t: Any) -> None:
                if t.max().item() > 5:
                    t.clamp_(max=top)

            top = 5.0
            y = self.route(x * 2, by=3.0)
            clip(y)
            return y + 1

    gc.collect()
    route, defaults = Model.route.__wrapped__.__code__, Model.route.__wrapped__.__kwdefaults__
    report = explain(Model(), x_of(), check=True)
    names = sorted(mark.function.rpartition(".")[2] for mark in report.marks)
    assert names == ["clip", "route"], str(report)
    assert report.check, str(report)
    assert Model.route.__wrapped__.__code__ is route
    assert Model.route.__wrapped__.__kwdefaults__ is defaults


def test_a_number_that_the_capture_freezes_is_seen_by_the_check(device: Any) -> None:
    frozen = no_graph(largest)  # a mark that the user made, and that is wrong

    def step(x: Any) -> Any:
        return x * frozen(x)

    report = explain(step, x_of(), check=True)
    assert report.findings == ()
    assert report.check is not None
    assert report.check.captured
    assert not report.check.equal
    assert not report.check
    assert "differ" in report.check.text
    assert not report


def test_a_replay_that_fails_is_a_failed_check(device: Any) -> None:
    """What a break returns depends on data, and at capture it sees none."""

    def mask_of(t: Any) -> Any:
        return (t > 0) * 1.0 if not bool((t > -100).all()) else None

    def step(x: Any) -> Any:
        mask = mask_of(x * 2)
        return x + 1 if mask is None else x * mask

    capture_sees = no_graph(outputs="static")(mask_of)

    def marked_step(x: Any) -> Any:
        mask = capture_sees(x * 2)
        return x + 1 if mask is None else x * mask

    assert explain(step, x_of()).marks
    report = explain(marked_step, x_of(), check=True)
    assert report.check is not None
    assert report.check.captured
    assert report.check.equal is False
    assert "a replay failed on the given inputs: ReplayError" in report.check.text


def test_a_function_that_changes_python_state_is_not_compared(device: Any) -> None:
    counter = [0]

    def step(x: Any) -> Any:
        counter[0] += 1
        return x * counter[0]

    check = explain(step, x_of(), check=True).check
    assert check is not None
    assert check.equal is None
    assert "state of Python's" in check.text


def test_what_a_trial_finds_beyond_the_watched_run_is_told(device: Any) -> None:
    def step(x: Any) -> Any:
        y = x * 2
        hidden = [y]
        if (
            bindings.current().capture_info(bindings.types.CUstream(tensors.current_stream())).id
        ):  # only in a capture
            hidden[0].tolist()  # here
        return y

    report = explain(step, x_of(), check=True)
    assert not report
    finding = only(report)
    assert (finding.kind, finding.line) == ("refused", here(step))


def test_code_without_a_file_is_the_users_too(device: Any) -> None:
    """As of `python -c`, a prompt, or a notebook's cell."""
    source = """
def gate(t):
    if t.sum().item() > 0:
        t.mul_(2)
def step(x):
    y = x * 2
    gate(y)
    return y
"""
    scope: dict[str, Any] = {}
    exec(source, scope)
    report = explain(scope["step"], x_of(), check=True)
    assert (only(report).file, only(report).line) == ("<string>", 3)
    assert [mark.function for mark in report.marks] == ["gate"]
    assert report.check, str(report)


# ---------------------------------------------------------------- state, and what it leaves alone


class Counter:
    """Does something else at each call."""

    calls = 0

    def __call__(self, t: Any) -> None:
        self.calls += 1
        t.mul_(self.calls)


def test_arguments_hold_what_one_run_made_of_them(device: Any) -> None:
    x = x_of()
    explain(inside(gate), x)
    assert x.tolist() == [1.0, -2.0, 3.0, -4.0]
    explain(gate, x)
    assert x.tolist() == [-3.0, 6.0, -9.0, 12.0]


@pytest.mark.parametrize(
    "function", [gate, largest, Counter()], ids=["captured", "refused", "uneven"]
)
def test_a_check_puts_the_arguments_back(device: Any, function: Callable[..., Any]) -> None:
    x = x_of()
    explain(function, x, check=True)
    assert x.tolist() == [1.0, -2.0, 3.0, -4.0]


def test_random_numbers_are_those_of_eager_runs(device: Any) -> None:
    def step(x: Any) -> Any:
        gate(x)
        return torch.nn.functional.dropout(x, 0.5) + torch.rand(4)

    report = explain(step, x_of(), check=True)
    assert report.check, str(report)


def test_an_error_of_the_function_surfaces_and_everything_is_put_back(device: Any) -> None:
    torch_wait, profile = torch.cpu.synchronize, sys.getprofile()
    launch = bindings.current().module.cuLaunchHostFunc

    def fails(x: Any) -> None:
        gate(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        explain(fails, x_of())
    assert torch.cpu.synchronize is torch_wait
    assert sys.getprofile() is profile
    assert bindings.current().module.cuLaunchHostFunc == launch
    assert explain(lambda x: x + 1, x_of())


def test_it_is_refused_inside_a_capture_and_inside_itself(device: Any) -> None:
    with breakable_graph(CUDAGraphSequence()):
        with pytest.raises(CaptureError, match="outside"):
            explain(gate, x_of())
    with pytest.raises(RuntimeError, match="one at a time"):
        explain(lambda: explain(gate, x_of()))


def test_it_is_refused_under_a_profiler(device: Any) -> None:
    sys.setprofile(lambda *_: None)
    try:
        with pytest.raises(RuntimeError, match="profile function"):
            explain(gate, x_of())
    finally:
        sys.setprofile(None)


def test_a_function_whose_work_is_still_to_be_done_is_not_called_sound(device: Any) -> None:
    """Nothing of it has run: "nothing found" would be said of nothing."""
    x = torch.ones(2)

    async def later() -> float:
        return x.sum().item()

    for unfinished in (
        later,
        lambda: (x.sum().item() for _ in range(2)),
        lambda: [map(torch.Tensor.item, (x,))],
    ):
        with pytest.raises(TypeError, match="whose work is still to be done"):
            explain(unfinished)
    assert not explain(lambda: list(map(torch.Tensor.item, x)))


def test_what_is_not_callable_is_refused(device: Any) -> None:
    with pytest.raises(TypeError, match="callable"):
        explain(3)  # type: ignore[arg-type]


def test_it_works_in_a_thread_of_its_own(device: Any) -> None:
    report = in_thread(lambda: explain(inside(gate), x_of()))
    assert_found(report, "host read", gate)


def test_what_other_threads_do_is_not_the_functions(device: Any) -> None:
    def step(x: Any) -> Any:
        in_thread(torch.cpu.synchronize)
        return x * 2

    report = explain(step, x_of())
    assert report.findings == (), str(report)


# ---------------------------------------------------------------- the page


def test_the_page_names_lines_marks_and_what_to_do(device: Any) -> None:
    def step(x: Any) -> Any:
        hidden = x * 2
        for _ in range(3):
            gate(hidden)
        keep_positive(hidden)
        return hidden

    page = str(explain(step, x_of(), check=True))
    assert "2 findings" in page
    assert "3 times" in page
    assert f"test_explain.py:{here(gate)} in gate" in page
    assert "if t.sum().item() > 0:" in page
    assert "capture_if" in page
    assert "@no_graph on gate" in page
    assert '@no_graph(outputs="static") on keep_positive' in page
    assert "Check: captured as 9 segments; replays equal eager runs" in page


def test_a_report_is_true_where_nothing_was_found(device: Any) -> None:
    report = explain(lambda x: x * 2, x_of())
    assert report
    assert report.check is None
    assert "nothing found" in str(report)


# ---------------------------------------------------------------- without torch


def test_without_torch_the_driver_and_trial_captures_tell(
    monkeypatch: pytest.MonkeyPatch, bare_device: Any
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    driver = bindings.current()

    def asks() -> None:
        driver.cuStreamSynchronize(bindings.types.CUstream(0))  # here

    def step() -> None:
        asks()

    report = explain(step, check=True)
    assert (only(report).kind, only(report).line) == ("sync", here(asks))
    assert report.check is not None
    assert report.check.captured
    assert report.check.equal is None
    assert any("without torch" in note for note in report.notes)


# ---------------------------------------------------------------- libraries


LIBRARY = """
def clip(t):
    if t.max().item() > 5:
        t.clamp_(max=5)


def forward(t):
    y = t * 2
    clip(y)
    return y + 1
"""


@pytest.fixture
def library(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library that is installed, by its place."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_library_of_nobody.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    yield __import__("a_library_of_nobody")
    sys.modules.pop("a_library_of_nobody", None)


def test_what_a_library_does_is_told_at_the_users_line_and_at_its_own(
    device: Any, library: Any
) -> None:
    def step(x: Any) -> Any:
        return library.forward(x) * 3  # here

    report = explain(step, x_of(), check=True)
    finding = assert_found(report, "host read", step)
    assert finding.inside.endswith("a_library_of_nobody.py:3 (clip)")
    assert [mark.function for mark in report.marks] == ["clip"]
    assert report.check, str(report)


def test_a_library_alone_is_told_at_its_own_line(device: Any, library: Any) -> None:
    finding = only(explain(library.forward, x_of()))
    assert (finding.function, finding.line, finding.inside) == ("clip", 3, "")


def test_a_function_of_the_users_between_is_marked_first(device: Any, library: Any) -> None:
    def prepare(t: Any) -> None:
        library.clip(t)

    report = explain(inside(prepare), x_of(), check=True)
    assert [mark.function.rpartition(".")[2] for mark in report.marks] == ["prepare"]
    assert report.check, str(report)
