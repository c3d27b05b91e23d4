"""CuPy without torch: replays equal eager code while allocations hammer between them.

The hard problem: memory that is handed out twice shows only if somebody takes and fills it at the
right moment. So canaries of many sizes are made, filled and dropped around every replay, by CuPy's
own pool and by another capture.
"""

import gc
import sys

import cupy

import breakable_cuda_graphs as bcg
from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph
from breakable_cuda_graphs.frameworks import cupy as adapter

N = 4096
mix = cupy.RawKernel(
    r"""
    extern "C" __global__ void mix(float* out, const float* a, const float* b, int count)
    {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < count) out[i] = a[i] * 0.25f + b[count - 1 - i];
    }
    """,
    "mix",
)
log: list[float] = []


@no_graph
def look(total: cupy.ndarray, row: cupy.ndarray) -> None:
    """A host-side break that reads and writes memory of the segment before."""
    log.append(float(total))
    row += cupy.float32(len(log) % 3)
    cupy.ones(N, dtype="f4").sum()  # memory of a break, let go again


@no_graph(outputs="static")
def pick(row: cupy.ndarray) -> cupy.ndarray:
    """A result that lies elsewhere each time."""
    return cupy.sort(row)[::2] + cupy.float32(len(log) % 3)


def step(x: cupy.ndarray) -> tuple[cupy.ndarray, cupy.ndarray]:
    y = cupy.sqrt(cupy.abs(x) + 1) * 2  # temporaries, whose blocks are used again
    total = y.sum()
    look(total, y)
    out = cupy.empty_like(y)
    mix((N // 256,), (256,), (out, y, x, cupy.int32(N)))
    half = pick(out)
    return out.max() + half.reshape(2, -1).sum(axis=1), out


def hammer() -> None:
    birds = [cupy.full(n, -7, dtype="f4") for n in (1, 100, N // 2, N, 2 * N) for _ in range(8)]
    assert all(bool((bird == -7).all()) for bird in birds)
    cupy.get_default_memory_pool().free_all_blocks()


def taken() -> int:
    """The bytes that CuPy's own pool and the sequences' private memory have."""
    cupy.get_default_memory_pool().free_all_blocks()
    private = sum(memory.nbytes() for memory in adapter._memories.values())
    assert private, "nothing was allocated privately"
    return private + int(cupy.get_default_memory_pool().total_bytes())


x = cupy.zeros(N, dtype="f4")
step(x)
step(x)

sequence, other = CUDAGraphSequence(), CUDAGraphSequence()
with breakable_graph(sequence):
    result, out = step(x)
with breakable_graph(other):
    others, _ = step(x)

before = 0
for k in range(60):
    x[...] = cupy.arange(N, dtype="f4") % 17 - k
    mark = len(log)
    hammer()
    sequence.replay()
    hammer()
    got, got_out = result.copy(), out.copy()
    other.replay()
    del log[mark:]
    want, want_out = step(x)
    cupy.testing.assert_array_equal(got_out, want_out)
    cupy.testing.assert_array_equal(got, want)
    if k == 10:
        before = taken()
assert taken() - before < 1 << 20, "replays take memory"

last = result.copy()
sequence.reset()
other.reset()
del sequence, other
gc.collect()
hammer()
assert bool((result == last).all())  # memory of the user's arrays outlives the sequence
assert cupy.cuda.get_current_stream().ptr == 0, "a stream was left current"
assert cupy.cuda.get_allocator() == cupy.get_default_memory_pool().malloc, "an allocator was left"
assert bcg.is_in_breakable_graph() is False
assert "torch" not in sys.modules
print("ok")
