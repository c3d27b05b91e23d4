"""What `rebind` changed, and what it left, for people to read.

The hard problem: a model has thousands of nodes, and a server moves memory at each request. So nothing is put
into words before somebody asks.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ..._driver.node_params import label_of


class Doubt(NamedTuple):
    """A word that was left as it is although it could be taken for an old address."""

    node: str
    argument: int
    offset: int
    value: int
    why: str


@dataclasses.dataclass(frozen=True)
class Rebound:
    """What `rebind` changed: numbers of nodes, of words in them, and of arguments of breaks.

    `changes` says each in a line; `doubts` are words that look like old addresses and were left.
    """

    nodes: int
    words: int
    arguments: int
    doubts: tuple[Doubt, ...]
    #: put in words when somebody asks
    _moved: tuple[tuple[Any, ...], ...] = dataclasses.field(repr=False)

    @property
    def changes(self) -> tuple[str, ...]:
        """A line for each node and each break."""
        return tuple(_line(*each) for each in self._moved)

    def __str__(self) -> str:
        lines = [
            f"{self.words} addresses in {self.nodes} nodes and {self.arguments} arguments of breaks",
            *self.changes,
            *(f"left: {doubt.value:#x} in {doubt.node}: {doubt.why}" for doubt in self.doubts),
        ]
        return "\n".join(lines)


# ---------------------------------------------------------------- helpers


def _line(number: int | None, count: int, what: Any) -> str:
    if number is None:
        return f"break {what}: {count} arguments"
    return f"segment {number}: {count} in {label_of(what)}"
