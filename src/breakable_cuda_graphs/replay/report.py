"""What a profile found: figures, a table to print, and the forms that other tools read.

The hard problem: a table of a page has to answer "what do I do now?", so beside the figures it says
which breaks cost the replay time that would be gained without them, and how far the figures can be
trusted: what timing itself has added, and how well the two clocks agree.

Chrome trace events: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(the "Trace Event Format"; Perfetto reads it).
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import os
import shutil
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..sequence.pages import assemble
from . import errors

_WORTH = 0.01  # of the replay; less is not worth a line
_NAMED = 5  # breaks that are named as worth removing
_WIDTH = 118  # of a table that is not printed to a terminal


@dataclass(frozen=True)
class Row:
    """One unit of a replay: a launch ("graph"), a call ("break"), or what is around all of them
    ("replay").

    segments: places in `sequence.segments`; several where neighbours are one launch.
    gpu_us: how long the stream works at it. gap_us: how long the stream waits in it for the host.
    cpu_us: how long the host is busy with it, waiting for the device included.
    launches, nodes: of graphs; None for a break, whose launches nobody counts.
    share: of the whole replay, work and gap together, from 0 to 1.
    waits: a break that waits for the device; from there on all that the stream takes is gap.
    """

    kind: str
    name: str
    scope: str
    line: str
    segments: tuple[int, ...]
    gpu_us: float
    gap_us: float
    cpu_us: float
    launches: int | None
    nodes: int | None
    share: float
    waits: bool

    @property
    def label(self) -> str:
        """Scope and name in one: "layer 3/attend"."""
        return f"{self.scope}/{self.name}" if self.scope else self.name


class TimelineEntry(NamedTuple):
    """One unit of one replay on the timeline; times in microseconds from its start.

    `work` is the part of the stream's time that is work; the rest, the gap, is drawn before it (in a
    break that launches several kernels it really lies between them).
    """

    replay: int
    unit: int
    cpu_start: float
    cpu: float
    gpu_start: float
    gpu: float
    work: float


@dataclass(frozen=True)
class Profile:
    """What `sequence.profile()` measured. All times are microseconds.

    rows: one a unit, and a last one for what a replay does besides. `gpu_us + gap_us` of all rows
        add up to the replay: the time of the marks between the units is taken out of them.
    replay_us: a replay that is not looked into, from its first work to that of the next one; the
        mean of the middle half of `iterations`, measured in turn with those that are.
        `fastest_us` and `slowest_us` are its extremes, `cpu_us` is what `replay()` takes the host.
    profiled_us: a replay with marks. overhead_us: what they have added, `profiled_us - replay_us`.
    mark_us: what one mark takes the host; it is taken out of `cpu_us`.
    clock_error_us: by how much the host's times and the stream's may lie apart on the timeline.
    replays: how often the sequence was replayed in all.
    pool_bytes: memory of the sequence's pool, where there is one. executable_bytes: device memory of
        its executables, measured by making them again and again; None where that does not show.
    simulated: the times are those of the simulated driver, and say nothing about a device.
    """

    sequence: str
    device: str
    simulated: bool
    iterations: int
    replays: int
    replay_us: float
    fastest_us: float
    slowest_us: float
    cpu_us: float
    profiled_us: float
    mark_us: float
    clock_error_us: float
    pool_bytes: int | None
    executable_bytes: float | None
    rows: tuple[Row, ...]
    timeline: tuple[TimelineEntry, ...]

    @property
    def gpu_us(self) -> float:
        """The work of the stream in one replay."""
        return sum(row.gpu_us for row in self.rows)

    @property
    def gap_us(self) -> float:
        """How long the stream waits for the host in one replay."""
        return sum(row.gap_us for row in self.rows)

    @property
    def overhead_us(self) -> float:
        """What looking into a replay has added to it."""
        return self.profiled_us - self.replay_us

    @property
    def worth_removing(self) -> tuple[tuple[Row, float], ...]:
        """The breaks whose gaps cost the replay most, and what would be gained without each.

        That is the break's own gap, and that of the launch behind it, which is only needed because of
        the break. Breaks that cost less than a hundredth of the replay are left out.
        """
        found = []
        for row, following in zip(self.rows, self.rows[1:], strict=False):
            if row.kind == "break":
                gain = row.gap_us + (following.gap_us if following.kind == "graph" else 0.0)
                if gain > _WORTH * self.replay_us:
                    found.append((row, gain))
        return tuple(sorted(found, key=lambda pair: -pair[1]))

    # ---- for people

    def __str__(self) -> str:
        """A table, drawn by rich where that is installed."""
        width = max(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
        try:
            console = importlib.import_module("rich.console")
        except ImportError:
            return "\n".join([self._headline(), "", self.table(), "", *self._remarks()])
        text = io.StringIO()
        shown = console.Console(file=text, width=width, highlight=False, color_system=None)
        shown.print(self._headline(), markup=False)
        shown.print(self._rich_table())
        for line in self._remarks():
            shown.print(line, markup=False, soft_wrap=True)
        return text.getvalue().rstrip()

    def __rich_console__(self, console: Any, options: Any) -> Any:
        text = importlib.import_module("rich.text")
        yield text.Text(self._headline())
        yield self._rich_table()
        for line in self._remarks():
            yield text.Text(line)

    def _headline(self) -> str:
        where = "simulated driver: its times are not a device's" if self.simulated else self.device
        return f"{self.sequence}, {where}"

    def _cells(self, row: Row) -> tuple[str, ...]:
        return (
            row.label + (" (waits)" if row.waits else ""),
            _short_line(row.line),
            _figure(row.gpu_us),
            _figure(row.gap_us),
            _figure(row.cpu_us),
            "-" if row.launches is None else str(row.launches),
            "-" if row.nodes is None else str(row.nodes),
            f"{row.share:.1%}",
        )

    def _table(self) -> list[tuple[str, ...]]:
        launches = sum(row.launches or 0 for row in self.rows)
        nodes = sum(row.nodes or 0 for row in self.rows)
        total = (
            "all", "", _figure(self.gpu_us), _figure(self.gap_us),
            _figure(sum(row.cpu_us for row in self.rows)), str(launches), str(nodes), "100.0%",
        )  # fmt: skip
        return [*(self._cells(row) for row in self.rows), total]

    def table(self) -> str:
        """The table alone, as plain text."""
        table = [_HEADS, *self._table()]
        widths = [max(len(cells[place]) for cells in table) for place in range(len(_HEADS))]
        lines = ["  ".join(_aligned(cells, widths)).rstrip() for cells in table]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])

    def _rich_table(self) -> Any:
        rich_table, text = (importlib.import_module(f"rich.{name}") for name in ("table", "text"))
        table = rich_table.Table()
        for place, head in enumerate(_HEADS):
            table.add_column(head, justify="left" if place < _TEXTS else "right", overflow="fold")
        *rows, total = self._table()
        for cells in rows:  # `Text`: names are not markup
            table.add_row(*(text.Text(cell) for cell in cells))
        table.add_section()
        table.add_row(*(text.Text(cell) for cell in total))
        return table

    def _remarks(self) -> list[str]:
        """What the table means, and how far to trust it."""
        spread = f"{_figure(self.fastest_us)} to {_figure(self.slowest_us)}"
        lines = [
            f"a replay takes {_figure(self.replay_us)} us ({spread}), {_figure(self.cpu_us)} us of "
            f"the host; profiling added {_figure(self.overhead_us)} us "
            f"({self.overhead_us / max(self.replay_us, 1e-9):.1%}), which is taken out of the units: "
            f"they add up to {_figure(self.gpu_us + self.gap_us)} us"
        ]
        memory = [
            f"{name} {_bytes(number)}"
            for name, number in (
                ("pool", self.pool_bytes), ("executables about", self.executable_bytes)
            )
            if number is not None
        ]  # fmt: skip
        if memory:
            lines.append("memory: " + ", ".join(memory))
        worth = self.worth_removing
        if worth:
            lines.append("breaks that cost the replay most:")
            for row, gain in worth[:_NAMED]:
                share = gain / self.replay_us
                lines.append(
                    f"  {row.label} at {_short_line(row.line)}: {_figure(gain)} us ({share:.1%})"
                )
        elif any(row.kind == "break" for row in self.rows):
            lines.append("no break costs the replay a hundredth of its time")
        return lines

    # ---- for programs

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """All figures as JSON; written to `path` too, if one is given."""
        values = asdict(self)
        values["timeline"] = [block._asdict() for block in self.timeline]
        values["overhead_us"], values["gpu_us"] = self.overhead_us, self.gpu_us
        values["gap_us"] = self.gap_us
        place = {id(row): number for number, row in enumerate(self.rows)}
        values["worth_removing"] = [
            {"row": place[id(row)], "name": row.label, "gain_us": gain}
            for row, gain in self.worth_removing
        ]
        text = json.dumps(values, indent=1)
        if path is not None:
            _write(path, text)
        return text

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The report that `to_json` wrote: print it, or make its page, on another machine.

        Raises `ValueError` for a text that is none.
        """
        try:
            values = json.loads(text)
            rows = [Row(**(row | {"segments": tuple(row["segments"])})) for row in values["rows"]]
            fields = {field.name: values[field.name] for field in dataclasses.fields(cls)}
            timeline = tuple(TimelineEntry(**block) for block in values["timeline"])
        except (KeyError, TypeError, ValueError) as error:
            raise errors.not_a_report(error) from error
        return cls(**(fields | {"rows": tuple(rows), "timeline": timeline}))

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """A trace for Perfetto (https://ui.perfetto.dev) and `chrome://tracing`.

        One track for the host, one for the stream, with the gaps as slices of their own.
        """
        _write(path, json.dumps({"displayTimeUnit": "ns", "traceEvents": self._trace()}))

    def _trace(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": self.sequence}}
        ]
        for track, name in ((_HOST, "host"), (_STREAM, "stream")):
            named = {"name": name}
            events.append({"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": named})
        for block in self.timeline:
            row = self.rows[block.unit]
            args: dict[str, Any] = {
                "line": row.line, "segments": list(row.segments), "replay": block.replay,
                "nodes": row.nodes,
            }  # fmt: skip
            gap = block.gpu - block.work
            slices = (
                (_HOST, row.label, block.cpu_start, block.cpu),
                (_STREAM, f"gap before or in {row.label}", block.gpu_start, gap),
                (_STREAM, row.label, block.gpu_start + gap, block.work),
            )
            for track, name, start, length in slices:
                if length > 0:
                    events.append(
                        {
                            "ph": "X", "pid": 1, "tid": track, "name": name, "cat": row.kind,
                            "ts": start, "dur": length, "args": args,
                        }
                    )  # fmt: skip
        return events

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """One page that needs nothing else: a timeline to zoom into, and a table to sort."""
        data = json.loads(self.to_json())
        for row, shown in zip(self.rows, data["rows"], strict=True):
            shown["label"] = row.label
        _write(path, assemble.page("profile", f"Profile of {self.sequence}", data))


_HEADS = (
    "unit", "captured at", "GPU us", "gap us", "CPU us", "launches", "nodes", "share",
)  # fmt: skip

_TEXTS = 2  # the first columns, which are not numbers

_HOST, _STREAM = 1, 2  # tracks of the trace


def _aligned(cells: tuple[str, ...], widths: list[int]) -> list[str]:
    return [
        cell.ljust(width) if place < _TEXTS else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]


def _figure(microseconds: float) -> str:
    return f"{microseconds:,.1f}"


def _short_line(line: str) -> str:
    """A file's name and the line, without the folders."""
    return line.replace("\\", "/").rpartition("/")[2]


def _bytes(number: float) -> str:
    return f"{number / (1 << 20):,.1f} MiB"


def _write(path: str | os.PathLike[str], text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
