"""Which `breakable_graph` block a call belongs to.

The hard problem: a break may be called by autograd's own thread, and a thread beside a capture may
call the same function without being part of it. So a call belongs to the block in whose capture the
*current stream* is (the framework's, then CuPy's), and only where no stream says so, to the innermost
block of its own thread.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from .._driver.unfinished import sweep
from ..frameworks import companions
from ..graph.capture_notes import Journal, Page

if TYPE_CHECKING:
    from .block import Block


#: The open blocks of the process, in the order in which they were opened. Replaced, never changed,
#: so that it can be read without a lock.
open_blocks: tuple[Block, ...] = ()

#: Nothing is made or called while it is held: the collector or a signal may come there.
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


def remove(block: Block) -> None:
    """A block has closed."""
    while not _replaced(before := open_blocks, tuple(b for b in before if b is not block)):
        pass


def _replaced(before: tuple[Block, ...], after: tuple[Block, ...]) -> bool:
    """Whether nobody was faster."""
    global open_blocks
    with _lock:
        if open_blocks is before:
            open_blocks = after
            return True
    return False


def of_block(block: Block) -> Page:
    """The journal of a block, begun now if nobody has."""
    journal = block.journal
    if journal is None:
        journal = block.journal = Journal(block.driver, block.stream)
    number = block.next_index
    return Page(journal, number if block._is_open else number + 1)


def _forget_all() -> None:
    """In a forked child: they are the parent's, and so may be who holds the lock."""
    global open_blocks, _lock
    _lock = threading.Lock()
    open_blocks = ()


os.register_at_fork(after_in_child=_forget_all)
