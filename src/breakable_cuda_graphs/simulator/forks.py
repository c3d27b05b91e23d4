"""What forked children did, told to the parent.

The hard problem: a child's findings live in the child's memory and die with it, while the test that
must fail runs in the parent. A page of shared memory, made before any fork, carries them over.
"""

from __future__ import annotations

import mmap

_ROOM = 64 * 1024
_LENGTH = 4


class ChildReports:
    """Sentences that travel from forked children to the process that made this object."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, _ROOM)

    def send(self, sentence: str) -> None:
        """Called in a child. What no longer fits is dropped; the first sentences matter."""
        used = self._used()
        line = sentence.encode(errors="replace") + b"\n"
        if _LENGTH + used + len(line) <= _ROOM:
            self._page[_LENGTH + used : _LENGTH + used + len(line)] = line
            self._page[:_LENGTH] = (used + len(line)).to_bytes(_LENGTH, "little")

    def received(self) -> list[str]:
        """Called in the parent: every sentence so far."""
        text = bytes(self._page[_LENGTH : _LENGTH + self._used()])
        return text.decode(errors="replace").splitlines()

    def _used(self) -> int:
        return int.from_bytes(self._page[:_LENGTH], "little")
