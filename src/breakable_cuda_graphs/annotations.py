"""Names for parts of a capture, and the Python lines that captured each node.

The hard problem: kernels are launched by many libraries, by autograd's thread too, and none of them
says who asked for it. A scope is noted by counting nodes (see `journals.py`). Lines are noted in the
same way, by asking for the count at every line of Python that runs: slow, and therefore only done
when a capture is told to (`record_stacks=True`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from . import blocks
from .journals import Page, of_block, open_recordings

if TYPE_CHECKING:
    from .capture import Block

__all__ = ["StackRecorder", "annotate"]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_DEEPEST = 32


@contextlib.contextmanager
def annotate(label: str) -> Iterator[None]:
    """Name what is captured in the block: `with annotate("layer 3"):`.

    Every node that is captured inside, on any stream of the capture, has the label in its `.scopes`;
    blocks may lie inside each other and around breaks. Outside of captures it does nothing.
    """
    page = current_page()
    if page is None:
        yield
        return
    scope = page.journal.enter(str(label), page.segment)
    try:
        yield
    finally:
        now = current_page()
        same = now is not None and now.journal is page.journal
        page.journal.leave(scope, now.segment if same and now is not None else page.segment)


def current_page() -> Page | None:
    """Where to note what the calling thread captures now; None outside of captures."""
    mine = open_recordings.get(threading.get_ident()) if open_recordings else None
    if mine:
        return mine[-1].page()
    if not blocks.open_blocks:
        return None
    block = blocks.find()
    return None if block is None else of_block(block)


class StackRecorder:
    """Notes the Python lines of captured nodes, for one block, from `start` to `stop`.

    What a line has added is found when the next line runs, so a node is credited to the line that
    was running when it was added, whichever library launched it. A debugger or a coverage tool that
    traces the thread is set aside meanwhile.
    """

    def __init__(self, block: Block) -> None:
        self._block = block
        self._previous: Any = None
        self._stack: tuple[str, ...] = ()
        self._segment, self._count = -1, 0
        self._frames: list[tuple[FrameType, Any]] = []

    def start(self) -> None:
        """Trace this thread's lines, those of the functions that are running already too."""
        self._previous = sys.gettrace()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if not _is_ours(frame):
                self._frames.append((frame, frame.f_trace))
                frame.f_trace = self._trace
            frame = frame.f_back
        self._segment, self._count = self._where()
        sys.settrace(self._trace)

    def stop(self) -> None:
        """Note what the last line has added, and trace no more."""
        self._note()
        sys.settrace(self._previous)
        for frame, before in self._frames:
            frame.f_trace = before
        self._frames.clear()

    def flush(self) -> None:
        """A segment is about to end: note what the line that runs now has added to it."""
        self._note()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if _is_ours(frame):
            return None
        self._note()
        if event in ("line", "call"):
            self._stack = _lines(frame)
        return self._trace

    def _where(self) -> tuple[int, int]:
        page = of_block(self._block)
        return page.segment, page.journal.size()

    def _note(self) -> None:
        segment, count = self._where()
        if segment != self._segment:
            self._segment, self._count = segment, 0
        if count > self._count:
            journal = of_block(self._block).journal
            journal.note_stack(segment, self._count, count, self._stack)
        self._count = count


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_HERE)


def _lines(frame: FrameType | None) -> tuple[str, ...]:
    """The lines that are running, the innermost last, without this library's own."""
    found: list[str] = []
    while frame is not None and len(found) < _DEEPEST:
        if not _is_ours(frame):
            code = frame.f_code
            found.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
        frame = frame.f_back
    return tuple(reversed(found))
