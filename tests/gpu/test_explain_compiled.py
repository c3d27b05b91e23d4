"""`explain` sees what compiles and tunes itself, once, and does not make warm code compile again."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from breakable_cuda_graphs import explain

from .helpers import dev, torch

try:
    import triton
    import triton.language as tl
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

if triton is not None:

    @triton.jit
    def scale(x, count, amount, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        tl.store(x + at, tl.load(x + at, mask=inside) * amount, mask=inside)

    @triton.autotune(configs=[triton.Config({"BLOCK": n}) for n in (32, 64)], key=["count"])
    @triton.jit
    def tuned_scale(x, count, amount, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        tl.store(x + at, tl.load(x + at, mask=inside) * amount, mask=inside)


def kinds_of(report: Any) -> list[tuple[str, str]]:
    return [(finding.kind, finding.function.rpartition(".")[2]) for finding in report.findings]


def test_what_torch_compile_compiles_is_found_once() -> None:
    compiled = torch.compile(lambda t: torch.sin(t) * 3 + 1)

    def runs_compiled(t: Any) -> None:
        t.copy_(compiled(t))

    def step(x: Any) -> Any:
        hidden = x * 2
        runs_compiled(hidden)
        return hidden

    assert kinds_of(explain(step, dev(3))) == [("compile", "runs_compiled")]
    again = explain(step, dev(3), check=True)
    assert again.findings == (), str(again)
    assert again.check, str(again)


def test_what_triton_compiles_is_found_once() -> None:
    def step(x: Any) -> Any:
        scale[(1,)](x, x.numel(), 2.0, BLOCK=64)
        return x * 1

    assert kinds_of(explain(step, dev(3))) == [("compile", "step")]
    again = explain(step, dev(3), check=True)
    assert again.findings == (), str(again)
    assert again.check, str(again)


def test_what_triton_tunes_is_found_once() -> None:
    def step(x: Any) -> Any:
        tuned_scale[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, x.numel(), 2.0)
        return x * 1

    found = kinds_of(explain(step, dev(3)))
    assert found, "neither compiling nor tuning was seen"
    assert {kind for kind, _ in found} == {"compile"}
    assert explain(step, dev(3)).findings == ()
