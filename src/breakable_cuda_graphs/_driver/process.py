"""Where this process stands: forked, or at the end of the interpreter.

The hard problem: CUDA handles do not survive `fork`, and at interpreter exit the driver may be gone
before the last Python object. Both turn a harmless release into a crash, so both are known here, in
two plain variables that cost nothing to read.
"""

from __future__ import annotations

import atexit
import os
import sys

#: Counts the forks above this process. An object made under another number came from a parent.
epoch = 0

#: True once the interpreter has begun to exit: from then on handles are leaked on purpose.
exiting = False

_driver_used_in_epoch: int | None = None


def note_driver_use() -> None:
    """Remember that the driver was used here: a fork after this cannot use the driver at all."""
    global _driver_used_in_epoch
    _driver_used_in_epoch = epoch


def driver_lost_in_fork() -> bool:
    """True in a child whose parent had used the driver: CUDA cannot be initialised there again."""
    return _driver_used_in_epoch is not None and _driver_used_in_epoch != epoch


def can_release(made_in_epoch: int) -> bool:
    """Whether a handle that was made in that epoch may still be given back to the driver."""
    return made_in_epoch == epoch and not exiting and not sys.is_finalizing()


def _after_fork_in_child() -> None:
    global epoch
    epoch += 1


def _at_exit() -> None:
    global exiting
    exiting = True


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
