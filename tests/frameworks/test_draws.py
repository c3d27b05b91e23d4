"""Random numbers, as far as they go without torch's kernels: what those read, and the traffic of captures."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import (  # noqa: E402
    CaptureError,
    CUDAError,
    ReplayError,
)
from breakable_cuda_graphs._driver import (  # noqa: E402
    bindings,
    release,
    stream_capture,
    stream_order,
)
from breakable_cuda_graphs._driver.handles import ExecHandle  # noqa: E402
from breakable_cuda_graphs.frameworks.pytorch import draws as module  # noqa: E402
from breakable_cuda_graphs.frameworks.pytorch import modes  # noqa: E402
from breakable_cuda_graphs.frameworks.pytorch.draws import (  # noqa: E402
    Traffic,
    generator_states,
)
from breakable_cuda_graphs.simulator import SimulatedKernel  # noqa: E402
from helping import in_thread  # noqa: E402

SEED, OFFSET = 0x7F00_0000_0200, 0x7F00_0000_0400
STATE = [SEED, OFFSET, 8, 1]


# ---------------------------------------------------------------- what the kernels read


@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_generators_state_is_found_wherever_it_lies(before):
    words = [3] * before + STATE + [9, 9]
    assert generator_states([words]) == [(SEED, OFFSET, 8)]


def test_the_flag_is_one_byte():
    assert generator_states([[SEED, OFFSET, 0, 0xABCD_EF01]]) == [(SEED, OFFSET, 0)]
    assert generator_states([[SEED, OFFSET, 0, 0x0100]]) == []


@pytest.mark.parametrize(
    "words",
    [
        [],
        STATE[:3],
        [SEED, OFFSET, 8, 0],  # no capture
        [SEED, OFFSET, 6, 1],  # offsets are multiples of four
        [SEED, SEED, 8, 1],  # one pointer twice
        [SEED + 8, OFFSET, 8, 1],  # no beginning of a block
        [512, 1024, 8, 1],  # small numbers
        [1 << 60, OFFSET, 8, 1],  # no address
    ],
)
def test_what_only_looks_like_one_is_none(words):
    assert generator_states([words]) == []


def test_several_kernels_are_searched():
    other = [SEED + 0x1000, OFFSET + 0x1000, 0, 1]
    assert generator_states([[1], STATE, [7, *other]]) == [
        (SEED, OFFSET, 8),
        (SEED + 0x1000, OFFSET + 0x1000, 0),
    ]


LIKENESS = [SEED + 0x8000, OFFSET + 0x8000, 1024, 1]  # a norm: two pointers, a count, a flag


def test_pointers_to_other_blocks_are_no_state():
    assert generator_states([LIKENESS, STATE], {SEED, OFFSET}) == [(SEED, OFFSET, 8)]


def test_a_likeness_does_not_hide_the_state_behind_it():
    assert generator_states([[*LIKENESS, *STATE]], {SEED, OFFSET}) == [(SEED, OFFSET, 8)]


# ---------------------------------------------------------------- the end of a block


class SeededGenerator:
    """A generator whose state is a seed and an offset."""

    def __init__(self, seed: int, offset: int) -> None:
        self.state = (seed, offset)

    def graphsafe_get_state(self) -> SeededGenerator:
        return self

    def get_state(self) -> Any:
        return torch.tensor(self.state)

    def set_state(self, state: Any) -> None:
        self.state = tuple(state.tolist())

    def initial_seed(self) -> int:
        return self.state[0]

    def get_offset(self) -> int:
        return self.state[1]

    def set_offset(self, offset: int) -> None:
        self.state = (self.state[0], offset)


def counted(generator: Any, *segments: int) -> Any:
    """A counter that has seen segments with so many draws."""
    counter = module._Counter(generator)
    for drawn in segments:
        segment(counter, drawn)
    return counter


def segment(counter: Any, drawn: int) -> None:
    counter.begin()
    counter.used = drawn
    counter.closed()


def test_a_block_that_failed_leaves_the_generator_as_it_was():
    generator = SeededGenerator(7, 40)
    counter = counted(generator, 8, 4)
    generator.state = (9, 1000)  # a break has seeded it and drawn
    counter.finish(failed=True)
    assert generator.state == (7, 40)
    generator.set_offset(48)
    counter.finish(failed=True)  # an end that could not be finished is gone through again
    assert generator.state == (7, 48)


@pytest.mark.parametrize("is_open", [False, True])
def test_numbers_that_were_drawn_since_a_thread_ended_in_its_block_do_not_come_again(is_open):
    for since, after in ((0, 40), (4, 56)):
        generator = SeededGenerator(7, 40)
        counter = counted(generator, 8, 4)
        if is_open:
            counter.begin()
        generator.set_offset(generator.get_offset() + since)
        counter.finish(failed=True, is_late=True)
        assert generator.state == (7, after)


def test_captured_draws_are_taken_back_and_those_of_breaks_stay():
    generator = SeededGenerator(7, 40)
    counter = counted(generator, 8)
    generator.set_offset(generator.get_offset() + 100)  # a break has drawn
    segment(counter, 4)
    assert generator.state == (7, 152)
    counter.finish(failed=False)
    assert generator.state == (7, 140)
    counter.finish(failed=True)  # an interrupt came behind
    assert generator.state == (7, 140)


# ---------------------------------------------------------------- where the tensors are, and their words


_U64 = ctypes.c_uint64
_DRAW = (_U64, _U64, _U64, _U64, _U64)  # a count, and a generator's state


class DeviceGenerator(SeededGenerator):
    """A generator with a seed and an offset on the simulated device."""

    def __init__(self, seed: int, offset: int, words: tuple[int, int]) -> None:
        super().__init__(seed, offset)
        self.words = words
        self.device = torch.device("cuda", 0)

    def clone_state(self) -> None:
        """A copy is in place only while a capture begins, which draws nothing."""

    def graphsafe_set_state(self, state: Any) -> None:
        pass


class Shell:
    """What torch began a capture with."""

    given_up = 0

    def give_up(self) -> None:
        self.given_up += 1


class Stage:
    """Draws of a block on the simulated driver; `seen` are the seed and offset that kernels read."""

    def __init__(self, monkeypatch: Any, count: int = 1) -> None:
        self.driver = driver = bindings.current()
        driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0))
        self.stream = driver.cuStreamCreate(1)
        self.memory = int(driver.cuMemAlloc(8192))
        base = -(-self.memory // 512) * 512
        self.generators = [
            DeviceGenerator(7 + n, 40, (base + 1024 * n, base + 1024 * n + 512))
            for n in range(count)
        ]
        self.seen: list[tuple[int, int]] = []
        self.kernel = SimulatedKernel(self._read, _DRAW, name="distribution")
        self.shell = Shell()
        self.shows = True
        monkeypatch.setattr(module.torch.cuda, "default_generators", self.generators[:1])
        monkeypatch.setattr(module, "_refuse_other_device", lambda *_: None)
        handle = int(self.stream)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: handle, raising=False)
        self.begin_block(*self.generators[1:])

    def begin_block(self, *generators: Any) -> None:
        self.draws = module.Draws(self.driver, 0, self.stream, generators)
        self.draws.scratch = self

    def _read(self, count: int, seed: int, offset: int, inside: int, flag: int) -> None:
        words = [_U64.from_address(address).value for address in (seed, offset)]
        self.seen.append((words[0], (words[1] + inside) % (1 << 64)))

    def uniform_(self, generator: Any) -> None:
        """What torch's operator of that name does in a capture."""
        seed, offset = generator.words if self.shows else (1, 2)
        self.launch(1, seed, offset, generator.state[1], 1)
        generator.set_offset(generator.get_offset() + 4)

    def launch(self, *words: int) -> None:
        values = (words, _DRAW)
        self.driver.cuLaunchKernel(self.kernel.handle, 1, 1, 1, 1, 1, 1, 0, self.stream, values, 0)

    @contextlib.contextmanager
    def segment(self) -> Iterator[None]:
        """Capture one segment; afterwards `graph` and `runner` are there."""
        self.draws.open(lambda: stream_capture.begin(self.driver, self.stream, "relaxed"))
        yield
        info = self.driver.capture_info(self.stream)
        reader = module.kernel_params.KernelReader(self.driver)
        words = [reader.words_of(node) for node in self.driver.graph_nodes(info.graph)]
        with self.draws.lock:
            states = self.draws.states_in([each for each in words if each is not None])
            draw, problem = self.draws.ending(states)
            assert problem is None
            self.graph = stream_capture.end(self.driver, self.stream).graph
            self.draws.closed(self.shell)
        needs_shell = not self.draws.take_probes_out() or draw
        self.runner = self.draws.runner(self.shell.give_up) if needs_shell else None

    def close(self) -> None:
        self.driver.cuMemFree(self.memory)
        self.driver.cuStreamDestroy(self.stream)
        traffic = self.driver.cache.pop((Traffic, 0))
        traffic._mark.close()
        release.drain()


@pytest.fixture
def stage(bare_device: Any, monkeypatch: Any) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(count: int = 1) -> Stage:
        made.append(Stage(monkeypatch, count))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("shared", [True, False])
def test_a_replay_writes_what_the_kernels_read_and_moves_the_generator_on(
    stage, monkeypatch, shared
):
    monkeypatch.setattr(module, "SHARED_TENSORS", shared)
    on = stage()
    generator = on.generators[0]
    with on.segment():
        on.uniform_(generator)
        on.uniform_(generator)
    on.draws.finish(failed=False)
    assert generator.state == (7, 40)
    assert len(on.driver.graph_nodes(on.graph.value)) == 2, "what looked in is part of the graph"
    executable = ExecHandle.instantiate(on.graph)
    on.runner.launch(executable.value)
    assert (on.seen, generator.state) == ([(7, 40), (7, 44)], (7, 48))
    generator.state = ((1 << 64) - 1, 8)  # seeded anew: the base is before the capture's
    on.runner.launch(executable.value)
    assert on.seen[2:] == [((1 << 64) - 1, 8), ((1 << 64) - 1, 12)]
    assert generator.get_offset() == 16
    executable.close()
    on.graph.close()


@pytest.mark.parametrize(
    ("start", "used"),
    [
        (0, 8),
        (16, 8),
        (16, 0),  # a checkpoint drew and put the offset back
        (16, -12),  # one of an earlier segment was restored
        (0, 0),
    ],
)
@pytest.mark.parametrize("now", [16, 400])
def test_a_replay_draws_from_where_the_generator_is(stage, start, used, now):
    on = stage()
    generator = on.generators[0]
    generator.set_offset(now)
    counter = SimpleNamespace(view=generator, start=start, used=used)
    draws = [module._Draw(counter, generator.words)]
    launched: list[Any] = []
    runner = module.DrawingRunner(on.driver, on.draws._traffic, on.shell.give_up, draws)
    runner._raw_launch = lambda *call: launched.append(call) or (0,)
    runner.launch("executable")
    seed, offset = (_U64.from_address(word).value for word in generator.words)
    assert (seed, (offset + start) % (1 << 64)) == (7, now)  # kernels count from the start on
    assert generator.get_offset() == now + used
    assert [(what, int(where)) for what, where in launched] == [("executable", int(on.stream))]


def test_a_launch_that_fails_leaves_the_generator(stage):
    on = stage()
    with on.segment():
        on.uniform_(on.generators[0])
    on.draws.finish(failed=False)
    with pytest.raises(CUDAError, match="cuGraphLaunch"):
        on.runner.launch(bindings.types.CUgraphExec(64))
    assert on.generators[0].state == (7, 40)
    on.graph.close()


def test_each_generator_has_its_own_words_and_one_that_did_not_draw_stays_where_it_is(stage):
    on = stage(3)
    with on.segment():
        on.uniform_(on.generators[2])
        on.uniform_(on.generators[0])
    on.draws.finish(failed=False)
    executable = ExecHandle.instantiate(on.graph)
    on.generators[1].state = (99, 1000)
    on.generators[1].set_offset = lambda _: pytest.fail("another thread may have drawn from it")
    on.runner.launch(executable.value)
    assert on.seen == [(9, 40), (7, 40)]
    assert [each.state for each in on.generators] == [(7, 44), (99, 1000), (9, 44)]
    executable.close()
    on.graph.close()


def test_a_launch_that_is_interrupted_leaves_numbers_out_and_repeats_none(stage, monkeypatch):
    monkeypatch.setattr(module, "SHARED_TENSORS", True)
    on = stage()
    with on.segment():
        on.uniform_(on.generators[0])
    on.draws.finish(failed=False)
    marked: list[int] = []
    mark = on.draws._traffic._mark
    monkeypatch.setattr(type(mark), "record", lambda mark, handle, stream: marked.append(handle))
    executable = ExecHandle.instantiate(on.graph)
    launch = on.runner._raw_launch

    def interrupted(*call: Any) -> Any:
        launch(*call)
        raise KeyboardInterrupt

    on.runner._raw_launch = interrupted
    with pytest.raises(KeyboardInterrupt):
        on.runner.launch(executable.value)
    assert on.seen == [(7, 40)]
    assert on.generators[0].state == (7, 44)
    assert marked == [int(on.stream)], "what follows on another stream does not wait for it"
    executable.close()
    on.graph.close()


def test_a_generator_that_is_given_twice_is_counted_once(stage):
    on = stage(2)
    first, other = on.generators
    on.begin_block(other, first, other)
    assert on.draws.generators == (first, other)
    with on.segment():
        on.uniform_(other)
    on.draws.finish(failed=False)
    assert other.state == (8, 40)
    on.graph.close()


def test_draws_of_kernels_that_hide_the_state_are_written_for_too(stage):
    """All that tells of them is that the generator has moved."""
    on = stage()
    generator = on.generators[0]

    def read(flag: int, seed: int, inside: int, offset: int) -> None:
        on._read(1, seed, offset, inside, flag)

    hiding = SimulatedKernel(read, (_U64,) * 4, name="hiding")
    with on.segment():
        values = ((1, generator.words[0], generator.state[1], generator.words[1]), (_U64,) * 4)
        on.driver.cuLaunchKernel(hiding.handle, 1, 1, 1, 1, 1, 1, 0, on.stream, values, 0)
        generator.set_offset(generator.get_offset() + 4)
    on.draws.finish(failed=False)
    executable = ExecHandle.instantiate(on.graph)
    for _ in range(2):
        on.runner.launch(executable.value)
    assert (on.seen, generator.state) == ([(7, 40), (7, 44)], (7, 48))
    executable.close()
    on.graph.close()


@pytest.mark.parametrize("draws", [True, False])
def test_a_graph_with_allocations_keeps_what_looked_in_and_what_that_reads(stage, draws):
    """The driver takes no node out of such a graph."""
    on = stage()
    with on.segment():
        address = on.driver.cuMemAllocAsync(64, on.stream)
        if draws:
            on.uniform_(on.generators[0])
        else:
            on.launch(1, *on.generators[0].words, 1024, 0)
            on.launch(5, *(word + 4096 for word in on.generators[0].words), 1024, 1)
        on.driver.cuMemFreeAsync(address, on.stream)
    on.draws.finish(failed=False)
    executable = ExecHandle.instantiate(on.graph)
    for _ in range(2):
        on.seen.clear()
        on.runner.launch(executable.value)
    drawn = 4 if draws else 0
    assert on.generators[0].state == (7, 40 + 2 * drawn)
    if draws:
        assert on.seen[0] == (7, 44)
    assert not on.shell.given_up
    for _ in range(2):
        on.runner.close()
    assert on.shell.given_up == 1
    executable.close()
    on.graph.close()


def test_where_the_tensors_are_is_believed_while_a_shell_that_knows_the_generator_lives(
    stage, monkeypatch
):
    """They go with the last such shell, and the next segment's are elsewhere."""
    monkeypatch.setattr(module, "SHARED_TENSORS", True)
    on = stage()
    with on.segment():
        on.launch(*LIKENESS, 1)
    assert on.runner is None
    alive = weakref.ref(on.shell)
    on.graph.close()
    on.shell = Shell()
    assert alive() is not None
    with on.segment():
        on.launch(*LIKENESS, 1)
    on.graph.close()
    assert alive() is not None
    on.draws.finish(failed=False)
    assert alive() is None


def test_a_draw_that_launches_nothing_costs_the_segment_no_node(stage, monkeypatch):
    on = stage()
    generator = on.generators[0]
    on.draws.open(lambda: stream_capture.begin(on.driver, on.stream, "relaxed"))
    on.uniform_(generator)
    monkeypatch.setattr(on, "uniform_", lambda generator: None)
    with pytest.raises(CaptureError, match="does not show where the generator"):
        on.draws.states_in([STATE])
    assert on.draws._probes == []
    stream_capture.discard(on.driver, on.stream)
    with on.draws.lock:
        on.draws.ended()


def test_what_only_looks_like_a_generators_state_is_never_written_to(stage):
    on = stage()
    seed, offset = (word + 4096 for word in on.generators[0].words)
    with on.segment():
        on.launch(5, seed, offset, 1024, 1)
    assert on.runner is None
    assert len(on.driver.graph_nodes(on.graph.value)) == 1
    assert on.generators[0].state == (7, 40)
    on.graph.close()


def test_a_draw_into_a_guests_copy_is_seen_whoever_else_has_drawn(stage):
    on = stage(2)
    on.draws.open(lambda: stream_capture.begin(on.driver, on.stream, "relaxed"))
    on.uniform_(on.generators[0])
    on.draws.had_guest = True
    own, copy = (*on.generators[0].words, 40), (SEED, OFFSET, 0)
    with on.draws.lock:
        draws, problem = on.draws.ending([own, copy])
        assert not draws
        assert "another capture" in str(problem)
        stream_capture.discard(on.driver, on.stream)
        on.draws.ended()


def test_a_host_is_not_moved_on_by_what_a_guest_has_drawn(stage):
    on = stage()
    with on.segment():
        on.draws.had_guest = on.draws.is_spoilt = True
        on.generators[0].set_offset(44)
    assert on.runner is None
    on.draws.finish(failed=False)
    on.graph.close()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("draws", [None, 0, 1])
def test_a_guest_whose_host_waits_is_refused_only_if_it_draws(stage, monkeypatch, waits, draws):
    """A host that goes on may be drawing at any moment: who looks then would disturb it."""
    monkeypatch.setattr(module, "SHARED_TENSORS", True)
    on = stage(2)
    driver, generator = on.driver, on.generators[0]
    side = driver.cuStreamCreate(1)
    host = module.Draws(driver, 0, side, (on.generators[1],))
    on.begin_block()  # torch lets a guest draw from all that its host has
    host.open(lambda: stream_capture.begin(driver, side, "relaxed"))
    on.draws.open(lambda: stream_capture.begin(driver, on.stream, "relaxed"))
    on.draws.hosts_wait = waits
    on.launch(5, *(word + 4096 for word in generator.words), 1024, 1)
    if draws is not None:
        on.uniform_(on.generators[draws])
    nodes = driver.graph_nodes(driver.capture_info(on.stream).graph)
    words = [module.kernel_params.KernelReader(driver).words_of(node) for node in nodes]
    with on.draws.lock:
        found, problem = on.draws.ending(on.draws.states_in(words))
        assert not found
        assert (problem is None) is (waits and draws is None)
        graph = stream_capture.end(driver, on.stream).graph
        on.draws.closed(on.shell)
    assert on.draws.take_probes_out()
    assert len(driver.graph_nodes(graph.value)) == len(nodes)
    assert [each.state for each in on.generators] == [(7, 40), (8, 40)], "hosts draw on from here"
    assert not host.is_spoilt
    graph.close()
    stream_capture.discard(driver, side)
    with host.lock:
        host.ended()
    driver.cuStreamDestroy(side)


@pytest.mark.parametrize(("shared", "count", "looks"), [(True, 1, 1), (True, 2, 6), (False, 1, 3)])
def test_the_tensors_are_looked_for_when_there_is_a_likeness_and_they_may_have_moved(
    stage, monkeypatch, shared, count, looks
):
    monkeypatch.setattr(module, "SHARED_TENSORS", shared)
    on = stage(count)
    looked = []
    probe = on.draws._probe
    monkeypatch.setattr(on.draws, "_probe", lambda g: looked.append(g) or probe(g))
    with on.segment():
        on.launch(1, 2, 3, 4, 5)
    assert looked == []
    on.graph.close()
    for _ in range(3):
        with on.segment():
            on.uniform_(on.generators[0])
        on.graph.close()
    assert len(looked) == looks
    on.draws.had_guest = True  # the copy's tensors may be gone
    assert on.draws.states_in([LIKENESS]) == [tuple(LIKENESS[:3])]
    assert len(looked) == looks


def test_kernels_that_do_not_show_the_generators_state_are_refused(stage):
    on = stage()
    on.shows = False
    on.draws.open(lambda: stream_capture.begin(on.driver, on.stream, "relaxed"))
    with pytest.raises(CaptureError, match="does not show where the generator"):
        on.draws.states_in([STATE])
    assert on.generators[0].get_offset() == 40
    stream_capture.discard(on.driver, on.stream)
    with on.draws.lock:
        on.draws.ended()


def test_modes_and_transforms_of_the_users_do_not_see_the_draw_that_looks(monkeypatch):
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    def drawing(x: Any) -> Any:
        with modes.unseen():
            torch.empty(1).uniform_()
        return (x * x).sum()

    x = torch.ones(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of its own way to load jvp
        torch.func.vmap(torch.func.grad(drawing))(x)
        torch.func.jvp(drawing, (x,), (x,))
    with Functions(), Watch(), torch.inference_mode():
        with modes.unseen():
            made = torch.empty(1)
            made.uniform_()
        assert seen == []
        made.uniform_()
        assert torch.is_inference_mode_enabled()
    assert len(seen) == 2
    assert not made.is_inference()


# ---------------------------------------------------------------- captures at the same time


class FakeDraws:
    """A block's generators, for the traffic: how many nodes its capture has, and whose guest it is."""

    def __init__(self) -> None:
        self.is_guest = self.had_guest = self.is_spoilt = False
        self.hosts_wait = True
        self.generators: tuple[Any, ...] = ()
        self.stream: Any = None
        self.handle = 0
        self.nodes = 1

    def progress(self) -> tuple[int, ...]:
        return (1, self.nodes)


@pytest.fixture
def road(bare_device, monkeypatch):
    """Traffic as on torch 2.11, with two streams."""
    driver = bindings.current()
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0))
    monkeypatch.setattr(module, "SHARED_TENSORS", True)
    made = Traffic(driver, 0)
    streams = [driver.cuStreamCreate(1) for _ in range(2)]
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: int(streams[0]), raising=False
    )
    yield made, streams
    assert not made._open
    assert not made._progress_of_hosts
    made._mark.close()
    for stream in streams:
        driver.cuStreamDestroy(stream)
    release.drain()
    assert made._mark._event not in stream_order._events
    assert bare_device.leaks() == []


def replay(traffic: Traffic, launch: Callable[[], object] = lambda: None) -> None:
    with traffic.lock:
        traffic.before_replay()
        launch()
        traffic.after_replay()


def put(draws: Any, stream: Any) -> None:
    draws.stream, draws.handle = stream, int(stream)


def open_(traffic: Traffic, draws: Any, stream: Any) -> None:
    begun: list[int] = []
    put(draws, stream)
    traffic.open(draws, lambda: begun.append(1))
    assert begun == [1]


def close(traffic: Traffic, draws: Any, stream: Any) -> None:
    put(draws, stream)
    with traffic.lock:
        traffic.ended(draws)


def test_the_first_capture_has_the_generators_and_a_second_is_its_guest(road):
    traffic, (one, two) = road
    host, guest = FakeDraws(), FakeDraws()
    open_(traffic, host, one)
    open_(traffic, guest, two)
    assert (host.is_guest, guest.is_guest) == (False, True)
    close(traffic, host, one)
    close(traffic, guest, two)
    later = FakeDraws()
    later.is_guest = True
    open_(traffic, later, two)
    assert not later.is_guest
    close(traffic, later, two)


def test_a_guest_of_a_guest_is_a_guest_of_the_host_only(road):
    traffic, (one, two) = road
    host, guest, third = FakeDraws(), FakeDraws(), FakeDraws()
    for draws, stream in ((host, one), (guest, two), (third, two)):
        open_(traffic, draws, stream)
    assert third.is_guest
    assert set(traffic._progress_of_hosts[third]) == {host}
    for draws in (third, guest, host):
        close(traffic, draws, one)


def test_only_a_guest_of_another_thread_casts_doubt_on_what_its_host_draws(road):
    """One of the host's own, as the body of a `capture_if`, begins while the host draws nothing."""
    traffic, (one, two) = road
    context = bindings.current().cuCtxGetCurrent()

    def elsewhere(guest: FakeDraws) -> None:
        bindings.current().cuCtxSetCurrent(context)
        open_(traffic, guest, two)
        close(traffic, guest, two)

    host, inner, other = FakeDraws(), FakeDraws(), FakeDraws()
    open_(traffic, host, one)
    open_(traffic, inner, two)
    assert (inner.is_guest, inner.hosts_wait, host.had_guest) == (True, True, False)
    close(traffic, inner, two)
    in_thread(lambda: elsewhere(other))
    assert (other.is_guest, other.hosts_wait, host.had_guest) == (True, False, True)
    close(traffic, host, one)


@pytest.mark.parametrize("gone_on", [False, True])
def test_a_guest_that_draws_spoils_a_host_that_has_gone_on(road, gone_on):
    traffic, (one, two) = road
    host, guest = FakeDraws(), FakeDraws()
    open_(traffic, host, one)
    open_(traffic, guest, two)
    host.nodes += gone_on
    assert traffic.spoil_hosts(guest) is gone_on
    assert host.is_spoilt is gone_on
    close(traffic, guest, two)
    close(traffic, host, one)


def test_a_host_that_has_ended_cannot_be_spoilt(road):
    traffic, (one, two) = road
    host, guest = FakeDraws(), FakeDraws()
    open_(traffic, host, one)
    open_(traffic, guest, two)
    close(traffic, host, one)
    host.nodes += 5
    assert traffic.spoil_hosts(guest) is False
    assert not host.is_spoilt
    close(traffic, guest, two)


def test_a_failed_opening_can_be_closed(road):
    traffic, (one, _) = road
    draws = FakeDraws()

    def fail() -> None:
        raise ValueError("mine")

    put(draws, one)
    with pytest.raises(ValueError, match="mine"):
        traffic.open(draws, fail)
    close(traffic, draws, one)
    close(traffic, draws, one)
    replay(traffic)


class FakeGenerator:
    """A generator's handle: what it holds is a state that can be swapped."""

    def __init__(self) -> None:
        self.state: Any = "own"

    def graphsafe_get_state(self) -> Any:
        return self.state

    def graphsafe_set_state(self, state: Any) -> None:
        self.state = state

    def clone_state(self) -> Any:
        return f"copy of {self.state}"


@pytest.mark.parametrize("fails", [False, True])
def test_a_guest_begins_with_copies_and_the_generators_get_their_own_back(road, fails):
    traffic, (one, two) = road
    host, guest = FakeDraws(), FakeDraws()
    host.generators = guest.generators = (FakeGenerator(), FakeGenerator())
    seen: list[Any] = []

    def begin() -> None:
        seen.append([generator.state for generator in guest.generators])
        if fails:
            raise ValueError("mine")

    open_(traffic, host, one)
    put(guest, two)
    if fails:
        with pytest.raises(ValueError, match="mine"):
            traffic.open(guest, begin)
    else:
        traffic.open(guest, begin)
    assert seen[-1] == ["copy of own"] * 2
    assert [generator.state for generator in guest.generators] == ["own"] * 2
    close(traffic, guest, two)
    close(traffic, host, one)


def test_a_replay_in_the_capturing_thread_is_refused(road):
    traffic, (one, _) = road
    draws = FakeDraws()
    open_(traffic, draws, one)
    with pytest.raises(ReplayError, match="random"):
        replay(traffic, lambda: pytest.fail("it was let through"))
    close(traffic, draws, one)
    replay(traffic)


def test_a_replay_waits_for_the_segment_of_another_thread(road):
    traffic, (one, _) = road
    draws, log = FakeDraws(), []
    entered = threading.Event()
    driver = bindings.current()
    context = driver.cuCtxGetCurrent()

    def other() -> None:
        driver.cuCtxSetCurrent(context)
        entered.set()
        replay(traffic, lambda: log.append("replayed"))

    open_(traffic, draws, one)
    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(10)
    thread.join(0.05)
    assert log == []
    close(traffic, draws, one)
    thread.join(10)
    assert log == ["replayed"]


def test_a_replay_does_not_wait_for_ever(road, monkeypatch):
    traffic, (one, _) = road
    monkeypatch.setattr(module, "_PATIENCE", 0.02)
    draws = FakeDraws()
    open_(traffic, draws, one)

    with pytest.raises(ReplayError, match="Replay when"):
        in_thread(lambda: replay(traffic, lambda: pytest.fail("it was let through")))
    close(traffic, draws, one)


def test_refills_on_different_streams_follow_each_other(road, monkeypatch):
    traffic, (one, two) = road
    waited = []
    monkeypatch.setattr(
        type(traffic._mark), "order_after", lambda mark, handle, stream: waited.append(handle)
    )
    draws, other = FakeDraws(), FakeDraws()
    open_(traffic, draws, two)
    close(traffic, draws, two)
    replay(traffic)
    assert traffic._mark._stream == int(one)
    open_(traffic, other, two)
    close(traffic, other, two)
    assert waited == [int(two), int(one), int(two)]


def test_no_mark_is_recorded_while_a_segment_is_open(road, monkeypatch):
    """It would be captured, and whoever waits for it would be drawn into that capture."""
    traffic, (one, two) = road
    recorded: list[int] = []
    monkeypatch.setattr(
        type(traffic._mark), "record", lambda mark, handle, stream: recorded.append(handle)
    )
    host, guest = FakeDraws(), FakeDraws()
    for _ in range(2):
        open_(traffic, host, two)
        close(traffic, host, two)
    open_(traffic, host, two)
    assert recorded == [int(two)] * 2
    open_(traffic, guest, one)
    assert guest.is_guest
    assert recorded == [int(two)] * 2
    close(traffic, guest, one)
    close(traffic, host, two)
    assert recorded == [int(two)] * 2 + [int(one), int(two)]


def test_nothing_is_kept_apart_where_tensors_are_not_shared(road, monkeypatch):
    traffic, (one, two) = road
    monkeypatch.setattr(module, "SHARED_TENSORS", False)
    host, other = FakeDraws(), FakeDraws()
    open_(traffic, host, one)
    open_(traffic, other, two)
    assert not other.is_guest
    replay(traffic)
    close(traffic, host, one)
    close(traffic, other, two)


def test_a_guest_is_not_drawn_into_the_capture_of_its_host(road):
    traffic, (one, two) = road
    driver = bindings.current()
    host, guest = FakeDraws(), FakeDraws()
    open_(traffic, host, one)
    close(traffic, host, one)  # the host's second segment is open when the guest comes
    mode = bindings.types.CUstreamCaptureMode(2)
    traffic.open(host, lambda: driver.cuStreamBeginCapture(one, mode))
    open_(traffic, guest, two)
    assert guest.is_guest
    assert stream_capture.status(driver, two) is stream_capture.Status.NONE
    close(traffic, guest, two)
    assert stream_capture.status(driver, one) is stream_capture.Status.ACTIVE
    driver.cuGraphDestroy(driver.cuStreamEndCapture(one))
    close(traffic, host, one)


def test_a_device_has_one_traffic(bare_device):
    driver = bindings.current()
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0))
    made = driver.once(Traffic, 0)
    assert driver.once(Traffic, 0) is made
    other = driver.once(Traffic, 1)
    assert other is not made
    made._mark.close()
    other._mark.close()
