"""Which thread something belongs to: a capture, and the state of a thread that was changed for it.

The hard problem: the number of a thread is given to another one once it has ended, so it proves
nothing; the thread's object does. And a thread that has ended cannot put back what was its own, nor
need it: its current streams, devices and modes have gone with it.
"""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager
from typing import Any

from . import process, release


class Home:
    """The thread that made this object."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._epoch = process.epoch
        self.ident = threading.get_ident()

    def is_here(self) -> bool:
        """Whether the caller is that thread."""
        return threading.current_thread() is self._thread

    def is_over(self) -> bool:
        """Whether it has ended. A forked child, in which only one thread lives on, is not told so."""
        if self._epoch != process.epoch:
            return False
        return not self._thread.is_alive() or self._thread not in threading.enumerate()


class Changes:
    """Context managers that change a thread's own state, to be left together and on that thread."""

    def __init__(self) -> None:
        self._home = Home()
        self._entered = contextlib.ExitStack()

    def enter(self, change: AbstractContextManager[Any]) -> None:
        """Enter one more."""
        self._entered.enter_context(change)

    def undo(self) -> None:
        """Leave them all; on another thread, where that would change that one's state, forget them."""
        if self._home.is_here():
            self._entered.close()
        else:
            release.leak(self._entered)  # collected, some would leave themselves here
            self._entered = contextlib.ExitStack()
