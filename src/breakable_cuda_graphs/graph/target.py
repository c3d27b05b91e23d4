"""Which executable an edit goes to, and by which node it knows each node.

The hard problem: what runs a segment of a sequence may be another executable than its own, one that was
joined from several, and which it is can change with the next capture. So nobody keeps an executable: an
edit asks a target, at each call anew.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

from .._driver import process, release, set_params
from .._driver.handles import ExecHandle
from .._driver.stream_order import CompletionMark


class Target(Protocol):
    """Which executable an edit goes to."""

    @property
    def mark(self) -> CompletionMark | None:
        """The end of the last work that may read what the executable names."""

    def executable(self) -> Any:
        """The CUgraphExec; raises once it is closed."""

    def twins(self) -> dict[int, Any] | None:
        """The nodes by which the executable knows those of the template; None: they are the same."""

    def update_from(self, graph: Any) -> set_params.UpdateRefusal | None:
        """Give all nodes the parameters of another graph's."""

    def launch(self, handle: int, stream: Any) -> None:
        """Launch it on a stream."""

    def turn(self) -> AbstractContextManager[Any]:
        """Keep others from launching or editing meanwhile."""

    def close(self) -> None:
        """Give it back, if it is ours to give."""

    @property
    def closed(self) -> bool:
        """Whether it is gone."""


class OwnTarget:
    """An executable that belongs to its `GraphExec`."""

    def __init__(self, handle: ExecHandle, mark: CompletionMark) -> None:
        self.handle = handle
        self.driver = handle.driver
        self._mark: CompletionMark | None = mark
        self._lock = threading.RLock()
        self._epoch = process.epoch

    @property
    def mark(self) -> CompletionMark | None:
        return self._mark

    def executable(self) -> Any:
        return self.handle.value

    def twins(self) -> dict[int, Any] | None:
        return None

    def update_from(self, graph: Any) -> set_params.UpdateRefusal | None:
        return set_params.update_exec(self.driver, self.executable(), graph)

    def launch(self, handle: int, stream: Any) -> None:
        executable, mark = self.executable(), self._mark
        assert mark is not None
        mark.order_after(handle, stream)
        self.driver.cuGraphLaunch(executable, stream)
        mark.record(handle, stream)

    def turn(self) -> AbstractContextManager[Any]:
        return self._lock

    @property
    def closed(self) -> bool:
        return self.handle.closed

    def close(self) -> None:
        mark = self._mark
        if mark is not None and process.can_release(self._epoch):
            with release.relaxed_thread():
                mark.close()
                self.handle.close()
        self._mark = None

    def __del__(self, later: Any = release.later) -> None:
        mark = getattr(self, "_mark", None)
        if mark is not None:
            later(self._epoch, mark.close)
