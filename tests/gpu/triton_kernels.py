"""Kernels of Triton, whose compiler reads them, and their globals, from a file."""

import triton
import triton.language as tl


@triton.jit
def known_triton(out, source, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(source + at, mask=inside) * 2, mask=inside)


@triton.jit
def twice_plus(x, out, count, amount, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    tl.store(out + at, tl.load(x + at, mask=here) * 2 + amount, mask=here)
