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
import functools
from collections.abc import Callable
from typing import Any, Self

from . import bindings, errors, process, release
from .enums import AUTO_FREE, DISABLE_TIMING, NON_BLOCKING, USE_NODE_PRIORITY

#: What torch instantiates with, and what we do too.
INSTANTIATE_FLAGS = AUTO_FREE | USE_NODE_PRIORITY


class Owner:
    """Owns one handle. `close()` gives it back; so does the release queue after a finalizer.

    It is filled by `make`, or by whoever writes into `slot`.

    keep: what must outlive the handle.
    is_lost: tells that the handle went with its context.
    """

    __slots__ = ("__weakref__", "_queued", "driver", "slot")

    #: the driver's function that destroys the handle, and what users call such a thing
    _destroy, _what = "", ""
    #: the driver's function that makes one out of nothing but flags
    _create, _flags = "", 0

    def __init__(
        self,
        driver: bindings.Driver,
        keep: object = None,
        is_lost: Callable[[], bool] | None = None,
    ) -> None:
        self.driver = driver
        self.slot: list[Any] = [None]  # the handle; empty once it is gone
        end = functools.partial(_end, driver, self._destroy, self.slot, is_lost, keep)
        self._queued: tuple[int, release.Release] = (process.epoch, end)  # by the finalizer
        owners = driver.owners
        if owners is not None:
            owners.add(self)

    @classmethod
    def create(cls, driver: bindings.Driver) -> Self:
        """The owner of a new one, for the kinds that are made of nothing."""
        return cls.make(driver, cls._create, cls._flags)

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
        owner = cls(driver, keep, is_lost)
        slot, call = owner.slot, driver.raw(name)
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
        slot = self.slot
        if not slot or slot[0] is None:
            raise errors.closed(self._what)
        if self._queued[0] != process.epoch:
            raise errors.used_after_fork(self._what)
        return slot[0]

    @property
    def closed(self) -> bool:
        """Whether the handle has been given back."""
        return not self.slot or self.slot[0] is None

    def __int__(self) -> int:
        return int(self.value)

    def close(self) -> None:
        """Give the handle back now. A second call does nothing."""
        epoch, end = self._queued
        if process.can_release(epoch):
            end()
        self.forget()

    def forget(self) -> None:
        """The handle is gone, or somebody else's now: let go of it and of what was kept for it."""
        self.slot.clear()
        self._queued = (self._queued[0], _nothing)

    def detach(self) -> Any:
        """Give the handle itself away: who takes it owns it now."""
        value = self.slot[0] if self.slot else None
        self.forget()
        return value

    def __del__(self, queue: Any = release.queue) -> None:
        slot = getattr(self, "slot", None)
        if slot and slot[0] is not None:
            queue(self._queued)

    def __repr__(self) -> str:
        state = "closed" if self.closed else hex(int(self.slot[0]))
        return f"<{type(self).__name__} {state}>"


def _end(
    driver: bindings.Driver, destroy: str, slot: list[Any], is_lost: Callable[[], bool] | None,
    keep: object,
) -> None:  # fmt: skip
    """The end of a handle, now or from the queue; what was kept for it goes with this call.

    It does not raise: after a sticky device error the handle is gone with its context anyway.
    """
    if is_lost is None or not is_lost():
        call = getattr(driver.module, destroy)
        with contextlib.suppress(IndexError):  # it is gone already
            call(slot.pop())
    slot.clear()


def _nothing() -> None:
    """The end of what has ended."""


class StreamHandle(Owner):
    """A non-blocking stream of our own."""

    __slots__ = ()
    _destroy, _what = "cuStreamDestroy", "stream"
    _create, _flags = "cuStreamCreate", NON_BLOCKING


class EventHandle(Owner):
    """An event without timing."""

    __slots__ = ()
    _destroy, _what = "cuEventDestroy", "event"
    _create, _flags = "cuEventCreate", DISABLE_TIMING


class GraphHandle(Owner):
    """A graph: the template from which executables are made."""

    __slots__ = ()
    _destroy, _what = "cuGraphDestroy", "graph"
    _create = "cuGraphCreate"


class GraphView:
    """A graph inside another, which owns it. Closing a view closes nothing."""

    __slots__ = ("driver", "value")

    def __init__(self, driver: bindings.Driver, value: Any) -> None:
        self.driver, self.value = driver, value

    def close(self) -> None:
        """Does nothing: the graph is not ours."""


class ExecHandle(Owner):
    """An executable graph; keeps the graph that it was made from, whose nodes address its own."""

    __slots__ = ()
    _destroy, _what = "cuGraphExecDestroy", "executable"

    @classmethod
    def instantiate(
        cls,
        graph: GraphHandle,
        flags: int = INSTANTIATE_FLAGS,
        is_lost: Callable[[], bool] | None = None,
    ) -> ExecHandle:
        """Make an executable; destroying one whose context is gone would crash: see `is_lost`."""
        return cls.make(
            graph.driver, "cuGraphInstantiate", graph.value, flags,
            keep=graph, is_lost=is_lost,
        )  # fmt: skip
