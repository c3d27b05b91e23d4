"""What a framework must be told when a segment begins and ends, as protocols.

The hard problem: a capture is a driver call on a stream, but a framework that does not know of it
hands out memory, random numbers and streams that are wrong for a graph. A `Framework` knows one
library on one device; a `Session` accompanies one `breakable_graph` block; everything else of a
capture is the same for all of them and lives in `capture/`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from .._driver.bindings import Driver
from .._driver.handles import GraphHandle
from .._driver.stream_order import CompletionMark
from .._driver.survey import Survey


class Runner(Protocol):
    """Launches a segment where a framework has to prepare each launch (torch's random numbers)."""

    def launch(self, executable: Any) -> None:
        """Prepare, and launch the segment's executable on the framework's current stream."""

    def close(self) -> None:
        """Give back what the segment holds."""


@dataclass(slots=True)
class Captured:
    """How a segment ended. `code` is the driver's; `problem` an error of the framework's own."""

    code: int
    graph: GraphHandle | None
    runner: Runner | None = None
    problem: Exception | None = None
    keep: object = None  # what the graph needs for as long as it may run

    def close(self) -> None:
        """Give back what ended and is of no use."""
        if self.runner is not None:
            self.runner.close()
        if self.graph is not None:
            self.graph.close()


class Pool(Protocol):
    """The private memory of a sequence, and the stream that its captures run on."""

    @property
    def handle(self) -> Any:
        """What `seq.pool()` returns and `pool=` takes."""

    @property
    def stream(self) -> Any:
        """The framework's stream object for the capture stream; from now on it stays the same."""

    def lease(self, lessee: object) -> Any:
        """The stream for one block's captures; nobody else captures on it until `end_lease`."""

    def end_lease(self, lessee: object, keep: bool) -> None:
        """A block is over; `keep` the stream for this pool, or let others have it.

        Does nothing for somebody who has no lease.
        """

    @property
    def mark(self) -> CompletionMark:
        """The end of the last replay of any sequence in this pool."""

    def nbytes(self) -> int | None:
        """The device memory that the pool has now, in bytes; None where there is no pool of memory."""

    def discard(self) -> None:
        """Queue for release what the pool holds; it is not used again."""


#: (dtype, shape, device)
ArrayKind = tuple[str, tuple[int, ...], str]


class Found(NamedTuple):
    """A piece of memory that captured work reads or writes, and the object that owns it."""

    address: int
    storage: Any  # lives as long as the memory; None: nothing tells when that ends
    kind: ArrayKind  # of an array in it
    is_host: bool = False  # pinned memory, which a capture may have made itself
    keeper: Any = None  # what to hold to keep the memory, where that is not the storage


class Birth(Enum):
    """When and where the memory of an array was made, seen from a capture."""

    POOL = "in the private pool, by captured work"
    BREAK = "during the capture, outside the pool"
    OLDER = "before the capture"


class Arrays(Protocol):
    """The device arrays of one library, as arguments and results of breaks."""

    def owns(self, value: Any) -> bool:
        """Whether a value is a device array of this library."""

    def can_alias(self, value: Any) -> bool:
        """Whether `alias` works; an array for which it does not is owned by the sequence."""

    def alias(self, value: Any) -> Any:
        """An array over the same memory that does not keep it and has no history."""

    def moved(self, value: Any, start: int, end: int, shift: int) -> Any:
        """An alias whose memory, as far as it lies from `start` to before `end`, is `shift` bytes on."""

    def detached(self, value: Any) -> Any:
        """The same memory without history; keeps it."""

    def storage(self, value: Any) -> tuple[int, int, Any]:
        """(first address, bytes, object that lives as long as the memory, or None: see `Found`)."""

    def keeper(self, value: Any) -> Any:
        """What to hold to keep the memory."""

    def place(self, value: Any) -> tuple[Any, ...]:
        """What two arrays that are the same view of the same memory agree in."""

    def kind(self, value: Any) -> ArrayKind:
        """(dtype, shape, device): what a result must keep from call to call."""

    def history(self, value: Any) -> Any:
        """A token that changes when an operation changes the array's autograd history."""

    def requires_grad(self, value: Any) -> bool:
        """Whether the array takes part in autograd."""

    def new_buffer(self, value: Any) -> Any:
        """A new array of the same kind and strides."""

    def new_views(self, values: list[Any]) -> list[Any] | None:
        """New arrays that lie to each other as these views of one memory do; None: cannot be made."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy values between two arrays of the same kind, on the current stream."""


class Session(Protocol):
    """One block's dealings with a framework. `leave` is called whatever happened before."""

    @property
    def uses_workspace(self) -> bool:
        """Whether captured work depends on the capture stream itself (a workspace of it)."""

    @property
    def had_company(self) -> bool:
        """Whether another capture that shares generators was open during the present segment."""

    def enter(self) -> None:
        """Make the capture stream current and get ready for the first segment."""

    def begin(self) -> None:
        """Open the capture of the next segment on the capture stream."""

    def end(self, survey: Survey | None) -> Captured:
        """End the capture and close the framework's books; a failed capture is an answer.

        `survey` is what the capture's graph held just before; None if it was lost already.
        """

    def abandon(self) -> None:
        """End an open capture without wanting its graph. Does nothing where none is open."""

    def leave(self, failed: bool) -> None:
        """Restore what `enter` changed."""

    def before_break(self) -> None:
        """A break's body is about to run: note what memory exists, if that will be asked for."""

    def birth(self, address: int, storage: Any = None) -> Birth:
        """When the memory at an address was made; `storage`, if known, is the object that owns it."""

    def inputs(self, survey: Survey) -> tuple[list[Found], list[int]]:
        """The memory that a segment reads or writes and its pool does not own.

        Returns the pieces whose owner is known, and the addresses of which nobody knows the owner.
        """


class Companion(Protocol):
    """A library that works in a block beside the block's framework: what a session does for it."""

    def enter(self) -> None:
        """A block opens, or the library was loaded in one of its breaks."""

    def begin(self) -> None:
        """The capture of a segment has begun."""

    def end(self) -> object:
        """A segment is about to end; returns what its graph needs for as long as it may run."""

    def birth(self, address: int) -> Birth | None:
        """When the memory at an address was made; None if it is not this library's, or older."""

    def leave(self, failed: bool) -> None:
        """Restore what `enter` changed. A second call does nothing."""


class Follower(Protocol):
    """A library with a current stream of its own, which breaks need to be the framework's."""

    def current_stream(self) -> int:
        """The handle of this thread's current stream."""

    def stands_at(self, handle: int) -> bool:
        """Whether a stream is current in this thread; on the hot path of replay."""

    def stream_current(self, handle: int) -> AbstractContextManager[Any]:
        """Make a stream current inside the block."""


class Framework(Protocol):
    """One library on one device."""

    name: str
    driver: Driver
    arrays: Arrays

    #: the driver's context that captures and replays need current
    context: int

    @property
    def current_stream(self) -> Callable[[], int]:
        """Tells the handle of this thread's current stream of the device; on the hot path of replay."""

    @property
    def is_capturing(self) -> Callable[[], bool] | None:
        """Tells whether this thread's current stream is in a capture; it may raise.

        None where the bindings tell it as quickly as the library.
        """

    def stream_object(self, stream: Any) -> Any:
        """The library's own kind of stream for a stream-like object."""

    def stream_current(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream (an object or a handle) current inside the block."""

    def lasts(self, stream: Any, handle: int) -> bool:
        """Whether a stream (None: the current one) is never destroyed, so that its handle means it."""

    def new_pool(self, given: Any) -> Pool:
        """The pool for a sequence: a fresh one for None, else the one that `given` names."""

    def session(self, pool: Pool, stream: Any, mode: str, generators: tuple[Any, ...]) -> Session:
        """A session for one block that captures on `stream` (an object or a handle)."""

    def modes(self) -> Any:
        """The modes of this thread that change what an eager break does; compared by equality."""

    def in_modes(self, modes: Any) -> AbstractContextManager[Any]:
        """Run a block under modes that `modes()` returned."""


class Gone:
    """Stands for the storage of such memory, which nobody can keep; `words` are for messages."""

    def __init__(self, words: str) -> None:
        self.words = words
