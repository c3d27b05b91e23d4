"""`explain` without torch: CuPy's reads, waits, copies, callbacks and compilations, each at its line."""

import sys

import cupy
import numpy

from breakable_cuda_graphs import explain

HOST = numpy.ones(64, dtype="f4")
scale = cupy.RawKernel(
    'extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= 2.0f; }', "scale"
)


def reads(x):
    if float(x.sum()) > 0:
        x *= 2


def waits(x):
    x *= 2
    cupy.cuda.get_current_stream().synchronize()


def waits_for_the_device(x):
    x *= 2
    cupy.cuda.Device().synchronize()


def copies(x):
    x += cupy.asarray(HOST)


def calls_back(x):
    x *= 2
    cupy.cuda.get_current_stream().launch_host_func(lambda _: None, None)


def compiles(x):
    scale((1,), (64,), (x,))


def step_of(function):
    def step(x):
        x += 1
        function(x)
        x -= 1

    return step


EXPECTED = {
    reads: {"host read"},
    waits: {"sync"},
    waits_for_the_device: {"sync", "refused"},  # a compiled method: the trial may be what tells
    copies: {"pageable copy"},
    calls_back: {"callback"},
    compiles: {"compile"},
}

x = cupy.ones(64, dtype="f4")
for function in (reads, copies):
    step_of(function)(x)  # what is compiled at the first call is not what is looked for
for function, kinds in EXPECTED.items():
    report = explain(step_of(function), x, check=True)
    found = [(finding.kind, finding.function) for finding in report.findings]
    assert found, f"nothing was found in {function.__name__}\n{report}"
    assert {name for _, name in found} == {function.__name__}, str(report)
    assert {kind for kind, _ in found} <= kinds, str(report)
    if kinds != {"compile"}:
        assert [mark.function for mark in report.marks] == [function.__name__], str(report)
    assert report.check.captured, str(report)

clean = explain(step_of(compiles), x, check=True)
assert clean.findings == (), str(clean)
assert clean.check.captured, str(clean)
assert "torch" not in sys.modules
print("ok")
