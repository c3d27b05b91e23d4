"""The guides' pictures of pages: `python docs/screenshots.py` takes them again, with Chromium.

The hard problem: a page is a picture only in a browser, and the figures on it are worth showing only if
they are a device's. So the report of a run on an H200 is kept (`docs/screenshots/decoder.json`), and what
the guide shows of it is made anew from that.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "screenshots"
REPORT = FOLDER / "decoder.json"
GUIDE = ROOT / "docs" / "profile.md"

_TABLE = re.compile(r"(?<=^```text\n)unit .*?(?=^```)", re.MULTILINE | re.DOTALL)


def table() -> str:
    """The table of the report that is kept."""
    from breakable_cuda_graphs.replay.report import Profile

    return Profile.from_json(REPORT.read_text()).table() + "\n"


def table_shown() -> str:
    """The table that the guide shows."""
    found = _TABLE.search(GUIDE.read_text())
    return found[0] if found else ""


def main() -> int:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from docs.pages import blocks_of

    from breakable_cuda_graphs.replay.report import Profile
    from breakable_cuda_graphs.simulator import simulated_device
    from browser import Browser

    GUIDE.write_text(GUIDE.read_text().replace(table_shown(), table()))
    page = Path(tempfile.mkdtemp()) / "page.html"
    browser = Browser()
    try:
        Profile.from_json(REPORT.read_text()).to_html(page)
        for dark in (False, True):
            browser.open(page, dark=dark, width=1100, height=640)
            browser.picture(FOLDER / f"profile-{'dark' if dark else 'light'}.png")
        namespace: dict[str, Any] = {"__name__": "page"}
        with simulated_device(seed=0):
            for block in blocks_of(GUIDE):
                block.run(namespace, "cpu")
            namespace["seq"].to_html(page)
        browser.open(page, width=1100, height=420)
        browser.press("Tab", "Tab", "ArrowDown", "ArrowDown", "Enter")
        browser.picture(FOLDER / "sequence.png")
    finally:
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
