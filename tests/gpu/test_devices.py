"""Several GPUs in one process: a sequence belongs to the device of its first capture."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from breakable_cuda_graphs import (
    CaptureError,
    CUDAGraphSequence,
    Graph,
    ReplayError,
    breakable_graph,
    no_graph,
)

from .helpers import MODES, same

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

N = 64


@pytest.fixture(autouse=True)
def first_device_is_current() -> Iterator[None]:
    with torch.cuda.device(0):
        yield


class Scene:
    """y = ((x * 2) + 1) * 2 on one device, with a break in the middle that notes where it ran."""

    def __init__(self, home: int) -> None:
        self.home, self.seq, self.seen = home, CUDAGraphSequence(), list[int]()
        self.x = torch.ones(N, device=f"cuda:{home}")

        @no_graph
        def look(t: Any) -> None:
            self.seen.append(torch.cuda.current_device())
            t.add_(torch.ones(N, device="cuda"))  # on the current device

        self.look = look

    def capture(self, **options: Any) -> Any:
        with breakable_graph(self.seq, **options):
            y = self.x * 2
            self.look(y)
            return y * 2

    def check(self, y: Any) -> None:
        for value in (3.0, 5.0, -1.0):
            self.x.fill_(value)
            y.fill_(float("nan"))
            self.seq.replay()  # on the current stream of its device, as the two fills before
            assert y.tolist() == [4 * value + 2] * N
        assert set(self.seen) == {self.home}


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize("away", [0, 1])
def test_a_sequence_is_replayed_on_its_own_device_whichever_is_current(
    home: int, away: int
) -> None:
    scene = Scene(home)
    with torch.cuda.device(home):
        y = scene.capture()
    assert y.device.index == scene.seq.stream.device_index == home
    with torch.cuda.device(away):
        streams = [torch.cuda.current_stream(number) for number in (0, 1)]
        scene.check(y)
        assert torch.cuda.current_device() == away
        assert [torch.cuda.current_stream(number) for number in (0, 1)] == streams


@pytest.mark.parametrize("mode", MODES)
def test_a_second_capture_goes_to_the_device_of_the_first(mode: str) -> None:
    scene = Scene(1)
    with torch.cuda.device(1):
        y = scene.capture(capture_error_mode=mode)
    z = scene.capture(capture_error_mode=mode)
    assert torch.cuda.current_device() == 0
    scene.check(y)
    scene.check(z)


@pytest.mark.parametrize("kind", ["torch", "handle"])
def test_a_stream_says_which_device_a_capture_is_for(kind: str) -> None:
    stream = torch.cuda.Stream(device=1)
    scene = Scene(1)
    y = scene.capture(stream=stream if kind == "torch" else stream.cuda_stream)
    assert torch.cuda.current_device() == 0
    scene.check(y)


def test_the_stream_of_another_device_is_refused_for_a_sequence_that_has_one() -> None:
    scene = Scene(0)
    scene.capture()
    for current in (0, 1):
        with torch.cuda.device(current):
            stream = torch.cuda.Stream(device=1)
            with pytest.raises(CaptureError, match="another device"):
                scene.capture(stream=stream)
            with pytest.raises(ReplayError, match="another device"):
                scene.seq.replay(stream)
            assert torch.cuda.current_device() == current
    scene.seq.reset()
    scene.check(scene.capture())


def test_a_replay_on_a_given_stream_of_the_device() -> None:
    scene = Scene(1)
    with torch.cuda.device(1):
        y, stream = scene.capture(), torch.cuda.Stream()
    scene.x.fill_(3)
    torch.cuda.synchronize(1)
    scene.seq.replay(stream)
    torch.cuda.synchronize(1)
    assert y.tolist() == [14.0] * N
    assert torch.cuda.current_device() == 0


def test_a_pool_of_another_device_is_refused() -> None:
    first, second = Scene(0), Scene(1)
    first.capture()
    second.seq = CUDAGraphSequence(pool=first.seq.pool())
    with torch.cuda.device(1), pytest.raises(ValueError, match=r"cuda:0.*cuda:1"):
        second.capture()
    assert torch.cuda.current_device() == 0


def test_a_generator_of_another_device_is_refused() -> None:
    scene = Scene(0)
    for generator in (torch.Generator(device="cuda:1"), torch.Generator()):
        with pytest.raises(ValueError, match="generators must be"):
            scene.capture(generators=[generator])
    scene.check(scene.capture(generators=[torch.Generator(device="cuda:0")]))


@pytest.mark.parametrize("home", [0, 1])
def test_random_numbers_are_those_of_the_device(home: int) -> None:
    device = f"cuda:{home}"
    x = torch.ones(1024, device=device)
    drawn: list[Any] = []

    @no_graph
    def draw() -> None:
        drawn.append(torch.rand(4, device=device))

    def body() -> Any:
        y = torch.nn.functional.dropout(x, 0.5)
        draw()
        return y + torch.rand_like(x)

    seq = CUDAGraphSequence()
    with torch.cuda.device(home):
        with breakable_graph(seq):
            y = body()
    for current in (0, 1):
        with torch.cuda.device(current):
            torch.cuda.manual_seed_all(7)
            wanted = [body() for _ in range(3)]
            left = torch.cuda.get_rng_state(1 - home)
            eager, drawn[:] = list(drawn[-3:]), []
            torch.cuda.manual_seed_all(7)
            for want in wanted:
                seq.replay()
                same(y.clone(), want)
            assert all(torch.equal(a, b) for a, b in zip(drawn, eager, strict=True))
            assert torch.equal(torch.cuda.get_rng_state(1 - home), left)


def test_matrix_products_and_static_results_on_the_second_device() -> None:
    weight = torch.randn(128, 128, device="cuda:1")
    x = torch.randn(8, 128, device="cuda:1")

    @no_graph(outputs="static")
    def double(t: Any) -> Any:
        return t * 2

    def body(t: Any) -> Any:
        return double(t @ weight) @ weight

    seq = CUDAGraphSequence()
    with torch.cuda.device(1):
        with breakable_graph(seq):
            out = body(x)
    for _ in range(3):
        x.normal_()
        want = body(x)
        seq.replay()
        torch.cuda.synchronize(1)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-3)


def test_a_break_where_another_device_is_current_is_refused() -> None:
    scene = Scene(0)
    with pytest.raises(CaptureError, match="inside of the break"), breakable_graph(scene.seq):
        y = scene.x * 2
        with torch.cuda.device(1):
            scene.look(y)
    assert scene.seen == []
    scene.check(scene.capture())


def test_a_body_may_leave_another_device_current() -> None:
    scene = Scene(0)
    with breakable_graph(scene.seq):
        y = scene.x * 2
        torch.cuda.set_device(1)
    assert torch.cuda.current_device() == 0
    scene.x.fill_(4)
    scene.seq.replay()
    same(y, 8.0)


def test_a_break_may_copy_between_devices() -> None:
    there = torch.empty(N, device="cuda:1")

    @no_graph
    def exchange(t: Any) -> None:
        there.copy_(t)
        there.add_(1)
        t.copy_(there)

    scene = Scene(0)
    with breakable_graph(scene.seq):
        y = scene.x * 2
        exchange(y)
        out = y * 2
    for value in (3.0, 5.0):
        scene.x.fill_(value)
        scene.seq.replay()
        same(out, 4 * value + 2)


def test_sequences_of_two_devices_take_turns() -> None:
    scenes = [Scene(0), Scene(1)]
    outputs = []
    for scene in scenes:
        with torch.cuda.device(scene.home):
            outputs.append(scene.capture())
    for value in range(5):
        for scene in scenes:
            scene.x.fill_(value + scene.home)
        for number in (0, 1):
            torch.cuda.synchronize(number)
        for scene in scenes:
            scene.seq.replay()
        for scene, y in zip(scenes, outputs, strict=True):
            torch.cuda.synchronize(scene.home)
            assert y.tolist() == [4 * (value + scene.home) + 2] * N


def test_threads_capture_and_replay_on_a_device_each() -> None:
    problems: list[BaseException] = []
    together = threading.Barrier(2, timeout=20)

    def work(home: int) -> None:
        try:
            torch.cuda.set_device(home)
            scene = Scene(home)
            torch.cuda.synchronize()
            for _ in range(3):
                together.wait()
                y = scene.capture(capture_error_mode="thread_local")
                together.wait()
                scene.check(y)
                scene.seq.reset()
        except BaseException as error:
            problems.append(error)
            together.abort()

    threads = [threading.Thread(target=work, args=(home,)) for home in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if problems:
        raise problems[0]


def test_an_executable_is_launched_on_its_own_device_whichever_is_current() -> None:
    memory = torch.zeros(4, dtype=torch.int32, device="cuda:0")
    graph = Graph()
    graph.memset(memory, ctypes.c_uint32(7), memory.nbytes)
    scene = Scene(0)
    y = scene.capture()
    with torch.cuda.device(1):
        elsewhere = torch.cuda.Stream(device=1)
        with graph.instantiate() as executable:
            for launch in (executable.launch, executable.upload, scene.seq.segments[0].exec.launch):
                launch()
                with pytest.raises(ReplayError, match="another device"):
                    launch(elsewhere)
                assert torch.cuda.current_device() == 1
            assert memory.tolist() == [7] * 4
        scene.check(y)


def test_a_sequence_is_dropped_and_reset_wherever_one_is() -> None:
    scenes = [Scene(1), Scene(1)]
    for scene in scenes:
        with torch.cuda.device(1):
            scene.check(scene.capture())
    assert torch.cuda.current_device() == 0
    scenes[0].seq.reset()
    scenes.clear()
    last = Scene(1)
    with torch.cuda.device(1):
        y = last.capture()
    last.check(y)
