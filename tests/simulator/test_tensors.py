"""CPU tensors captured operator by operator behave as device tensors do in a capture."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import pytest

from breakable_cuda_graphs.simulator import SimulatedDriver
from raw_calls import GLOBAL, begin, code, nodes, ok, status

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from breakable_cuda_graphs.simulator import tensor_places, tensors  # noqa: E402  (needs torch)


class Captured(NamedTuple):
    """What a capture gave: the body's result, the graph, and a way to launch it."""

    result: Any
    graph: Any
    replay: Callable[[], None]


class Bench:
    """A simulated driver, one stream, and captures on it."""

    def __init__(self, seed: int = 1) -> None:
        self.driver: Any = SimulatedDriver(seed)
        ok(self.driver.cuInit(0))
        self.stream = ok(self.driver.cuStreamCreate(1))
        self.recorder = tensors.TensorRecorder(self.driver)

    def capture(self, body: Callable[[], Any]) -> Captured:
        begin(self.driver, self.stream, GLOBAL)
        self.recorder.begin(self.stream)
        try:
            result = body()
        finally:
            self.recorder.end()
            answer = self.driver.cuStreamEndCapture(self.stream)
        graph = ok(answer)
        executable = ok(self.driver.cuGraphInstantiate(graph, 0))
        return Captured(
            result, graph, lambda: ok(self.driver.cuGraphLaunch(executable, self.stream))
        )


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A bench on which nothing may be misused."""
    made = Bench()
    yield made
    assert made.driver.findings == []
    assert tensors.current_stream() == 0


def names(bench: Bench, graph: Any) -> list[str]:
    """The kernels of a graph by name."""
    found = []
    for node in nodes(bench.driver, graph):
        params = ok(bench.driver.cuGraphKernelNodeGetParams(node))
        found.append(ok(bench.driver.cuFuncGetName(params.func)).decode())
    return found


# ---------------------------------------------------------------- capture runs nothing


def test_a_replay_computes_from_what_the_inputs_hold_then(bench):
    x = torch.ones(3)
    captured = bench.capture(lambda: (x * 2 + 1).sum())
    x.fill_(5)
    captured.replay()
    assert captured.result.item() == 33
    x.fill_(0)
    captured.replay()
    assert captured.result.item() == 3


def test_each_operator_is_one_kernel_node_and_views_are_none(bench):
    x = torch.ones(2, 3)
    captured = bench.capture(lambda: (x.t()[1:].reshape(-1) + 1).mul(2))
    assert names(bench, captured.graph) == ["aten::clone", "aten::add.Tensor", "aten::mul.Tensor"]


def test_writes_to_older_tensors_do_not_happen_at_capture(bench):
    x = torch.zeros(3)
    captured = bench.capture(lambda: x.add_(1))
    assert captured.result is x
    assert x.tolist() == [0, 0, 0]
    captured.replay()
    captured.replay()
    assert x.tolist() == [2, 2, 2]


def test_results_are_poisoned_until_the_first_replay(bench):
    x = torch.ones(2)
    captured = bench.capture(
        lambda: (x + 1, x.to(torch.int64), x > 0, torch.empty(2), torch.zeros(2, dtype=torch.int8))
    )
    floats, ints, flags, empty, bytes_ = captured.result
    assert floats.isnan().all()
    assert ints.tolist() == [torch.iinfo(torch.int64).min] * 2
    assert flags.tolist() == [True, True]
    assert empty.isnan().all()
    assert bytes_.tolist() == [-128, -128]
    captured.replay()
    assert floats.tolist() == [2, 2]
    assert ints.tolist() == [1, 1]
    assert empty.isnan().all()
    assert bytes_.tolist() == [0, 0]


def test_results_of_an_earlier_segment_can_be_inputs_of_a_later_one(bench):
    table, index = torch.arange(4.0), torch.tensor([3, 1])
    one = bench.capture(lambda: index + 0)
    two = bench.capture(lambda: table[one.result])
    one.replay()
    two.replay()
    assert two.result.tolist() == [3, 1]


def test_out_and_several_results_work(bench):
    x, target = torch.arange(6.0).reshape(2, 3), torch.zeros(2, 3)

    def body() -> Any:
        torch.mul(x, 2, out=target)
        return torch.max(x, dim=1)

    captured = bench.capture(body)
    captured.replay()
    assert target.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert captured.result.values.tolist() == [2, 5]
    assert captured.result.indices.tolist() == [2, 2]


def test_views_share_memory_with_what_they_view(bench):
    x = torch.zeros(2, 3)

    def body() -> Any:
        row = x[1]
        row += 1
        x.t()[0].mul_(3)
        return row

    captured = bench.capture(body)
    captured.replay()
    assert x.tolist() == [[0, 0, 0], [3, 1, 1]]
    assert captured.result.data_ptr() == x[1].data_ptr()


def test_strides_types_and_lazy_conjugates_survive(bench):
    x = torch.randn(3, 4, dtype=torch.complex64).t()
    half = torch.randn(4, 3).to(torch.bfloat16)
    captured = bench.capture(lambda: (x.conj() * 2, x.conj().imag + half, half.t() @ half))
    captured.replay()
    expected = (x.conj() * 2, x.conj().imag + half, half.t() @ half)
    for got, wanted in zip(captured.result, expected, strict=True):
        assert torch.equal(got, wanted)
        assert got.stride() == wanted.stride()


def test_empty_tensors_pass(bench):
    captured = bench.capture(lambda: torch.cat([torch.ones(0), torch.ones(2)]) + torch.ones(2))
    captured.replay()
    assert captured.result.tolist() == [2, 2]


def test_training_steps_can_be_captured(bench):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    )
    twin = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    )
    twin.load_state_dict(model.state_dict())
    x, y = torch.randn(16, 4), torch.randn(16, 1)

    def step(net: Any) -> Any:
        loss = F.mse_loss(net(x), y)
        grads = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(net.parameters(), grads, strict=True):
                parameter.sub_(grad, alpha=0.1)
        return loss

    captured = bench.capture(lambda: step(model))
    for _ in range(3):
        captured.replay()
        loss = step(twin)
        assert torch.allclose(captured.result, loss)
    for mine, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.allclose(mine, theirs)


def test_backward_is_captured_and_leaves_gradients(bench):
    w = torch.ones(3, requires_grad=True)
    x = torch.arange(3.0)
    bench_result = bench.capture(lambda: (w * x).sum().backward())
    assert w.grad.isnan().all()
    bench_result.replay()
    assert w.grad.tolist() == [0, 1, 2]


def test_a_missing_dependency_shows_in_the_values():
    seen = set()
    bench = Bench(seed=4)
    x = torch.zeros(1)
    side = ok(bench.driver.cuStreamCreate(1))
    fork, join = (ok(bench.driver.cuEventCreate(2)) for _ in range(2))

    def body() -> None:
        ok(bench.driver.cuEventRecord(fork, bench.stream))
        ok(bench.driver.cuStreamWaitEvent(side, fork, 0))
        with tensors.stream(side):
            x.fill_(1)
        x.fill_(2)  # does not wait for the side stream
        ok(bench.driver.cuEventRecord(join, side))
        ok(bench.driver.cuStreamWaitEvent(bench.stream, join, 0))

    captured = bench.capture(body)
    for _ in range(20):
        captured.replay()
        seen.add(x.item())
    assert seen == {1, 2}


# ---------------------------------------------------------------- random numbers


def test_random_operators_draw_at_replay_what_eager_code_draws(bench):
    x = torch.ones(64)

    def body() -> Any:
        return F.dropout(x, 0.5), torch.rand(4), torch.empty(4).normal_(), torch.bernoulli(x / 2)

    torch.manual_seed(3)
    before = torch.get_rng_state()
    captured = bench.capture(body)
    assert torch.equal(torch.get_rng_state(), before)
    for _ in range(2):
        state = torch.get_rng_state()
        captured.replay()
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        for got, wanted in zip(captured.result, body(), strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(torch.get_rng_state(), after)


def test_a_generator_of_ones_own_is_left_alone_at_capture(bench):
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    captured = bench.capture(lambda: torch.rand(3, generator=generator))
    assert torch.equal(generator.get_state(), state)
    captured.replay()
    assert torch.equal(captured.result, torch.rand(3, generator=generator.manual_seed(1)))


# ---------------------------------------------------------------- reading the device

x = torch.arange(4.0)
READS = {
    "item": lambda: x.sum().item(),
    "bool": lambda: bool(x.sum() > 0),
    "tolist": lambda: x.tolist(),
    "numpy": lambda: x.numpy(),
    "print": lambda: repr(x),
    "format": lambda: f"{x.sum()}",
    "asarray": lambda: numpy.asarray(x),
    "index": lambda: range(4)[x[1].long()],
    "iterate": lambda: [float(each) for each in x],
    "nonzero": lambda: torch.nonzero(x),
    "mask": lambda: x[x > 1],
    "masked_select": lambda: torch.masked_select(x, x > 1),
    "equal": lambda: torch.equal(x, x),
    "unique": lambda: torch.unique(x),
    "repeat": lambda: torch.repeat_interleave(x, torch.ones(4, dtype=torch.int64)),
}


@pytest.mark.parametrize("read", READS)
def test_reading_the_device_raises_and_invalidates(bench, read):
    begin(bench.driver, bench.stream, GLOBAL)
    bench.recorder.begin(bench.stream)
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        READS[read]()
    with pytest.raises(RuntimeError, match="previous error during capture"):
        x + 1
    bench.recorder.end()
    assert code(bench.driver.cuStreamEndCapture(bench.stream)) == 901


def test_the_error_names_the_operator(bench):
    begin(bench.driver, bench.stream, GLOBAL)
    bench.recorder.begin(bench.stream)
    with pytest.raises(RuntimeError, match="aten::nonzero"):
        torch.nonzero(x)
    bench.recorder.end()
    bench.driver.cuStreamEndCapture(bench.stream)


def test_masks_that_need_no_reading_are_fine(bench):
    target, mask = torch.zeros(4), torch.tensor([True, False, True, False])

    def body() -> None:
        target[mask] = 3.0
        target.masked_fill_(~mask, -1)

    captured = bench.capture(body)
    captured.replay()
    assert target.tolist() == [3, -1, 3, -1]


def test_reading_is_fine_when_nothing_is_captured(bench):
    bench.recorder.begin(0)
    try:
        assert x.sum().item() == 6
        assert "tensor" in repr(x)
    finally:
        bench.recorder.end()


# ---------------------------------------------------------------- streams, threads, modes


def test_operators_on_a_stream_outside_the_capture_run_at_once(bench):
    target = torch.zeros(2)

    def body() -> None:
        with tensors.stream(0):
            target.add_(1)

    captured = bench.capture(body)
    assert target.tolist() == [1, 1]
    assert nodes(bench.driver, captured.graph) == []


def test_other_threads_are_not_recorded(bench):
    target = torch.zeros(2)

    def body() -> None:
        thread = threading.Thread(target=lambda: target.add_(1))
        thread.start()
        thread.join()

    captured = bench.capture(body)
    assert target.tolist() == [1, 1]
    assert nodes(bench.driver, captured.graph) == []


def test_one_thread_may_look_for_births_while_another_records():
    """Found by a random program: two captures at once, a set that grew while it was read."""
    stop, seen = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            seen.append(tensor_places.was_made_in_a_capture(1))

    bench, looking, interval = Bench(), threading.Thread(target=look), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    looking.start()
    try:
        made = [bench.capture(lambda: [x + 1 for _ in range(20)]).result for _ in range(20)]
    finally:
        stop.set()
        looking.join(20)
        sys.setswitchinterval(interval)
    assert not any(seen)
    assert tensor_places.was_made_in_a_capture(made[0][0].data_ptr())


def test_a_stream_is_current_inside_its_block_only():
    with tensors.stream(64):
        with tensors.stream(128):
            assert tensors.current_stream() == 128
        assert tensors.current_stream() == 64
    assert tensors.current_stream() == 0


def test_recording_ends_under_modes_of_the_users_own(bench):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    counted = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counted.append(func)
            return func(*args, **(kwargs or {}))

    class Passing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    target = torch.zeros(2)
    begin(bench.driver, bench.stream, GLOBAL)
    bench.recorder.begin(bench.stream)
    with Counting(), Passing():
        bench.recorder.end()
        target.add_(1)
    assert target.tolist() == [1, 1]
    assert len(counted) == 1
    ok(bench.driver.cuGraphDestroy(ok(bench.driver.cuStreamEndCapture(bench.stream))))


def test_a_replay_means_what_was_recorded_whatever_modes_are_on_then(bench):
    x = torch.randn(4, 4)
    captured = bench.capture(lambda: x @ x)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        captured.replay()
    assert torch.equal(captured.result, x @ x)


def test_the_recorder_is_not_entered_twice(bench):
    bench.recorder.begin(0)
    with pytest.raises(RuntimeError, match="already"):
        bench.recorder.begin(0)
    bench.recorder.end()
    bench.recorder.end()


# ---------------------------------------------------------------- addresses and lifetimes


def test_kernel_arguments_are_the_data_pointers(bench):
    x, y = torch.ones(2), torch.ones(2)
    captured = bench.capture(lambda: x + y)
    (node,) = nodes(bench.driver, captured.graph)
    params = ok(bench.driver.cuGraphKernelNodeGetParams(node))
    cells = (ctypes.c_void_p * 3).from_address(int(params.kernelParams))
    pointers = [ctypes.c_void_p.from_address(cell).value for cell in cells]
    assert pointers == [x.data_ptr(), y.data_ptr(), captured.result.data_ptr()]


def test_edited_addresses_are_followed(bench):
    x, other = torch.ones(2), torch.full((2,), 10.0)
    captured = bench.capture(lambda: x * 2)
    (node,) = nodes(bench.driver, captured.graph)
    executable = ok(bench.driver.cuGraphInstantiate(captured.graph, 0))
    params = ok(bench.driver.cuGraphKernelNodeGetParams(node))
    pointers = (other.data_ptr(), captured.result.data_ptr())
    params.kernelParams = (pointers, (ctypes.c_void_p, ctypes.c_void_p))
    ok(bench.driver.cuGraphExecKernelNodeSetParams(executable, node, params))
    ok(bench.driver.cuGraphLaunch(executable, bench.stream))
    assert captured.result.tolist() == [20, 20]


def test_intermediate_results_live_as_long_as_the_graph(bench):
    x = torch.ones(2)
    captured = bench.capture(lambda: ((x + 1) * 3) - 1)
    gc.collect()
    torch.randn(1000)
    captured.replay()
    assert captured.result.tolist() == [5, 5]


def test_constants_made_in_a_capture_are_kept(bench):
    x = torch.ones(2)
    captured = bench.capture(lambda: x + torch.tensor([5.0, 6.0]))
    gc.collect()
    captured.replay()
    assert captured.result.tolist() == [6, 7]


def test_an_input_that_died_is_found_and_the_result_is_poisoned():
    bench = Bench()
    inputs = [torch.ones(1000)]
    captured = bench.capture(lambda: inputs[0] + 1)
    captured.replay()
    assert captured.result[0].item() == 2
    inputs.clear()
    gc.collect()
    captured.replay()
    (sentence,) = bench.driver.findings
    assert "aten::add.Tensor ran on memory that was freed" in sentence
    assert "(1000,)" in sentence
    assert captured.result.isnan().all()


def test_a_graph_does_not_keep_its_inputs(bench):
    inputs = [torch.ones(1000)]
    captured = bench.capture(lambda: inputs[0] + 1)
    gone: list[bool] = []
    weakref.finalize(inputs[0].untyped_storage(), gone.append, True)
    inputs.clear()
    gc.collect()
    assert gone == [True]
    assert status(bench.driver, bench.stream) == 0
    del captured
