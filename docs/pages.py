"""The guides' code, and their pictures: `python docs/pages.py` draws the pictures again.

The hard problem: a picture in a guide goes out of date without anybody's seeing it. So each is drawn by
the library from what the guide's own code has made: a comment in the page, `<!-- drawn: EXPRESSION -->`,
stands before the link to the picture, and is evaluated once all the code above it has run, on the
simulated device. `tests/test_docs.py` draws them anew and compares.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

NEEDS_GPU = "<!-- needs a GPU -->"
_BLOCK = re.compile(
    r"^(?P<mark><!-- [^\n]* -->\n)?```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL
)
_DRAWN = re.compile(
    r"^<!-- drawn: (?P<what>[^\n]+) -->\n!\[[^\]]*\]\((?P<file>[^)]+)\)", re.MULTILINE
)


class Block(NamedTuple):
    """One piece of Python of a page."""

    page: Path
    line: int
    code: str
    needs_gpu: bool

    def run(self, namespace: dict[str, Any], device: str) -> list[str]:
        """Run it; returns the lines that it printed."""
        code = "\n" * (self.line - 1) + self.code.replace('device="cuda"', f'device="{device}"')
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(code, str(self.page), "exec"), namespace)
        return said.getvalue().splitlines()


class Picture(NamedTuple):
    """A picture of a page: what is drawn, at which line, and the file."""

    line: int
    what: str
    file: Path


def blocks_of(page: Path) -> list[Block]:
    """The Python of a page, in order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        needs_gpu = (match["mark"] or "").strip() == NEEDS_GPU
        found.append(Block(page, _line(text, match.start("code")), match["code"], needs_gpu))
    return found


def pictures_of(page: Path) -> list[Picture]:
    """The pictures of a page that the library draws, in order."""
    text = page.read_text()
    return [
        Picture(_line(text, match.start()), match["what"], page.parent / match["file"])
        for match in _DRAWN.finditer(text)
    ]


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def drawn(page: Path) -> Iterator[tuple[Picture, str]]:
    """Each picture of a page, drawn anew from its code."""
    from breakable_cuda_graphs.simulator import simulated_device

    pictures = pictures_of(page)
    namespace: dict[str, Any] = {"__name__": "page"}
    with simulated_device(seed=0):
        for each in sorted([*blocks_of(page), *pictures], key=lambda each: each.line):
            if isinstance(each, Picture):
                yield each, eval(each.what, namespace).to_svg()
            elif not each.needs_gpu:
                each.run(namespace, "cpu")


def main() -> int:
    for page in sorted((ROOT / "docs").glob("*.md")):
        for picture, svg in drawn(page) if pictures_of(page) else ():
            picture.file.parent.mkdir(exist_ok=True)
            picture.file.write_text(svg)
            print(picture.file.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
