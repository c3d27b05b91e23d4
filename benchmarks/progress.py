"""A progress bar; the hard problem is that drawing it must not disturb what is being timed.

So it is drawn between rounds only, from the thread that measures: rich's own refresh thread,
which would take the interpreter lock in the middle of a launch loop, is kept off.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Protocol


class Progress(Protocol):
    def begin(self, title: str, total: int) -> None: ...
    def tick(self) -> None: ...
    def __enter__(self) -> Progress: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class PlainProgress:
    """One line, rewritten on a terminal, written once a stage elsewhere."""

    def __init__(self, interval: float = 0.5) -> None:
        self._title = ""
        self._total = self._done = 0
        self._drawn = 0.0
        self._interval = interval
        self._terminal = sys.stderr.isatty()

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._terminal:
            print(file=sys.stderr)

    def begin(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        if not self._terminal:
            print(f"{title} ...", file=sys.stderr, flush=True)

    def tick(self) -> None:
        self._done += 1
        now = time.monotonic()
        if self._terminal and (now - self._drawn > self._interval or self._done == self._total):
            self._drawn = now
            filled = 30 * self._done // max(1, self._total)
            bar = "#" * filled + "." * (30 - filled)
            print(f"\r\x1b[K{self._title} [{bar}]", end="", file=sys.stderr, flush=True)


class RichProgress:
    """The same with rich, whose refresh thread stays off (see above)."""

    def __init__(self, interval: float = 0.25) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._bars: Any = Bars(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
        )
        self._task: Any = None
        self._drawn = 0.0
        self._interval = interval

    def __enter__(self) -> RichProgress:
        self._bars.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.refresh()
        self._bars.__exit__(kind, error, trace)

    def begin(self, title: str, total: int) -> None:
        self._task = self._bars.add_task(title, total=total)
        self._bars.refresh()

    def tick(self) -> None:
        self._bars.advance(self._task)
        now = time.monotonic()
        if now - self._drawn > self._interval:
            self._drawn = now
            self._bars.refresh()


def make_progress() -> Progress:
    """Rich on a terminal that has it, plain text otherwise."""
    if sys.stderr.isatty():
        try:
            return RichProgress()
        except ImportError:
            pass
    return PlainProgress()
