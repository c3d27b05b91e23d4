"""Owners of driver handles: each handle has exactly one, and is given back once.

The hard problem: a handle must be destroyed exactly once, by the driver that made it, in the right
order, and not by a finalizer. An owner therefore releases in `close()`; its finalizer only queues.
A view of somebody else's handle is a plain integer or a bindings object: it has no owner type, so
nothing can be closed through it by mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import errors
from . import bindings, process, release

_NON_BLOCKING = 1
_DISABLE_TIMING = 2

#: AUTO_FREE_ON_LAUNCH | USE_NODE_PRIORITY: what torch instantiates with, and what we do too.
INSTANTIATE_FLAGS = 1 | 8


class Owner:
    """Owns one handle. `close()` gives it back; so does the release queue after a finalizer."""

    __slots__ = ("__weakref__", "_epoch", "_is_lost", "_keep", "_value", "driver")

    #: the driver's function that destroys the handle
    _destroy = ""

    def __init__(
        self,
        driver: bindings.Driver,
        value: Any,
        keep: object = None,
        is_lost: Callable[[], bool] | None = None,
    ) -> None:
        self.driver = driver
        self._keep = keep  # what must outlive the handle
        self._is_lost = is_lost  # tells that the handle went with its context
        self._epoch = process.epoch
        self._value = value  # last: from here on the finalizer has something to release

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
        """Whether the handle has been given back."""
        return self._value is None

    def __int__(self) -> int:
        return int(self.value)

    def close(self) -> None:
        """Give the handle back now. A second call does nothing."""
        value, self._value = self._value, None
        if value is not None and process.can_release(self._epoch):
            _Destroy(self, value)()
        self._keep = None

    def detach(self) -> Any:
        """Give the handle itself away: who takes it owns it now."""
        value, self._value = self._value, None
        return value

    def __del__(self) -> None:
        value = getattr(self, "_value", None)
        if value is not None and _Destroy is not None:  # at the interpreter's end it is None
            self._value = None
            release.later(self._epoch, _Destroy(self, value))

    def __repr__(self) -> str:
        state = "closed" if self._value is None else hex(int(self._value))
        return f"<{type(self).__name__} {state}>"


class _Destroy:
    """One destruction, now or queued; holds what the handle needs until it is done.

    It does not raise: after a sticky device error the handle is gone with its context anyway.
    """

    __slots__ = ("call", "driver", "is_lost", "keep", "value")

    def __init__(self, owner: Owner, value: Any) -> None:
        self.driver, self.call, self.value = owner.driver, owner._destroy, value
        self.keep, self.is_lost = owner._keep, owner._is_lost

    def __call__(self) -> None:
        if self.is_lost is None or not self.is_lost():
            getattr(self.driver.module, self.call)(self.value)


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
        cls,
        graph: GraphHandle,
        flags: int = INSTANTIATE_FLAGS,
        keep: object = None,
        is_lost: Callable[[], bool] | None = None,
    ) -> ExecHandle:
        """Make an executable; destroying one whose context is gone would crash: see `is_lost`."""
        value = graph.driver.cuGraphInstantiate(graph.value, flags)
        return cls(graph.driver, value, (graph, keep), is_lost)
