"""Where breaks stand, what they are called with, and when their bodies run."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from breakable_cuda_graphs import (
    CUDAGraphSequence,
    EagerSegment,
    GraphSegment,
    breakable_graph,
    force_no_graph,
    is_in_breakable_graph,
    no_graph,
)

from .helpers import Boom, bump, check, check_replays, close, dev, kinds, same, torch

pytestmark = pytest.mark.gpu


@no_graph
def triple_if_large(t: Any) -> None:
    """An eager step that needs a value on the host."""
    if t.abs().max().item() > 5:
        t.mul_(3)
    else:
        t.sub_(1)


# ---------------------------------------------------------------- where breaks stand

PROGRAMS = {
    "break only": "b",
    "break first": "bw",
    "break last": "wb",
    "break in the middle": "wbw",
    "break first and last": "bwb",
    "breaks in a row": "wbbbbw",
    "breaks in a row without work": "bbb",
    "break after every step": "wbwbwbwbw",
    "many": "wwb" * 25,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_n_breaks_make_2n_plus_1_segments_and_right_values(program: str) -> None:
    def body(x: Any) -> Any:
        y = x.clone()
        for step in program:
            if step == "b":
                triple_if_large(y)
            else:
                y = (y * 2 + 1).clamp(-50, 50)
        return y

    breaks = program.count("b")
    seq = check(body)
    assert len(seq) == len(seq.segments) == 2 * breaks + 1
    assert kinds(seq) == "ge" * breaks + "g"


def test_a_break_works_on_an_input_without_any_captured_work() -> None:
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        bump(x)
    same(x, 2.0)
    for expected in (3.0, 4.0):
        seq.replay()
        same(x, expected)
    assert kinds(seq) == "geg"


class Layer:
    offset = 10.0

    def __init__(self, amount: float) -> None:
        self.amount = amount

    @no_graph
    def add(self, t: Any) -> None:
        t.add_(self.amount)

    @classmethod
    @no_graph
    def shift(cls, t: Any) -> None:
        t.add_(cls.offset)

    @staticmethod
    @no_graph
    def halve(t: Any) -> None:
        t.div_(2)

    def plain(self, t: Any) -> None:
        t.mul_(self.amount)


def test_methods_of_every_kind_can_be_breaks() -> None:
    layer = Layer(3)
    wrapped = no_graph(layer.plain)

    def body(x: Any) -> Any:
        y = x * 2
        layer.add(y)
        y = y + 1
        layer.shift(y)
        Layer.halve(y)
        y = y * 4
        wrapped(y)
        return y - 1

    assert kinds(check(body)) == "gegegegeg"


def test_a_bound_method_sees_the_present_state_of_its_object() -> None:
    layer, x, seq = Layer(1), dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        layer.add(y)
        z = y + 0
    for amount in (1.0, 5.0, -2.0):
        layer.amount = amount
        check_replays(seq, x, z, lambda t, amount=amount: t * 2 + amount, values=(0.0, 3.0))


def test_a_break_three_calls_deep_splits_the_graph() -> None:
    def outer(t: Any) -> Any:
        return middle(t + 1) * 2

    def middle(t: Any) -> Any:
        return inner(t * 3) - 1

    def inner(t: Any) -> Any:
        triple_if_large(t)
        return t + 5

    assert kinds(check(outer)) == "geg"


def test_a_break_inside_a_break_is_a_plain_call() -> None:
    @no_graph
    def outer(t: Any) -> None:
        t.mul_(2)
        bump(t)
        outer_again(t, 2)

    @no_graph
    def outer_again(t: Any, depth: int) -> None:
        t.add_(depth)
        if depth:
            outer_again(t, depth - 1)

    def body(x: Any) -> Any:
        y = x + 1
        outer(y)
        return y * 2

    assert kinds(check(body)) == "geg"


def test_callables_of_other_kinds_can_be_breaks() -> None:
    def scale(t: Any, factor: float) -> None:
        t.mul_(factor)

    class Adder:
        def __call__(self, t: Any) -> None:
            t.add_(4)

    double = no_graph(functools.partial(scale, factor=2))
    adder = no_graph(Adder())
    nameless = no_graph(lambda t: scale(t, 5))

    def body(x: Any) -> Any:
        y = x + 1
        double(y)
        adder(y)
        nameless(y)
        return y + 0

    assert kinds(check(body)) == "gegegeg"


def test_the_decorator_keeps_name_and_documentation() -> None:
    assert triple_if_large.__name__ == "triple_if_large"
    assert triple_if_large.__doc__ == "An eager step that needs a value on the host."


def test_outside_a_capture_the_decorated_function_is_a_plain_call() -> None:
    @no_graph
    def double(t: Any, *, extra: float = 0) -> Any:
        assert not is_in_breakable_graph()
        return t * 2 + extra

    same(double(dev(3)), 6.0)
    same(double(dev(3), extra=1), 7.0)


def test_eager_segments_tell_what_they_call() -> None:
    x, seq = dev(1), CUDAGraphSequence()

    @no_graph
    def note(t: Any, amount: float, *, flag: bool) -> None:
        t.add_(amount if flag else 0)

    with breakable_graph(seq):
        y = x * 2
        note(y, 3, flag=True)
    first, eager, last = seq.segments
    assert isinstance(first, GraphSegment)
    assert isinstance(last, GraphSegment)
    assert isinstance(eager, EagerSegment)
    assert callable(eager.fn)
    assert "note" in eager.name
    assert len(eager.args) == 2
    assert eager.args[0].data_ptr() == y.data_ptr()
    assert eager.args[1] == 3
    assert eager.kwargs == {"flag": True}
    assert "CUDAGraphSequence" in repr(seq)


# ---------------------------------------------------------------- when bodies run


def test_bodies_run_once_at_capture_and_once_a_replay_in_order() -> None:
    order: list[int] = []

    @no_graph
    def mark(t: Any, number: int) -> None:
        order.append(number)
        t.add_(number)

    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        for number in range(5):
            mark(y, number)
            y = y + 0
    assert order == [0, 1, 2, 3, 4]
    order.clear()
    check_replays(seq, x, y, lambda t: t * 2 + 10, values=(1.0, 2.0, 3.0))
    assert order == [0, 1, 2, 3, 4] * 3


def test_segments_never_run_python_again_and_breaks_see_the_present_state() -> None:
    runs = {"segment": 0, "break": 0}
    scale = 1.0

    @no_graph
    def step(t: Any, by_value: float) -> None:
        runs["break"] += 1
        t.mul_(scale).add_(by_value)

    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        runs["segment"] += 1
        y = x * 2
        step(y, scale)
        z = y + 0
    scale = 10.0
    seq.replay()
    same(z, 2 * 10.0 + 1)
    assert runs == {"segment": 1, "break": 2}


def test_a_break_sees_the_values_of_this_replay() -> None:
    seen: list[float] = []

    @no_graph
    def look(t: Any) -> None:
        seen.append(t.sum().item())

    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        look(y)
        y + 1
    seen.clear()
    for k in range(5):
        x.fill_(k)
        seq.replay()
    assert seen == [2.0 * k * 64 for k in range(5)]


def test_at_capture_breaks_run_outside_any_capture_on_the_capture_stream() -> None:
    seen: list[Any] = []

    @no_graph
    def look() -> None:
        seen.append((torch.cuda.is_current_stream_capturing(), torch.cuda.current_stream()))

    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        x + 1
        inside = torch.cuda.current_stream()
        look()
        assert torch.cuda.is_current_stream_capturing()
        assert torch.cuda.current_stream() == inside
    assert seen == [(False, inside)]
    assert inside.cuda_stream == seq.stream.cuda_stream


def test_is_in_breakable_graph_is_true_at_capture_only() -> None:
    seen: list[bool] = []

    @no_graph
    def look() -> None:
        seen.append(is_in_breakable_graph())

    x, seq = dev(1), CUDAGraphSequence()
    assert not is_in_breakable_graph()
    with breakable_graph(seq):
        assert is_in_breakable_graph()
        x + 1
        look()
        assert is_in_breakable_graph()
        x + 2
    assert not is_in_breakable_graph()
    seq.replay()
    look()
    assert seen == [True, False, False]


def test_a_disabled_break_is_the_function_itself_and_part_of_the_segment() -> None:
    calls: list[int] = []

    def step(t: Any) -> None:
        calls.append(1)
        t.add_(1)

    disabled = no_graph(enable=False)(step)
    assert disabled is step
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        disabled(y)
        z = y + 0
    check_replays(seq, x, z, lambda t: t * 2 + 1)
    assert kinds(seq) == "g"
    assert len(calls) == 1


def test_an_enabled_break_breaks() -> None:
    enabled = no_graph(enable=True)(lambda t: bump(t))

    def body(x: Any) -> Any:
        y = x * 2
        enabled(y)
        return y + 0

    assert kinds(check(body)) == "geg"


def test_a_stub_stands_in_at_capture_and_the_capture_sees_what_it_returns() -> None:
    calls: list[Any] = []

    def stub(t: Any, *, scale: float) -> int:
        calls.append(("stub", tuple(t.shape), scale))
        return 3

    @no_graph(capture_stub=stub)
    def step(t: Any, *, scale: float) -> int:
        calls.append(("body", tuple(t.shape), scale))
        t.mul_(scale)
        return 5

    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        factor = step(y, scale=10.0)
        z = y * factor
    assert factor == 3
    assert calls == [("stub", (64,), 10.0)]
    check_replays(seq, x, z, lambda t: t * 2 * 10 * 3, values=(1.0, 2.0))
    assert calls[1:] == [("body", (64,), 10.0)] * 2
    assert step(x, scale=1.0) == 5, "outside a capture the body runs"


@pytest.mark.parametrize("stub", ["text", 3])
def test_a_stub_that_cannot_be_called_is_refused_at_once(stub: object) -> None:
    with pytest.raises(TypeError, match="capture_stub"):
        no_graph(capture_stub=stub)


def test_the_barrier_runs_at_capture_only_between_a_segment_and_the_body_or_stub() -> None:
    events: list[str] = []

    def barrier() -> None:
        assert not torch.cuda.is_current_stream_capturing(), "the segment has ended"
        events.append("barrier")

    @no_graph
    def body(t: Any) -> None:
        events.append("body")
        t.add_(1)

    def stub(t: Any) -> None:
        events.append("stub")

    @no_graph(capture_stub=stub)
    def stubbed(t: Any) -> None:
        events.append("stubbed body")
        t.add_(2)

    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq, barrier_fn=barrier):
        y = x * 2
        body(y)
        y = y + 1
        stubbed(y)
        z = y + 0
    assert events == ["barrier", "body", "barrier", "stub"]
    events.clear()
    check_replays(seq, x, z, lambda t: t * 2 + 4, values=(2.0, 3.0))
    assert events == ["body", "stubbed body"] * 2


def test_a_barrier_that_cannot_be_called_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="barrier_fn"):
        breakable_graph(CUDAGraphSequence(), barrier_fn="text")


# ---------------------------------------------------------------- what bodies are called with


def test_keywords_and_containers_reach_the_body_as_they_were_given() -> None:
    types: list[Any] = []

    @no_graph
    def mix(
        first: Any, *rest: Any, table: Any, pair: Any, scale: float = 1.0, none: Any = 0
    ) -> None:
        types.append((len(rest), type(table), type(pair), none, sorted(table)))
        first.add_(rest[0]).mul_(scale)
        for t in table["many"]:
            first.add_(t)
        pair[1]["deep"][0].sub_(first)

    def body(x: Any) -> Any:
        a, b, c = x + 1, x * 2, x * 3
        mix(
            a,
            b,
            7,
            table={"many": [a, b], "name": "t"},
            pair=(1, {"deep": [c]}),
            scale=0.5,
            none=None,
        )
        return a + c

    seq = check(body)
    assert set(map(str, types)) == {str((2, dict, tuple, None, ["many", "name"]))}
    assert kinds(seq) == "geg"


def test_plain_values_stay_those_of_the_capture() -> None:
    seen: list[Any] = []

    @no_graph
    def note(t: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))

    x, seq = dev(1), CUDAGraphSequence()
    number, text = 5, "old"
    with breakable_graph(seq):
        note(x + 1, number, text, (1, None), flag=True, dtype=torch.float16)
    number, text = 6, "new"
    del seen[:]
    seq.replay()
    assert seen == [((5, "old", (1, None)), {"flag": True, "dtype": torch.float16})]


def test_objects_are_passed_as_the_same_objects() -> None:
    marker, seen = object(), []

    @no_graph
    def note(thing: Any, *, other: Any) -> None:
        seen.append(thing is marker and other is marker)

    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        note(marker, other=marker)
    seq.replay()
    assert seen == [True, True]


def test_a_cpu_tensor_is_read_anew_at_every_replay() -> None:
    host = torch.ones(64)
    written = torch.zeros(64)

    @no_graph
    def add_host(t: Any, source: Any, *, target: Any) -> None:
        assert source.device.type == target.device.type == "cpu"
        t.add_(source.to(t.device))
        target.copy_(t)

    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        add_host(y, host, target=written)
        z = y + 0
    for k in range(3):
        host.fill_(100 * k)
        check_replays(seq, x, z, lambda t: t * 2 + host.cuda(), values=(1.0, -2.0))
        same(written.cuda(), z)


VIEWS = {
    "transposed": lambda h: h.view(8, 8).t(),
    "sliced with an offset": lambda h: h[3:40:2],
    "a column": lambda h: h.view(8, 8)[:, 3],
    "expanded": lambda h: h[5:6].expand(16),
    "windows that overlap": lambda h: h.unfold(0, 8, 4),
    "no elements": lambda h: h[:0],
    "no dimensions": lambda h: h[7],
    "conjugated": lambda h: torch.complex(h, h * 2).conj(),
    "negated": lambda h: torch.complex(h, h * 2).conj().imag,
    "read as integers": lambda h: h.view(torch.int32)[4:],
    "half": lambda h: h.half()[::3],
    "truth values": lambda h: (h > 0)[1:],
    "channels last": lambda h: h.view(1, 4, 4, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_keeps_its_shape_strides_offset_type_and_bits(view: Any) -> None:
    seen: list[Any] = []

    def facts(t: Any) -> Any:
        return t.shape, t.stride(), t.storage_offset(), t.dtype, t.is_conj(), t.is_neg()

    @no_graph
    def copy_out(t: Any, target: Any) -> None:
        seen.append(facts(t))
        target.copy_(t)

    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        h = x + 1
        v = view(h)
        wanted = facts(v)
        target = torch.zeros(v.shape, dtype=v.dtype, device="cuda")
        copy_out(v, target)
        out = target.clone()
    del h, v
    for k in (1.0, -2.0):
        x.copy_(torch.arange(64, device="cuda") - 20 + k)
        seq.replay()
        same(out, view(x + 1).resolve_conj().resolve_neg().contiguous())
    assert seen == [wanted] * 3


def test_a_view_written_in_a_break_is_seen_by_the_next_segment() -> None:
    def body(x: Any) -> Any:
        y = x.view(8, 8) * 2
        bump(y.t()[2:5])
        bump(torch.view_as_complex(y.view(-1, 2)).imag)
        return y + 1

    check(body)


def test_two_arguments_that_share_memory_still_do() -> None:
    @no_graph
    def write_one_read_other(whole: Any, part: Any) -> None:
        part.fill_(9)
        whole.mul_(2)

    def body(x: Any) -> Any:
        y = x + 1
        write_one_read_other(y, y[10:20])
        return y + 0

    check(body)


def test_tensors_of_a_closure_are_used_as_they_are() -> None:
    buffer = dev(2)

    @no_graph
    def use() -> None:
        buffer.add_(1)

    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        use()
        z = y + buffer
    for k in range(3):
        x.fill_(k)
        buffer.fill_(10 * k)
        seq.replay()
        same(z, 2.0 * k + 10 * k + 1)


def test_values_that_are_no_cuda_tensors_may_be_returned() -> None:
    @no_graph
    def facts(t: Any) -> Any:
        return {"count": t.numel(), "host": torch.ones(3), "none": None, "text": "t"}

    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        found = facts(y)
        z = y * found["count"]
    assert found["text"] == "t"
    assert found["host"].tolist() == [1, 1, 1]
    check_replays(seq, x, z, lambda t: t * 2 * 64)


RETURNED = {
    "tensor": lambda t: t * 2,
    "its argument": lambda t: t.add_(1),
    "tuple": lambda t: (1, t * 2),
    "dict": lambda t: {"a": [t * 2]},
}


@pytest.mark.parametrize("make", RETURNED.values(), ids=RETURNED.keys())
def test_an_undeclared_cuda_tensor_in_what_is_returned_is_refused(make: Any) -> None:
    @no_graph
    def undeclared(t: Any) -> Any:
        return make(t)

    x = dev(1)
    with pytest.raises(RuntimeError, match=r"(?s)undeclared.*tensor|tensor.*undeclared"):
        with breakable_graph(CUDAGraphSequence()):
            undeclared(x + 1)


# ---------------------------------------------------------------- what stands between them


def test_products_elementwise_work_and_reductions_around_breaks() -> None:
    weight = torch.randn(64, 64, device="cuda") / 8
    bias = torch.randn(64, device="cuda")

    @no_graph
    def clip(t: Any, limit: float) -> None:
        norm = t.norm().item()
        if norm > limit:
            t.mul_(limit / norm)

    def body(x: Any) -> Any:
        h = torch.addmm(bias, x.expand(16, 64), weight).relu()
        clip(h, 20.0)
        s = torch.softmax(h - h.amax(dim=1, keepdim=True), dim=1)
        m = torch.einsum("ij,kj->ik", s, h)
        clip(m, 5.0)
        return (m @ h).mean(dim=0).cumsum(0) + x.sort().values

    body(dev(1))
    assert kinds(check(body, compare=close)) == "gegeg"


def test_force_no_graph_splits_and_stays_right() -> None:
    def body(x: Any) -> Any:
        y = x * 2
        force_no_graph()
        force_no_graph()
        y = y + 1
        bump(y)
        y = y * 3
        force_no_graph()
        return y - 1

    seq = check(body)
    assert kinds(seq) == "geg" + "eg" * 3
    assert sum(isinstance(segment, EagerSegment) for segment in seq.segments) == 4


def test_many_forced_splits_keep_the_order_of_the_work() -> None:
    def body(x: Any) -> Any:
        y = x.clone()
        for k in range(20):
            y.mul_(2).add_(k)
            force_no_graph()
            y = (y / 2).floor()
        return y

    seq = check(body)
    assert len(seq) == 41


def test_forced_splits_first_last_and_alone_do_nothing_else() -> None:
    def body(x: Any) -> Any:
        force_no_graph()
        y = x + 1
        force_no_graph()
        return y

    check(body)
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        force_no_graph()
    seq.replay()
    assert kinds(seq) == "geg"


def test_force_no_graph_outside_a_capture_does_nothing() -> None:
    x = dev(1)
    force_no_graph()
    same(x + 1, 2.0)


def test_a_failing_break_does_not_run_what_stands_after_it_and_the_next_replay_is_fresh() -> None:
    fail, mine, counter = False, Boom("mine"), dev(0)

    @no_graph
    def touchy(t: Any) -> None:
        if fail:
            raise mine
        t.add_(1)

    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        touchy(y)
        counter.add_(1)
        z = y + 0
    fail = True
    with pytest.raises(Boom) as info:
        seq.replay()
    assert info.value is mine
    assert info.value.__cause__ is None
    same(counter, 0.0, "what stands after the break")
    fail = False
    check_replays(seq, x, z, lambda t: t * 2 + 1, values=(1.0, 2.0))
    same(counter, 2.0)
