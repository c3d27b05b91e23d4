"""What has begun and not ended, and who puts it back when nobody will end it any more.

The hard problem: an interrupt can hit any line, also of what repairs the damage of another one, and a
thread may end in the middle. So what changes something is noted before it does, and it counts as
abandoned except while its body runs. Whoever uses the library next puts it back, as often as it takes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import CodeType, FrameType

from . import contexts, release
from .bindings import Driver
from .threads import Home


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


#: In the order in which they began; a dict for that. Adding and removing are atomic.
pending: dict[Unfinished, None] = {}

#: Nothing is made or called while it is held: wherever that happens the collector may come, and end a
#: block that this thread has lost, or a signal's handler, which may do anything.
_lock = threading.Lock()


def sweep() -> None:
    """End what this thread, or one that has ended, has begun and nobody will end any more.

    An interrupt hit it between two lines of its own beginning or end, or its context manager has
    gone without having been left, or is still there but its thread is not.
    """
    for each in reversed(list(pending)):  # what lies inside another comes first
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


def end_inside(block: Unfinished) -> bool:
    """End what this thread has begun inside of a block and has not ended; whether there was any."""
    if block not in pending:
        return False
    begun = list(pending)
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


def _forget_all() -> None:
    """In a forked child: they are the parent's, and so may be who holds the lock."""
    global _lock
    _lock = threading.Lock()
    pending.clear()


os.register_at_fork(after_in_child=_forget_all)
