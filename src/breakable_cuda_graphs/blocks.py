"""Which `breakable_graph` block a call belongs to.

The hard problem: a break may be called by autograd's own thread, and a thread beside a capture may
call the same function without being part of it. So a call belongs to the block in whose capture the
*current stream* is (the framework's, then CuPy's), and only where no stream says so, to the innermost
block of its own thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from ._driver import contexts, release
from ._driver.bindings import Driver
from ._driver.threads import Home
from .frameworks import companions

if TYPE_CHECKING:
    from .capture import Block


class Unfinished:
    """What changes something when it begins and has to put it back: on its own thread, if that lives."""

    def __init__(self) -> None:
        self.home = Home()
        self.is_abandoned = True  # nobody will leave it: except while its body runs
        self._has_lost_its_thread = False

    def is_home(self) -> bool:
        """Whether the caller is on the thread that began it."""
        return self.home.is_here() and not self._has_lost_its_thread

    def adopt(self) -> bool:
        """Whether the thread that began it has ended, and it is the calling thread's to put back now."""
        lost = self.home
        if not lost.is_over():
            return False
        heir = Home()
        with _lock:  # one thread takes it
            if self.home is not lost:
                return False
            self._has_lost_its_thread = self.is_abandoned = True
            self.home = heir  # last: from here on this thread tries until it is done
        return True

    def is_at_work(self) -> bool:
        """Whether this thread is inside its beginning or end."""
        raise NotImplementedError

    def place(self) -> tuple[Driver, int]:
        """The driver, and the context that has to be current while it is put back."""
        raise NotImplementedError

    def put_back(self) -> object:
        """Put everything back; can be repeated."""
        raise NotImplementedError


#: The open blocks of the process, in the order in which they were opened. Replaced, never changed,
#: so that it can be read without a lock.
open_blocks: tuple[Block, ...] = ()

#: In the order in which they began; a dict for that. Adding and removing are atomic.
unfinished: dict[Unfinished, None] = {}

#: Nothing is made or called while it is held: wherever that happens the collector may come, and end a
#: block that this thread has lost, or a signal's handler, which may do anything.
_lock = threading.Lock()


def find() -> Block | None:
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


def capturing(stream: int) -> Block | None:
    """The block whose open segment a capturing stream belongs to, if it is one of ours."""
    for block in open_blocks:
        if block.is_in_segment and block.holds_stream(stream):
            return block
    return None


def add(block: Block) -> None:
    """A block has opened."""
    while not _replaced(before := open_blocks, (*before, block)):
        pass


def sweep() -> None:
    """End what this thread, or one that has ended, has begun and nobody will end any more.

    An interrupt hit it between two lines of its own beginning or end, or its context manager has
    gone without having been left, or is still there but its thread is not.
    """
    for each in reversed(list(unfinished)):  # what lies inside another comes first
        if not each.home.is_here() and not each.adopt():
            continue
        if each.is_abandoned and not each.is_at_work():
            # It is tried again if it fails; other work goes on meanwhile.
            with (
                contextlib.suppress(Exception),
                contexts.visited(*each.place()),
                release.relaxed_thread(),  # this thread may have a capture open
            ):
                each.put_back()


def end_inside(block: Block) -> bool:
    """End what this thread has begun inside of a block and has not ended; whether there was any."""
    if block not in unfinished:
        return False
    begun = list(unfinished)
    left = [each for each in begun[begun.index(block) + 1 :] if each.home.is_here()]
    for each in left:
        each.is_abandoned = True
    if left:
        sweep()
    return bool(left)


def is_running(thing: object, work: frozenset[CodeType]) -> bool:
    """Whether one of these methods of a thing is on this thread's stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in work and frame.f_locals["self"] is thing:
            return True
        frame = frame.f_back
    return False


def remove(block: Block) -> None:
    """A block has closed."""
    while not _replaced(before := open_blocks, tuple(b for b in before if b is not block)):
        pass


def _forget_all() -> None:
    """In a forked child: they are the parent's, and so may be who holds the lock."""
    global open_blocks, _lock
    _lock = threading.Lock()
    open_blocks = ()
    unfinished.clear()


os.register_at_fork(after_in_child=_forget_all)


def _replaced(before: tuple[Block, ...], after: tuple[Block, ...]) -> bool:
    """Whether nobody was faster."""
    global open_blocks
    with _lock:
        if open_blocks is before:
            open_blocks = after
            return True
    return False
