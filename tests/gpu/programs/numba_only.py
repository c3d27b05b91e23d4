"""Numba without torch: replays equal eager code while allocations hammer between them."""

import sys
import warnings

import numpy
from numba import cuda

from breakable_cuda_graphs import (
    CaptureError,
    CUDAGraphSequence,
    EscapedWorkWarning,
    breakable_graph,
    no_graph,
)

N = 4096
log: list[float] = []


@cuda.jit
def mix(out, a, b):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < out.size:
        out[i] = a[i] * 0.25 + b[out.size - 1 - i]


@cuda.jit
def add_up(total, source):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < source.size:
        cuda.atomic.add(total, 0, int(source[i]))


stream = cuda.stream()


def device(values):  # type: ignore[no-untyped-def]
    return cuda.to_device(numpy.ascontiguousarray(values))


x, y, out = (device(numpy.zeros(N, dtype="f4")) for _ in range(3))
total = device(numpy.zeros(1, dtype="i8"))


@no_graph
def look(total, row):  # type: ignore[no-untyped-def]
    host = total.copy_to_host(stream=stream)
    stream.synchronize()
    log.append(float(host[0]))
    scratch = cuda.device_array(N, dtype="f4", stream=stream)
    mix[N // 256, 256, stream](scratch, row, row)
    row.copy_to_device(scratch, stream=stream)
    total.copy_to_device(numpy.zeros(1, dtype="i8"), stream=stream)
    stream.synchronize()


@no_graph(outputs="static")
def fresh(row):  # type: ignore[no-untyped-def]
    made = cuda.device_array(N, dtype="f4")
    mix[N // 256, 256, stream](made, row, row)
    return made


def step():  # type: ignore[no-untyped-def]
    mix[N // 256, 256, stream](y, x, x)
    add_up[N // 256, 256, stream](total, y)
    look(total, y)
    made = fresh(y)
    mix[N // 256, 256, stream](out, made, x)


def hammer() -> None:
    birds = [cuda.to_device(numpy.full(n, -7, dtype="f4")) for n in (1, N // 2, N, 2 * N)]
    assert all((bird.copy_to_host() == -7).all() for bird in birds)


step()
sequence = CUDAGraphSequence()
with breakable_graph(sequence, stream=stream):
    step()

for k in range(30):
    x.copy_to_device((numpy.arange(N) % 17 - k).astype("f4"))
    hammer()
    sequence.replay(stream)
    stream.synchronize()
    hammer()
    got, seen = out.copy_to_host(), log.pop()
    step()
    stream.synchronize()
    numpy.testing.assert_array_equal(got, out.copy_to_host())
    assert seen == log.pop()

# An allocation inside a segment is refused, and everything works as before.
try:
    with breakable_graph(CUDAGraphSequence(), stream=stream):
        cuda.device_array(16, dtype="f4")
except CaptureError as error:
    assert "Numba allocates" in str(error)
else:
    raise AssertionError("an allocation of Numba's was captured")
cuda.device_array(16, dtype="f4")

# A launch without a stream goes past the capture, with a word.
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with breakable_graph(CUDAGraphSequence()):  # on a stream of its own, which waits for no other
        mix[N // 256, 256](out, x, y)
assert any(
    issubclass(w.category, EscapedWorkWarning) and "mix" in str(w.message) for w in caught
), caught
sequence.replay(stream)
stream.synchronize()
sequence.reset()
assert "torch" not in sys.modules
print("ok")
