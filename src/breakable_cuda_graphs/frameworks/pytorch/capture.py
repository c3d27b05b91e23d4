"""One torch segment: opened by a CUDAGraph shell, ended by the driver, closed by a dummy.

The hard problem: torch's allocator, pinned memory and generators route by the id of the capture
that a `torch.cuda.CUDAGraph` began, and there is no way to register a foreign id; but its
`capture_end()` keeps the graph, hides the driver's reason when it fails, and up to torch 2.11 then
leaves its routes switched on for ever. So torch begins, the driver ends, and whatever came of that,
a second capture of one node is opened and given to `capture_end()` to close the books with.

Every step notes how far it got, so that `close()` can take up from anywhere.
Facts: torch/csrc (CUDAGraph.cpp, capture_begin and capture_end, torch 2.10 to 2.14).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..._driver import release, stream_capture
from ..._driver.bindings import Driver
from ..._driver.stream_capture import Ended
from . import modes

_is_inference, _transform = torch.is_inference_mode_enabled, modes.transform

_NEW, _OPENING, _OPEN, _ENDED, _CLOSED = range(5)

_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL: the recording becomes a node


class Books:
    """The torch side of one capture on one stream, which is torch's current stream throughout."""

    _stage = _NEW
    is_sound = False  # torch has ended the capture: the shell can anchor a pool

    def __init__(
        self, driver: Driver, stream: Any, pool: Any, mode: str, generators: tuple[Any, ...],
        event: Any,
    ) -> None:  # fmt: skip
        self.driver = driver
        self.mode = mode
        self.pool = pool
        self.stream = stream
        self.shell: Any = torch.cuda.CUDAGraph(keep_graph=True)
        self._generators = generators
        self._event = event  # any: the dummy's node names it, and nobody launches the dummy

    def open(self) -> None:
        """`capture_begin`: pool routes, generators, pinned memory, then cuStreamBeginCapture."""
        for generator in self._generators:
            self.shell.register_generator_state(generator)
        self._stage = _OPENING
        release.capture_opened(self)
        if _is_inference() or _transform() is not None:  # both refuse fills of others' tensors
            with modes.unseen():
                self.shell.capture_begin(pool=self.pool, capture_error_mode=self.mode)
        else:
            self.shell.capture_begin(pool=self.pool, capture_error_mode=self.mode)
        self._stage = _OPEN

    @property
    def is_closed(self) -> bool:
        """Whether there is nothing left to close."""
        return self._stage in (_NEW, _CLOSED)

    def end(self) -> Ended:
        """End the capture by the driver: a graph that is ours, or the code that says why not."""
        ended = stream_capture.end(self.driver, self.stream)
        if ended.is_over:
            self._stage = _ENDED
        return ended

    def close(self) -> None:
        """Close torch's books from whatever stage was reached.

        No torch call may come between `end` and this.
        """
        if self._stage != _ENDED:
            if self.is_closed:
                return
            stream_capture.discard(self.driver, self.stream)  # or raises: to be tried again
        try:
            self._end_dummy()
        except BaseException as error:  # a shell that never began answers with anything
            if self._stage == _OPENING and isinstance(error, Exception):
                self._free_generators()
                return
            with contextlib.suppress(Exception):
                self._end_dummy()  # torch's books have to be closed all the same
            raise
        finally:
            self._closed()

    def _end_dummy(self) -> None:
        driver, stream = self.driver, self.stream
        stream_capture.begin(driver, stream, "relaxed")
        try:
            driver.cuEventRecordWithFlags(self._event, stream, _EXTERNAL)  # one call makes a node
            self._capture_end()
            self.is_sound = True
        except BaseException:
            with contextlib.suppress(Exception):
                stream_capture.discard(driver, stream)
            raise

    def _capture_end(self) -> None:
        """`capture_end`, under the same modes."""
        if _is_inference() or _transform() is not None:
            with modes.unseen():
                self.shell.capture_end()
        else:
            self.shell.capture_end()

    def _free_generators(self) -> None:
        """`capture_begin` failed before it had a stream: it may have left generators in capture."""
        if release.open_captures() > 1:
            return  # another capture has them, rightly
        for generator in (*self._generators, torch.cuda.default_generators[_device()]):
            offset = generator.get_offset()
            try:
                torch.empty(1, device=generator.device).uniform_(generator=generator)
            except RuntimeError:  # "Offset increment outside graph capture": it is stuck
                generator.graphsafe_set_state(generator.clone_state())
            generator.set_offset(offset)

    def _closed(self) -> None:
        release.capture_closed(self)
        self._stage = _CLOSED  # last: an interrupted end is taken up by `close`


def _device() -> int:
    return int(torch.cuda.current_device())
