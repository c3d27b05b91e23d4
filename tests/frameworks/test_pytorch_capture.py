"""Torch's books of one segment are closed from every stage, with what torch really does in a fake shell.

The hard problem: on the CPU there is no `torch.cuda.CUDAGraph`. The fake here does the driver calls that
torch's does, in its order, and counts the route of the allocator that torch switches on and off: as in
torch 2.11, an end that fails leaves it on for ever (torch/csrc/cuda/CUDAGraph.cpp).
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs._driver import (  # noqa: E402
    bindings,
    release,
    stream_capture,
)
from breakable_cuda_graphs._driver.bindings import types  # noqa: E402
from breakable_cuda_graphs._driver.stream_capture import Status  # noqa: E402
from breakable_cuda_graphs.frameworks.pytorch import capture as books_module  # noqa: E402
from breakable_cuda_graphs.frameworks.pytorch.capture import Books  # noqa: E402
from helping import Boom, in_thread  # noqa: E402

MODE_NUMBERS = stream_capture.MODES


class FakeShell:
    """What `torch.cuda.CUDAGraph` does, as far as the driver and the allocator's route see it."""

    routes = 0
    stream: Any = None
    fail_begin = ""  # "early": before anything; "late": before the driver call; "after": behind it
    fail_end = ""  # "early", "late"

    def __init__(self, keep_graph: bool = False) -> None:
        assert keep_graph
        self.graph: Any = None
        self.registered: list[Any] = []
        self.is_open = False
        self.inference: list[bool] = []

    def register_generator_state(self, generator: Any) -> None:
        assert not self.is_open
        self.registered.append(generator)

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.inference.append(torch.is_inference_mode_enabled())
        if self.fail_begin == "early":
            raise Boom("capture_begin, early")
        cls, driver = type(self), bindings.current()
        cls.routes += 1
        self.is_open = True
        if self.fail_begin == "late":
            raise Boom("capture_begin, late")
        mode = types.CUstreamCaptureMode(MODE_NUMBERS[capture_error_mode])
        driver.cuStreamBeginCapture(self.stream, mode)
        if self.fail_begin == "after":
            raise Boom("capture_begin, after")

    def capture_end(self) -> None:
        self.inference.append(torch.is_inference_mode_enabled())
        cls, driver = type(self), bindings.current()
        if self.fail_end == "early":
            raise Boom("capture_end, early")
        graph = driver.cuStreamEndCapture(self.stream)  # fails where nothing is captured
        if not self.is_open:
            driver.cuGraphDestroy(graph)
            raise TypeError("this shell never began")
        self.is_open = False
        cls.routes -= 1
        self.graph = graph
        if self.fail_end == "late":
            raise Boom("capture_end, late")

    def raw_cuda_graph(self) -> int:
        return int(self.graph)

    def reset(self) -> None:
        graph, self.graph = self.graph, None
        if graph is not None:
            bindings.current().cuGraphDestroy(graph)


class Bench:
    def __init__(self, device: Any) -> None:
        self.device, self.driver = device, bindings.current()
        self.driver.cuCtxSetCurrent(self.driver.cuDevicePrimaryCtxRetain(0))
        self.stream = FakeShell.stream = self.driver.cuStreamCreate(1)
        self.address = int(self.driver.cuMemAlloc(4))
        self.event = self.driver.cuEventCreate(2)
        self.freed: list[Books] = []
        self.made: list[Books] = []

    def books(self, mode: str = "global", generators: tuple[Any, ...] = ()) -> Books:
        made = Books(self.driver, self.stream, (0, 1), mode, generators, self.event)
        self.made.append(made)
        return made

    def work(self) -> None:
        self.driver.cuMemsetD32Async(self.address, 7, 1, self.stream)

    def check_all_closed(self, routes: int = 0) -> None:
        assert stream_capture.status(self.driver, self.stream) is Status.NONE
        assert self.device.open_captures() == 0
        assert release.open_captures() == 0
        assert FakeShell.routes == routes

    def close(self) -> None:
        for books in self.made:
            books.shell.reset()
        self.driver.cuMemFree(self.address)
        self.driver.cuEventDestroy(self.event)
        self.driver.cuStreamDestroy(self.stream)
        release.drain()
        assert self.device.leaks() == []


@pytest.fixture
def bench(bare_device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeShell)
    monkeypatch.setattr(FakeShell, "routes", 0)
    monkeypatch.setattr(FakeShell, "fail_begin", "")
    monkeypatch.setattr(FakeShell, "fail_end", "")
    made = Bench(bare_device)
    monkeypatch.setattr(Books, "_free_generators", lambda books: made.freed.append(books))
    yield made
    made.close()


@pytest.mark.parametrize("mode", list(MODE_NUMBERS))
def test_a_segment_is_opened_by_torch_ended_by_us_and_its_books_closed(bench, mode):
    books = bench.books(mode)
    books.open()
    assert FakeShell.routes == 1
    assert release.open_captures() == 1
    bench.work()
    code, graph, _ = books.end()
    assert code == 0
    assert len(bench.driver.graph_nodes(graph.value)) == 1
    books.close()
    bench.check_all_closed()
    books.close()
    bench.check_all_closed()
    dummy = types.CUgraph(books.shell.raw_cuda_graph())
    assert len(bench.driver.graph_nodes(dummy)) == 1
    graph.close()


def test_generators_are_registered_before_the_begin(bench):
    generators = (object(), object())
    books = bench.books(generators=generators)
    books.open()
    assert books.shell.registered == list(generators)
    books.close()
    bench.check_all_closed()


def test_inference_mode_is_off_around_torchs_calls_and_back(bench):
    with torch.inference_mode():
        books = bench.books()
        books.open()
        books.end().graph.close()
        books.close()
        assert torch.is_inference_mode_enabled()
    assert books.shell.inference == [False, False]
    bench.check_all_closed()


def test_torch_may_fill_what_is_its_own_inside_of_a_transform(bench, monkeypatch):
    """`capture_begin` fills the generators' tensors; `torch.func.grad` refuses that in its function."""
    own, begin = torch.zeros(1), FakeShell.capture_begin

    def fills(shell: Any, **arguments: Any) -> None:
        own.fill_(7)
        begin(shell, **arguments)

    def function(t: Any) -> Any:
        books.open()
        bench.work()
        books.close()
        return (t * t).sum()

    monkeypatch.setattr(FakeShell, "capture_begin", fills)
    books = bench.books()
    assert torch.func.grad(function)(torch.ones(2)).tolist() == [2, 2]
    assert own.item() == 7
    bench.check_all_closed()


# ---------------------------------------------------------------- from every stage


def test_books_that_were_never_opened_close_to_nothing(bench):
    bench.books().close()
    bench.check_all_closed()


@pytest.mark.parametrize(("place", "routes"), [("early", 0), ("late", 0), ("after", 0)])
def test_a_begin_that_failed_is_taken_back(bench, monkeypatch, place, routes):
    monkeypatch.setattr(FakeShell, "fail_begin", place)
    books = bench.books()
    with pytest.raises(Boom, match=place):
        books.open()
    books.close()
    bench.check_all_closed(routes)
    assert bool(bench.freed) == (place == "early")
    monkeypatch.setattr(FakeShell, "fail_begin", "")
    again = bench.books()
    again.open()
    again.close()
    bench.check_all_closed(routes)


def test_an_open_segment_is_abandoned(bench):
    books = bench.books()
    books.open()
    bench.work()
    books.close()
    bench.check_all_closed()


def test_a_capture_that_was_invalidated_is_closed(bench):
    books = bench.books()
    books.open()
    bench.work()
    bench.driver.module.cuStreamSynchronize(bench.stream)
    assert books.end() == (901, None, True)
    books.close()
    bench.check_all_closed()


def test_an_invalidated_capture_is_abandoned(bench):
    books = bench.books()
    books.open()
    bench.driver.module.cuStreamSynchronize(bench.stream)
    books.close()
    bench.check_all_closed()


def test_an_end_on_another_thread_has_no_graph_and_is_an_end(bench):
    books = bench.books()
    books.open()
    bench.work()
    driver = bench.driver
    context = driver.cuCtxGetCurrent()

    def other() -> Any:
        driver.cuCtxSetCurrent(context)
        return books.end()

    assert in_thread(other) == (908, None, True)
    books.close()
    bench.check_all_closed()


def test_a_capture_that_the_user_ended_is_closed(bench):
    books = bench.books()
    books.open()
    bench.driver.cuGraphDestroy(bench.driver.cuStreamEndCapture(bench.stream))
    assert books.end() == (401, None, True)
    books.close()
    bench.check_all_closed()


@pytest.mark.parametrize(("place", "routes"), [("early", 1), ("late", 0)])
def test_a_failing_capture_end_is_told_and_leaves_no_capture(bench, monkeypatch, place, routes):
    books = bench.books()
    books.open()
    graph = books.end().graph
    monkeypatch.setattr(FakeShell, "fail_end", place)
    with pytest.raises(Boom, match=place):
        books.close()
    bench.check_all_closed(routes)
    assert not books.is_sound
    assert bench.freed == []
    graph.close()
    books.close()
    bench.check_all_closed(routes)


def test_a_dummy_that_cannot_begin_is_told(bench, monkeypatch):
    from breakable_cuda_graphs import CUDAError

    books = bench.books()
    books.open()
    books.end().graph.close()

    def refuse(driver: Any, stream: Any, mode: str) -> None:
        raise CUDAError("no")

    monkeypatch.setattr(books_module.stream_capture, "begin", refuse)
    with pytest.raises(CUDAError):
        books.close()
    bench.check_all_closed(routes=1)


def test_an_interrupt_in_the_dummy_leaves_no_capture(bench, monkeypatch):
    books = bench.books()
    books.open()
    books.end().graph.close()

    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeShell, "capture_end", interrupt)
    with pytest.raises(KeyboardInterrupt):
        books.close()
    bench.check_all_closed(routes=1)
