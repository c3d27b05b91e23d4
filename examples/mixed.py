"""torch, CuPy and Triton in one block: the same stream, the same memory, a break of each."""

import cupy
import torch
import triton
import triton.language as tl

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph

N = 1024


@triton.jit
def twice_plus(out, source, amount, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(source + at, mask=inside) * 2 + amount, mask=inside)


@no_graph
def halve_if_large(array: cupy.ndarray) -> None:
    """A break in CuPy, whose current stream is the replay's as torch's is."""
    if float(array.max()) > 1000:
        array *= 0.5


@no_graph
def shift_by_the_mean(t: torch.Tensor) -> None:
    """A break in torch."""
    t.sub_(round(t.mean().item()))


def step(x: torch.Tensor) -> torch.Tensor:
    array = cupy.from_dlpack(x * 3)  # torch's memory, seen by CuPy
    scaled = array + 1  # CuPy's memory, private to the sequence
    halve_if_large(scaled)
    t = torch.from_dlpack(scaled)  # CuPy's memory, seen by torch
    out = torch.empty_like(t)
    twice_plus[(triton.cdiv(N, 256),)](out, t, 5.0, N, BLOCK=256)
    shift_by_the_mean(out)
    return out * 2


x = torch.zeros(N, device="cuda")
step(x)  # CuPy and Triton compile at the first launch, which no capture survives

sequence = CUDAGraphSequence()
with breakable_graph(sequence):
    out = step(x)

for k in range(5):
    x.copy_(torch.arange(float(N), device="cuda") * k)
    sequence.replay()
    torch.testing.assert_close(out, step(x), rtol=0, atol=0)
print("torch, CuPy and Triton: the same as eager")
