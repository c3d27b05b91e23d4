"""The Python lines that captured each node (`record_stacks=True`).

The hard problem: kernels are launched by many libraries, and none of them says who asked for it. So at every
line of Python that runs, the nodes are counted: what is new belongs to the line before. That is slow, and
therefore only done when a capture is told to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from .._driver.threads import Home
from ..graph.capture_notes import Page
from ..sequence.source_lines import ROOT, is_library_file

_DEEPEST = 32


class StackRecorder:
    """Notes the Python lines of captured nodes, for one block, from `start` to `stop`.

    What a line has added is found when the next line runs, so a node is credited to the line that
    was running when it was added, whichever library launched it. Lines of torch, of the standard
    library and of this one are nobody's: the line that called them gets the credit. A debugger or a
    coverage tool that traces the thread is set aside meanwhile.
    """

    def __init__(self, page: Callable[[], Page]) -> None:
        self._page = page  # where to note what is captured now
        self._home = Home()
        self._previous: Any = None
        self._line: Line = ()
        self._segment, self._count = -1, 0
        self._frames: list[tuple[FrameType, Any]] = []

    def start(self) -> None:
        """Trace this thread's lines, those of the functions that are running already too."""
        self._previous = sys.gettrace()
        frame: FrameType | None = sys._getframe(1)
        self._line = _running(frame)
        while frame is not None:
            if not _is_library(frame):
                self._frames.append((frame, frame.f_trace))
                frame.f_trace = self._trace
            frame = frame.f_back
        self._segment, self._count = self._where()
        sys.settrace(self._trace)

    def stop(self) -> None:
        """Note what the last line has added, and trace no more."""
        if (
            self._home.is_here() and sys.gettrace() == self._trace
        ):  # else it is somebody's since then
            sys.settrace(self._previous)
        for frame, before in self._frames:
            frame.f_trace = before
        self._frames.clear()
        self.flush()

    def flush(self) -> None:
        """A segment is about to end: note what the line that runs now has added to it."""
        segment, count = self._where()
        if segment != self._segment:
            self._segment, self._count = segment, 0
        if count > self._count:
            journal = self._page().journal
            journal.note_stack(segment, self._count, count, _in_words(self._line))
        self._count = count

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call" and not _is_traced(frame):
            return None
        self.flush()
        self._line = _running(frame if event != "return" else frame.f_back)
        return self._trace

    def _where(self) -> tuple[int, int]:
        page = self._page()
        return page.segment, page.journal.size()


#: The running functions and their lines, the innermost first.
Line = tuple[tuple[CodeType, int], ...]


def _is_library(frame: FrameType) -> bool:
    """Whether a function is one whose lines are nobody's."""
    return is_library_file(frame.f_code.co_filename)


def _is_traced(frame: FrameType) -> bool:
    """Whether to follow a call: a user's function, called by one or called back by a library.

    What runs because a library imports something is called by neither.
    """
    caller = frame.f_back
    if _is_library(frame) or caller is None:
        return False
    if _is_library(caller):
        name = caller.f_code.co_filename
        return not name.startswith((ROOT, "<frozen"))
    return caller.f_trace is not None


def _running(frame: FrameType | None) -> Line:
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _DEEPEST:
        if not _is_library(frame):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _in_words(line: Line) -> tuple[str, ...]:
    """The lines as people read them, the innermost last."""
    return tuple(
        f"{code.co_filename}:{number} in {code.co_qualname}" for code, number in reversed(line)
    )
