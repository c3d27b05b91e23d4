"""no_graph, force_no_graph, is_in_breakable_graph: what a marked function does, where."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import pickle
import types
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import (  # noqa: E402
    CaptureError,
    CUDAGraphSequence,
    StaleInputError,
    breakable_graph,
    force_no_graph,
    is_in_breakable_graph,
    no_graph,
)
from breakable_cuda_graphs.simulator import tensors  # noqa: E402
from helping import (  # noqa: E402
    a_stream,
    assert_nothing_open,
    capture,
    forked,
    kinds,
)


@no_graph
def bump(t: Any) -> None:
    t.add_(1)


# ---------------------------------------------------------------- outside of a capture


def test_outside_a_capture_it_is_a_plain_call():
    @no_graph(outputs="static")
    def double(t: Any, *, by: int = 2) -> Any:
        return t * by

    assert double(3) == 6
    assert double(3, by=5) == 15
    assert not is_in_breakable_graph()
    force_no_graph()


def test_the_stub_is_for_captures_only():
    @no_graph(capture_stub=lambda: "stub")
    def real() -> str:
        return "real"

    assert real() == "real"


def test_enable_false_gives_the_function_itself():
    def plain() -> None: ...

    assert no_graph(plain, enable=False) is plain
    assert no_graph(enable=False)(plain) is plain


def test_a_marked_function_keeps_its_name_and_its_pickle():
    assert bump.__name__ == "bump"
    assert bump.__wrapped__ is not bump
    assert pickle.loads(pickle.dumps(bump)) is bump
    assert copy.deepcopy(bump) is bump


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"function": 3}, TypeError, "function"),
        ({"capture_stub": 3}, TypeError, "capture_stub"),
        ({"outputs": "statik"}, ValueError, "'reject', 'static'"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, error, word):
    with pytest.raises(error, match=word):
        no_graph(**arguments)


def test_the_deferred_form_refuses_what_is_not_callable():
    with pytest.raises(TypeError, match="function"):
        no_graph()(3)


# ---------------------------------------------------------------- inside


def test_callables_of_every_kind_can_be_breaks(device):
    class Model:
        def __init__(self) -> None:
            self.calls = 0

        @no_graph
        def step(self, t: Any) -> None:
            self.calls += 1
            t.add_(1)

        @staticmethod
        @no_graph
        def static(t: Any) -> None:
            t.add_(2)

        @classmethod
        @no_graph
        def of_class(cls, t: Any) -> None:
            t.add_(3)

        def __call__(self, t: Any) -> None:
            t.add_(4)

    model = Model()
    x = torch.zeros(2)
    partial = no_graph(functools.partial(torch.Tensor.add_, other=5))
    assert functools.partial is type(partial.__wrapped__)

    def drop(t: Any) -> None:
        t.add_(5)

    def body() -> Any:
        y = x + 0
        model.step(y)
        model.static(y)
        Model.of_class(y)
        no_graph(model)(y)
        no_graph(functools.partial(drop))(y)
        return y

    seq, y = capture(body)
    assert kinds(seq) == "ge" + "-e" * 4 + "-"
    assert [s.name.rpartition(".")[2] for s in seq.segments[1::2]] == [
        "step", "static", "of_class", "Model", "drop",
    ]  # fmt: skip
    x.fill_(100)
    seq.replay()
    assert y.tolist() == [115, 115]
    assert model.calls == 2


def test_the_mark_may_stand_above_or_below_static_and_class_methods(device):
    class Model:
        @no_graph
        @staticmethod
        def static(t: Any) -> None:
            t.add_(1)

        @no_graph()
        @classmethod
        def of_class(cls, t: Any) -> None:
            assert cls is Model
            t.add_(2)

    x = torch.zeros(2)
    seq, _ = capture(lambda: (Model().static(x), Model().of_class(x), Model.static(x)))
    seq.replay()
    assert x.tolist() == [8, 8]
    with pytest.raises(TypeError, match="below @property"):
        no_graph(property(lambda self: 1))


async def later(t: Any) -> None:
    t.add_(1)


def steps(t: Any) -> Any:
    yield t.add_(1)


@pytest.mark.parametrize("function", [later, steps, functools.partial(later)])
def test_what_does_its_work_after_its_call_cannot_be_marked(function):
    with pytest.raises(TypeError, match=r"(later|steps) is a generator or an async function"):
        no_graph(function)


@pytest.mark.parametrize("outputs", ["reject", "static"])
@pytest.mark.parametrize(
    "make",
    [
        later,
        steps,
        lambda t: map(t.add_, [1]),
        lambda t: [steps(t)],
        contextlib.contextmanager(steps),
    ],
)
def test_work_that_is_still_to_be_done_is_no_result(device, make, outputs):
    x = torch.ones(2)
    with pytest.raises(CaptureError, match="still to be done"):
        capture(lambda: no_graph(outputs=outputs)(lambda t: make(t))(x))
    assert_nothing_open(device)


def test_the_owner_of_a_method_is_live_even_if_it_is_a_container_of_tensors(device):
    @dataclasses.dataclass
    class Cache:
        inside: Any
        calls: int = 0
        by: int = 1

        @no_graph
        def step(self, t: Any) -> None:
            self.calls += 1
            t.add_(self.inside * self.by)

        @no_graph(capture_stub=lambda self, t: seen.append(self))
        def stubbed(self, t: Any) -> None:
            t.add_(self.by)

    cache, x, seen = Cache(torch.ones(2)), torch.ones(2), []

    def body() -> Any:
        y = x * 2
        cache.step(y)
        Cache.stubbed(cache, t=y)
        return y * 1

    seq, y = capture(body)
    assert seen[0] is cache
    assert (cache.calls, len(seq.segments[1].args)) == (1, 1)
    cache.by = 10
    cache.inside.fill_(3)
    seq.replay()
    assert cache.calls == 2
    assert y.tolist() == [2 + 30 + 10] * 2


@dataclasses.dataclass
class Counter:
    """A container with tensors, whose methods are marked in all the ways there are."""

    inside: Any
    calls: int = 0

    def _count(self) -> None:
        self.calls += 1

    @torch.no_grad()
    @no_graph
    def under_another_decorator(self) -> None:
        self._count()

    @no_graph
    def __private(self) -> None:
        self._count()

    def private(self) -> None:
        self.__private()

    def plain(self) -> None:
        self._count()

    @property
    @no_graph
    def shown(self) -> None:
        self._count()

    @functools.cached_property
    @no_graph
    def shown_once(self) -> None:
        self._count()

    nameless = no_graph(lambda self: self._count())
    with_more = functools.partialmethod(no_graph(lambda self, _: self._count()), 1)

    @staticmethod
    @no_graph
    def beside(counter: Any) -> None:
        counter._count()


@pytest.mark.parametrize(
    "call",
    [
        lambda counter: counter.under_another_decorator(),
        lambda counter: counter.private(),
        lambda counter: no_graph(counter.plain)(),
        lambda counter: counter.shown,
        lambda counter: counter.shown_once,
        lambda counter: counter.nameless(),
        lambda counter: counter.with_more(),
    ],
)
def test_the_owner_is_live_however_the_method_is_marked(device, call):
    counter = Counter(torch.ones(2))
    seq, _ = capture(lambda: call(counter))
    seq.replay()
    counter.inside = None
    seq.replay()
    assert counter.calls == 3


def test_a_static_method_has_no_owner(device):
    counter = Counter(torch.ones(2))
    seq, _ = capture(lambda: Counter.beside(counter))
    assert len(seq.segments[1].args) == 1
    seq.replay()
    assert counter.calls == 1


def test_a_copy_of_an_object_with_a_marked_method_has_a_method_of_its_own(device):
    model, x = torch.nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    stub = lambda t: t * 0  # noqa: E731
    model.forward = no_graph(model.forward, capture_stub=stub, outputs="static")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.fill_(5)
        seq, y = capture(lambda: twin(x) * 1)
    seq.replay()
    assert y.tolist() == [[10, 10]]


def test_arguments_may_have_any_name(device):
    x = torch.ones(2)

    @no_graph(outputs="static")
    def double(self: int, t: Any) -> Any:
        return t * self

    def body() -> Any:
        with torch.no_grad():
            first = double(self=2, t=x)
        return first + double(self=3, t=x)

    seq, y = capture(body)
    x.fill_(4)
    seq.replay()
    assert y.tolist() == [20, 20]


def test_a_break_three_calls_deep_and_one_inside_another(device):
    x, inside = torch.ones(2), []

    @no_graph
    def outer(t: Any) -> None:
        bump(t)
        force_no_graph()
        inside.append(is_in_breakable_graph())

    def deep(t: Any) -> Any:
        return deeper(t * 2)

    def deeper(t: Any) -> Any:
        outer(t)
        return t * 3

    seq, y = capture(lambda: deep(x))
    assert kinds(seq) == "geg"
    x.fill_(2)
    seq.replay()
    assert y.tolist() == [15, 15]
    assert inside == [True, False]


def test_the_question_is_answered_everywhere(device):
    answers = {}

    @no_graph
    def ask() -> None:
        answers["break"] = is_in_breakable_graph()

    def body() -> None:
        answers["segment"] = is_in_breakable_graph()
        ask()

    answers["before"] = is_in_breakable_graph()
    seq, _ = capture(body)
    answers["after"] = is_in_breakable_graph()
    assert answers == {"before": False, "segment": True, "break": True, "after": False}
    seq.replay()
    assert answers["break"] is False


def test_a_stub_runs_at_capture_and_the_body_at_replay(device):
    x, log = torch.ones(2), []

    def stub(t: Any, n: int, *, k: int) -> str:
        log.append(("stub", n, k))
        return "from the stub"

    @no_graph(capture_stub=stub)
    def real(t: Any, n: int, *, k: int) -> str:
        log.append(("real", n, k))
        t.add_(n)
        return "from the body"

    def body() -> Any:
        y = x * 2
        assert real(y, 1, k=2) == "from the stub"
        return y * 3

    seq, y = capture(body)
    seq.replay()
    assert log == [("stub", 1, 2), ("real", 1, 2)]
    assert y.tolist() == [9, 9]


def test_a_stub_that_counts_as_false_is_a_stub(device):
    class Stub(list):
        def __call__(self) -> None:
            calls.append("stub")

    calls: list[str] = []
    seq, _ = capture(no_graph(capture_stub=Stub())(lambda: calls.append("body")))
    seq.replay()
    assert calls == ["stub", "body"]


def test_a_stub_gives_static_outputs(device):
    x = torch.ones(2)

    @no_graph(capture_stub=lambda t: torch.empty_like(t), outputs="static")
    def real(t: Any) -> Any:
        return t + 1

    seq, y = capture(lambda: real(x * 2) * 3)
    seq.replay()
    assert y.tolist() == [9, 9]


def test_the_barrier_runs_before_each_break_at_capture_only(device):
    x, log = torch.ones(2), []

    @no_graph
    def step(t: Any) -> None:
        log.append("break")

    def body() -> None:
        y = x * 2
        step(y)
        force_no_graph()
        step(y)

    seq, _ = capture(body, barrier_fn=lambda: log.append("barrier"))
    assert log == ["barrier", "break", "barrier", "break"]
    seq.replay()
    assert log[4:] == ["break", "break"]


def test_numbers_and_objects_are_given_as_they_were(device):
    marker, seen = object(), []

    @no_graph
    def look(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))

    state = {"n": 1}
    seq, _ = capture(lambda: look(1, "a", marker, state, key=[marker]))
    state["n"] = 2
    seq.replay()
    assert seen[1] == ((1, "a", marker, {"n": 2}), {"key": [marker]})
    assert seen[1][0][3] is state


class Pair(NamedTuple):
    left: Any
    right: Any


def test_tensors_in_containers_reach_the_break_as_aliases(device):
    x = torch.arange(6.0).reshape(2, 3)
    seen: list[Any] = []

    @no_graph
    def look(pair: Pair, *, table: dict[str, Any]) -> None:
        seen.append((pair, table))
        pair.left.add_(1)

    def body() -> None:
        look(Pair(x.t(), 3), table={"view": x[1:, ::2], "list": [x, None]})

    seq, _ = capture(body)
    seq.replay()
    pair, table = seen[1]
    assert type(pair) is Pair
    assert pair.left.shape == (3, 2)
    assert pair.left.stride() == (1, 3)
    assert pair.left.data_ptr() == x.data_ptr()
    assert pair.right == 3
    assert table["view"].storage_offset() == 3
    assert table["view"].stride() == (3, 2)
    assert table["list"][1] is None
    assert x[0, 0] == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
        lambda: torch.arange(8).reshape(2, 4)[:, 1::2],
        lambda: torch.ones(0, 3),
        lambda: torch.ones(()),
        lambda: torch.ones(2, dtype=torch.bfloat16),
        lambda: torch.ones(1, 3).expand(4, 3),
        lambda: torch.ones(2, dtype=torch.bool),
        lambda: torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_an_alias_is_the_same_view(device, make):
    original, seen = make(), []
    with torch.no_grad():
        seq, _ = capture(lambda: no_graph(lambda t: seen.append(t))(original))
    seq.replay()
    alias = seen[1]
    assert type(alias) is torch.Tensor
    for what in ("shape", "dtype", "device"):
        assert getattr(alias, what) == getattr(original, what)
    for what in ("stride", "storage_offset", "is_conj", "is_neg", "data_ptr"):
        assert getattr(alias, what)() == getattr(original, what)()
    assert not alias.requires_grad
    with torch.no_grad():
        assert torch.equal(alias, original)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_given_itself_and_is_no_result(device):
    x, seen = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), []
    seq, _ = capture(lambda: no_graph(lambda t: seen.append(t))(x))
    seq.replay()
    assert seen[1] is x
    with pytest.raises(CaptureError, match="Tensor of nested tensors"):
        capture(lambda: no_graph(lambda t: t, outputs="static")(x))


def test_a_tensor_subclass_is_given_itself(device):
    x, seen = torch.ones(2).as_subclass(Named), []
    seq, _ = capture(lambda: no_graph(lambda t: seen.append(t))(x))
    seq.replay()
    assert seen[1] is x


@dataclasses.dataclass
class State:
    inside: Any
    calls: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    inside: Any


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda t: [t, 1], lambda given: given.pop(0).add_(given.pop(0))),
        (lambda t: {"t": t}, lambda given: given.pop("t").add_(given.setdefault("by", 1))),
        (lambda t: State(t), lambda given: inside(given).add_(given.calls)),
        (lambda t: ([[t]], 1), lambda given: given[0].pop()[0].add_(given[1])),
        (lambda t: Frozen({"t": [t, 1]}), lambda given: given.inside["t"].pop(0).add_(1)),
        (lambda t: Sized(t, 1), lambda given: given.pop(0).add_(given.size)),
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_what_a_break_does_to_a_container_is_undone_for_the_next_replay(device, make, use, by_name):
    x = torch.ones(2)
    add = no_graph(lambda given: done(use(given)))

    def body() -> Any:
        y = x * 2
        add(given=make(y)) if by_name else add(make(y))
        return y + 1

    seq, z = capture(body)
    outer, outer_z = capture(lambda: (seq.replay(), z * 1)[1])
    for value in (3.0, 5.0, 7.0):
        x.fill_(value)
        seq.replay()
        assert z.tolist() == [value * 2 + 2] * 2
        outer.replay()
        assert outer_z.tolist() == [value * 2 + 2] * 2


def inside(state: State) -> Any:
    state.calls += 1
    return state.inside


def done(_: Any) -> None:
    """For a break that returns nothing."""


class Sized(list):
    def __init__(self, *values: Any) -> None:
        super().__init__(values)
        self.size = 1


def test_a_container_without_tensors_is_the_users_own(device):
    log: list[int] = []
    seq, _ = capture(lambda: no_graph(lambda given: done(given.append(1)))(log))
    seq.replay()
    assert log == [1, 1]


def test_a_generator_that_the_body_uses_up_is_refused(device):
    model, batches = torch.nn.Linear(2, 2), iter([1, 2, 3])
    with pytest.raises(CaptureError, match=r"a generator \(argument 0\).*parameters"):
        capture(lambda: no_graph(lambda parameters: done([*parameters]))(model.parameters()))
    assert_nothing_open(device)
    seen: list[int] = []
    endless = (k for k in range(10))
    fetch = no_graph(lambda *sources: seen.extend(map(next, sources)))
    seq, _ = capture(lambda: fetch(endless, batches))
    seq.replay()
    assert seen == [0, 1, 1, 2]


def test_one_tensor_given_twice_is_one(device):
    x, seen = torch.ones(2), []
    seq, _ = capture(
        lambda: no_graph(lambda a, b, c: seen.append(a is b is c["x"]))(x, b=x, c={"x": x})
    )
    seq.replay()
    other = torch.zeros(2)
    seq.rebind({x: other})
    seq.replay()
    assert seen == [True] * 3


def test_what_was_written_on_a_tensor_is_there_at_replay(device):
    x, other = torch.ones(2), torch.ones(2)
    x.scale = 3

    seq, _ = capture(lambda: no_graph(lambda t: t.mul_(t.scale).sum().item())(x))
    seq.replay()
    assert x.tolist() == [9, 9]
    seq.rebind({x: other})
    seq.replay()
    assert other.tolist() == [3, 3]


def test_a_break_finds_the_gradients_of_parameters(device):
    w = torch.nn.Parameter(torch.ones(2))

    @no_graph
    def clip(parameters: Any) -> None:
        for p in parameters:
            p.grad.clamp_(max=1.0)

    def body() -> None:
        (w * w).sum().backward()
        clip([w])
        with torch.no_grad():
            w.sub_(w.grad)
        w.grad.zero_()

    w.grad = torch.zeros(2)
    seq, _ = capture(body)
    with torch.no_grad():
        w.fill_(5)
    seq.replay()
    assert w.tolist() == [4, 4]


def test_breaks_in_hooks_of_modules_tensors_and_parameters(device):
    w, seen = torch.nn.Parameter(torch.ones(2)), {}

    def note(name: str, value: Any) -> None:
        seen.setdefault(name, []).append(value)

    class Square(torch.nn.Module):
        def forward(self, t: Any) -> Any:
            return t * t

    @no_graph
    def of_module(module: Any, inputs: Any, output: Any) -> None:
        note("module", output.sum().item())

    @no_graph(outputs="static")
    def of_tensor(gradient: Any) -> Any:
        return gradient * 10

    @no_graph
    def of_parameter(parameter: Any) -> None:
        note("parameter", parameter.grad.sum().item())

    square = Square()
    square.register_forward_hook(of_module)
    w.register_post_accumulate_grad_hook(of_parameter)

    def body() -> None:
        y = w * 1
        y.register_hook(of_tensor)
        square(y).sum().backward()

    seq, _ = capture(body, capture_error_mode="relaxed")
    w.grad.zero_()
    with torch.no_grad():
        w.fill_(3)
    seq.replay()
    assert kinds(seq) == "gegege-"
    assert {name: values[1:] for name, values in seen.items()} == {
        "module": [18],
        "parameter": [120],
    }


# ---------------------------------------------------------------- what is refused


def test_a_tensor_that_stands_for_others_in_a_transform_is_refused(device):
    x = torch.ones(3, 2)
    with pytest.raises(CaptureError, match=r"torch\.func\.vmap"):
        capture(lambda: torch.vmap(lambda t: bump(t))(x))
    assert_nothing_open(device)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: {t * 2},
        lambda t: collections.deque([[t * 2]]),
        lambda t: types.SimpleNamespace(inside={"t": t * 2}),
        lambda t: (1, Slotted(t * 2)),
        lambda t: {"a": t * 2}.values(),
        lambda t: iter([t * 2]),
        lambda t: functools.partial(print, t * 2),
        lambda t: types.SimpleNamespace(inside={t * 2: 1}),
        lambda t: types.SimpleNamespace(inside=(t * 2).as_subclass(Named)),
    ],
)
def test_new_tensors_inside_of_a_returned_object_are_refused(device, make):
    x = torch.ones(2)
    with pytest.raises(CaptureError, match="that it has made"):
        capture(lambda: no_graph(make)(x))
    assert_nothing_open(device)


class Slotted:
    __slots__ = ("__inside",)

    def __init__(self, inside: Any) -> None:
        self.__inside = inside


class Named(torch.Tensor):
    pass


@dataclasses.dataclass
class Doubled:
    """One field, and one attribute that is none."""

    inside: Any

    def __post_init__(self) -> None:
        self.twice = None if self.inside is None else self.inside * 2


def with_attribute(container: Any, value: Any) -> Any:
    container.size = value
    return container


@pytest.mark.parametrize("outputs", ["reject", "static"])
@pytest.mark.parametrize(
    "make",
    [
        lambda t: [with_attribute(Sized(1), t * 2)],
        lambda t: with_attribute(Doubled(None), [t * 2]),
        lambda t: {t * 2: 1},
    ],
)
def test_new_tensors_beside_the_parts_of_a_container_are_refused(device, make, outputs):
    x = torch.ones(2)
    with pytest.raises(CaptureError, match="beside its parts"):
        capture(lambda: no_graph(outputs=outputs)(make)(x))
    assert_nothing_open(device)


def test_objects_with_older_tensors_in_them_and_arguments_are_returned(device):
    x = torch.ones(2)
    older, given = types.SimpleNamespace(inside=torch.ones(2)), types.SimpleNamespace()

    @no_graph
    def work(t: Any, holder: Any) -> Any:
        holder.cache = t * 2
        return older, holder, [5]

    seq, result = capture(lambda: work(x, given))
    assert result == (older, given, [5])


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda t: t, "result"),
        (lambda t: (1, [t]), r"result\[1\]\[0\]"),
        (lambda t: {"a": t}, r"result\['a'\]"),
        (lambda t: Pair(None, t), r"result\.right"),
    ],
)
def test_tensors_returned_are_refused_and_where_they_are(device, make, path):
    x = torch.ones(2)
    with pytest.raises(CaptureError, match=path) as info:
        capture(lambda: no_graph(make)(x))
    assert 'outputs="static"' in str(info.value)
    assert info.value.function
    assert_nothing_open(device)


def test_other_results_are_returned(device):
    results = []
    seq, _ = capture(lambda: results.append(no_graph(lambda: (1, {"a": object}))()))
    assert results == [(1, {"a": object})]
    seq.replay()


@pytest.mark.parametrize(
    "move",
    [
        lambda t: setattr(t, "data", t * 2),
        lambda t: t.set_(t * 2),
        lambda t: t.resize_(100),
        lambda t: t.resize_(1),
        lambda t: t.t_(),
        lambda t: t.unsqueeze_(0),
        lambda t: torch.mul(torch.ones(9), 2, out=t),
    ],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_break_that_moves_or_reshapes_its_argument_is_refused(device, move):
    """Its stand-in would be moved once more by each replay, and the next segment would not follow."""
    x = torch.ones(2, 3)

    def body() -> Any:
        y = x * 1
        no_graph(lambda given: done(move(given["y"])))({"y": y})
        return y + 1

    with pytest.raises(
        CaptureError, match=r"gave its argument 0\['y'\] other memory or another shape"
    ):
        capture(body)
    assert_nothing_open(device)


def test_a_break_that_gives_a_parameter_other_data_is_refused(device):
    weight = torch.nn.Parameter(torch.ones(2))
    change = no_graph(lambda w: setattr(w, "data", torch.zeros(2)))
    with pytest.raises(CaptureError, match="argument 0 other memory"):
        capture(lambda: (change(weight), weight.detach() * 2))


FILLED = {
    "a list": (lambda t: [t], lambda given: given.append(given[0] * 2), lambda given: given[1]),
    "a dict": (lambda t: {"h": t}, lambda d: d.update(h=d["h"] * 2), lambda d: d["h"]),
    "a data class": (
        lambda t: State(t), lambda s: setattr(s, "inside", s.inside * 2), lambda s: s.inside,
    ),
    "an attribute": (lambda t: t, lambda t: setattr(t, "twice", t * 2), lambda t: t.twice),
    "a gradient": (
        lambda t: with_gradient(t), lambda t: setattr(t, "grad", t.detach() * 2), lambda t: t.grad,
    ),
}  # fmt: skip


def with_gradient(t: Any) -> Any:
    t.grad = torch.ones(2)
    return t


@pytest.mark.parametrize("reader", ["a segment", "a break"])
@pytest.mark.parametrize("name", FILLED)
def test_a_new_tensor_put_into_an_argument_is_refused_where_it_is_read(device, name, reader):
    """Each replay puts another one there, or into a copy of the container: nobody would see it."""
    make, fill, pick = FILLED[name]
    given = make(torch.ones(2))
    read = no_graph(lambda t: None) if reader == "a break" else lambda t: t * 1

    def body() -> Any:
        no_graph(lambda value: done(fill(value)))(given)
        return read(pick(given))

    with pytest.raises(CaptureError, match="put a new tensor into its argument 0"):
        capture(body)
    assert_nothing_open(device)


def test_a_new_tensor_put_into_an_argument_is_the_users_where_nothing_captured_reads_it(device):
    x, results = torch.ones(2), []
    note = no_graph(lambda t, results: results.append(t.clone()))
    seq, y = capture(lambda: (lambda t: (note(t, results), t + 1)[1])(x * 2))
    x.fill_(3)
    seq.replay()
    assert y.tolist() == [7, 7]
    assert results[1].tolist() == [6, 6]


def test_a_first_gradient_made_in_a_break_is_read_by_the_next_segment(device):
    weight, x = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    backward = no_graph(lambda w: (w * x).sum().backward())
    seq, total = capture(lambda: (backward(weight), weight.grad * 1)[1])
    for value in (3.0, 5.0):
        x.fill_(value)
        weight.grad.zero_()
        seq.replay()
        assert total.tolist() == [value] * 2


def test_a_break_that_leaves_another_stream_current_is_refused(device):
    """At a replay the next break would run there, and the caller go on there."""
    x = torch.ones(2)
    with a_stream() as side:
        change = no_graph(lambda t: setattr(tensors._current, "handle", int(side)))  # `set_stream`

        def body() -> Any:
            y = x * 1
            change(y)
            return y + 1

        with pytest.raises(CaptureError, match="left another stream current"):
            capture(body)
        assert tensors.current_stream() == 0


def test_history_changed_by_a_break_is_refused(device):
    w = torch.ones(2, requires_grad=True)

    def body() -> None:
        y = w * 2
        no_graph(lambda t: t.mul_(w))(y)

    with pytest.raises(CaptureError, match="autograd history of its argument 0"):
        capture(body)
    assert_nothing_open(device)


def test_results_that_require_grad_are_refused(device):
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(CaptureError, match="requires grad"):
        capture(lambda: no_graph(outputs="static")(lambda t: t * w)(w))


def test_an_autograd_function_of_breaks_differentiates(device):
    @no_graph(outputs="static")
    def forward(t: Any) -> Any:
        return t * 3

    @no_graph(outputs="static")
    def backward(g: Any) -> Any:
        return g * 3

    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Any) -> Any:
            return forward(t)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return backward(g)

    w = torch.ones(2, requires_grad=True)

    def body() -> Any:
        loss = (Triple.apply(w * 2) * w).sum()
        return torch.autograd.grad(loss, w)[0]

    seq, grad = capture(body, capture_error_mode="relaxed")
    for value in (1.0, 4.0):
        with torch.no_grad():
            w.fill_(value)
        seq.replay()
        assert grad.tolist() == [12 * value] * 2


def test_a_break_on_a_stream_that_was_forked_from_the_capture(device):
    x = torch.ones(2)
    with a_stream() as side:

        def body() -> Any:
            y = x * 2
            with forked(side):
                inside = is_in_breakable_graph()
            bump(y)
            return inside, y * 3

        seq, (inside, y) = capture(body)
        seq.replay()
        assert inside
        assert y.tolist() == [9, 9]
        seq.reset()


def test_a_break_with_side_work_open_is_refused_with_the_kernels(device):
    from breakable_cuda_graphs import UnjoinedStreamError

    x = torch.ones(2)
    with a_stream() as side:

        def body() -> None:
            y = x * 2
            with forked(side, join=False):
                y.sqrt()
            bump(y)

        seq = CUDAGraphSequence()
        with pytest.raises(UnjoinedStreamError, match="sqrt") as info, breakable_graph(seq):
            body()
        assert info.value.kernels == ("aten::sqrt",)
        assert info.value.segment == 0
        assert info.value.streams == ()
        assert "bump" in str(info.value)
        assert_nothing_open(device)


def test_a_parameter_whose_data_was_replaced_is_stale_for_a_break_too(device):
    w, out = torch.nn.Parameter(torch.ones(2)), torch.zeros(2)

    @no_graph
    def use(p: Any) -> None:
        with torch.no_grad():
            out.copy_(p)

    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        use(w)
    seq.replay()
    w.data = torch.full((2,), 3.0)
    with pytest.raises(StaleInputError, match="argument"):
        seq.replay()
