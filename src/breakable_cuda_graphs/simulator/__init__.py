"""A CUDA driver on the CPU: for machines without a GPU, and for tests that must see every misuse.

The hard problem: a test double is only worth having if what passes on it passes on a device. So it
stands in at the lowest border, the module `cuda.bindings.driver`, keeps that module's names, tuples
and result codes, runs graphs in a different order each time, and writes down whatever a real driver
would have answered with a crash.

    with simulated_device():
        ...                      # the library uses this driver now
                                 # at the end: an error for each misuse and each lost handle

    driver.py         the stand-in itself, made of the calls below
    bindings129.py    the same in the shape of the 12.9 bindings
    calls/            the calls, by groups
    world.py          one lock, many threads, methods that look like C calls
    contexts.py       devices and contexts
    stream_state.py   what streams, events and captures are
    captures.py       the rules of captures
    streams.py        where work goes that is given to a stream
    memory.py         real addresses of this process that count as device memory
    graphs.py         graphs as data, and what a node's work is
    nodes.py          the kinds of work, as values
    structs.py        those and the bindings' structs
    execs.py          executables and their random orders
    updates.py        what may change in one
    kernels.py        kernels with Python bodies
    setters.py        those that set a conditional's value
    users.py          user objects
    forks.py          what forked children did, told to the parent
    tensors.py        CPU torch tensors captured operator by operator (needs torch)
    tensor_places.py  tensors as places in memory, operators as what they do (needs torch)
    torch_modes.py    the modes through which operators are seen (needs torch)
    errors.py         the text of misuse
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .._driver import bindings, release
from .driver import SimulatedDriver
from .errors import misused
from .kernels import SimulatedKernel, conditional_setter, current_launch, set_conditional

__all__ = [
    "SimulatedDevice",
    "SimulatedDriver",
    "SimulatedKernel",
    "conditional_setter",
    "current_launch",
    "set_conditional",
    "simulated_device",
]


class SimulatedDevice:
    """What `simulated_device` yields: the driver, and what it has seen."""

    def __init__(self, used: bindings.Driver) -> None:
        self._used = used
        self.driver: SimulatedDriver = used.module

    @property
    def findings(self) -> list[str]:
        """Every misuse seen so far, one sentence each; empty is good."""
        return self.driver.findings

    def leaks(self) -> list[str]:
        """What is live now and should have been released; empty is good at the end.

        Releases that finalizers have queued are done first, if no capture is open.
        """
        self._drain()
        return self.driver.leaks()

    def lost(self) -> list[str]:
        """The leaks that nobody can release any more: no object of this library owns the handle."""
        self._drain()
        owned = [value for owner in list(self._used.owners or ()) for value in owner.slot]
        return self.driver.leaks({int(value) for value in owned if value is not None})

    def _drain(self) -> None:
        if bindings.current() is self._used:
            release.drain()

    def open_captures(self) -> int:
        """How many captures are open now."""
        return self.driver.open_captures()

    @property
    def seed(self) -> int:
        """The seed of the launch orders: give it to `simulated_device` to see a failure again."""
        return self.driver.seed

    def misuse(self) -> list[str]:
        """All that is wrong at the end: findings, captures that are open, handles that are lost."""
        count = self.open_captures()
        still = [f"{count} captures are open at the end"] if count else []
        return self.findings + still + self.lost()


def new_driver() -> bindings.Driver:
    """A simulated driver, for a process that uses no other."""
    return bindings.Driver(SimulatedDriver(), simulated=True)


@contextmanager
def simulated_device(
    seed: int | None = None,
    shape: str | None = None,
    devices: int = 1,
    *,
    check: bool = True,
) -> Iterator[SimulatedDevice]:
    """Inside, this library uses a simulated driver (for all threads); afterwards the one before.

    seed: chooses the orders in which executables run their nodes; drawn if it is not given.
    shape: "13" or "12.9", the names and tuples of that major of cuda-bindings.
    devices: how many devices there are, at least one.
    check: whether misuse is an error at the end: an `AssertionError` with a sentence for each use
        after release, second release, release in a capture, call from a forked child, open capture,
        and handle that no object owns any more. An exception of the body goes on, with a note.
    """
    used = bindings.Driver(SimulatedDriver(seed, shape or "13", devices), simulated=True)
    device = SimulatedDevice(used)
    previous = bindings.use(used)
    try:
        yield device
    except BaseException as error:
        if check and device.findings:
            error.add_note(str(misused(device.findings, device.seed)))
        raise
    else:
        if check and (sentences := device.misuse()):
            raise misused(sentences, device.seed)
    finally:
        bindings.use(previous)
