"""Replays draw what the eager code would draw, bit for bit, eager breaks included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, force_no_graph, no_graph
from breakable_cuda_graphs._driver import bindings

from .helpers import busy, dev, kinds, same, sync, torch, warm_up

pytestmark = pytest.mark.gpu

dropout = torch.nn.functional.dropout


@no_graph
def eager_dropout(t: Any) -> None:
    t.copy_(dropout(t, 0.3))


def check_random(
    body: Callable[[Any], Any], rounds: int = 4, seq: Any = None, reseed: bool = False
) -> Any:
    """Replays of body give the draws and the generator states of the same body run eagerly."""
    x, seq = dev(1), seq or CUDAGraphSequence()
    body(x)
    torch.cuda.manual_seed(5)
    with breakable_graph(seq):
        out = body(x)

    def run(step: Callable[[], Any]) -> list[Any]:
        results = []
        torch.cuda.manual_seed(17)
        torch.rand(3, device="cuda")
        for k in range(rounds):
            if reseed:
                torch.cuda.manual_seed(100 + k % 2)
            x.copy_(torch.arange(64, device="cuda") + k + 1)
            results.append((step().clone(), torch.cuda.get_rng_state()))
        return results

    def replay() -> Any:
        out.fill_(float("nan"))
        seq.replay()
        return out

    for k, (ours, eager) in enumerate(zip(run(replay), run(lambda: body(x)), strict=True)):
        same(ours[0], eager[0], f"draw {k}")
        assert torch.equal(ours[1], eager[1]), f"the state of the generator after replay {k}"
    return seq


def test_dropout_then_eager_dropout_then_dropout_is_bit_exact() -> None:
    def body(x: Any) -> Any:
        y = dropout(x, 0.5)
        eager_dropout(y)
        return dropout(y + 1, 0.25)

    assert kinds(check_random(body)) == "geg"


BODIES: dict[str, Callable[[Any], Any]] = {}


def body_named(name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def keep(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
        BODIES[name] = body
        return body

    return keep


@body_named("one segment")
def one_segment(x: Any) -> Any:
    return dropout(x, 0.5) + torch.rand_like(x)


@body_named("only the break draws")
def only_the_break(x: Any) -> Any:
    y = x * 2
    eager_dropout(y)
    return y + 1


@body_named("only the last of many segments draws")
def only_the_last(x: Any) -> Any:
    y = x * 2
    for _ in range(3):
        look(y)
        y = y + 1
    return y * torch.rand_like(y)


@body_named("some segments draw and some do not")
def some_segments(x: Any) -> Any:
    y = dropout(x, 0.5)
    look(y)
    y = y * 2
    eager_dropout(y)
    y = y + 1
    look(y)
    return y + torch.randn_like(y)


@body_named("breaks first and last draw")
def first_and_last(x: Any) -> Any:
    y = x.clone()
    eager_dropout(y)
    y = y + torch.rand_like(y)
    eager_dropout(y)
    return y


@body_named("many kinds of draw")
def many_kinds(x: Any) -> Any:
    y = torch.randn(64, device="cuda") + torch.rand(64, device="cuda")
    y = y + torch.randint(0, 100, (64,), device="cuda")
    eager_dropout(y)
    y = y + torch.empty_like(y).exponential_().log1p() + torch.bernoulli(torch.full_like(y, 0.5))
    return y + torch.empty_like(y).uniform_(-2, 2) + x


@body_named("many draws in one segment")
def many_draws(x: Any) -> Any:
    y = x
    for _ in range(20):
        y = y + torch.rand_like(y)
    eager_dropout(y)
    for _ in range(20):
        y = y + torch.rand_like(y)
    return y


@body_named("segments with nothing eager between them")
def forced(x: Any) -> Any:
    y = dropout(x, 0.5)
    force_no_graph()
    y = y + torch.rand_like(y)
    force_no_graph()
    y = y * 2
    force_no_graph()
    y = y + dropout(y, 0.25)
    eager_dropout(y)
    y = y + torch.rand_like(y)
    force_no_graph()
    return y + torch.rand_like(y)


@body_named("a segment that allocates in its stream's order")
def allocating(x: Any) -> Any:
    driver, stream = bindings.current(), int(torch.cuda.current_stream().cuda_stream)
    memory = driver.cuMemAllocAsync(256, stream)
    y = dropout(x, 0.5)
    driver.cuMemFreeAsync(memory, stream)
    eager_dropout(y)
    return y + torch.rand_like(y)


@body_named("a segment that ends inside of a transform")
def transformed(x: Any) -> Any:
    def loss(t: Any) -> Any:
        y = t * torch.rand(64, device="cuda")
        force_no_graph()
        return (y * y * torch.rand(64, device="cuda")).sum()

    return torch.func.grad(loss)(x)


@no_graph
def look(t: Any) -> None:
    t.sum().item()


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_replays_draw_what_eager_code_draws(body: Callable[[Any], Any]) -> None:
    check_random(body)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_reseeding_between_replays_is_obeyed(body: Callable[[Any], Any]) -> None:
    check_random(body, reseed=True)


def test_the_same_seed_gives_the_same_replay_and_no_seed_gives_new_numbers() -> None:
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        y = torch.rand(64, device="cuda")
        look(y)
        out = y + torch.rand(64, device="cuda")
    results = []
    for seed in (1, None, 2, 1):
        if seed is not None:
            torch.cuda.manual_seed(seed)
        seq.replay()
        results.append(out.clone())
    first, unseeded, second, again = results
    same(again, first)
    assert not torch.equal(first, unseeded)
    assert not torch.equal(first, second)


def test_a_state_set_between_replays_is_obeyed() -> None:
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        y = torch.rand(64, device="cuda")
        eager_dropout(y)
        out = y + torch.rand(64, device="cuda")
    seq.replay()
    state = torch.cuda.get_rng_state()
    seq.replay()
    first = out.clone()
    seq.replay()
    torch.cuda.set_rng_state(state)
    seq.replay()
    same(out, first)


def test_a_break_that_draws_a_different_amount_each_time_keeps_the_eager_order() -> None:
    counter = {"k": 0}

    @no_graph
    def some_draws(t: Any) -> None:
        counter["k"] += 1
        for _ in range(counter["k"] % 4):
            t.add_(torch.rand_like(t))

    seq = CUDAGraphSequence()

    def body() -> Any:
        y = torch.rand(64, device="cuda")
        some_draws(y)
        return y + torch.rand(64, device="cuda")

    with breakable_graph(seq):
        out = body()

    def run(step: Callable[[], Any]) -> list[Any]:
        counter["k"] = 0
        torch.cuda.manual_seed(3)
        return [step().clone() for _ in range(5)]

    ours = run(lambda: (seq.replay(), out)[1])
    for k, eager in enumerate(run(body)):
        same(ours[k], eager, f"replay {k}")


def test_eager_draws_between_replays_keep_their_place() -> None:
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        y = torch.rand(64, device="cuda")
        look(y)
        out = y + torch.rand(64, device="cuda")

    def run(step: Callable[[], Any]) -> list[Any]:
        torch.cuda.manual_seed(8)
        return [t.clone() for _ in range(3) for t in (torch.rand(5, device="cuda"), step())]

    ours = run(lambda: (seq.replay(), out)[1])
    eager = run(lambda: torch.rand(64, device="cuda") + torch.rand(64, device="cuda"))
    for k in range(6):
        same(ours[k], eager[k], f"draw {k}")


@pytest.mark.parametrize("drawn_before", [0, 7], ids=["offset zero", "offset not zero"])
@pytest.mark.parametrize("breaks", [0, 1])
def test_a_segment_that_draws_and_restores_still_reads_the_generator(
    drawn_before: int, breaks: int
) -> None:
    seq = CUDAGraphSequence()

    def body() -> Any:
        state = torch.cuda.get_rng_state()
        y = torch.rand(64, device="cuda")
        torch.cuda.set_rng_state(state)
        for _ in range(breaks):
            look(y)
        return y + 1

    torch.cuda.manual_seed(5)
    if drawn_before:
        torch.rand(drawn_before, device="cuda")
    with breakable_graph(seq):
        out = body()
    for seed in (5, 6, 7, 6):
        for step in range(2):
            torch.cuda.manual_seed(seed)
            torch.rand(3 * step + 1, device="cuda")
            seq.replay()
            ours, state = out.clone(), torch.cuda.get_rng_state()
            torch.cuda.manual_seed(seed)
            torch.rand(3 * step + 1, device="cuda")
            same(ours, body(), f"seed {seed}")
            assert torch.equal(state, torch.cuda.get_rng_state())


def test_later_draws_follow_a_segment_that_draws_and_restores() -> None:
    def body(x: Any) -> Any:
        state = torch.cuda.get_rng_state()
        y = dropout(x, 0.5)
        torch.cuda.set_rng_state(state)
        look(y)
        y = y + dropout(x, 0.5)  # the same mask again
        look(y)
        return y + torch.rand_like(y)

    seq = check_random(body)
    assert kinds(seq) == "gegeg"


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_activation_checkpointing_across_a_break_gives_the_same_masks(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    weight = torch.rand(64, device="cuda") + 1

    def body(x: Any) -> Any:
        y = checkpoint(lambda t: dropout(t * weight, 0.5), x, use_reentrant=reentrant)
        look(y)
        z = dropout(y, 0.25)
        look(z)
        z.sum().backward()
        return z.detach()

    def leaf() -> Any:
        return dev(3).requires_grad_()

    x, seq = leaf(), CUDAGraphSequence()
    warm_up(seq, lambda: body(leaf()))
    torch.cuda.manual_seed(5)
    with breakable_graph(seq):
        z = body(x)
    masks = []
    for seed in (1, 2, 3):
        torch.cuda.manual_seed(seed)
        seq.replay()
        ours = z.clone(), x.grad.clone(), torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        twin = leaf()
        same(ours[0], body(twin), "the output")
        same(ours[1], twin.grad, "the gradient")
        assert torch.equal(ours[2], torch.cuda.get_rng_state())
        assert torch.equal(ours[0] != 0, ours[1] != 0), "the recompute drew other masks"
        masks.append(ours[0] != 0)
    assert not torch.equal(masks[0], masks[1])


def test_generators_given_to_the_block_draw_what_they_would_draw_eagerly() -> None:
    first, second = torch.Generator("cuda"), torch.Generator("cuda")
    x, seq = dev(1), CUDAGraphSequence()

    @no_graph
    def eager_draw(t: Any) -> None:
        t.add_(torch.rand(64, device="cuda", generator=first))

    def body() -> Any:
        y = x + torch.rand(64, device="cuda", generator=first)
        y = y + torch.rand(64, device="cuda")
        eager_draw(y)
        y = y * torch.rand(64, device="cuda", generator=second)
        return y + torch.randn(64, device="cuda", generator=first)

    with breakable_graph(seq, generators=[first, second]):
        out = body()

    def run(step: Callable[[], Any]) -> list[Any]:
        first.manual_seed(1)
        second.manual_seed(2)
        torch.cuda.manual_seed(3)
        return [
            (step().clone(), first.get_state(), second.get_state(), torch.cuda.get_rng_state())
            for _ in range(3)
        ]

    ours = run(lambda: (seq.replay(), out)[1])
    for k, eager in enumerate(run(body)):
        same(ours[k][0], eager[0], f"replay {k}")
        for mine, theirs in zip(ours[k][1:], eager[1:], strict=True):
            assert torch.equal(mine, theirs), f"a state after replay {k}"


def test_a_generator_that_was_not_given_is_refused() -> None:
    stranger = torch.Generator("cuda")
    stranger.manual_seed(1)
    with pytest.raises(RuntimeError), breakable_graph(CUDAGraphSequence()):
        torch.rand(64, device="cuda", generator=stranger)
    stranger.manual_seed(1)
    first = torch.rand(8, device="cuda", generator=stranger)
    stranger.manual_seed(1)
    same(torch.rand(8, device="cuda", generator=stranger), first, "the generator afterwards")


def test_appended_captures_draw_in_their_order() -> None:
    x, seq = dev(1), CUDAGraphSequence()

    def first() -> Any:
        y = dropout(x, 0.5)
        eager_dropout(y)
        return y + torch.rand_like(y)

    def second(y: Any) -> Any:
        z = y + torch.rand_like(y)
        look(z)
        return z + torch.rand_like(z)

    with breakable_graph(seq):
        a = first()
    with breakable_graph(seq):
        b = second(a)
    torch.cuda.manual_seed(4)
    ours = [(seq.replay(), b.clone())[1] for _ in range(3)]
    torch.cuda.manual_seed(4)
    for k in range(3):
        same(ours[k], second(first()), f"replay {k}")


def test_two_sequences_of_one_generator_replay_in_any_order() -> None:
    sequences, outs = [], []
    for k in range(2):
        seq = CUDAGraphSequence()
        with breakable_graph(seq):
            y = torch.rand(64, device="cuda") + k
            look(y)
            outs.append(y + torch.rand(64, device="cuda"))
        sequences.append(seq)
    order = (0, 1, 1, 0, 0, 1)
    torch.cuda.manual_seed(2)
    ours = [(sequences[k].replay(), outs[k].clone())[1] for k in order]
    torch.cuda.manual_seed(2)
    for step, k in enumerate(order):
        want = torch.rand(64, device="cuda") + k + torch.rand(64, device="cuda")
        same(ours[step], want, f"replay {step}")


def test_replays_of_one_generator_on_two_streams_do_not_take_each_others_numbers() -> None:
    sequences, outs = [], []
    for _ in range(2):
        seq = CUDAGraphSequence()
        with breakable_graph(seq):
            busy(10)
            outs.append(torch.rand(64, device="cuda"))
        sequences.append(seq)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    sync()
    torch.cuda.manual_seed(6)
    for seq, stream in zip(sequences, streams, strict=True):
        with torch.cuda.stream(stream):
            seq.replay()
    sync()
    torch.cuda.manual_seed(6)
    for k in range(2):
        same(outs[k], torch.rand(64, device="cuda"), f"the numbers of stream {k}")


def test_a_capture_while_a_random_replay_runs_does_not_change_its_numbers() -> None:
    seq, stream = CUDAGraphSequence(), torch.cuda.Stream()
    with breakable_graph(seq):
        busy(20)
        out = torch.rand(64, device="cuda")
    sync()
    torch.cuda.manual_seed(9)
    torch.rand(100, device="cuda")
    with torch.cuda.stream(stream):
        seq.replay()
    other = CUDAGraphSequence()
    with breakable_graph(other):
        torch.rand(64, device="cuda")
    sync()
    torch.cuda.manual_seed(9)
    torch.rand(100, device="cuda")
    same(out, torch.rand(64, device="cuda"))


def test_a_torch_graph_and_a_sequence_share_the_generator() -> None:
    seq, graph = CUDAGraphSequence(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        theirs = torch.rand(64, device="cuda")
    with breakable_graph(seq):
        y = torch.rand(64, device="cuda")
        look(y)
        ours = y + torch.rand(64, device="cuda")
    torch.cuda.manual_seed(12)
    results = []
    for _ in range(2):
        graph.replay()
        results.append(theirs.clone())
        seq.replay()
        results.append(ours.clone())
    torch.cuda.manual_seed(12)
    for _ in range(2):
        same(results.pop(0), torch.rand(64, device="cuda"))
        same(results.pop(0), torch.rand(64, device="cuda") + torch.rand(64, device="cuda"))


def test_after_reset_and_a_new_capture_the_draws_are_right() -> None:
    def body(x: Any) -> Any:
        y = dropout(x, 0.5)
        eager_dropout(y)
        return y + torch.rand_like(y)

    seq = check_random(body)
    seq.reset()
    check_random(body, seq=seq)


def test_a_sequence_of_which_all_segments_draw_is_captured_again_into_its_pool() -> None:
    x, seq = dev(1), CUDAGraphSequence()
    warm_up(seq, lambda: dropout(x, 0.5))  # its stream was seen, so its pool stays
    for _ in range(3):
        assert kinds(check_random(lambda t: dropout(t, 0.5), seq=seq)) == "g"
        seq.reset()


def test_a_long_sequence_of_random_segments_stays_exact() -> None:
    def body(x: Any) -> Any:
        y = x
        for k in range(30):
            y = y + torch.rand_like(y)
            if k % 3 == 0:
                eager_dropout(y)
            else:
                look(y)
        return y + 0

    check_random(body, rounds=2)


def test_segments_of_a_decoder_layer_are_not_taken_for_ones_that_draw() -> None:
    """Those take more calls at each replay."""
    weight = torch.rand(1024, 1024, device="cuda", dtype=torch.bfloat16) / 32
    scale = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    x = torch.rand(1, 1, 1024, device="cuda", dtype=torch.bfloat16)

    def layer(h: Any) -> Any:
        wide = h.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype)
        gate = torch.nn.functional.silu(normed * scale @ weight)
        h = h + (gate * (normed @ weight)) @ weight
        return torch.nn.functional.layer_norm(h, (1024,), scale) + torch.nn.functional.rms_norm(
            h, (1024,), scale
        )

    touch = no_graph(lambda t: None)
    seq = CUDAGraphSequence()
    with torch.no_grad():
        layer(x)
        with breakable_graph(seq):
            h = x
            for _ in range(3):
                h = layer(h)
                touch(h)
            h = torch.nn.functional.dropout(h, 0.5)
    draw = [s._runner is not None for s in seq.segments[::2]]
    assert draw == [False, False, False, True]
