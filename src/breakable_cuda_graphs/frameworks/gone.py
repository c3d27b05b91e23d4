"""What stands for memory that was given back while the segment that names it was still being captured.

The hard problem: nothing is left then that could be watched, and a word in a kernel's arguments that
points there need not be an address: large arguments hold what happened to lie on the stack. So a word
counts only where it has to be one: in a small argument, or as an end of a copy or a fill
(`Survey.sure_addresses`).
"""

from __future__ import annotations


class Gone:
    """Stands for the storage of such memory, which nobody can keep; `words` are for messages."""

    def __init__(self, words: str) -> None:
        self.words = words
