"""The page of errors by message knows every message, and none that is not one.

Messages are read off the source of each room's errors.py, with a gap where a value goes in. A row of the
page is how
a message begins.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from breakable_cuda_graphs import errors

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
PACKAGE = ROOT / "src" / "breakable_cuda_graphs"
GAP = "…"

#: Names that whole messages have there.
_WHOLE = ("text", "error", "notes")


_BUILT_IN = ("ValueError", "TypeError", "RuntimeError")


def templates() -> dict[str, list[str]]:
    """The texts that the functions of all errors.py build, with gaps where values go."""
    found: dict[str, list[str]] = {}
    for function in builders():
        body: list[ast.stmt] = []
        if isinstance(function, ast.FunctionDef):
            name, body = function.name, function.body[bool(ast.get_docstring(function)) :]
        elif isinstance(function, ast.Assign) and _text(function.value) is not None:
            name, body = ast.unparse(function.targets[0]), [function]
        texts = [text for statement in body for text in _texts(statement)]
        if texts:
            found[name] = [text for text in texts if _is_whole(text)]
    return {name: texts for name, texts in found.items() if texts}


def builders() -> Iterator[ast.stmt]:
    """What builds errors: all of the files of errors, and what in distributed.py returns one."""
    for path in sorted(PACKAGE.rglob("errors.py")):
        yield from ast.parse(path.read_text()).body
    for function in ast.parse((PACKAGE / "distributed.py").read_text()).body:
        if not isinstance(function, ast.FunctionDef) or function.name.startswith("_"):
            continue
        if ast.unparse(function.returns or function) in ("str", "RankError", *_BUILT_IN):
            yield function


def _is_whole(text: str) -> bool:
    """Not a word or two, and not the end of another text."""
    return len(text.replace(GAP, "")) >= 25 and not text[0].isspace()


def _texts(node: ast.AST) -> Iterator[str]:
    """The texts in a piece of code, without those that are given a name to become part of another."""
    if isinstance(node, ast.Assign):
        name = ast.unparse(node.targets[0])
        if name not in _WHOLE and not name.isupper():
            return
    text = _text(node)
    if text is not None:
        yield re.sub(f"{GAP}+", GAP, text)
        return
    for child in ast.iter_child_nodes(node):
        yield from _texts(child)


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else GAP for part in node.values
        )
    if isinstance(node, ast.BinOp):
        left, right = _text(node.left), _text(node.right)
        return None if left is None or right is None else left + right
    return None


def messages() -> list[str]:
    """The beginnings of messages on the page: the first cells of its tables."""
    rows = re.findall(r"^\| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    return [row for row in rows if row not in ("message", "note")]


def test_every_error_class_is_on_the_page_of_errors() -> None:
    page = PAGE.read_text()
    for name in errors.__all__:
        assert re.search(rf"\b{name}\b", page), f"docs/errors.md does not speak of {name}"


@pytest.mark.parametrize("name", templates())
def test_every_message_is_on_the_page_of_errors(name: str) -> None:
    """A new message needs a row in docs/errors.md: how it begins, what it means, what to do."""
    known = messages()
    for text in templates()[name]:
        assert any(text.startswith(each) for each in known), (
            f'docs/errors.md has no row for errors.{name}: "{text[:60]}"'
        )


def test_every_message_on_the_page_of_errors_is_one() -> None:
    texts = [text for each in templates().values() for text in each] + short_texts()
    stale = [row for row in messages() if not any(text.startswith(row) for text in texts)]
    assert stale == []


def short_texts() -> list[str]:
    """Texts that are constants of the module, or too short for `templates`."""
    texts = [text for builder in builders() for text in _texts(builder)]
    return [re.sub(f"{GAP}+", GAP, text) for text in texts]
