"""outputs="static": every container, what is refused at capture, what is refused at replay."""

from __future__ import annotations

import dataclasses
import unittest.mock
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")


from breakable_cuda_graphs import (  # noqa: E402
    CaptureError,
    ReplayError,
    no_graph,
)
from helping import assert_nothing_open, capture  # noqa: E402


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    value: Any
    note: str = "n"


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


def static(make: Any) -> Any:
    return no_graph(outputs="static")(make)


CONTAINERS = {
    "tensor": (lambda t: t * 2, lambda r: r),
    "tuple": (lambda t: (t * 2, 5), lambda r: r[0]),
    "list": (lambda t: [None, t * 2], lambda r: r[1]),
    "dict": (lambda t: {"a": t * 2, 3: "x"}, lambda r: r["a"]),
    "ordered dict": (lambda t: OrderedDict(a=t * 2), lambda r: r["a"]),
    "default dict": (lambda t: defaultdict(list, a=t * 2), lambda r: r["a"]),
    "named tuple": (lambda t: Pair(t * 2, None), lambda r: r.left),
    "data class": (lambda t: Record(t * 2), lambda r: r.value),
    "frozen": (lambda t: Frozen(t * 2), lambda r: r.value),
    "nested": (lambda t: {"p": Pair([1, (t * 2,)], 2.5)}, lambda r: r["p"].left[1][0]),
    "torch's own": (lambda t: torch.max(torch.stack([t * 2, t]), dim=0), lambda r: r.values),
    "view": (lambda t: torch.stack([t, t * 2])[1], lambda r: r),
    "strided": (lambda t: torch.stack([t * 2, t]).t()[:, 0], lambda r: r),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_new_values_land_in_the_same_places(device, name):
    make, pick = CONTAINERS[name]
    x, results = torch.tensor([1.0, 2.0]), []

    def body() -> Any:
        result = static(make)(x + 0)
        results.append(result)
        return pick(result) + 1

    seq, y = capture(body)
    (result,) = results
    assert type(result) is type(make(x))
    address = pick(result).data_ptr()
    for value in (1.0, 7.0):
        x.fill_(value)
        seq.replay()
        assert pick(result).tolist() == [value * 2] * 2
        assert pick(result).data_ptr() == address
        assert y.tolist() == [value * 2 + 1] * 2


class Key:
    """A key that says nothing of itself."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return "key"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.number == other.number

    def __hash__(self) -> int:
        return self.number


def test_keys_of_any_type_have_places_of_their_own(device):
    x, order = torch.ones(2), [1, 2]

    @static
    def work(t: Any) -> Any:
        return {Key(number): t * number for number in order}

    def body() -> Any:
        result = work(x)
        return result[Key(1)] + 10 * result[Key(2)]

    seq, y = capture(body)
    x.fill_(3)
    seq.replay()
    assert y.tolist() == [63, 63]
    order.reverse()
    with pytest.raises(ReplayError, match="another structure"):
        seq.replay()


def test_no_error_is_as_long_as_a_key(device):
    x = torch.ones(2)
    with pytest.raises(CaptureError, match=r"result\[str 0\]") as info:
        capture(lambda: no_graph(lambda t: {"k" * 10_000: t * 2})(x))
    assert len(str(info.value)) < 1000


def test_no_key_is_printed_that_is_a_tensor(device, monkeypatch):
    """That would wait for the device."""
    x, state = torch.ones(2), {torch.nn.Parameter(torch.ones(2)): torch.ones(2)}
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda self: pytest.fail("printed"))

    @static
    def work(state: Any, t: Any) -> Any:
        return dict.fromkeys(state, t * 2)

    seq, y = capture(lambda: next(iter(work(state, x).values())) * 1)
    x.fill_(4)
    seq.replay()
    assert y.tolist() == [8, 8]
    assert "[Parameter 0]" in seq.explain() + str(seq.watched)


def test_what_is_no_tensor_is_that_of_the_capture(device):
    seq, result = capture(lambda: static(lambda: (None, 1, 2.5, True, "s", b"b", [], {}))())
    assert result == (None, 1, 2.5, True, "s", b"b", [], {})
    seq.replay()


def test_an_argument_returned_is_used_in_place(device):
    x = torch.ones(2)

    @static
    def work(t: Any) -> Any:
        t.add_(1)
        return t, t.reshape(2, 1)[1:], t * 10

    def body() -> Any:
        y = x * 2
        same, view, new = work(y)
        assert same.data_ptr() == y.data_ptr()
        assert view.data_ptr() == y.data_ptr() + 4
        return same.sum() + view.sum() + new.sum()

    seq, total = capture(body)
    x.fill_(2)
    seq.replay()
    assert total.item() == 10 + 5 + 100


def test_an_older_tensor_returned_is_used_in_place(device):
    table, x = torch.zeros(3), torch.ones(3)

    def body() -> Any:
        return static(lambda t: table)(x) * 2

    seq, y = capture(body)
    table.fill_(4)
    seq.replay()
    assert y.tolist() == [8] * 3


def test_one_tensor_twice_is_one_place(device):
    x, seen = torch.ones(2), []

    @static
    def twice(t: Any) -> Any:
        new = t * 2
        return new, {"again": new}

    def body() -> Any:
        first, rest = twice(x + 0)
        seen.append((first, rest["again"]))
        return first + rest["again"]

    seq, y = capture(body)
    assert seen[0][0].data_ptr() == seen[0][1].data_ptr()
    x.fill_(3)
    seq.replay()
    assert y.tolist() == [12, 12]


VIEWS = {
    "chunks": lambda t: (t * 2).view(2, 6).chunk(3, dim=1),
    "a whole and its part": lambda t: (lambda new: (new, new[3:5], new))(t * 2),
    "rows": lambda t: (t * 2).view(3, 4).unbind(0),
    "the last first": lambda t: (lambda new: [new[8:], new[:2]])(t * 2),
    "with nothing": lambda t: (lambda new: (new[:0], new[1:0], new[2:], new[:3]))(t * 2),
    "two types": lambda t: (lambda new: (new, new.view(torch.int32)))(t * 2),
    "conjugates": lambda t: (lambda new: (new, new.conj(), new.conj().imag))(
        torch.complex(t, t * 3)
    ),
    "an older one": lambda t: (OLDER.copy_(t)[:4], OLDER[2:]),
}

OLDER = torch.zeros(12)


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_one_new_memory_are_views_of_one(device, name):
    x = torch.arange(12.0)

    def body() -> Any:
        views = static(VIEWS[name])(x + 0)
        results.append(views)
        return [view + 0 for view in views]

    results: list[Any] = []
    seq, copies = capture(body)
    for value in (1.0, 4.0):
        x.copy_(torch.arange(12.0) + value)
        seq.replay()
        for now, copied, right in zip(*results, copies, VIEWS[name](x), strict=True):
            assert torch.equal(now, right)
            assert torch.equal(copied, right)
            assert (now.is_conj(), now.is_neg()) == (right.is_conj(), right.is_neg())


def test_what_a_segment_writes_to_a_view_is_seen_in_the_others(device):
    x = torch.ones(4)

    def views(t: Any) -> Any:
        new = t * 2
        return new, new[1:3]

    def body() -> Any:
        whole, part = static(views)(x)
        part.add_(10)
        return whole * 1

    seq, y = capture(body)
    x.fill_(2)
    seq.replay()
    assert y.tolist() == [4, 14, 14, 4]


def test_an_empty_tensor_is_a_result(device):
    x = torch.ones(2)
    seq, y = capture(lambda: static(lambda t: t[:0].clone())(x).sum() + 1)
    seq.replay()
    assert y.item() == 1


def test_a_list_inside_itself_is_a_result(device):
    def tangled(t: Any) -> Any:
        made: list[Any] = [5]
        made.append(made)
        return made

    use = [tangled]
    seq, result = capture(lambda: static(lambda t: use[0](t))(1))
    assert result[1][1] is result[1]
    seq.replay()
    use[0] = lambda t: [5, [5, 5]]
    with pytest.raises(ReplayError, match="another structure"):
        seq.replay()


def test_static_results_have_no_history(device):
    w = torch.ones(2, requires_grad=True)

    def body() -> Any:
        with torch.no_grad():
            return static(lambda t: t * 2)(w)

    seq, new = capture(body)
    assert not new.requires_grad
    assert w.requires_grad
    with pytest.raises(CaptureError, match="requires grad"):
        capture(lambda: static(lambda t: t)(w))


# ---------------------------------------------------------------- refused at capture


class Opaque:
    pass


class Unwilling:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Opaque(), "Opaque"),
        (unittest.mock.MagicMock(), r"a MagicMock \(result"),
        ([{"a": Opaque()}], "Opaque"),
        ({1, 2}, "set"),
        (lambda: None, "function"),
        (torch.float32, "dtype"),
        (torch.eye(2).to_sparse(), "Tensor of layout sparse_coo"),
    ],
)
def test_other_types_are_refused_by_name(device, value, name):
    with pytest.raises(CaptureError, match=name):
        capture(lambda: static(lambda: value)())
    assert_nothing_open(device)


def test_an_object_that_answers_nothing_is_refused_by_name(device):
    with pytest.raises(CaptureError, match=r"a Unwilling \(result"):
        capture(lambda: static(Unwilling)())


def test_subclasses_are_refused_by_name(device):
    class Named(torch.Tensor):
        pass

    with pytest.raises(CaptureError, match="Named"):
        capture(lambda: static(lambda: torch.ones(2).as_subclass(Named))())


def test_views_of_one_new_memory_that_repeat_elements_are_refused(device):
    x = torch.ones(4)

    def views(t: Any) -> Any:
        new = t * 2
        return new, new.expand(3, 4)

    with pytest.raises(CaptureError, match=r"views of one piece of memory \(result\[1\]\)"):
        capture(lambda: static(views)(x))
    assert_nothing_open(device)


# ---------------------------------------------------------------- refused at replay


def fresh(t: Any) -> Any:
    return (t * 2, 5)


CHANGES = {
    "shape": (fresh, lambda t: (t[:1] * 2, 5), r"result\[0\].*\[2\].*\[1\]"),
    "broadcast": (fresh, lambda t: (t.sum(), 5), r"\[\] on cpu now"),
    "dtype": (fresh, lambda t: ((t * 2).double(), 5), "float64"),
    "no tensor": (fresh, lambda t: (3.0, 5), "float"),
    "a tensor now": (fresh, lambda t: (t * 2, t * 1), r"result\[1\]"),
    "longer": (fresh, lambda t: (t * 2, 5, 6), "another structure"),
    "list": (fresh, lambda t: [t * 2, 5], "another structure"),
    "none": (fresh, lambda t: None, "another structure"),
    "device": (fresh, lambda t: (torch.empty(2, device="meta"), 5), "meta"),
    "keys": (lambda t: {"a": t * 2}, lambda t: {"b": t * 2}, "another structure"),
    "sparse": (fresh, lambda t: ((t * 2).to_sparse(), 5), "Tensor of layout sparse_coo"),
    "moved": (lambda t: t, lambda t: t * 1, "memory that it did not return"),
    "no longer views of one": (
        lambda t: (t * 2).chunk(2),
        lambda t: (
            [each.clone() for each in (t * 2).chunk(2)] and tuple((t * 2).flip(0).chunk(2)[::-1])
        ),
        r"result\[1\]",
    ),
    "no longer one": (lambda t: [t * 2] * 2, lambda t: [t * 2, t * 2], r"result\[1\]"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_result_raises_and_nothing_later_is_launched(device, name):
    at_capture, later, words = CHANGES[name]
    x, out, use = torch.ones(2), torch.zeros(2), [at_capture]
    results: list[Any] = []

    @static
    def work(t: Any) -> Any:
        return use[0](t)

    def body() -> None:
        results.append(work(x + 0))
        out.add_(1)

    seq, _ = capture(body)
    seq.replay()
    assert out.tolist() == [1, 1]
    use[0] = later
    with pytest.raises(ReplayError, match=words) as info:
        seq.replay()
    assert "Nothing after it was launched" in str(info.value)
    assert "work" in info.value.function
    assert out.tolist() == [1, 1]
    assert_nothing_open(device)
    use[0] = at_capture
    x.fill_(4)
    seq.replay()
    assert out.tolist() == [2, 2]


def test_nothing_is_copied_when_a_later_part_does_not_fit(device):
    x, use = torch.ones(2), [lambda t: (t * 2, t * 3)]

    @static
    def work(t: Any) -> Any:
        return use[0](t)

    seq, (first, _) = capture(lambda: work(x + 0))
    seq.replay()
    x.fill_(100)
    use[0] = lambda t: (t * 2, t[:1])
    with pytest.raises(ReplayError):
        seq.replay()
    assert first.tolist() == [2, 2]


def test_strides_may_change_and_values_do_not(device):
    x, use = torch.arange(6.0).reshape(2, 3), [lambda t: t * 1]

    @static
    def work(t: Any) -> Any:
        return use[0](t)

    seq, y = capture(lambda: work(x + 0) * 2)
    use[0] = lambda t: (t.t() * 1).contiguous().t()
    seq.replay()
    assert y.tolist() == (x * 2).tolist()


def test_static_buffers_are_owned_until_reset(device):
    x = torch.ones(64)
    seq, _ = capture(lambda: (static(lambda t: t * 2)(x) * 3).sum())
    assert seq._memory.owned == 1
    seq.reset()
    assert seq._memory.owned == 0
