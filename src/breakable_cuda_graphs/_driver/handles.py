"""Owners of driver handles: each handle has exactly one, and is given back once.

The hard problem: a handle must be destroyed exactly once, by the driver that made it, in the right
order, and not by a finalizer. An owner therefore releases in `close()`; its finalizer only queues.
A view of somebody else's handle is a plain integer or a bindings object: it has no owner type, so
nothing can be closed through it by mistake.
"""

from __future__ import annotations

from typing import Any

from .. import errors
from . import bindings, process, release

_NON_BLOCKING = 1
_DISABLE_TIMING = 2

#: AUTO_FREE_ON_LAUNCH | USE_NODE_PRIORITY: what torch instantiates with, and what we do too.
INSTANTIATE_FLAGS = 1 | 8


class Owner:
    """Owns one handle. `close()` gives it back; so does the release queue after a finalizer."""

    __slots__ = ("__weakref__", "_epoch", "_keep", "_value", "driver")

    #: the driver's function that destroys the handle
    _destroy = ""

    def __init__(self, driver: bindings.Driver, value: Any, keep: object = None) -> None:
        self.driver = driver
        self._value = value
        self._keep = keep  # what must outlive the handle
        self._epoch = process.epoch

    @property
    def value(self) -> Any:
        """The bindings' handle object; raises once this is closed or in a forked child."""
        if self._value is None:
            raise errors.closed(type(self).__name__)
        if self._epoch != process.epoch:
            raise errors.used_after_fork(type(self).__name__)
        return self._value

    @property
    def closed(self) -> bool:
        return self._value is None

    def __int__(self) -> int:
        return int(self.value)

    def close(self) -> None:
        """Give the handle back now. A second call does nothing."""
        value, self._value = self._value, None
        if value is not None and process.can_release(self._epoch):
            _destroy(self.driver, self._destroy, value)
        self._keep = None

    def detach(self) -> Any:
        """Give the handle itself to a new owner."""
        value, self._value = self._value, None
        return value

    def __del__(self, later: Any = release.later, destroy: Any = None, is_none: Any = None) -> None:
        value = getattr(self, "_value", None)
        if value is not None:
            self._value = None
            later(self._epoch, _Destroy(self.driver, self._destroy, value, self._keep))

    def __repr__(self) -> str:
        state = "closed" if self._value is None else hex(int(self._value))
        return f"<{type(self).__name__} {state}>"


class _Destroy:
    """One queued destruction; holds what the handle needs until it is done."""

    __slots__ = ("call", "driver", "keep", "value")

    def __init__(self, driver: bindings.Driver, call: str, value: Any, keep: object) -> None:
        self.driver, self.call, self.value, self.keep = driver, call, value, keep

    def __call__(self) -> None:
        _destroy(self.driver, self.call, self.value)


def _destroy(driver: bindings.Driver, call: str, value: Any) -> None:
    """Destroying does not raise: after a sticky device error the handle is gone with its context."""
    getattr(driver.module, call)(value)


class StreamHandle(Owner):
    """A non-blocking stream of our own."""

    __slots__ = ()
    _destroy = "cuStreamDestroy"

    @classmethod
    def create(cls, driver: bindings.Driver) -> StreamHandle:
        return cls(driver, driver.cuStreamCreate(_NON_BLOCKING))


class EventHandle(Owner):
    """An event without timing."""

    __slots__ = ()
    _destroy = "cuEventDestroy"

    @classmethod
    def create(cls, driver: bindings.Driver) -> EventHandle:
        return cls(driver, driver.cuEventCreate(_DISABLE_TIMING))


class GraphHandle(Owner):
    """A graph: the template from which executables are made."""

    __slots__ = ()
    _destroy = "cuGraphDestroy"

    @classmethod
    def create(cls, driver: bindings.Driver) -> GraphHandle:
        return cls(driver, driver.cuGraphCreate(0))


class GraphView:
    """Somebody else's graph, which lives as long as `keep`. Closing a view closes nothing."""

    __slots__ = ("driver", "keep", "value")

    def __init__(self, driver: bindings.Driver, value: Any, keep: object) -> None:
        self.driver, self.value, self.keep = driver, value, keep

    def close(self) -> None:
        """Does nothing: the graph is not ours."""


class ExecHandle(Owner):
    """An executable graph; keeps the graph that it was made from, whose nodes address its own."""

    __slots__ = ()
    _destroy = "cuGraphExecDestroy"

    @classmethod
    def instantiate(
        cls, graph: GraphHandle, flags: int = INSTANTIATE_FLAGS, keep: object = None
    ) -> ExecHandle:
        driver = graph.driver
        return cls(driver, driver.cuGraphInstantiate(graph.value, flags), (graph, keep))
