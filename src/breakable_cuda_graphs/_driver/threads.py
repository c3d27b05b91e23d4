"""Which thread something belongs to: a capture, and the state of a thread that was changed for it.

The hard problem: the number of a thread is given to another one once it has ended, and `threading` may
give both the same object where it did not start them. So each thread has a token in its own storage,
which goes when the thread does. And a thread that has ended cannot put back what was its own, nor need
it: its current streams, devices and modes have gone with it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

from . import process, release


class _Token:
    """One thread, for as long as it lives."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.token = _Token()


_here = _Here()


class Home:
    """The thread that made this object. In a forked child it is nowhere: nobody's, and not over."""

    __slots__ = ("_epoch", "_token")

    def __init__(self) -> None:
        self._token = weakref.ref(_here.token)
        self._epoch = process.epoch

    def is_here(self) -> bool:
        """Whether the caller is that thread."""
        return self._token() is _here.token and self._epoch == process.epoch

    def is_in_parent(self) -> bool:
        """Whether this process is a forked child of that thread's."""
        return self._epoch != process.epoch

    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._token() is None and not self.is_in_parent()


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
