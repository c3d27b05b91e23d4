"""Which `breakable_graph` block a call belongs to.

The hard problem: a break may be called by autograd's own thread, and a thread beside a capture may
call the same function without being part of it. So a call belongs to the block in whose capture the
*current stream* is (the framework's, then CuPy's), and only where no stream says so, to the innermost
block of its own thread.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from .._driver.bindings import Driver
from .._driver.unfinished import Unfinished, sweep
from ..frameworks import companions
from ..frameworks.protocols import Found, Framework
from ..graph.capture_notes import Journal, Page
from ..sequence.memory import Memory, Use
from ..sequence.segments import EagerSegment


class OpenBlock(Unfinished):
    """One open `breakable_graph` block, as those see it who find it."""

    driver: Driver
    framework: Framework
    stream: Any  # of the capture
    handle: int  # the same as a number
    is_open = False  # a segment is being captured
    in_break = ""  # the name of the break that runs now
    in_body = ""  # the part of a conditional node that is being captured now
    poison: BaseException | None = None  # why nothing may go on
    journal: Journal | None = None  # begun by whoever first has something to note

    @property
    def is_in_segment(self) -> bool:
        """Whether a segment is open now, and no break is running."""
        return self.is_open and not self.in_break

    @property
    @abstractmethod
    def next_index(self) -> int:
        """The place in `sequence.segments` of what is captured now, or comes next."""

    @abstractmethod
    def holds_stream(self, handle: int) -> bool:
        """Whether a stream is this block's own, or one that was forked from it into its capture."""

    @abstractmethod
    def border(self, name: str, does_nothing: Callable[[], None]) -> None:
        """`force_no_graph`: end the segment and begin the next, with nothing in between."""

    @abstractmethod
    def run_break(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *,
        name: str, stub: Callable[..., Any] | None, static: bool,
    ) -> Any:  # fmt: skip
        """A call of a function marked @no_graph in this block's capture."""

    @abstractmethod
    def embed_break(self, segment: EagerSegment) -> None:
        """Make a break of another sequence, which is replayed in this block, one of ours."""

    @abstractmethod
    def keep(self, thing: object, memory: Memory | None = None) -> None:
        """Keep something for as long as the sequence's segments live, and watch what it watches."""

    @abstractmethod
    def take_inputs(self, found: list[Found], unknown: list[int], role: Use) -> None:
        """Watch, or own, memory that captured work names, as the block was told to."""

    def page(self) -> Page:
        """Where to note what is captured now."""
        if self.journal is None:
            self.journal = Journal(self.driver, self.stream)
        number = self.next_index
        return Page(self.journal, number if self.is_open else number + 1)


#: The open blocks of the process, in the order in which they were opened. Replaced, never changed,
#: so that it can be read without a lock.
open_blocks: tuple[OpenBlock, ...] = ()

#: Nothing is made or called while it is held: the collector or a signal may come there.
_lock = threading.Lock()


def find() -> OpenBlock | None:
    """The block that the calling code belongs to, or None."""
    sweep()
    blocks = open_blocks
    for block in blocks:
        if block.holds_stream(block.framework.current_stream()):
            return block
    for block in blocks:
        follower = companions.follower(block.framework)
        if follower is not None and block.holds_stream(follower.current_stream()):
            return block
    for block in reversed(blocks):
        if block.is_home():
            return block
    return None


def capturing(stream: int) -> OpenBlock | None:
    """The block whose open segment a capturing stream belongs to, if it is one of ours."""
    for block in open_blocks:
        if block.is_in_segment and block.holds_stream(stream):
            return block
    return None


def add(block: OpenBlock) -> None:
    """A block has opened."""
    while not _replaced(before := open_blocks, (*before, block)):
        pass


def remove(block: OpenBlock) -> None:
    """A block has closed."""
    while not _replaced(before := open_blocks, tuple(b for b in before if b is not block)):
        pass


def _replaced(before: tuple[OpenBlock, ...], after: tuple[OpenBlock, ...]) -> bool:
    """Whether nobody was faster."""
    global open_blocks
    with _lock:
        if open_blocks is before:
            open_blocks = after
            return True
    return False


def _forget_all() -> None:
    """In a forked child: they are the parent's, and so may be who holds the lock."""
    global open_blocks, _lock
    _lock = threading.Lock()
    open_blocks = ()


os.register_at_fork(after_in_child=_forget_all)
