"""The docs site's own part: README.md and DESIGN.md become pages of it.

The hard problem: both lie beside docs/ and link into it, as people read them in a checkout, and a site
has no "beside". So they are added under names of their own, and links between them and the guides are
written anew on the way, in both directions; a link that then leads nowhere fails the build.

https://www.mkdocs.org/user-guide/configuration/#hooks
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]

#: Files beside docs/, and what they are called on the site.
OUTSIDE = {"README.md": "readme.md", "DESIGN.md": "design.md"}

_LINK = re.compile(r"\]\(([^)\s]+)\)")

#: Links to files of the repository that are no pages: the site shows their text only.
_BESIDE = re.compile(r"\[([^\]]+)\]\(\.\./(?:examples|tests)[^)\s]*\)")


def on_files(files: Files, config: Any) -> Files:
    """The files of the site, and the two that lie outside."""
    for source, page in OUTSIDE.items():
        text = _LINK.sub(_from_root, (ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The guides' links to the two; of links to other files beside docs/, the text."""
    return _LINK.sub(_from_docs, _BESIDE.sub(r"\1", markdown))


def _from_root(link: re.Match[str]) -> str:
    """A link in a file beside docs/, as the site has it."""
    target = OUTSIDE.get(link[1].partition("#")[0])
    if target is not None:
        return f"]({target}{link[1][len(link[1].partition('#')[0]) :]})"
    return f"]({link[1].removeprefix('docs/')})"


def _from_docs(link: re.Match[str]) -> str:
    """A link in docs/ to a file beside it, as the site has it."""
    file, mark, anchor = link[1].partition("#")
    target = OUTSIDE.get(file.removeprefix("../")) if file.startswith("../") else None
    return link[0] if target is None else f"]({target}{mark}{anchor})"
