"""One lock, many threads, and Python methods that must look like C calls.

The hard problem: every simulated function has to answer as the bindings do (a tuple that begins
with the result code, `None` for each output after a failure, no exception), whatever happens inside
it and whichever thread or forked child calls. So functions are written as ordinary methods that
return their outputs or raise `Refusal`, and the decorator `call` does the rest. State changes under
one lock; work (kernels, callbacks, destructors) runs after the lock has been let go, because a
kernel's body may wait for another thread that wants to call the driver.

Handles are unique numbers, never used again in the process: a released one is always recognised.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import os
import threading
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar

from .._driver import bindings
from .._driver.enums import INVALID_VALUE, LAUNCH_FAILED, NOT_INITIALIZED, NOT_PERMITTED, SUCCESS
from .forks import ChildReports

types: Any = bindings.types

Handle = Any
Code = int

_addresses = itertools.count(0x7F5A_0000_0000, 0x40)
_identities = itertools.count(1)

#: Functions that answer before `cuInit`, as in the driver.
_WITHOUT_INIT = {"cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"}


class Refusal(Exception):
    """A driver call that fails, with this result code and no outputs."""

    def __init__(self, code: Code) -> None:
        super().__init__(code)
        self.code = code


class DriverLacksFunction(RuntimeError):
    """What the bindings raise for a function that they know and the driver does not."""


def new_address() -> int:
    """A handle value that no other object of this process has or had."""
    return next(_addresses)


def new_identity() -> int:
    """A small unique number: capture ids, stream ids, graph ids."""
    return next(_identities)


def as_int(handle: Handle) -> int:
    """The number in a handle, as the bindings read it: `None` is the null handle."""
    return 0 if handle is None else int(handle)


def result(code: Code) -> Any:
    """The bindings' enum member for a code."""
    return types.CUresult(code)


@dataclass(eq=False, kw_only=True)
class DriverObject:
    """What a handle of the bindings' type `handle_type` stands for."""

    handle_type: ClassVar[Any]
    address: int = field(default_factory=new_address)

    @property
    def handle(self) -> Any:
        return self.handle_type(self.address)


class ThreadState(threading.local):
    """What the driver keeps for each thread."""

    def __init__(self) -> None:
        self.contexts: list[Any] = []
        self.capture_mode = 0
        self.call = ""
        self.running = ""
        self.afterwards: list[Callable[[], Code | None]] = []


class _Collector:
    """Python's collector, which does not come while any thread plays the device.

    The device has none, and finalizers that it ran there would call the driver from inside a kernel.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._players = 0
        self._is_wanted = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._players:
                self._is_wanted = gc.isenabled()
                gc.disable()
            self._players += 1

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._players -= 1
            if not self._players and self._is_wanted:
                gc.enable()


_collector = _Collector()


class World:
    """The state that all parts of one simulated driver share."""

    def __init__(self, driver_version: int) -> None:
        self.driver_version = driver_version
        self.initialised = False
        self.lock = threading.RLock()
        self.thread = ThreadState()
        self.pid = os.getpid()
        self.registries: list[Registry[Any]] = []
        self._findings: list[str] = []
        self._children = ChildReports()

    # ---- findings

    def find(self, sentence: str) -> None:
        """Note a misuse. In a forked child the note travels to the parent too."""
        self._findings.append(sentence)
        if os.getpid() != self.pid:
            self._children.send(sentence)

    @property
    def findings(self) -> list[str]:
        """All misuse seen so far, in the forked children of this process too."""
        if os.getpid() != self.pid:
            return list(self._findings)
        return self._findings + self._children.received()

    def leaks(self, owned: Container[int] = ()) -> list[str]:
        """Live handles that somebody should have given back, but for those that have an owner."""
        with self.lock:
            return [line for registry in self.registries for line in registry.leaks(owned)]

    # ---- calls

    def enter(self, name: str, body: Callable[[], Any], outputs: int) -> tuple[Any, ...]:
        """Run one driver function and shape its answer."""
        refused = self._refused_outright(name)
        if refused:
            return (result(refused), *(None,) * outputs)
        outer, self.thread.call = self.thread.call, name
        try:
            with self.lock:
                value = body()
            values = _as_outputs(value, outputs)
            code = self._finish()
        except Refusal as refusal:
            self._finish()
            code, values = refusal.code, (None,) * outputs
        finally:
            self.thread.afterwards.clear()  # something else than a refusal: the call did not happen
            self.thread.call = outer
        return (result(code), *values)

    def _refused_outright(self, name: str) -> Code:
        if os.getpid() != self.pid:
            self.find(f"{name} was called in a forked child of the process that uses the driver")
            return NOT_INITIALIZED
        if self.thread.running:
            self.find(f"{name} was called from inside {self.thread.running}")
            return NOT_PERMITTED
        return SUCCESS if self.initialised or name in _WITHOUT_INIT else NOT_INITIALIZED

    def afterwards(self, work: Callable[[], Code | None]) -> None:
        """Run something once the current call has let go of the lock."""
        self.thread.afterwards.append(work)

    def _finish(self) -> Code:
        code = SUCCESS
        pending = self.thread.afterwards
        while pending:
            code = pending.pop(0)() or code
        return code

    def run_foreign(self, what: str, body: Callable[[], Any]) -> Code:
        """Run a kernel, a host callback or a destructor: code that may not call the driver."""
        self.thread.running = what
        try:
            with _collector:
                body()
        except Exception as error:
            self.find(f"{what} raised {type(error).__name__}: {error}")
            return LAUNCH_FAILED
        finally:
            self.thread.running = ""
        return SUCCESS


def _as_outputs(value: Any, outputs: int) -> tuple[Any, ...]:
    if outputs == 0:
        return ()
    if outputs == 1:
        return (value,)
    return tuple(value)


class DriverCalls:
    """Base of the groups of driver functions."""

    world: World


P = ParamSpec("P")
C = TypeVar("C", bound=DriverCalls)


def call(
    outputs: int = 0, *, since: int = 0, name: str = ""
) -> Callable[[Callable[Concatenate[C, P], Any]], Callable[Concatenate[C, P], tuple[Any, ...]]]:
    """Make a method a driver function with that many outputs, known to drivers from `since` on.

    name: what the function is called, if not as the method: several may be answered in one way.
    """

    def decorate(
        function: Callable[Concatenate[C, P], Any],
    ) -> Callable[Concatenate[C, P], tuple[Any, ...]]:
        called = name or function.__name__

        @functools.wraps(function)
        def answer(self: C, /, *args: P.args, **kwargs: P.kwargs) -> tuple[Any, ...]:
            if since > self.world.driver_version:
                raise DriverLacksFunction(f'Function "{called}" not found')
            return self.world.enter(called, lambda: function(self, *args, **kwargs), outputs)

        answer.__name__ = called
        return answer

    return decorate


T = TypeVar("T", bound=DriverObject)


class Registry(Generic[T]):
    """Live objects of one kind by handle, and what became of the released ones."""

    def __init__(self, world: World, kind: str, unknown: Code = INVALID_VALUE) -> None:
        self.world = world
        self.kind = kind
        self.unknown = unknown
        self.live: dict[int, T] = {}
        self.released: dict[int, str] = {}
        world.registries.append(self)

    def add(self, thing: T) -> T:
        """A new object of this kind."""
        self.live[thing.address] = thing
        return thing

    def get(self, handle: Handle) -> T:
        """The object behind a handle; a released one is a finding."""
        address = as_int(handle)
        thing = self.live.get(address)
        if thing is None:
            if address in self.released:
                self.world.find(
                    f"{self.world.thread.call} used {self.name(address)} after "
                    f"{self.released[address]} had released it"
                )
            raise Refusal(self.unknown)
        return thing

    def find(self, handle: Handle) -> T | None:
        """The object behind a handle, or nothing; never a finding."""
        return self.live.get(as_int(handle))

    def release(self, handle: Handle) -> T:
        """Take an object out; a second time is a finding."""
        address = as_int(handle)
        if address in self.released:
            self.world.find(
                f"{self.world.thread.call} released {self.name(address)} a second time "
                f"(first: {self.released[address]})"
            )
            raise Refusal(self.unknown)
        thing = self.get(handle)
        self.forget(address)
        return thing

    def forget(self, address: int) -> None:
        """The object is gone, for whatever reason."""
        del self.live[address]
        self.released[address] = self.world.thread.call or "the simulator"

    def name(self, address: int) -> str:
        """How messages call an object."""
        return f"{self.kind} {address:#x}"

    def leaks(self, owned: Container[int] = ()) -> list[str]:
        """One line for each live object that the caller has to give back, and does not own."""
        return [
            f"{self.name(address)} was not released"
            for address, thing in self.live.items()
            if address not in owned and getattr(thing, "counts_as_leak", True)
        ]


def address_of(argument: Any) -> int:
    """The address in a pointer argument: a number, a handle, or the start of a buffer."""
    if argument is None:
        return 0
    if hasattr(argument, "ctypes"):  # numpy
        return int(argument.ctypes.data)
    if hasattr(argument, "__int__"):
        return int(argument)
    if isinstance(argument, bytes):
        return ctypes.cast(ctypes.c_char_p(argument), ctypes.c_void_p).value or 0
    return ctypes.addressof(ctypes.c_char.from_buffer(argument))
