"""Owners of driver handles: each handle has exactly one, and is given back once.

The hard problem: a handle must be destroyed exactly once, by the driver that made it, in the right
order, and not by a finalizer. An owner therefore releases in `close()`; its finalizer only queues
what was prepared when the owner was made, so that it needs no memory. An interrupt may come between
any two lines: so a handle goes from the driver into its owner in one statement, and from there to
the call that destroys it in another.

A view of somebody else's handle is a plain integer or a bindings object: it has no owner type, so
nothing can be closed through it by mistake.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Self

from .. import errors
from . import bindings, process, release

_NON_BLOCKING = 1
_DISABLE_TIMING = 2

#: AUTO_FREE_ON_LAUNCH | USE_NODE_PRIORITY: what torch instantiates with, and what we do too.
INSTANTIATE_FLAGS = 1 | 8


class Owner:
    """Owns one handle. `close()` gives it back; so does the release queue after a finalizer.

    value: None for an owner that is filled by `make`, or by whoever writes into `held.slot`.
    keep: what must outlive the handle.
    is_lost: tells that the handle went with its context.
    """

    __slots__ = ("__weakref__", "_epoch", "_queued", "driver", "held")

    #: the driver's function that destroys the handle
    _destroy = ""

    def __init__(
        self,
        driver: bindings.Driver,
        value: Any = None,
        keep: object = None,
        is_lost: Callable[[], bool] | None = None,
    ) -> None:
        self.driver = driver
        self._epoch = process.epoch
        self.held = Held(driver, self._destroy, keep, is_lost)
        self._queued = (self._epoch, self.held)  # what the finalizer appends
        if value is not None:
            self.held.slot[0] = value
        if driver.owners is not None:
            driver.owners.add(self)

    @classmethod
    def make(
        cls,
        driver: bindings.Driver,
        name: str,
        *args: Any,
        keep: object = None,
        is_lost: Callable[[], bool] | None = None,
    ) -> Self:
        """The owner of what a driver call makes."""
        owner = cls(driver, None, keep, is_lost)
        slot, call = owner.held.slot, driver.raw(name)
        try:
            code, slot[0] = call(*args)
        except RuntimeError as error:
            raise errors.driver_call_missing(name, error) from error
        if code:
            raise driver.error(name, code)
        return owner

    @property
    def value(self) -> Any:
        """The bindings' handle object; raises once this is closed or in a forked child."""
        value = self.held.value
        if value is None:
            raise errors.closed(type(self).__name__)
        if self._epoch != process.epoch:
            raise errors.used_after_fork(type(self).__name__)
        return value

    @property
    def closed(self) -> bool:
        """Whether the handle has been given back."""
        return self.held.value is None

    def __int__(self) -> int:
        return int(self.value)

    def close(self) -> None:
        """Give the handle back now. A second call does nothing."""
        if process.can_release(self._epoch):
            self.held()
        else:
            self.held.forget()

    def detach(self) -> Any:
        """Give the handle itself away: who takes it owns it now."""
        value = self.held.value
        self.held.forget()
        return value

    def __del__(self, queue: Any = release.queue) -> None:
        held = getattr(self, "held", None)
        if held is not None and held.value is not None:
            queue(self._queued)

    def __repr__(self) -> str:
        state = "closed" if self.closed else hex(int(self.held.value))
        return f"<{type(self).__name__} {state}>"


class Held:
    """A handle, what it needs for as long as it lives, and its end: now, or from the queue.

    The end does not raise: after a sticky device error the handle is gone with its context anyway.
    """

    __slots__ = ("call", "driver", "is_lost", "keep", "slot")

    def __init__(
        self,
        driver: bindings.Driver,
        call: str,
        keep: object,
        is_lost: Callable[[], bool] | None,
    ) -> None:
        self.driver, self.call, self.keep, self.is_lost = driver, call, keep, is_lost
        self.slot: list[Any] = [None]  # the handle; empty once it is gone

    @property
    def value(self) -> Any:
        """The handle, or None."""
        slot = self.slot
        return slot[0] if slot else None

    def forget(self) -> None:
        """The handle is somebody else's, or went with its context or process."""
        self.slot.clear()
        self.keep = None

    def __call__(self) -> None:
        if self.is_lost is None or not self.is_lost():
            destroy = getattr(self.driver.module, self.call)
            with contextlib.suppress(IndexError):  # it is gone already
                destroy(self.slot.pop())
        self.forget()


class StreamHandle(Owner):
    """A non-blocking stream of our own."""

    __slots__ = ()
    _destroy = "cuStreamDestroy"

    @classmethod
    def create(cls, driver: bindings.Driver) -> StreamHandle:
        return cls.make(driver, "cuStreamCreate", _NON_BLOCKING)


class EventHandle(Owner):
    """An event without timing."""

    __slots__ = ()
    _destroy = "cuEventDestroy"

    @classmethod
    def create(cls, driver: bindings.Driver) -> EventHandle:
        return cls.make(driver, "cuEventCreate", _DISABLE_TIMING)


class GraphHandle(Owner):
    """A graph: the template from which executables are made."""

    __slots__ = ()
    _destroy = "cuGraphDestroy"

    @classmethod
    def create(cls, driver: bindings.Driver) -> GraphHandle:
        return cls.make(driver, "cuGraphCreate", 0)


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
        return cls.make(
            graph.driver, "cuGraphInstantiate", graph.value, flags,
            keep=(graph, keep), is_lost=is_lost,
        )  # fmt: skip
