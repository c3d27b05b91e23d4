"""`annotate`: names for parts of a capture.

The hard problem: kernels are launched by many libraries, by autograd's thread too, and none of them
says who asked for it. So a scope is noted by counting nodes, when it begins and when it ends
(`graph.capture_notes`), in whichever capture the calling thread is in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..graph.capture_notes import Page
from ..graph.recording import open_recording
from . import open_blocks


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
    recording = open_recording()
    if recording is not None:
        return recording.page()
    if not open_blocks.open_blocks:
        return None
    block = open_blocks.find()
    return None if block is None else block.page()
