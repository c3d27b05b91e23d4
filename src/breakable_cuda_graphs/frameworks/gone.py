"""Memory that was given back while the segment that names it was still being captured.

The hard problem: nothing is left then that could be watched, and a word in a kernel's arguments that
points there need not be an address: large arguments hold what happened to lie on the stack. So a word
counts only where it has to be one: in a small argument, or as an end of a copy or a fill.
"""

from __future__ import annotations

from .._driver.reading import Survey
from .base import Found


class Gone:
    """Stands for the storage of such memory, which nobody can keep; `words` are for messages."""

    def __init__(self, words: str) -> None:
        self.words = words


def sorted_out(
    found: list[Found], unknown: list[int], survey: Survey
) -> tuple[list[Found], list[int]]:
    """The same with what may be no address among the unknown."""
    doubtful = {piece.address for piece in found if isinstance(piece.storage, Gone)}
    if not doubtful:
        return found, unknown
    doubtful -= survey.sure_addresses()
    known = [
        piece
        for piece in found
        if not isinstance(piece.storage, Gone) or piece.address not in doubtful
    ]
    return known, [*unknown, *doubtful]
