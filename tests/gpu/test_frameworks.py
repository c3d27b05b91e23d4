"""CuPy, Numba and bare addresses: alone, in processes without torch, and beside torch in one block."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from typing import Any

import numpy
import pytest

from breakable_cuda_graphs import (
    CaptureError,
    CUDAGraphSequence,
    EscapedWorkWarning,
    StaleInputError,
    breakable_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import bindings

from . import libraries
from .helpers import (
    Boom,
    canaries,
    check_canaries,
    dev,
    kinds,
    same,
    sync,
    text_of,
    together,
    torch,
)
from .kernels import cupy_scale, f32, found, i32, launch_scale, numba_scale
from .libraries import ROOT, run_program

pytestmark = pytest.mark.gpu

N = 1024
PROGRAMS = ROOT / "tests" / "gpu" / "programs"


def test_cupy_without_torch_equals_eager_code() -> None:
    assert run_program(PROGRAMS / "cupy_only.py", "cupy").endswith("ok\n")


def test_numba_without_torch_equals_eager_code() -> None:
    assert run_program(PROGRAMS / "numba_only.py", "numba").endswith("ok\n")


# ---------------------------------------------------------------- CuPy


@pytest.fixture
def cupy() -> Any:
    """CuPy; afterwards its allocator, its current stream and its threads' are as before."""
    module = libraries.cupy()
    allocator, stream = module.cuda.get_allocator(), module.cuda.get_current_stream()
    yield module
    assert module.cuda.get_allocator() == allocator, "another allocator was left in force"
    assert module.cuda.get_current_stream().ptr == stream.ptr, "another stream was left current"


def expect(array: Any, value: float) -> None:
    """All elements are equal to a number."""
    sync()
    assert bool((array == value).all()), f"{array[:4]} is not {value}"


def warm(work: Any) -> None:
    """Compile what work() launches."""
    work()
    sync()


def test_memory_of_cupy_is_private_until_reset(cupy: Any) -> None:
    x, kept = cupy.zeros(N, dtype="f4"), []

    @no_graph
    def look(t: Any) -> None:
        t += 1

    def body() -> Any:
        t = x * 2
        look(t)
        u = t * 3  # t's block is free behind this line
        return u + (x - x)

    warm(body)
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        kept.append(body())
    others = [cupy.full(N, -7, dtype="f4") for _ in range(64)]
    torchs = canaries()
    for k in range(20):
        x.fill(k)
        seq.replay()
        expect(kept[0], (2.0 * k + 1) * 3)
        others += [cupy.full(N, -7, dtype="f4") for _ in range(4)]
    assert all(bool((other == -7).all()) for other in others)
    check_canaries(torchs)
    pool = cupy.get_default_memory_pool()
    seq.reset()
    used = pool.used_bytes()
    del kept[:]
    assert pool.used_bytes() == used, "the result lay in CuPy's own pool"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # CuPy calls it experimental
def test_the_stream_ordered_allocator_of_the_user_is_not_used_in_segments(cupy: Any) -> None:
    pool, allocator = cupy.cuda.MemoryAsyncPool(), cupy.cuda.get_allocator()
    with contextlib.ExitStack() as stack:
        stack.enter_context(cupy.cuda.using_allocator(pool.malloc))
        x, out = cupy.ones(N, dtype="f4"), cupy.zeros(N, dtype="f4")

        @no_graph
        def look(t: Any) -> None:
            t += 1

        def body() -> None:
            t = x * 2
            look(t)
            out[...] = t * 3

        warm(body)
        seq = CUDAGraphSequence()
        with breakable_graph(seq):
            body()
        for k in range(50):
            x.fill(k)
            seq.replay()
            expect(out, (2.0 * k + 1) * 3)
        del x, out, look, body
        seq.reset()
    assert cupy.cuda.get_allocator() == allocator


def test_a_failure_puts_cupys_allocator_and_stream_back(cupy: Any) -> None:
    x = cupy.zeros(N, dtype="f4")
    warm(lambda: x + 1)
    for _ in range(2):
        with pytest.raises(Boom), breakable_graph(CUDAGraphSequence()):
            x + 1
            raise Boom
    with pytest.raises(RuntimeError), breakable_graph(CUDAGraphSequence()):
        x + 1
        x.get()
    expect(x + 1, 1)


def test_another_threads_allocator_is_its_own(cupy: Any) -> None:
    x = cupy.zeros(N, dtype="f4")
    warm(lambda: x + 1)
    theirs: list[Any] = []

    def other() -> None:
        theirs.append(cupy.cuda.get_allocator())

    before = cupy.cuda.get_allocator()
    with breakable_graph(CUDAGraphSequence(), capture_error_mode="thread_local"):
        x + 1
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert cupy.cuda.get_allocator() != before
    assert theirs == [before]


def test_breaks_see_the_replays_stream_as_cupys(cupy: Any) -> None:
    x, seen = cupy.zeros(N, dtype="f4"), []

    @no_graph
    def look(t: Any) -> None:
        seen.append((cupy.cuda.get_current_stream().ptr, torch.cuda.current_stream().cuda_stream))
        t += 1

    def body() -> None:
        nonlocal out
        look(x)
        out = x * 2

    out: Any = None
    warm(body)
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        body()
    side = torch.cuda.Stream()
    seen.clear()
    seq.replay()
    with torch.cuda.stream(side):
        seq.replay()
    seq.replay(side)
    with cupy.cuda.Stream(non_blocking=True):
        seq.replay()
    here = torch.cuda.current_stream().cuda_stream
    assert seen == [(here, here), (side.cuda_stream,) * 2, (side.cuda_stream,) * 2, (here, here)]


def test_a_freed_array_of_cupy_is_refused_at_replay(cupy: Any) -> None:
    x, y = cupy.zeros(N, dtype="f4"), cupy.zeros(N, dtype="f4")

    @no_graph
    def look(t: Any) -> None:
        t += 1

    def body() -> None:
        nonlocal out
        out = y * 2
        look(x)

    out: Any = None
    warm(body)
    for name in ("x", "y"):
        seq = CUDAGraphSequence()
        with breakable_graph(seq):
            body()
        seq.replay()
        assert len(seq.watched) == 2, seq.watched
        if name == "x":
            x = cupy.zeros(N, dtype="f4")
        else:
            y = cupy.zeros(N, dtype="f4")
        with pytest.raises(StaleInputError, match="float32"):
            seq.replay()
    with breakable_graph(seq := CUDAGraphSequence(), keep_inputs=True):
        body()
    x = y = None
    seq.replay()


def test_views_and_memory_of_breaks_stay(cupy: Any) -> None:
    base = cupy.zeros((4, N), dtype="f4")
    made: list[Any] = []

    @no_graph
    def make(row: Any) -> None:
        made.append(row * 2)

    @no_graph
    def use(fresh: Any, row: Any) -> None:
        row += fresh

    def body() -> None:
        make(base[1])
        use(made.pop(), base[2, ::2].repeat(2))
        use(base[1], base[3])

    warm(body)
    base.fill(1)
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        body()
    gc.collect()
    base.fill(1)
    cupy.get_default_memory_pool().free_all_blocks()
    seq.replay()
    expect(base[3], 2)
    expect(base[0], 1)


def test_static_results_of_cupy(cupy: Any) -> None:
    x, k = cupy.zeros(N, dtype="f4"), [0]

    @no_graph(outputs="static")
    def pick(t: Any) -> Any:
        return t[::2] + k[0], t  # new memory, and memory of an argument

    def body() -> Any:
        half, whole = pick(x * 2)
        return half * 10, whole + 1

    warm(body)
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        tens, more = body()
    for k[0] in range(10):
        x.fill(k[0])
        seq.replay()
        expect(tens, 30.0 * k[0])
        expect(more, 2.0 * k[0] + 1)

    @no_graph
    def bare(t: Any) -> Any:
        return t + 1

    with pytest.raises(CaptureError, match="static"), breakable_graph(CUDAGraphSequence()):
        bare(x)


def test_what_goes_to_and_fro_between_torch_and_cupy(cupy: Any) -> None:
    x, y = dev(1, N), cupy.zeros(N, dtype="f4")

    @no_graph
    def in_cupy(t: Any) -> None:
        t += 1

    @no_graph
    def in_torch(t: Any) -> None:
        t.mul_(2)

    def body() -> Any:
        mine = cupy.from_dlpack(x * 3)
        in_cupy(mine)
        ours = mine + y
        theirs = torch.from_dlpack(ours)
        in_torch(theirs)
        in_cupy(cupy.asarray(x))
        in_torch(torch.from_dlpack(y))
        return theirs - 1

    warm(body)
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        out = body()
    gc.collect()
    for k in range(20):
        x.fill_(k)
        y.fill(1)
        birds, others = canaries(8), [cupy.full(N, -7, dtype="f4") for _ in range(8)]
        seq.replay()
        same(out, 2.0 * (3 * k + 2) - 1)
        same(x, k + 1.0)
        expect(y, 2)
        check_canaries(birds)
        assert all(bool((other == -7).all()) for other in others)


def test_host_functions_of_cupy_are_refused_or_run_at_every_replay(cupy: Any) -> None:
    calls: list[str] = []
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.zeros(N, dtype="f4")
        x += 1
        stream.synchronize()

    def body() -> None:
        cupy.add(x, 1, out=x)
        stream.launch_host_func(calls.append, "argument")

    with stream, pytest.raises(CaptureError, match="host callback"):
        with breakable_graph(CUDAGraphSequence(), stream=stream):
            body()
    seq = CUDAGraphSequence()
    with stream, breakable_graph(seq, stream=stream, host_nodes="allow"):
        body()
    gc.collect()
    assert not calls
    for _ in range(5):
        seq.replay()
    sync()
    assert calls == ["argument"] * 5
    expect(x, 6)


def test_a_generator_of_cupy_draws_what_eager_code_would(cupy: Any) -> None:
    def draws(generator: Any) -> Any:
        return generator.random(N, dtype="f4")

    warm(lambda: draws(cupy.random.default_rng(1)))
    eager = cupy.random.default_rng(7)
    want = [draws(eager) for _ in range(8)]
    generator, seq = cupy.random.default_rng(7), CUDAGraphSequence()
    between: list[Any] = []

    @no_graph
    def draw_outside() -> None:
        between.append(draws(generator))

    with breakable_graph(seq):
        first = draws(generator)
        draw_outside()
    got = between[:]  # the capture itself has drawn in its break
    for _ in range(3):
        seq.replay()
        got += [first.copy(), between[-1]]
    assert all(bool((a == b).all()) for a, b in zip(got, want, strict=False))
    assert len(got) == 7


@pytest.mark.parametrize("what", ["RandomState", "cuBLAS", "get"])
def test_what_cupy_refuses_in_a_capture_comes_with_advice(cupy: Any, what: str) -> None:
    x = cupy.ones((8, 8), dtype="f4")
    work = {
        "RandomState": lambda: cupy.random.rand(4),
        "cuBLAS": lambda: x @ x,
        "get": lambda: x.get(),
    }[what]
    warm(work)
    with pytest.raises(RuntimeError, match="captur") as caught:
        with breakable_graph(CUDAGraphSequence()):
            x + 1
            work()
    assert "@no_graph" in text_of(caught.value)

    @no_graph
    def outside() -> None:
        work()

    with breakable_graph(seq := CUDAGraphSequence()):
        x + 1
        outside()
    seq.replay()


def test_a_kernel_of_cupy_is_found_edited_and_rebound(cupy: Any) -> None:
    scale = cupy_scale()
    x, y, z = (cupy.full(N, value, dtype="f4") for value in (1, 0, 5))
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        scale((1,), (N,), (y, x, f32(2), i32(N)))
    ((segment, node),) = found(seq, "known_cupy")
    seq.replay()
    expect(y, 2)
    segment.exec.update(node, args={2: f32(3)})
    seq.replay()
    expect(y, 3)
    report = seq.rebind([(x, z)])
    assert report.words == 1
    seq.replay()
    expect(y, 15)
    del z
    with pytest.raises(StaleInputError):
        seq.replay()


def test_arguments_of_breaks_are_rebound(cupy: Any) -> None:
    x, z, seen = cupy.zeros(N, dtype="f4"), cupy.full(N, 5, dtype="f4"), []

    @no_graph
    def look(t: Any) -> None:
        seen.append(float(t[0]))

    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        look(x)
    seq.rebind([(x, z)])
    seq.replay()
    assert seen == [0, 5]


@pytest.mark.filterwarnings("ignore")  # those of compilers are not ours
def test_torch_cupy_and_triton_in_one_block_equal_eager_code(cupy: Any) -> None:
    libraries.triton()
    from .triton_kernels import twice_plus

    raw, log = cupy_scale(), []

    @no_graph
    def in_cupy(array: Any, extra: Any) -> None:
        log.append(float(array.max()))
        array *= cupy.float32(0.5 if log[-1] > 10 else 2)
        extra.add_(len(log) % 3)

    @no_graph(outputs="static")
    def in_torch(t: Any) -> Any:
        return torch.sort(t, descending=True).values + round(t.sum().item()) % 5

    def body(x: Any) -> Any:
        mine = cupy.from_dlpack(x * 3)
        scaled = cupy.sqrt(cupy.abs(mine)) + 1
        extra = torch.zeros_like(x)
        in_cupy(scaled, extra)
        raw((1,), (N,), (mine, scaled, f32(4), i32(N)))
        out = torch.empty_like(x)
        twice_plus[(N // 32,)](torch.from_dlpack(mine), out, N, 0.5, BLOCK=32)
        fixed = in_torch(out + extra)
        return fixed * 2 + torch.from_dlpack(scaled) + extra

    x = dev(1, N)
    warm(lambda: body(x))
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        out = body(x)
    for k in range(40):
        x.copy_(torch.arange(float(N), device="cuda") % 13 - k)
        birds, others = canaries(8, N), [cupy.full(N, -7, dtype="f4") for _ in range(8)]
        mark = len(log)
        seq.replay()
        check_canaries(birds)
        assert all(bool((other == -7).all()) for other in others)
        got = out.clone()
        del birds, others, log[mark:]
        same(got, body(x), f"replay {k}")


# ---------------------------------------------------------------- Numba


@pytest.fixture
def numba() -> Any:
    """`numba.cuda`; afterwards its methods are its own again."""
    cuda = libraries.numba_cuda()
    methods = (cuda.cudadrv.driver.Context, "memalloc"), (cuda.dispatcher._Kernel, "launch")
    before = [getattr(kind, name) for kind, name in methods]
    yield cuda
    assert [getattr(kind, name) for kind, name in methods] == before


def test_numba_beside_torch(numba: Any) -> None:
    scale = numba_scale()
    x = dev(1, N)
    mine = numba.to_device(numpy.zeros(N, dtype="f4"))
    scale[1, N](mine, numba.as_cuda_array(x), f32(2))
    sync()

    @no_graph
    def bump(t: Any) -> None:
        torch.as_tensor(t, device="cuda").add_(1)

    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        stream = numba.external_stream(torch.cuda.current_stream().cuda_stream)
        scale[1, N, stream](mine, numba.as_cuda_array(x, sync=False), f32(2))
        bump(mine)
        y = torch.as_tensor(mine, device="cuda") * 10
    for k in range(10):
        x.fill_(k)
        seq.replay()
        same(y, (2.0 * k + 1) * 10)
    ((segment, node),) = found(seq, "known_numba")
    segment.exec.update(node, args={len(node.args) - 1: f32(3)})
    seq.replay()
    same(y, (3.0 * 9 + 1) * 10)
    z = dev(2, N)
    assert seq.rebind([(x, z)]).words == 1
    seq.replay()
    same(y, (3.0 * 2 + 1) * 10)


def test_numba_allocates_in_breaks_only(numba: Any) -> None:
    with pytest.raises(CaptureError, match="Numba allocates"):
        with breakable_graph(CUDAGraphSequence()):
            numba.device_array(N)
    with pytest.raises(CaptureError, match="Numba allocates"):
        with breakable_graph(CUDAGraphSequence(), capture_error_mode="relaxed"):
            numba.to_device(numpy.zeros(N))
    made: list[Any] = []
    with breakable_graph(CUDAGraphSequence()):
        no_graph(lambda: made.append(numba.device_array(N)))()
    assert len(made) == 1


def test_random_states_of_numba_go_on_from_replay_to_replay(numba: Any) -> None:
    from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_uniform_float32

    @numba.jit
    def draw(states, out):  # type: ignore[no-untyped-def]
        i = numba.grid(1)
        if i < out.size:
            out[i] = xoroshiro128p_uniform_float32(states, i)

    out = numba.to_device(numpy.zeros(64, dtype="f4"))
    eager = create_xoroshiro128p_states(64, seed=5)
    want = []
    for _ in range(5):
        draw[1, 64](eager, out)
        want.append(out.copy_to_host())
    states = create_xoroshiro128p_states(64, seed=5)
    with breakable_graph(seq := CUDAGraphSequence()):
        stream = numba.external_stream(torch.cuda.current_stream().cuda_stream)
        draw[1, 64, stream](states, out)
        no_graph(lambda: draw[1, 64](states, out))()
    got = [out.copy_to_host()]  # of the break, at capture
    for _ in range(2):
        seq.replay()
        got.append(out.copy_to_host())
    numpy.testing.assert_array_equal(got, [want[0], want[2], want[4]])


def test_a_launch_of_numba_that_escapes_is_told(numba: Any) -> None:
    scale = numba_scale()
    x, y = (numba.to_device(numpy.zeros(N, dtype="f4")) for _ in range(2))
    scale[1, N](y, x, f32(2))
    with pytest.warns(EscapedWorkWarning, match="known_numba"):
        with breakable_graph(CUDAGraphSequence()):
            scale[1, N](y, x, f32(2))


def test_a_freed_array_of_numba_is_refused_at_replay(numba: Any) -> None:
    x = numba.to_device(numpy.zeros(N, dtype="f4"))
    view = x[4:]

    @no_graph
    def look(t: Any) -> None:
        pass

    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        look(x)
    del x
    gc.collect()
    seq.replay()  # the view keeps the memory
    del view
    gc.collect()
    with pytest.raises(StaleInputError):
        seq.replay()
    x = numba.to_device(numpy.full(N, 3, dtype="f4"))
    seen: list[float] = []
    read = no_graph(lambda t: seen.append(float(t.copy_to_host()[0])))
    with breakable_graph(seq := CUDAGraphSequence(), keep_inputs=True):
        read(x)
    del x
    gc.collect()
    others = [numba.to_device(numpy.full(N, -7, dtype="f4")) for _ in range(16)]
    seq.replay()
    assert seen == [3, 3]
    del others


# ---------------------------------------------------------------- addresses


class Foreign:
    """An array that only `__cuda_array_interface__` tells of."""

    def __init__(self, t: Any) -> None:
        self.memory = t

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self.memory.__cuda_array_interface__)


def test_an_array_of_an_unknown_library_is_kept() -> None:
    given, seen = Foreign(dev(4, N)), []

    @no_graph
    def look(t: Any) -> None:
        seen.append(float(torch.as_tensor(t, device="cuda")[0]))

    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        look(given)
    given.memory.fill_(6)
    del given
    gc.collect()
    canaries()
    seq.replay()
    assert seen == [4, 6]
    with pytest.raises(CaptureError, match="static"), breakable_graph(CUDAGraphSequence()):
        no_graph(lambda: Foreign(dev(1)))()


def driver_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def test_a_stream_ordered_allocation_that_crosses_a_break_is_refused() -> None:
    driver, x = bindings.current(), dev(1)
    cross = no_graph(lambda: None)
    with pytest.raises(CaptureError, match="allocation") as caught:
        with breakable_graph(CUDAGraphSequence()):
            pointer = driver.cuMemAllocAsync(256, driver_stream())
            driver.cuMemcpyDtoDAsync(pointer, x.data_ptr(), 256, driver_stream())
            cross()
            driver.cuMemFreeAsync(pointer, driver_stream())
    assert "256 bytes" in str(caught.value)
    seq, y = CUDAGraphSequence(), dev(0)
    with breakable_graph(seq):
        cross()
        pointer = driver.cuMemAllocAsync(256, driver_stream())
        driver.cuMemcpyDtoDAsync(pointer, x.data_ptr(), 256, driver_stream())
        driver.cuMemcpyDtoDAsync(y.data_ptr(), pointer, 256, driver_stream())
        driver.cuMemFreeAsync(pointer, driver_stream())
    for k in range(5):
        x.fill_(k)
        seq.replay()
        same(y, k)


@pytest.mark.parametrize("to_device", [True, False])
def test_a_copy_of_pageable_host_memory_is_refused(to_device: bool) -> None:
    driver, x = bindings.current(), dev(1)
    host, pinned = (ctypes.c_float * 64)(), torch.zeros(64).pin_memory()

    def copy(address: int) -> None:
        if to_device:
            driver.cuMemcpyHtoDAsync(x.data_ptr(), address, 256, driver_stream())
        else:
            driver.cuMemcpyDtoHAsync(address, x.data_ptr(), 256, driver_stream())

    with pytest.raises(CaptureError, match="pageable") as caught:
        with breakable_graph(CUDAGraphSequence()):
            copy(ctypes.addressof(host))
    assert "256 bytes" in str(caught.value)
    with breakable_graph(seq := CUDAGraphSequence()):
        copy(pinned.data_ptr())
        no_graph(copy)(ctypes.addressof(host))
    assert kinds(seq) == "geg"
    seq.replay()


def test_a_kernel_over_addresses_is_found_edited_and_rebound() -> None:
    x, y, z = dev(1, N), dev(0, N), dev(7, N)
    launch_scale(y, x, 2.0)
    with breakable_graph(seq := CUDAGraphSequence()):
        launch_scale(y, x, 2.0)
    ((segment, node),) = found(seq, "known_scale")
    segment.exec.update(node, args={2: f32(5)})
    seq.rebind([((x.data_ptr(), 4 * N), (z.data_ptr(), 4 * N))])
    seq.replay()
    same(y, 35.0)


def test_a_kernel_of_cuda_core_is_found_edited_and_rebound() -> None:
    core = pytest.importorskip("cuda.core")
    device = core.Device()
    device.set_current()
    stream = device.create_stream()
    source = r"""
    extern "C" __global__ void core_scale(float* out, const float* in, float f, int n)
    { int i = threadIdx.x; if (i < n) out[i] = in[i] * f; }
    """
    program = core.Program(source, "c++", core.ProgramOptions(arch=f"sm_{device.arch}"))
    kernel = program.compile("cubin").get_kernel("core_scale")
    config = core.LaunchConfig(grid=1, block=N)
    x, y, z = dev(1, N), dev(0, N), dev(7, N)

    def body() -> None:
        addresses = y.data_ptr(), x.data_ptr()
        core.launch(stream, config, kernel, *addresses, ctypes.c_float(2), ctypes.c_int(N))

    sync()
    warm(body)
    with breakable_graph(seq := CUDAGraphSequence(), stream=stream):
        body()
    ((segment, node),) = found(seq, "core_scale")
    assert [argument.size for argument in node.args] == [8, 8, 4, 4]
    segment.exec.update(node, args={2: f32(5)})
    seq.rebind([(x, z)])
    seq.replay()
    same(y, 35.0)


def test_two_threads_capture_with_cupy_at_once(cupy: Any) -> None:
    x = cupy.zeros(N, dtype="f4")
    warm(lambda: x * 2 + 1)

    def capture() -> Any:
        with breakable_graph(seq := CUDAGraphSequence(), capture_error_mode="thread_local"):
            return seq, x * 2 + 1

    made = together([capture, capture])
    x.fill(3)
    for seq, _ in made:
        seq.replay()
    for _, out in made:
        expect(out, 7)
