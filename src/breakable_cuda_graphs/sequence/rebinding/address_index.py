"""What the nodes of a captured segment do, and every word in them that may be an address.

The hard problem: moving a sequence to other memory is only worth it where it costs less than a copy, and
reading a node costs far more than changing it. But the graph of a segment never changes, only what its
executable was told: so its nodes are read once, their words stand in one array that is searched at once,
and later looks bring only what was edited in between up to date.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from ..._driver import node_params, set_params
from .moves import Move, move_of

if TYPE_CHECKING:
    from ...graph.state import Template


_WORD = 8


class Hit(NamedTuple):
    """A word of a kernel's argument that lies in a move; `move` is None just past the end of one."""

    argument: int
    offset: int
    value: int
    move: Move | None
    place: int  # in the array of words


class Entry:
    """One node: its handle, what it does now, and what writes its arguments, once that was needed."""

    __slots__ = ("first", "handle", "work", "writer")

    def __init__(self, handle: Any, work: node_params.Work) -> None:
        self.handle, self.work = handle, work
        self.first = 0  # the place of its first word
        self.writer: set_params.KernelWriter | None = None


class Inventory:
    """All nodes of a segment, those in graphs inside it too, in the order of `Template.walk`."""

    def __init__(self, template: Template) -> None:
        reader = template.reader()
        self.entries = [Entry(handle, reader.read(handle)) for _, handle in template.walk()]
        self.others = [
            each for each in self.entries if not isinstance(each.work, node_params.Kernel)
        ]
        self._by_handle = {int(each.handle): each for each in self.entries}
        self._lay_out()

    def _lay_out(self) -> None:
        """Put the words of all kernels into one array."""
        parts: list[bytes] = []
        owners: list[int] = []
        arguments: list[int] = []
        counts: list[int] = []
        place = 0
        for number, entry in enumerate(self.entries):
            entry.first = place
            if not isinstance(entry.work, node_params.Kernel):
                continue
            for argument, data in enumerate(entry.work.args):
                count = len(data) // _WORD
                if count:
                    parts.append(data[: count * _WORD])
                    owners.append(number)
                    arguments.append(argument)
                    counts.append(count)
                    place += count
        words = b"".join(parts)
        self._values = numpy.array(memoryview(words).cast("Q"), "u8")
        lengths = numpy.array(counts, "i8")
        self._owners = numpy.repeat(numpy.array(owners, "i8"), lengths)
        self._arguments = numpy.repeat(numpy.array(arguments, "i8"), lengths)
        starts = numpy.repeat(numpy.cumsum(lengths) - lengths, lengths)
        self._offsets = (numpy.arange(place) - starts) * _WORD

    def refresh(self, changed: dict[int, node_params.Work]) -> None:
        """Bring it up to date with what an executable was told."""
        is_new = False
        for handle, work in changed.items():
            entry = self._by_handle.get(handle)
            if entry is None or entry.work is work:
                continue
            is_new |= isinstance(work, node_params.Kernel)
            entry.work, entry.writer = work, None
        if is_new:
            self._lay_out()

    def kernels_in(self, moves: Sequence[Move]) -> Iterator[tuple[Entry, list[Hit]]]:
        """The kernels with a word in what moves, or just past the end of it, and those words."""
        values = self._values
        found = [
            numpy.flatnonzero(
                (values >= numpy.uint64(move.start)) & (values <= numpy.uint64(move.end))
            )
            for move in moves
        ]
        if not found:
            return
        places = found[0] if len(found) == 1 else numpy.unique(numpy.concatenate(found))
        rows = zip(
            self._owners[places].tolist(),
            self._arguments[places].tolist(),
            self._offsets[places].tolist(),
            values[places].tolist(),
            places.tolist(),
            strict=True,
        )
        for number, group in groupby(rows, key=_first):
            hits = [Hit(a, o, v, move_of(moves, v), place) for _, a, o, v, place in group]
            yield self.entries[number], hits

    def record(
        self, entry: Entry, after: node_params.Work, words: Sequence[tuple[int, int, int, int]]
    ) -> None:
        """A node was given new words: (argument, offset, place, value)."""
        entry.work = after
        for _, _, place, value in words:
            self._values[place] = value


def _first(row: tuple[int, ...]) -> int:
    return row[0]


def inventory_of(template: Template) -> Inventory:
    """The inventory of a segment's graph as it will run; made when it is first asked for."""
    made = template.inventory
    if not isinstance(made, Inventory):
        made = template.inventory = Inventory(template)
    if template.shown is not None:
        made.refresh(template.shown.works)
    return made
