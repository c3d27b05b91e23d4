"""Torch on one device: its streams, its modes, and the session of one block.

The hard problem: the order of things around a segment. Books are opened and closed with the capture
stream current, random numbers are read inside the capture and moved on outside it, and between the
driver's end and the close of the books no torch call may happen; whichever of these fails, all
that was switched on has to be switched off.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..._driver import contexts, release, stream_capture
from ..._driver.bindings import Driver, types
from ..._driver.stream_capture import Status
from ..._driver.survey import Survey
from ..._driver.threads import Changes
from .. import protocols
from ..streams import as_handle
from . import inputs, modes, workspaces
from .allocator import blocks_in_use
from .capture import Books
from .draws import Draws, PhiloxState
from .pools import TorchPool, pool_for, release_ended
from .stray import StrayWatch
from .tensors import Tensors

#: Below this share of free device memory, cached blocks are given back before a capture: inside it
#: the allocator cannot.
_SCARCE = 1 / 8


class TorchFramework:
    """Torch on one device."""

    name = "torch"

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver, self.device = driver, device
        self.context = contexts.primary(driver, device)
        self.arrays: protocols.Arrays = Tensors("cuda")
        self.modes = modes.current
        # `torch.cuda.current_stream().cuda_stream` is 40 times slower than the raw call.
        self.current_stream: Callable[[], int] = functools.partial(
            torch._C._cuda_getCurrentRawStream, device
        )
        self.is_capturing: Callable[[], bool] | None = torch._C._cuda_isCurrentStreamCapturing

    def stream_object(self, stream: Any) -> Any:
        """A torch stream for a stream-like object."""
        if isinstance(stream, torch.cuda.Stream):
            return stream
        return torch.cuda.ExternalStream(as_handle(stream), device=self.device)

    def stream_current(self, stream: Any) -> AbstractContextManager[Any]:
        if as_handle(stream) == 0:
            stream = torch.cuda.default_stream(self.device)
        return _stream_current(self.stream_object(stream))

    def lasts(self, stream: Any, handle: int) -> bool:
        known = torch.cuda.current_stream(self.device) if stream is None else stream
        if not isinstance(known, torch.cuda.Stream) or known.cuda_stream != handle:
            return False
        # torch's own have small numbers as ids, those of others their handle (c10/cuda/CUDAStream.cpp).
        return bool(known.stream_id != handle)

    def new_pool(self, given: Any) -> TorchPool:
        return pool_for(self.driver, self.device, given)

    def session(
        self, pool: protocols.Pool, stream: Any, mode: str, generators: tuple[Any, ...]
    ) -> TorchSession:
        assert isinstance(pool, TorchPool)
        return TorchSession(self, pool, self.stream_object(stream), mode, generators)

    def in_modes(self, wanted: Any) -> AbstractContextManager[Any]:
        return modes.entered(wanted)


class TorchSession:
    """One block's dealings with torch."""

    def __init__(
        self,
        framework: TorchFramework,
        pool: TorchPool,
        stream: Any,
        mode: str,
        generators: tuple[Any, ...],
    ) -> None:
        self.framework, self.driver, self.pool = framework, framework.driver, pool
        self.external, self.mode = stream, mode
        self.stream = types.CUstream(stream.cuda_stream)
        self._handle = int(self.stream)
        self._generators = generators
        self._changes = Changes()
        self._watch: StrayWatch | None = None
        self._draws: Draws | None = None
        self._books: Books | None = None
        self._older: set[int] | None = None  # blocks in use when the first break began
        self._pool_seen = False
        self.uses_workspace = False
        self._seen: set[int] = set()  # addresses that were looked up already
        self._states: list[PhiloxState] = []  # that the last segment's kernels read

    def enter(self) -> None:
        device, around = self.framework.device, types.CUstream(self.framework.current_stream())
        self._changes.enter(torch.cuda.device(device))
        # A body of `capture_if` may be part of somebody else's capture, which no sync survives.
        if (
            not release.open_captures()
            and stream_capture.status(self.driver, around) is Status.NONE
        ):
            release_ended()
            if _memory_is_scarce(device):
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()
        workspaces.make(device, self.external)
        self._draws = draws = Draws(self.driver, device, self.stream, self._generators)
        identity, event = self.pool.identity, self.pool.event.value
        self._new_books = functools.partial(
            Books, self.driver, self.stream, identity, self.mode, draws.registered, event
        )
        self._changes.enter(torch.cuda.stream(self.external))
        self._watch = StrayWatch(self._is_captured)
        self._watch.start()

    def _is_captured(self) -> bool:
        """Whether work on the current stream is captured, or no segment is open now."""
        if self._books is None:
            return True
        current = self.framework.current_stream()
        return current == self._handle or (
            stream_capture.status(self.driver, types.CUstream(current)) is not Status.NONE
        )

    def begin(self) -> None:
        draws = self._draws
        assert draws is not None
        modes.clear_weight_cache()
        self.pool.open_capture(self)
        books = self._books = self._new_books()
        self._on_stream(draws.open, books.open)

    def end(self, survey: Survey | None) -> protocols.Captured:
        modes.clear_weight_cache()
        captured: protocols.Captured = self._on_stream(self._end, survey)
        if survey is not None and not self.uses_workspace:
            self.uses_workspace = workspaces.contain(self._handle, survey.kernel_words)
        return captured

    def _end(self, survey: Survey | None) -> protocols.Captured:
        books, draws = self._books, self._draws
        assert books is not None
        assert draws is not None
        with draws.lock:
            states = None if survey is None else draws.states_in(survey.kernel_words)
            self._states = states or []
            draw, problem = draws.ending(states)
            code, graph, _ = books.end()
            books.close()
            draws.closed(books.shell)
            self._closed()
        left = None if graph is None or draws.take_probes_out() else draws.scratch
        if graph is not None and (draw or left is not None):
            give_up = functools.partial(self.pool.take_shell, books.shell)
            return protocols.Captured(code, graph, draws.runner(give_up), problem, keep=left)
        self.pool.take_shell(books.shell)
        return protocols.Captured(code, graph, None, problem)

    def _closed(self) -> None:
        self.pool.close_capture(self)
        self._books = None  # last: an interrupted end is taken up by `abandon`

    @property
    def had_company(self) -> bool:
        draws = self._draws
        return draws is not None and (draws.is_guest or draws.had_guest)

    def abandon(self) -> None:
        books = self._books
        if books is None:
            return
        self._on_stream(self._abandon, books)
        if books.is_sound:
            self.pool.take_shell(books.shell)

    def _abandon(self, books: Books) -> None:
        assert self._draws is not None
        with self._draws.lock:
            try:
                books.close()
            finally:
                if books.is_closed:  # else the stream is still in its capture: to be tried again
                    self._draws.ended()
                    self._closed()

    def _on_stream(self, work: Callable[..., Any], argument: Any) -> Any:
        """Work with the capture stream as torch's current one, whatever the user's code has made it."""
        if self.framework.current_stream() == self._handle:
            return work(argument)
        with _stream_current(self.external):
            return work(argument)

    def before_break(self) -> None:
        if self._older is None:
            self._older = blocks_in_use(self.framework.device)
        self._pool_seen = False

    def birth(self, address: int, storage: Any = None) -> protocols.Birth:
        if self.pool.contains(address):
            return protocols.Birth.POOL
        if not self._pool_seen:
            self.pool.look()  # once a break at most: between breaks only the pool can grow
            self._pool_seen = True
            if self.pool.contains(address):
                return protocols.Birth.POOL
        if self._older is None or address in self._older:
            return protocols.Birth.OLDER
        return protocols.Birth.BREAK

    def inputs(self, survey: Survey) -> tuple[list[protocols.Found], list[int]]:
        addresses = survey.addresses() - self._seen
        self._seen |= addresses
        addresses.difference_update(*(state[:2] for state in self._states))
        if not addresses:
            return [], []
        device, sure = self.framework.device, survey.sure_addresses
        return inputs.find(self.driver, device, addresses, self._is_ours, sure)

    def _is_ours(self, address: int) -> bool:
        """Memory of the pool, or of the stream's cuBLAS workspaces."""
        if self.pool.contains(address) or workspaces.contains(self._handle, address):
            return True
        self.pool.look()
        return self.pool.contains(address)

    def leave(self, failed: bool) -> None:
        with contextlib.ExitStack() as steps:  # each is done, whatever becomes of the others
            steps.callback(modes.clear_weight_cache)
            steps.callback(self._changes.undo)
            steps.callback(self._stop_watch)
            self.pool.close_capture(self)
            if self._draws is not None:
                self._draws.finish(failed)

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            # It knows this object: a cycle would keep the pool until it is collected.
            self._watch = None


def _stream_current(stream: Any) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context


def _memory_is_scarce(device: int) -> bool:
    free, total = torch.cuda.mem_get_info(device)
    return bool(free < total * _SCARCE)
