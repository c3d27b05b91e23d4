"""What the tests on the simulated device share: checks of the aftermath, programs, bad drivers.

The hard problem: "as usable as before" has to be checked in all the places where something can stay
switched on. `assert_nothing_open` knows them all.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, is_in_breakable_graph
from breakable_cuda_graphs._driver import bindings, release, user_objects
from breakable_cuda_graphs.capture import open_blocks
from breakable_cuda_graphs.simulator import SimulatedDevice

MODES = ("global", "thread_local", "relaxed")


class Boom(Exception):
    """An error that only the tests raise."""


# ---------------------------------------------------------------- the aftermath


def assert_nothing_open(device: SimulatedDevice) -> None:
    """No capture, no block, no stream, no mode and no lock was left as it must not be."""
    import torch
    from torch.overrides import _get_current_function_mode
    from torch.utils import _python_dispatch

    from breakable_cuda_graphs.simulator import tensors

    assert device.open_captures() == 0, "a capture is open"
    assert open_blocks.open_blocks == (), "a block is open"
    assert release.open_captures() == 0, "the release queue believes that a capture is open"
    assert not is_in_breakable_graph(), "this thread is in a block"
    assert thread_mode() == 0, "the thread's capture mode was left exchanged"
    assert tensors.current_stream() == 0, "a stream was left current"
    assert _python_dispatch._get_current_dispatch_mode() is None, "a recorder is on"
    assert _get_current_function_mode() is None, "a recorder is on"
    assert torch.is_grad_enabled(), "grad mode was left off"
    assert not torch.is_inference_mode_enabled(), "inference mode was left on"
    assert not torch.is_autocast_enabled("cpu"), "autocast was left on"


def assert_nothing_left(device: SimulatedDevice, besides: list[str] | None = None) -> None:
    """Nothing was misused, and once garbage is gone every handle has been given back."""
    settle()
    assert device.findings == [], f"misuse: {device.findings}"
    leaks = [line for line in device.leaks() if line not in (besides or ())]
    assert leaks == [], f"leaks: {leaks}"
    assert release.pending() == 0, "releases are still queued"
    assert user_objects.held() == 0, "objects are held for graphs that have gone"


def settle() -> None:
    """Collect garbage and let go of what it held."""
    gc.collect()
    release.drain()
    user_objects.sweep()
    gc.collect()
    release.drain()


def thread_mode() -> int:
    """This thread's capture mode: 0 global, as it was in the beginning."""
    exchange = bindings.current().module.cuThreadExchangeStreamCaptureMode
    _, mode = exchange(bindings.types.CUstreamCaptureMode(0))
    exchange(mode)
    return int(mode)


# ---------------------------------------------------------------- captures


def capture(body: Callable[[], Any], seq: Any = None, **options: Any) -> tuple[Any, Any]:
    """Capture a body; returns the sequence and what the body returned."""
    seq = CUDAGraphSequence() if seq is None else seq
    with breakable_graph(seq, **options):
        value = body()
    return seq, value


def kinds(seq: Any) -> str:
    """The segments of a sequence as letters: g for a graph, - for an empty one, e for a break."""
    from breakable_cuda_graphs import GraphSegment

    return "".join(
        ("-" if segment.is_empty else "g") if isinstance(segment, GraphSegment) else "e"
        for segment in seq.segments
    )


def text_of(error: BaseException) -> str:
    """What a user reads of an error: its type, its text and its notes."""
    return " ".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])


# ---------------------------------------------------------------- streams


def new_stream() -> Any:
    """A non-blocking stream; the test gives it back with `drop_stream`."""
    return bindings.current().cuStreamCreate(1)


def drop_stream(stream: Any) -> None:
    bindings.current().cuStreamDestroy(stream)


@contextlib.contextmanager
def a_stream() -> Iterator[Any]:
    """A stream of the user's."""
    stream = new_stream()
    try:
        yield stream
    finally:
        drop_stream(stream)


def wait(waiting: Any, earlier: Any) -> None:
    """One stream waits for what is in another, as torch's `wait_stream` does."""
    driver = bindings.current()
    with release.relaxed_thread():
        event = driver.cuEventCreate(2)
        try:
            driver.cuEventRecord(event, earlier)
            driver.cuStreamWaitEvent(waiting, event, 0)
        finally:
            driver.cuEventDestroy(event)


@contextlib.contextmanager
def forked(side: Any, *, join: bool = True) -> Iterator[None]:
    """Work inside goes to a side stream that forks from the current one and joins it again."""
    from breakable_cuda_graphs.simulator import tensors

    main = bindings.types.CUstream(tensors.current_stream())
    wait(side, main)
    with tensors.stream(side):
        yield
    if join:
        wait(main, side)


@contextlib.contextmanager
def as_nccl_captures(stream: Any, own: Any, event: Any) -> Iterator[None]:
    """Work inside is captured on `stream` in between what NCCL adds to every capture.

    NCCL brings a stream of its own into the capture, with nothing to wait for; there it waits for
    the event of its last launch anywhere, and at the end records that event by a node that is added
    to the graph by hand and that nothing waits for (src/misc/strongstream.cc).
    """
    driver = bindings.current()
    wait(own, stream)
    driver.update_capture_dependencies(own, [])
    driver.cuStreamWaitEvent(own, event, 1)
    wait(stream, own)
    yield
    info = driver.capture_info(stream)
    count = len(info.dependencies)
    record = driver.cuGraphAddEventRecordNode(info.graph, info.dependencies, count, event)
    driver.update_capture_dependencies(own, [record])


# ---------------------------------------------------------------- threads


def in_thread(work: Callable[[], Any], timeout: float = 20) -> Any:
    """Run work() in a new thread and return or raise what it did."""
    return together([work], timeout)[0]


def together(works: list[Callable[[], Any]], timeout: float = 20) -> list[Any]:
    """Run callables in threads at the same time; their results in order, or the first error."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(index: int, work: Callable[[], Any]) -> None:
        try:
            results[index] = work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors.pop(0)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results


def in_raw_thread(work: Callable[[], Any]) -> int:
    """Run work() in a thread that `threading` has not started; returns its number."""
    ended, local = threading.Event(), threading.local()
    problems: list[BaseException] = []
    numbers: list[int] = []
    storage: list[Any] = []  # something of the thread's own, which goes with it

    def run() -> None:
        numbers.append(_thread.get_ident())
        local.own = Boom()
        storage.append(weakref.ref(local.own))
        try:
            work()
        except BaseException as error:
            problems.append(error)
        finally:
            ended.set()

    _thread.start_new_thread(run, ())
    assert ended.wait(20)
    deadline = time.monotonic() + 20
    while storage and storage[0]() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    if problems:
        raise problems[0]
    return numbers[0]


def in_thread_of_number(number: int, work: Callable[[], Any]) -> None:
    """Run work() in a thread that has been given the number of one that has ended.

    Threads of other numbers stay until one has it: their memory, and so their numbers, would go first.
    """
    done, ended = threading.Event(), []
    problems: list[BaseException] = []

    def run(is_looked_at: threading.Event, has_ended: threading.Event) -> None:
        if _thread.get_ident() == number:
            try:
                work()
            except BaseException as error:
                problems.append(error)
            done.set()
        is_looked_at.set()
        done.wait(20)
        has_ended.set()

    while not done.is_set() and len(ended) < 200:
        is_looked_at = threading.Event()
        ended.append(threading.Event())
        _thread.start_new_thread(run, (is_looked_at, ended[-1]))
        assert is_looked_at.wait(20)
    was_found = done.is_set()
    done.set()
    assert all(each.wait(20) for each in ended)
    assert was_found, "the number was not given out again"
    if problems:
        raise problems[0]


# ---------------------------------------------------------------- drivers that count or fail


class WatchedDriver:
    """Goes in front of a simulated driver: notes every call, and may answer one in its place."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.__module__ = type(driver).__module__  # by which the library finds the simulator
        self.calls: list[str] = []
        self.answer: Callable[[int, str, Callable[[], Any]], Any] | None = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._driver, name)
        if not name.startswith("cu") or isinstance(value, type):
            return value

        def noted(*args: Any) -> Any:
            self.calls.append(name)
            if self.answer is None:
                return value(*args)
            return self.answer(len(self.calls) - 1, name, lambda: value(*args))

        return noted


@contextlib.contextmanager
def asked_collector() -> Iterator[None]:
    """Inside, the collector comes where it is asked to only.

    It adds releases, and relaxes a thread for itself: the driver's calls would not be the same each time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def watched_driver(device: SimulatedDevice) -> Iterator[WatchedDriver]:
    """Inside, the library's calls go through a `WatchedDriver`, and nobody collects unasked."""
    made = WatchedDriver(device.driver)
    previous = bindings.use(bindings.Driver(made, simulated=True))
    made.calls.clear()
    try:
        with asked_collector():
            yield made
    finally:
        bindings.use(previous)
