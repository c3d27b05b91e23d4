"""A template, its style, its script and its data as one page that can be mailed and opened anywhere.

The hard problem: what is shown comes from others' code (kernel names, labels, file names) and must
never become part of the page itself. So nothing is written into the markup but the title, escaped;
all the rest is data in one JSON block that cannot end early, and scripts show it as text. The page's
own policy forbids it to load anything.

HTML, "Restrictions for contents of script elements":
https://html.spec.whatwg.org/multipage/scripting.html
"""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from typing import TYPE_CHECKING, Any

from ..html import of as data_of

if TYPE_CHECKING:
    from ...replay.report import Profile
    from ...replay.sequence import CUDAGraphSequence


_MARK = re.compile(r"\{\{(\w+)\}\}")


def profile_page(report: Profile) -> str:
    """The page of a profile."""
    data = json.loads(report.to_json())
    for row, shown in zip(report.rows, data["rows"], strict=True):
        shown["label"] = row.label
    return _page("profile", f"Profile of {report.sequence}", data)


def sequence_page(sequence: CUDAGraphSequence, other: CUDAGraphSequence | None = None) -> str:
    """The page of a sequence, or of two side by side."""
    title = repr(sequence) if other is None else f"{sequence!r} and {other!r}"
    return _page("sequence", title, data_of(sequence, other))


def _page(name: str, title: str, data: Any) -> str:
    parts = {
        "title": html.escape(title),
        "style": _file("page.css") + _file(f"{name}.css"),
        "script": _file("page.js") + _file(f"{name}.js"),
        "data": _as_data(data),
    }
    return _MARK.sub(lambda mark: parts[mark[1]], _file(f"{name}.html"))


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _as_data(data: Any) -> str:
    """JSON that no parser of HTML sees an end, a comment or an entity in."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
