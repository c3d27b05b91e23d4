"""Who keeps the memory that a sequence reads: watched, owned, of the pool; and what happens when it dies."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import (  # noqa: E402
    CUDAGraphSequence,
    StaleInputError,
    breakable_graph,
    no_graph,
)
from breakable_cuda_graphs.simulator import simulated_device  # noqa: E402
from helping import Boom, capture, in_thread  # noqa: E402


@no_graph
def bump(t: Any) -> None:
    t.add_(1)


# ---------------------------------------------------------------- watched


def test_a_freed_input_of_a_segment_is_refused_with_where_it_was_read(device):
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    seq, _ = capture(lambda: y.copy_(x * 2))
    seq.replay()
    del x
    with pytest.raises(StaleInputError) as info:
        seq.replay()
    assert "float32 [2, 3] on cpu" in info.value.tensor
    assert "segment 0" in info.value.role
    assert "test_memory.py" in str(info.value) or "helping.py" in str(info.value)
    assert "keep_inputs=True" in str(info.value)
    assert y.tolist() == [[2] * 3] * 2


@pytest.mark.parametrize("options", [{}, {"keep_inputs": True}])
@pytest.mark.parametrize("born", ["before the block", "in a break"])
def test_an_input_that_dies_before_its_segment_has_ended_is_refused(device, options, born):
    """Nothing is left of it that could be watched or kept."""
    x, held, seq = torch.ones(2), [torch.ones(2)], CUDAGraphSequence()
    fill = no_graph(lambda: held.append(torch.ones(2)))
    y = torch.zeros(2)
    with breakable_graph(seq, **options):
        if born == "in a break":
            fill()
        y.copy_(x + held.pop())
    with pytest.raises(StaleInputError, match="given back before the segment had ended") as info:
        seq.replay()
    assert "[2] on cpu" in info.value.tensor
    assert "segment 0" in info.value.role or "segment 2" in info.value.role
    with pytest.raises(Boom), breakable_graph(seq, **options):
        raise Boom
    assert "stale" in repr(seq)
    seq.reset()
    capture(lambda: y.copy_(x * 5), seq)
    seq.replay()
    assert y.tolist() == [5, 5]


def test_what_dies_in_a_block_that_watches_nothing_is_its_users_own(device):
    x, held = torch.ones(2), [torch.ones(2)]
    seq, _ = capture(lambda: x + held.pop(), check_input_liveness=False)
    assert seq.watched == ()
    assert "stale" not in repr(seq)


def test_a_freed_argument_of_a_break_is_refused_with_its_role(device):
    x, y = torch.ones(5), torch.zeros(5)

    @no_graph
    def add(target: Any, *, table: dict[str, Any]) -> None:
        target.add_(table["t"][0])

    def body() -> None:
        add(y, table={"t": [x]})

    seq, _ = capture(body)
    del x
    with pytest.raises(StaleInputError) as info:
        seq.replay()
    assert "float32 [5]" in info.value.tensor
    assert "table['t'][0]" in info.value.role
    assert "break" in info.value.role


def test_memory_read_through_a_view_lives_as_long_as_a_view_does(device):
    x = torch.arange(4.0)
    view = x.view(2, 2)
    seq, y = capture(lambda: view * 2)
    del x
    seq.replay()
    assert y.tolist() == [[0, 2], [4, 6]]
    del view
    with pytest.raises(StaleInputError):
        seq.replay()


def test_memory_read_through_a_view_with_an_offset_is_watched(device):
    x = torch.arange(4.0)
    seq, _ = capture(lambda: x[2:] * 2)
    del x
    with pytest.raises(StaleInputError):
        seq.replay()


@pytest.mark.parametrize("again", [False, True])
def test_an_alias_of_another_sequence_is_nobodys_memory(again):
    """What is watched is the tensor, not the stand-in that a break of another sequence holds."""
    with simulated_device():
        for freed in (True, False):
            x = torch.ones(4)
            breaking, _ = capture(lambda x=x: bump(x))
            reading, y = capture(lambda x=x: x * 2)
            if again:
                breaking.reset()
                capture(lambda x=x: bump(x), breaking)
            if freed:
                del x
                gc.collect()
                with pytest.raises(StaleInputError):
                    reading.replay()
            else:
                breaking.reset()
                reading.replay()


def test_new_data_in_a_parameter_is_refused(device):
    parameter = torch.nn.Parameter(torch.ones(2))
    with torch.no_grad():
        seq, y = capture(lambda: parameter * 2)
        seq.replay()
    assert y.tolist() == [2, 2]
    parameter.data = torch.ones(2) * 5
    with pytest.raises(StaleInputError):
        seq.replay()


def test_what_dies_during_a_replay_stops_it_after_the_break(device):
    held, out, drop = [torch.ones(2)], torch.zeros(2), []

    @no_graph
    def maybe_drop() -> None:
        if drop:
            held.clear()

    def body() -> None:
        maybe_drop()
        out.copy_(held[0] * 2)

    seq, _ = capture(body)
    drop.append(True)
    with pytest.raises(StaleInputError):
        seq.replay()
    assert out.tolist() == [0, 0]


def test_a_stale_sequence_works_again_after_reset(device):
    seq, y = CUDAGraphSequence(), torch.zeros(2)
    for value in (1.0, 2.0):
        x = torch.full((2,), value)
        with breakable_graph(seq):
            y.copy_(x * 2)
        seq.replay()
        assert y.tolist() == [value * 2] * 2
        del x
        with pytest.raises(StaleInputError):
            seq.replay()
        seq.reset()


def test_a_flag_may_be_raised_in_another_thread(device):
    held, y = [torch.ones(2)], torch.zeros(2)
    seq, _ = capture(lambda: y.copy_(held[0] * 2))
    in_thread(held.clear)
    with pytest.raises(StaleInputError):
        seq.replay()


def test_watched_memory_is_listed(device):
    x, y = torch.ones(2), torch.zeros(3)
    seq, _ = capture(lambda: bump(x) or y.mul_(2))
    lines = sorted(seq.watched)
    assert len(lines) == 2
    assert any("float32 [2] on cpu, argument 0 of the break bump" in line for line in lines)
    assert any("float32 [3] on cpu, read or written in segment 2" in line for line in lines)
    assert seq.unwatched == ()


def test_one_memory_is_watched_once(device):
    x = torch.ones(8)
    seq, _ = capture(lambda: [bump(x), bump(x[2:]), bump(x.view(2, 4)), x.mul_(2)])
    assert len(seq.watched) == 1


def test_empty_tensors_are_not_watched(device):
    seq, _ = capture(lambda: bump(torch.ones(0)))
    seq.replay()
    assert seq.watched == ()


def test_switched_off_nothing_is_watched(device):
    x = torch.ones(2)
    seq, _ = capture(lambda: bump(x), check_input_liveness=False)
    assert seq.watched == ()
    assert seq._memory.owned == 0


def test_the_death_of_other_tensors_is_none_of_its_business(device):
    x, other = torch.ones(2), torch.ones(2)
    seq, _ = capture(lambda: bump(x))
    del other
    seq.replay()
    assert x.tolist() == [3, 3]


# ---------------------------------------------------------------- owned


def test_kept_inputs_live_until_reset(device):
    x, y = torch.ones(2), torch.zeros(2)
    reference = weakref.ref(x.untyped_storage())
    seq, _ = capture(lambda: bump(x) or y.copy_(x), keep_inputs=True)
    del x
    seq.replay()
    assert y.tolist() == [3, 3]
    assert seq._memory.owned == 2
    assert seq.watched == ()
    seq.reset()
    assert reference() is None


def test_inputs_kept_are_let_go_with_the_sequence(device):
    x = torch.ones(2)
    reference = weakref.ref(x.untyped_storage())
    seq, _ = capture(lambda: bump(x), keep_inputs=True)
    del x, seq
    from helping import settle

    settle()
    assert reference() is None


def test_what_is_born_in_a_break_belongs_to_the_sequence(device):
    x, log = torch.ones(2), []

    @no_graph
    def make(box: list[Any]) -> None:
        if not box:
            box.append(torch.full((2,), 3.0))

    def body() -> Any:
        box: list[Any] = []
        make(box)
        made = box[0]
        log.append(weakref.ref(made.untyped_storage()))
        y = x + made
        bump(made)
        return y

    seq, y = capture(body)
    assert log[0]() is not None
    assert seq._memory.owned == 1
    seq.replay()
    assert y.tolist() == [5, 5]  # the break ran at capture too
    seq.replay()
    assert y.tolist() == [6, 6]
    seq.reset()
    assert log[0]() is None


def test_what_captured_work_made_is_neither_owned_nor_watched(device):
    x = torch.ones(2)

    def body() -> Any:
        y = x * 2
        bump(y)
        z = y * 3
        bump(z)
        return z

    seq, z = capture(body)
    assert seq._memory.owned == 0
    assert len(seq.watched) == 1
    x.fill_(2)
    seq.replay()
    assert z.tolist() == [16, 16]


# ---------------------------------------------------------------- after a failure


def test_a_failed_block_watches_and_owns_nothing_more(device):
    x, y = torch.ones(2), torch.ones(3)
    seq, _ = capture(lambda: bump(x))
    before = seq.watched
    with pytest.raises(Boom), breakable_graph(seq, keep_inputs=True):
        bump(y)
        y.mul_(2)
        bump(y)
        raise Boom
    assert seq.watched == before
    assert seq._memory.owned == 0
    reference = weakref.ref(y.untyped_storage())
    del y
    assert reference() is None
    assert seq._memory.stale is None
    capture(lambda: bump(x), seq)
    seq.replay()


def test_the_death_of_what_a_failed_block_watched_is_no_concern(device):
    x, gone = torch.ones(2), torch.ones(3)
    seq, _ = capture(lambda: bump(x))
    with pytest.raises(Boom), breakable_graph(seq):
        bump(gone)
        raise Boom
    del gone
    capture(lambda: bump(x), seq)
    seq.replay()
    assert seq._memory.stale is None


def test_a_tensor_of_a_failed_break_is_not_kept(device):
    x = torch.ones(2)
    reference = weakref.ref(x.untyped_storage())

    def body() -> None:
        no_graph(lambda t: [][0])(x)

    with pytest.raises(IndexError) as info:
        capture(body, keep_inputs=True)
    del info, x, body
    assert reference() is None
