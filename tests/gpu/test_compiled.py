"""Code of compilers inside segments: Inductor's and Triton's, once warm."""

import shutil
from typing import Any

import pytest

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph

from .helpers import bump, check_replays, close, dev, kinds, same, torch

try:
    import triton

    from .triton_kernels import twice_plus
except ImportError:
    triton = None

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # those of compilers are not ours
    pytest.mark.skipif(
        not any(shutil.which(name) for name in ("cc", "gcc", "clang")),
        reason="needs a C compiler",
    ),
    pytest.mark.skipif(triton is None, reason="Triton is not installed"),
]


def launch(x: Any, amount: float) -> Any:
    out = torch.empty_like(x)
    twice_plus[(triton.cdiv(x.numel(), 32),)](x, out, x.numel(), amount, BLOCK=32)
    return out


def test_a_warm_triton_kernel_in_a_segment() -> None:
    def body(x: Any) -> Any:
        y = launch(x, 3.0)
        bump(y)
        return launch(y, 0.5)

    x, seq = dev(1), CUDAGraphSequence()
    body(x)
    with breakable_graph(seq):
        out = body(x)
    assert kinds(seq) == "geg"
    check_replays(seq, x, out, lambda t: (t * 2 + 4) * 2 + 0.5)


def test_warm_code_of_torch_compile_in_segments() -> None:
    @torch.compile
    def formula(t: Any) -> Any:
        return torch.sin(t) * 2 + torch.softmax(t, dim=0)

    def body(x: Any) -> Any:
        y = formula(x)
        bump(y)
        return formula(y)

    def expected(t: Any) -> Any:
        for step in range(2):
            t = torch.sin(t) * 2 + torch.softmax(t, dim=0) + (1 - step)
        return t

    x, seq = dev(1), CUDAGraphSequence()
    body(x)
    with breakable_graph(seq):
        out = body(x)
    assert kinds(seq) == "geg"
    check_replays(seq, x, out, expected, compare=close)


def test_warm_compiled_code_with_dropout_draws_new_numbers_at_every_replay() -> None:
    @torch.compile
    def drop(t: Any) -> Any:
        return torch.nn.functional.dropout(t, 0.5) + 1

    x, seq = dev(3, 4096), CUDAGraphSequence()
    drop(x)
    with breakable_graph(seq):
        y = drop(x)
        bump(y)
        out = y + 0
    results = []
    for seed in (1, 2, 1):
        torch.cuda.manual_seed(seed)
        seq.replay()
        results.append(out.clone())
        assert set(out.unique().tolist()) == {2.0, 8.0}
        assert 0.4 < float((out == 2).float().mean()) < 0.6
    same(results[0], results[2])
    assert not torch.equal(results[0], results[1])
