"""Streams of anybody, captured by the driver alone: no torch, any library that launches on a stream.

The hard problem: nobody tells us which stream is current, and nobody's allocator hears of the
capture. CuPy, when it is loaded, says which stream is current in this thread and is told which one
to use. Without it, this thread's stream is the one that this library has made current, and a break
is found through the block that is open in its thread. Allocations are the companions' business.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from .._driver import kernel_params, process, release, stream_capture
from .._driver.bindings import Driver, types
from .._driver.handles import StreamHandle
from .._driver.stream_order import CompletionMark
from .._driver.survey import Survey
from .._driver.threads import Changes, Home
from ..errors import EscapedWorkWarning
from . import cupy, errors, loaded, protocols
from .streams import as_handle


class RawStream:
    """A stream of ours for libraries that take any stream."""

    def __init__(self, owner: StreamHandle) -> None:
        self._owner = owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self._owner)

    @property
    def handle(self) -> int:
        """The driver's handle."""
        return int(self._owner)

    def __repr__(self) -> str:
        return f"<RawStream {self.handle:#x}>"


class RawPool:
    """Without a framework there is no pool of memory; what is shared is the capture stream."""

    def __init__(self, driver: Driver, context: int) -> None:
        self._epoch = process.epoch
        self.context = context
        self.stream = RawStream(StreamHandle.create(driver))
        self.mark = CompletionMark(driver)  # last: made whole, it has to be closed

    @property
    def handle(self) -> RawPool:
        return self

    def lease(self, lessee: object) -> RawStream:
        return self.stream

    def end_lease(self, lessee: object, keep: bool) -> None:
        """The stream stays with the pool."""

    def nbytes(self) -> int | None:
        """CuPy's memory; no other allocator is known."""
        return cupy.nbytes_of(self)

    def discard(self) -> None:
        """Queue the mark for release; the stream goes with its last reference."""
        release.later(self._epoch, self.mark.close)

    def __del__(self, later: Any = release.later) -> None:
        mark = getattr(self, "mark", None)
        if mark is not None:
            later(self._epoch, mark.close)


class NoArrays:
    """No array is known here: what a break is given, it is given again."""

    def owns(self, value: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class _ThreadStream(threading.local):
    """This thread's current stream, where no library tells one."""

    stream = 0


_here = _ThreadStream()


class RawFramework:
    """The driver alone, in one context."""

    name = "raw"

    def __init__(self, driver: Driver, context: int) -> None:
        self.driver, self.context = driver, context
        self.arrays: Any = NoArrays()
        self.is_capturing = None
        self._cupys_current: Any = None  # a function; looked up once, for the hot path of replay

    def current_stream(self) -> int:
        current = self._cupys_current
        if current is None:
            module = loaded.loaded(self.driver, "cupy")
            if module is None:
                return _here.stream
            current = self._cupys_current = module.cuda.get_current_stream
        return int(current().ptr)

    def stream_object(self, stream: Any) -> Any:
        return stream

    def stream_current(self, stream: Any) -> AbstractContextManager[Any]:
        return self._made_current(stream)

    @contextlib.contextmanager
    def _made_current(self, stream: Any) -> Iterator[None]:
        handle, before = as_handle(stream), _here.stream
        module = loaded.loaded(self.driver, "cupy")
        home = Home()
        with contextlib.ExitStack() as stack:
            if module is not None:
                stack.enter_context(cupy.stream_of(module, stream, handle))
            _here.stream = handle
            del stream  # what a thread that has ended cannot undo keeps this frame
            try:
                yield
            finally:
                if home.is_here():  # both are thread-local
                    _here.stream = before
                else:
                    stack.pop_all()

    def lasts(self, stream: Any, handle: int) -> bool:
        return False  # whoever made it may destroy it

    def new_pool(self, given: Any) -> RawPool:
        if given is None:
            return RawPool(self.driver, self.context)
        if not isinstance(given, RawPool):
            raise errors.pool_of_no_use(given)
        if given.context != self.context:
            raise errors.pool_of_other_context()
        return given

    def session(
        self, pool: protocols.Pool, stream: Any, mode: str, generators: tuple[Any, ...]
    ) -> RawSession:
        if generators:
            raise errors.generators_of_no_use(generators[0])
        return RawSession(self, stream, mode)

    def modes(self) -> Any:
        return None

    def in_modes(self, modes: Any) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


class RawSession:
    """One block's dealings with nobody but the driver."""

    #: whether launches name their stream, so that a forgotten one goes past the capture
    names_streams = True

    def __init__(self, framework: RawFramework, stream: Any, mode: str) -> None:
        self.framework, self.driver, self.mode = framework, framework.driver, mode
        self.external = stream
        self.stream = types.CUstream(as_handle(stream))
        self._changes = Changes()
        self._is_open = False
        self._has_work = self._has_breaks = False
        self.uses_workspace = self.had_company = False

    def enter(self) -> None:
        self._changes.enter(self.framework.stream_current(self.external))

    def begin(self) -> None:
        self._is_open = True  # before the call: an interrupt may come when it has begun
        release.capture_opened(self)
        try:
            stream_capture.begin(self.driver, self.stream, self.mode)
        except Exception:
            self._closed()
            raise

    def end(self, survey: Survey | None) -> protocols.Captured:
        ended = stream_capture.end(self.driver, self.stream)
        if ended.is_over:
            self._closed()
        self._has_work = self._has_work or (survey is not None and bool(survey.kinds))
        return protocols.Captured(ended.code, ended.graph)

    def _closed(self) -> None:
        release.capture_closed(self)
        self._is_open = False  # last: an interrupted end is taken up by `abandon`

    def abandon(self) -> None:
        if self._is_open:
            stream_capture.discard(self.driver, self.stream)
            self._closed()

    def before_break(self) -> None:
        self._has_breaks = True

    def birth(self, address: int, storage: Any = None) -> protocols.Birth:
        return protocols.Birth.OLDER

    def inputs(self, survey: Survey) -> tuple[list[protocols.Found], list[int]]:
        return [], sorted(a for a in survey.addresses() if kernel_params.is_memory(self.driver, a))

    def leave(self, failed: bool) -> None:
        self._changes.undo()
        if self.names_streams and not (failed or self._has_work or self._has_breaks):
            errors.warn(errors.NOTHING_CAPTURED, EscapedWorkWarning)
