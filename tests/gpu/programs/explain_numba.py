"""`explain` without torch: Numba's reads, waits and compilations, each at its line."""

import sys

import numpy
from numba import cuda

from breakable_cuda_graphs import explain


@cuda.jit
def add(x, amount):
    x[cuda.threadIdx.x] += amount


STREAM = []


def reads(x):
    if x.copy_to_host()[0] > 0:
        add[1, 64](x, 1.0)


def waits(x):
    cuda.synchronize()


def compiles(x):
    add[1, 64](x, 1)


def step_of(function):
    def step(x):
        function(x)

    return step


x = cuda.to_device(numpy.ones(64, dtype="f4"))
add[1, 64](x, 1.0)
for function, kind in ((reads, "host read"), (waits, "sync"), (compiles, "compile")):
    report = explain(step_of(function), x)
    found = [(finding.kind, finding.function) for finding in report.findings]
    assert (kind, function.__name__) in found, f"{function.__name__}\n{report}"
    assert {name for _, name in found} == {function.__name__}, str(report)
assert "torch" not in sys.modules
print("ok")
