"""Streams of anybody, captured by the driver alone: int handles, protocols, memsets, copies, kernels."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest

from breakable_cuda_graphs import (
    CaptureError,
    CUDAGraphSequence,
    ReplayError,
    UnjoinedStreamError,
    breakable_graph,
    is_in_breakable_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import bindings, contexts, release
from breakable_cuda_graphs._driver.bindings import types
from breakable_cuda_graphs.frameworks import choose, raw
from breakable_cuda_graphs.frameworks.protocols import Birth
from breakable_cuda_graphs.simulator import SimulatedKernel
from helping import Boom, in_thread, wait

U32 = ctypes.c_uint32


def add(address: int, value: int) -> None:
    cell = U32.from_address(address)
    cell.value += value


ADD = SimulatedKernel(add, (ctypes.c_void_p, ctypes.c_uint32), name="add")


class Bench:
    """The raw framework on a simulated device, two cells of memory and a stream."""

    def __init__(self) -> None:
        self.driver = bindings.current()
        self.x, self.y = (int(self.driver.cuMemAlloc(4)) for _ in range(2))
        self.stream = self.driver.cuStreamCreate(1)
        self.set(self.x, 0)
        self.set(self.y, 0)

    def set(self, address: int, value: int, stream: Any = 0) -> None:
        self.driver.cuMemsetD32Async(address, value, 1, stream)

    def copy(self, target: int, source: int, stream: Any) -> None:
        self.driver.cuMemcpyDtoDAsync(target, source, 4, stream)

    def add(self, address: int, value: int, stream: Any) -> None:
        arguments = ((address, value), ADD.parameters)
        self.driver.cuLaunchKernel(ADD.handle, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0)

    def read(self, address: int) -> int:
        return U32.from_address(address).value

    def close(self) -> None:
        for address in (self.x, self.y):
            self.driver.cuMemFree(address)
        self.driver.cuStreamDestroy(self.stream)


@pytest.fixture
def bench(bare_device, monkeypatch):
    """Torch may be loaded here: the raw framework is chosen all the same."""
    driver = bindings.current()
    driver.cuCtxSetCurrent(types.CUcontext(contexts.primary(driver, 0)))
    framework = raw.RawFramework(driver, contexts.primary(driver, 0))
    monkeypatch.setattr(choose, "framework_for", lambda driver, stream: framework)
    made = Bench()
    yield made
    made.close()
    import gc

    gc.collect()
    release.drain()
    release.drain()
    assert bare_device.leaks() == []


class Protocol:
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self.stream)


@pytest.mark.parametrize("spell", [int, Protocol, lambda stream: stream])
def test_fills_copies_kernels_and_a_break_on_a_stream_of_the_users(bench, spell):
    log: list[int] = []

    @no_graph
    def look(stream: Any) -> None:
        log.append(bench.read(bench.x))
        bench.add(bench.x, 100, stream)

    seq = CUDAGraphSequence()
    with breakable_graph(seq, stream=spell(bench.stream)):
        assert is_in_breakable_graph()
        bench.add(bench.x, 1, bench.stream)
        look(0)
        bench.copy(bench.y, bench.x, bench.stream)
        bench.add(bench.y, 1000, bench.stream)
    assert not is_in_breakable_graph()
    assert len(seq) == 3
    bench.set(bench.x, 5)
    seq.replay()
    assert bench.read(bench.y) == 1106
    seq.replay(spell(bench.stream))
    assert bench.read(bench.y) == 1207
    assert log[1:] == [6, 107]


def test_the_sequences_own_stream_is_used_without_one(bench):
    seq = CUDAGraphSequence()
    assert seq.stream.__cuda_stream__() == (0, seq.stream.handle)
    assert hex(seq.stream.handle) in repr(seq.stream)
    with breakable_graph(seq):
        bench.add(bench.x, 3, types.CUstream(seq.stream.handle))
    seq.replay()
    seq.replay()
    assert bench.read(bench.x) == 6


def test_addresses_of_unknown_owners_are_listed(bench):
    seq = CUDAGraphSequence()
    with breakable_graph(seq, stream=bench.stream):
        bench.add(bench.x, 3, bench.stream)
        bench.copy(bench.y, bench.x, bench.stream)
    lines = "\n".join(seq.unwatched)
    assert hex(bench.x) in lines
    assert hex(bench.y) in lines
    assert "segment 0" in lines
    assert seq.watched == ()


def test_unjoined_work_is_named(bench):
    side, seq = bench.driver.cuStreamCreate(1), CUDAGraphSequence()
    with pytest.raises(UnjoinedStreamError, match="add") as info:
        with breakable_graph(seq, stream=bench.stream):
            wait(side, bench.stream)
            bench.add(bench.x, 1, side)
    assert info.value.kernels == ("add",)
    bench.driver.cuStreamDestroy(side)


def test_pools_share_the_stream(bench):
    first = CUDAGraphSequence()
    second = CUDAGraphSequence(pool=first.pool())
    assert second.stream is first.stream


def test_a_failure_leaves_the_stream_usable(bench):
    seq = CUDAGraphSequence()
    with pytest.raises(Boom), breakable_graph(seq, stream=bench.stream):
        bench.add(bench.x, 1, bench.stream)
        raise Boom
    with pytest.raises(ReplayError):
        seq.replay()
    bench.add(bench.x, 1, bench.stream)
    assert bench.read(bench.x) == 1
    with (
        pytest.raises(CaptureError, match="invalidated"),
        breakable_graph(seq, stream=bench.stream),
    ):
        bench.driver.module.cuStreamSynchronize(bench.stream)
    with breakable_graph(seq, stream=bench.stream):
        bench.add(bench.x, 1, bench.stream)
    seq.replay()
    assert bench.read(bench.x) == 2


def test_a_break_belongs_to_the_block_of_its_thread(bench):
    log = []

    @no_graph
    def here() -> None:
        log.append(is_in_breakable_graph())

    seq = CUDAGraphSequence()
    with breakable_graph(seq, stream=bench.stream, capture_error_mode="relaxed"):
        in_thread(here)
        here()
    assert log == [False, True]
    assert len(seq) == 3


def test_a_copy_of_graphs_by_embedding_in_a_capture_of_the_users(bench):
    seq = CUDAGraphSequence()
    with breakable_graph(seq, stream=bench.stream):
        bench.add(bench.x, 1, bench.stream)
    bench.driver.cuStreamBeginCapture(bench.stream, types.CUstreamCaptureMode(2))
    seq.replay(bench.stream)
    seq.replay(bench.stream)
    graph = bench.driver.cuStreamEndCapture(bench.stream)
    executable = bench.driver.cuGraphInstantiate(graph, 0)
    bench.driver.cuGraphLaunch(executable, bench.stream)
    assert bench.read(bench.x) == 2
    bench.driver.cuGraphExecDestroy(executable)
    bench.driver.cuGraphDestroy(graph)
    from breakable_cuda_graphs._driver import user_objects

    user_objects.sweep()


def test_no_array_is_known(bench):
    framework = choose.framework_for(None, None)
    assert not framework.arrays.owns(object())
    with pytest.raises(AttributeError):
        framework.arrays.alias(object())
    session = framework.session(None, bench.stream, "global", ())
    assert session.birth(5) is Birth.OLDER
    assert framework.modes() is None
    assert framework.stream_object(bench.stream) is bench.stream


NEUTRAL = """
import ctypes, sys
from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph
from breakable_cuda_graphs._driver import bindings
from breakable_cuda_graphs.simulator import SimulatedKernel
driver = bindings.current()
assert driver.simulated
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0))
stream, x = driver.cuStreamCreate(1), int(driver.cuMemAlloc(4))
cell = ctypes.c_uint32.from_address(x)

def double(address):
    ctypes.c_uint32.from_address(address).value *= 2

kernel = SimulatedKernel(double, (ctypes.c_void_p,))

@no_graph
def add_one():
    cell.value += 1

seq = CUDAGraphSequence()
with breakable_graph(seq, stream=int(stream)):
    driver.cuMemsetD32Async(x, 5, 1, stream)
    add_one()
    arguments = ((x,), kernel.parameters)
    driver.cuLaunchKernel(kernel.handle, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0)
seq.replay(stream)
assert cell.value == 12, cell.value
assert "torch" not in sys.modules
seq.reset()
print("ok")
"""


def test_a_neutral_capture_imports_no_torch():
    import os

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", NEUTRAL],
        env={**os.environ, "BREAKABLE_CUDA_GRAPHS_SIMULATOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"
    assert done.stderr == ""


def test_of_a_block_whose_thread_has_ended_no_stream_is_kept(bench):
    """The fixture looks for what was not released."""

    def lose() -> None:
        bench.driver.cuCtxSetCurrent(types.CUcontext(contexts.primary(bench.driver, 0)))
        breakable_graph(CUDAGraphSequence()).__enter__()

    in_thread(lose)
    assert not is_in_breakable_graph()
    assert release.open_captures() == 0
