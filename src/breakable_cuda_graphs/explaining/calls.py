"""Entry points that are patched while a function is watched: waits, callbacks, allocations, streams.

The hard problem: the ways to wait for a device are many, and none of them is an operator. Each is
replaced by a function that notes the call and goes on to the original. They are all put back, in
reverse order, whatever happens in between; a caller who kept a replaced function gets one that only
passes on.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .._driver import bindings
from . import entry_points, frames
from .streams import WatchedStreams
from .watching import Watch

#: Functions of the driver (and, with another prefix, of the runtime), by what they are.
_WAITS = (
    "CtxSynchronize", "DeviceSynchronize", "StreamSynchronize", "EventSynchronize", "StreamQuery",
    "EventQuery", "Memcpy", "MemcpyHtoD", "MemcpyDtoH", "MemcpyDtoD",
)  # fmt: skip

_CALLBACKS = ("LaunchHostFunc", "StreamAddCallback")
_ALLOCATIONS = (
    "MemAlloc",
    "MemFree",
    "MemAllocHost",
    "MemFreeHost",
    "MemHostAlloc",
    "Malloc",
    "Free",
)

#: Functions of the driver that put work on the stream at this place of their arguments.
_WORKS = {
    "LaunchKernel": 8, "MemcpyAsync": 3, "MemcpyDtoDAsync": 3, "MemcpyHtoDAsync": 3,
    "MemcpyDtoHAsync": 3, "MemsetD8Async": 3, "MemsetD16Async": 3, "MemsetD32Async": 3,
}  # fmt: skip

_TORCH_WAITS = ("synchronize", "empty_cache", "ipc_collect")
_TORCH_CLASSES = {
    ("sync", "Stream"): ("synchronize", "query"),
    ("sync", "Event"): ("synchronize", "query", "elapsed_time"),
    ("graph", "CUDAGraph"): ("replay", "capture_begin"),
}


class PatchedCalls:
    """The patched calls of one watched run."""

    def __init__(self, watch: Watch, streams: WatchedStreams) -> None:
        self._watch, self._streams = watch, streams
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def patched(self, driver: bindings.Driver) -> Iterator[None]:
        """Inside, the calls are noted."""
        with self._undo:
            self._patch_driver(driver)
            self._patch_runtime()
            self._patch_torch(driver.simulated)
            self._patch_libraries()
            yield

    # ---- what is patched

    def _patch_driver(self, driver: bindings.Driver) -> None:
        for owner in (driver, driver.module):  # the checked calls first: they hold the raw ones
            for name, before in self._noted("cu"):
                if owner is not driver or driver.has(name):
                    self._wrap(owner, name, before)

    def _patch_runtime(self) -> None:
        runtime = sys.modules.get("cuda.bindings.runtime")
        if runtime is not None:
            for name, before in self._noted("cuda"):
                self._wrap(runtime, name, before)

    def _noted(self, prefix: str) -> Iterator[tuple[str, Callable[..., None]]]:
        for kind, names in (("sync", _WAITS), ("callback", _CALLBACKS), ("memory", _ALLOCATIONS)):
            for name in names:
                yield prefix + name, self._note(kind, prefix + name)
        if prefix == "cu":
            for name, place in _WORKS.items():
                yield prefix + name, self._work(prefix + name, place)
        yield prefix + "EventRecord", self._record
        yield prefix + "EventRecordWithFlags", self._record
        yield prefix + "StreamWaitEvent", self._wait

    def _patch_torch(self, is_simulated: bool) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            return
        for module in (torch.cuda, torch.accelerator, *((torch.cpu,) if is_simulated else ())):
            short = module.__name__
            for name in _TORCH_WAITS:
                self._wrap(module, name, self._note("sync", f"{short}.{name}"))
        for (kind, of), names in _TORCH_CLASSES.items():
            for name in names:
                note = self._note(kind, f"torch.cuda.{of}.{name}")
                self._wrap(getattr(torch.cuda, of), name, note)
        self._wrap(torch.cuda.Event, "record", self._torch_record)
        self._wrap(torch.cuda.Event, "wait", self._torch_wait)
        if not is_simulated:
            self._replace(torch.cuda, "is_current_stream_capturing", _is_capturing)

    def _patch_libraries(self) -> None:
        for entry in entry_points.entries():
            note = self._note(entry.kind, entry.operator)
            self._wrap(entry.owner, entry.name, _where_on_host(note) if entry.from_host else note)

    # ---- how

    def _wrap(self, owner: Any, name: str, before: Callable[..., None]) -> None:
        """Put a function that calls `before` first in the place of one; leave out what is not there."""

        def noted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before(*args, **kwargs)
            return function(*args, **kwargs)

        self._replace(owner, name, noted)

    def _replace(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        """Put `instead`, which is given the original, in the place of a function that is there."""
        function = getattr(owner, name, None)
        if not callable(function):
            return
        is_own = name in getattr(owner, "__dict__", {})
        is_on = True

        def call(*args: Any, **kwargs: Any) -> Any:
            return instead(function, *args, **kwargs) if is_on else function(*args, **kwargs)

        def undo() -> None:
            nonlocal is_on
            is_on = False
            if is_own:
                setattr(owner, name, function)
            else:
                delattr(owner, name)

        try:
            setattr(owner, name, call)
        except (AttributeError, TypeError):  # a class of a compiled module that cannot be changed
            return
        self._undo.callback(undo)

    def _note(self, kind: str, operator: str) -> Callable[..., None]:
        def before(*_: Any, **__: Any) -> None:
            self._watch.note(kind, operator, unless_known=True)

        return before

    def _work(self, operator: str, place: int) -> Callable[..., None]:
        def before(*args: Any) -> None:
            if len(args) > place:
                self._streams.worked(int(args[place] or 0), operator)

        return before

    def _record(self, event: Any, stream: Any = 0, *_: Any) -> None:
        self._streams.recorded(int(event), event, int(stream or 0))

    def _wait(self, stream: Any, event: Any, *_: Any) -> None:
        self._streams.waited(int(event), int(stream or 0))

    def _torch_record(self, event: Any, stream: Any = None) -> None:
        self._streams.recorded(id(event), event, _handle(stream))

    def _torch_wait(self, event: Any, stream: Any = None) -> None:
        self._streams.waited(id(event), _handle(stream))


def _is_capturing(function: Callable[[], bool]) -> bool:
    """To code that goes another way while it is captured, the watched run is a capture; not to torch."""
    caller = frames.owner(sys._getframe(2).f_code.co_filename)
    return function() if caller is frames.CodeOwner.FRAMEWORK else True


def _where_on_host(note: Callable[..., None]) -> Callable[..., None]:
    def before(*args: Any, **_: Any) -> None:
        if args and entry_points.is_on_host(args[0]):
            note()

    return before


def _handle(stream: Any) -> int:
    """The handle of a torch stream; None is the current one."""
    if stream is None:
        stream = sys.modules["torch"].cuda.current_stream()
    return int(stream.cuda_stream)
