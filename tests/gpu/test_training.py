"""Training steps: captured whole, with breaks between their parts, and inside backward."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph

from .helpers import close, dev, kinds, same, torch, warm_up

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-3  # captured and eager products may be split in different ways


class Trainer:
    """A small model with dropout, its optimizer, and one step over static data."""

    def __init__(self, look: Callable[[Any], Any] = lambda loss: None, drop: float = 0.5) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(drop)
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 8)).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.x = torch.randn(16, 32, device="cuda")
        self.y = torch.randn(16, 8, device="cuda")
        self.look = look

    def step(self) -> Any:
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(self.model(self.x), self.y)
        self.look(loss)
        loss.backward()
        self.optimizer.step()
        return loss

    def twin(self) -> Trainer:
        """An eager trainer that starts from the same parameters."""
        twin = Trainer(drop=self.model[2].p)
        twin.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        return twin


def train_both(
    trainer: Trainer,
    replay: Callable[[], Any],
    loss: Any,
    rounds: int = 4,
    tolerance: float = TOLERANCE,
) -> list[float]:
    """Replay and train an eager twin on the same data and seeds; returns the twin's losses."""
    twin, losses = trainer.twin(), []
    for k in range(rounds):
        data, target = torch.randn_like(trainer.x), torch.randn_like(trainer.y)
        for one in (trainer, twin):
            one.x.copy_(data)
            one.y.copy_(target)
        torch.cuda.manual_seed(50 + k)
        replay()
        state = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(50 + k)
        losses.append(twin.step().item())
        assert torch.equal(state, torch.cuda.get_rng_state()), "the generator after a step"
        close(loss.detach().view(1), torch.tensor([losses[-1]], device="cuda"), f"loss {k}")
        parameters = trainer.model.parameters(), twin.model.parameters()
        for mine, eager in zip(*parameters, strict=True):
            close(mine.detach(), eager.detach(), f"a parameter after step {k}", tolerance)
            close(mine.grad, eager.grad, f"a gradient of step {k}", tolerance)
    return losses


def test_a_whole_step_with_dropout_in_place_of_torch_cuda_graph() -> None:
    trainer, seq = Trainer(), CUDAGraphSequence()
    warm_up(seq, trainer.step)
    with breakable_graph(seq):
        loss = trainer.step()
    assert kinds(seq) == "g"
    train_both(trainer, seq.replay, loss)


def test_a_step_warmed_up_on_another_stream_as_torch_documents() -> None:
    trainer, seq, side = Trainer(), CUDAGraphSequence(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            trainer.step()
    torch.cuda.current_stream().wait_stream(side)
    trainer.optimizer.zero_grad(set_to_none=True)
    with breakable_graph(seq):
        loss = trainer.step()
    train_both(trainer, seq.replay, loss)


def test_loss_item_as_a_break_between_forward_and_backward() -> None:
    seen: list[float] = []

    @no_graph
    def note(loss: Any) -> None:
        seen.append(loss.item())

    trainer, seq = Trainer(note), CUDAGraphSequence()
    warm_up(seq, trainer.step)
    with breakable_graph(seq):
        loss = trainer.step()
    assert kinds(seq) == "geg"
    seen.clear()
    losses = train_both(trainer, seq.replay, loss)
    assert seen == pytest.approx(losses, rel=TOLERANCE)


def test_clipping_gradients_in_a_break_between_backward_and_the_optimizer() -> None:
    def make(clip: Callable[[Any], Any]) -> tuple[Any, Any, Callable[[], None]]:
        torch.manual_seed(1)
        model = torch.nn.Linear(32, 8).cuda()
        x = torch.randn(16, 32, device="cuda")

        def step() -> None:
            model.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            clip([p.grad for p in model.parameters()])
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)

        return model, x, step

    def clip(grads: Any) -> None:
        total = sum(g.norm().item() ** 2 for g in grads) ** 0.5
        if total > 0.01:
            for g in grads:
                g.mul_(0.01 / total)

    seq = CUDAGraphSequence()
    model, x, step = make(no_graph(clip))
    warm_up(seq, step)
    with breakable_graph(seq):
        step()
    twin, twin_x, twin_step = make(clip)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    for k in range(4):
        x.normal_().mul_(10 if k % 2 else 0.001)
        twin_x.copy_(x)
        seq.replay()
        twin_step()
        for mine, eager in zip(model.parameters(), twin.parameters(), strict=True):
            close(mine.detach(), eager.detach(), f"step {k}", TOLERANCE)


@pytest.mark.parametrize("where", ["the step of the scaler after the block", "as a break"])
def test_mixed_precision_with_a_gradient_scaler(where: str) -> None:
    def make() -> Any:
        torch.manual_seed(2)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
        ).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=2)
        x, y = torch.randn(16, 32, device="cuda"), torch.randn(16, 8, device="cuda")

        def forward_and_backward() -> Any:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.float16):
                loss = torch.nn.functional.mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            return loss

        def update() -> None:
            scaler.step(optimizer)
            scaler.update()

        return model, scaler, x, y, forward_and_backward, update

    model, scaler, x, y, forward_and_backward, update = make()
    seq = CUDAGraphSequence()
    warm_up(seq, lambda: (forward_and_backward(), update()))
    update_break = no_graph(capture_stub=lambda: None)(update)  # gradients have no value yet
    with breakable_graph(seq):
        forward_and_backward()
        if where == "as a break":
            update_break()
    twin, twin_scaler, twin_x, twin_y, twin_forward, twin_update = make()
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    twin_scaler.load_state_dict(scaler.state_dict())
    for k in range(4):
        x.normal_()
        y.normal_()
        twin_x.copy_(x)
        twin_y.copy_(y)
        seq.replay()
        if where != "as a break":
            update()
        twin_forward()
        twin_update()
        for mine, eager in zip(model.parameters(), twin.parameters(), strict=True):
            close(mine.detach(), eager.detach(), f"a parameter after step {k}", 0.01)
        assert scaler.get_scale() == twin_scaler.get_scale(), "the scale grows as it does eagerly"


# ---------------------------------------------------------------- breaks inside backward


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """An autograd function whose two directions write their results in the given breaks."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            out = torch.empty_like(x)
            forward(out, x)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            out = torch.empty_like(grad)
            backward(out, grad, x)
            return out

    return Function.apply


def test_a_break_inside_backward_runs_in_relaxed_mode_on_autograds_thread() -> None:
    threads: list[int] = []

    def forward(out: Any, x: Any) -> None:
        out.copy_(torch.relu(x) * x.abs().max().item())

    def backward(out: Any, grad: Any, x: Any) -> None:
        threads.append(threading.get_ident())
        out.copy_(grad * (x > 0) * x.abs().max().item())

    weight = torch.rand(64, device="cuda") + 0.5

    def body(x: Any, layer: Any) -> Any:
        loss = (layer(x * weight) * 3).square().sum()
        loss.backward()
        return x.grad

    def leaf() -> Any:
        return torch.randn(64, device="cuda").requires_grad_()

    seq, x = CUDAGraphSequence(), leaf()
    layer = differentiable(no_graph(forward), no_graph(backward))
    warm_up(seq, lambda: body(leaf(), layer))
    threads.clear()
    with breakable_graph(seq, capture_error_mode="relaxed"):
        body(x, layer)
    assert threads, "the break ran at capture"
    assert threads[0] != threading.get_ident(), "backward runs on autograd's own thread"
    assert kinds(seq) == "gegeg"
    threads.clear()
    for k in range(4):
        fresh = leaf()
        with torch.no_grad():
            x.copy_(fresh * (k + 1))
        twin = x.detach().clone().requires_grad_()
        seq.replay()
        ours, ran = x.grad.clone(), list(threads)
        close(ours, body(twin, differentiable(forward, backward)), f"the gradient of replay {k}")
        assert ran[-1] == threading.get_ident(), "at replay breaks run on the caller's thread"
        threads.clear()


def captured_with_hook(hook: Callable[[Any], Any]) -> tuple[Any, Any, Callable[[Any], Any]]:
    """A sequence of a backward with a hook on a gradient, its input, and the body."""

    def body(x: Any) -> Any:
        y = x * 3
        y.register_hook(hook)
        (y * y).sum().backward()
        return x.grad

    seq, x = CUDAGraphSequence(), dev(1).requires_grad_()
    warm_up(seq, lambda: body(dev(1).requires_grad_()))
    with breakable_graph(seq, capture_error_mode="relaxed"):
        body(x)
    return seq, x, body


def test_a_break_in_a_hook_on_a_gradient() -> None:
    norms: list[float] = []

    @no_graph
    def clip(grad: Any) -> None:
        norms.append(grad.norm().item())
        if norms[-1] > 10:
            grad.mul_(10 / norms[-1])

    def hook(grad: Any) -> Any:
        kept = grad.clone()
        clip(kept)
        return kept

    seq, x, body = captured_with_hook(hook)
    for value in (0.01, 5.0, 0.02):
        with torch.no_grad():
            x.fill_(value)
        seq.replay()
        ours = x.grad.clone()
        close(ours, body(dev(value).requires_grad_()), f"the gradient for {value}")


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_break_inside_backward_is_refused_in_other_modes_naming_the_relaxed_one(
    mode: str,
) -> None:
    ran: list[int] = []
    look = no_graph(lambda grad: ran.append(1))

    def body(x: Any) -> None:
        y = x * 3
        y.register_hook(lambda grad: look(grad))
        y.sum().backward()

    seq, x = CUDAGraphSequence(), dev(1).requires_grad_()
    warm_up(seq, lambda: body(dev(1).requires_grad_()))
    ran.clear()
    with pytest.raises(RuntimeError, match="relaxed"):
        with breakable_graph(seq, capture_error_mode=mode):
            body(x)
    assert not ran
    assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_break_inside_a_backward_of_one_thread_works_in_every_mode(mode: str) -> None:
    seen: list[float] = []
    look = no_graph(lambda grad: seen.append(grad.sum().item()))

    def body(x: Any) -> Any:
        y = x * 3
        y.register_hook(lambda grad: look(grad))
        with torch.autograd.set_multithreading_enabled(False):
            (y * y).sum().backward()
        return x.grad

    seq, x = CUDAGraphSequence(), dev(1).requires_grad_()
    warm_up(seq, lambda: body(dev(1).requires_grad_()))
    with breakable_graph(seq, capture_error_mode=mode):
        body(x)
    seen.clear()
    for k in range(3):
        with torch.no_grad():
            x.fill_(k)
        seq.replay()
        same(x.grad, 18.0 * k)
    assert seen == [64 * 6.0 * k for k in range(3)]


def test_a_layer_of_breaks_trains_like_the_eager_one() -> None:
    def forward(out: Any, x: Any) -> None:
        out.copy_(torch.relu(x))

    def backward(out: Any, grad: Any, x: Any) -> None:
        out.copy_(grad * (x > 0))

    class Layer(torch.nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Any) -> Any:
            return self.function(x)

    trainer, seq = Trainer(drop=0.25), CUDAGraphSequence()
    trainer.model[1] = Layer(differentiable(no_graph(forward), no_graph(backward)))
    warm_up(seq, trainer.step)
    with breakable_graph(seq, capture_error_mode="relaxed"):
        loss = trainer.step()
    assert kinds(seq) == "gegeg"
    train_both(trainer, seq.replay, loss)


def test_a_capturable_adam_steps_as_it_does_eagerly() -> None:
    def adam(trainer: Trainer) -> Any:
        return torch.optim.Adam(trainer.model.parameters(), lr=0.01, capturable=True)

    trainer, seq = Trainer(no_graph(lambda loss: loss.item() and None)), CUDAGraphSequence()
    trainer.optimizer = adam(trainer)
    warm_up(seq, trainer.step)
    with breakable_graph(seq):
        loss = trainer.step()
    state = copy.deepcopy(trainer.optimizer.state_dict())
    make_twin = trainer.twin

    def twin() -> Trainer:
        made = make_twin()
        made.optimizer = adam(made)
        made.optimizer.load_state_dict(state)
        return made

    trainer.twin = twin  # type: ignore[method-assign]
    train_both(trainer, seq.replay, loss, tolerance=0.05)  # a tiny gradient is as good as its sign


def test_a_break_that_autograd_calls_by_itself_is_one_of_the_block() -> None:
    """A marked function as the hook: on autograd's thread no Python runs below it."""
    norms: list[float] = []

    @no_graph
    def look(grad: Any) -> None:
        norms.append(grad.norm().item())

    seq, x, _ = captured_with_hook(look)
    for value in (2.0, 5.0):
        with torch.no_grad():
            x.fill_(value)
        norms.clear()
        seq.replay()
        assert norms == pytest.approx([6 * value * x.numel() ** 0.5])
