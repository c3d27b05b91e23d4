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
from typing import Any

#: The scripts of each page; they share their names.
_SCRIPTS = {
    "profile": ("page.js", "profile.js"),
    "sequence": ("page.js", "layout.js", "sequence.js"),
}

_MARK = re.compile(r"\{\{(\w+)\}\}")


def page(name: str, title: str, data: Any) -> str:
    """The page whose template, style and script have a name ("profile", "sequence")."""
    parts = {
        "title": html.escape(title),
        "style": _file("page.css") + _file(f"{name}.css"),
        "script": "".join(map(_file, _SCRIPTS[name])),
        "data": _as_data(data),
    }
    return _MARK.sub(lambda mark: parts[mark[1]], _file(f"{name}.html"))


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _as_data(data: Any) -> str:
    """JSON that no parser of HTML sees an end, a comment or an entity in."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
