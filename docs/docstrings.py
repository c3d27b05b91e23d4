"""Docstrings for the reference: their lists of arguments as lists.

The hard problem: a docstring of this package is Markdown, but for the lines "name: what it is", which
Markdown would run into one paragraph. They are turned into list items. What a node hands on of its work is
declared as `name = Field[type](path, text)`, and is shown with that type and text.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

#: "name: text", or "one, two: text", at the start of a line.
_ITEM = re.compile(r"^(`?\w+`?(?:, `?\w+`?)*): (.*)$")


class Arguments(griffe.Extension):
    """Rewrites the docstring of every object that is loaded."""

    def on_attribute_instance(self, *, node: Any, attr: Any, **_: Any) -> None:
        call = getattr(node, "value", None)
        match call:
            case ast.Call(func=ast.Subscript(value=ast.Name(id="Field")), args=[_, text]):
                attr.docstring = griffe.Docstring(ast.literal_eval(text), parent=attr)
                attr.annotation, attr.value = attr.value.function.slice, None

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    """A docstring with its arguments as list items."""
    made: list[str] = []
    in_list = False
    for line in text.split("\n"):
        item = _ITEM.match(line)
        if item is not None and (in_list or not made or not made[-1].strip()):
            made.append(f"- **{item[1]}**: {item[2]}")
            in_list = True
        elif in_list and line.startswith("    "):
            made.append(f"  {line.strip()}")
        else:
            in_list = False
            made.append(line)
    return "\n".join(made)
