"""The house: rooms that import only what stands below them, files that can be read in one sitting.

import-linter holds the arrows (`pyproject.toml`); what it cannot say is here, read off the source.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "breakable_cuda_graphs"
REPOSITORY = Path(__file__).resolve().parents[1]
ROOT = REPOSITORY / "src" / PACKAGE
FILES = sorted(ROOT.rglob("*.py"))
ROOMS = sorted(path.parent for path in FILES if path.name == "__init__.py" and path.parent != ROOT)

#: The one part of the simulator that needs torch.
TENSORS = ("simulator/tensors.py", "simulator/tensor_places.py", "simulator/torch_modes.py")


class Import(NamedTuple):
    module: str  # the file that imports
    target: str  # what
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> Iterator[Import]:
    """Every absolute import of a file: those of other packages."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            targets = [str(node.module)]
        else:
            continue
        for target in targets:
            yield Import(place(path), target, node.lineno)


IMPORTS = [each for path in FILES for each in imports_of(path)]


def checked(folder: Path) -> subprocess.CompletedProcess[str]:
    """What import-linter says of the package in a folder, by the project's own contracts."""
    command = [
        sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()",
        "--config", str(REPOSITORY / "pyproject.toml"), "--no-cache",
    ]  # fmt: skip
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(folder), "PATH": ""},
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, to break."""
    shutil.copytree(ROOT, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / PACKAGE


def test_imports_point_down_and_have_no_circles(copy: Path) -> None:
    done = checked(copy.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("_driver/handles.py", "from ..graph import graph"),
        ("graph/text.py", "def late():\n    from ..sequence import plan"),
        (
            "sequence/plan.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from ..replay import sequence",
        ),
        ("graph/arguments.py", "from . import graph"),
    ],
    ids=["upward", "upward, in a function", "upward, for the type checker", "a circle in a room"],
)
def test_an_arrow_that_points_up_is_found(copy: Path, room: str, line: str) -> None:
    file = copy / room
    file.write_text(f"{file.read_text()}\n{line}\n")
    assert checked(copy.parent).returncode != 0


def test_a_room_that_no_layer_names_is_found(copy: Path) -> None:
    (copy / "attic.py").write_text("")
    assert checked(copy.parent).returncode != 0


def test_only_the_lowest_room_imports_the_bindings() -> None:
    bindings = [each for each in IMPORTS if each.target.split(".")[0] == "cuda"]
    assert bindings
    strangers = [each for each in bindings if not each.module.startswith("_driver/")]
    assert not strangers, "\n".join(map(str, strangers))


@pytest.mark.parametrize("library", ["torch", "cupy", "numba"])
def test_the_lowest_rooms_know_no_framework(library: str) -> None:
    strangers = [
        each
        for each in IMPORTS
        if each.target.split(".")[0] == library
        and each.module.startswith(("_driver/", "simulator/", "errors"))
        and each.module not in TENSORS
    ]
    assert not strangers, "\n".join(map(str, strangers))


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 100
    assert len(ROOMS) > 8


# ---------------------------------------------------------------- sizes and names


def test_the_top_has_few_names() -> None:
    names = {path.name for path in ROOT.iterdir()} - {"py.typed", "__pycache__"}
    assert len(names) <= 17, sorted(names)


def test_no_file_is_too_long_to_be_read_in_one_sitting() -> None:
    files = [path for path in ROOT.rglob("*") if path.suffix in (".py", ".js", ".css", ".html")]
    lengths = {place(path): len(path.read_text().splitlines()) for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > 500} == {}


def test_no_room_is_crowded() -> None:
    counts = {place(room): len(list(room.glob("*.py"))) for room in ROOMS}
    assert {name: count for name, count in counts.items() if count > 25} == {}


def test_a_class_name_names_one_thing() -> None:
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(place(path))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_no_private_name_crosses_files() -> None:
    borrowed = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                private = [a.name for a in node.names if re.match(r"_[a-zA-Z]", a.name)]
                borrowed += [f"{place(path)}: {name}" for name in private if name != "_driver"]
    assert not borrowed


def test_each_file_says_what_its_hard_problem_is() -> None:
    """The house rule: a file has one job, and begins by saying what is hard about it."""
    silent = [
        place(path)
        for path in FILES
        if path.name != "__init__.py"
        and "hard problem" not in (ast.get_docstring(ast.parse(path.read_text())) or "")
    ]
    assert not silent


@pytest.mark.parametrize("room", ROOMS, ids=place)
def test_a_room_says_what_each_of_its_files_is_for(room: Path) -> None:
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    named = set(re.findall(r"(?:^|  )([a-z0-9_]+\.py)  ", text, re.MULTILINE))
    assert named == {path.name for path in room.glob("*.py")} - {"__init__.py"}


# ---------------------------------------------------------------- the picture's words


def test_design_names_every_room() -> None:
    """A room that comes, goes or is renamed changes the picture with it."""
    text = (REPOSITORY / "DESIGN.md").read_text()
    picture = text[text.index("```text") : text.index("```", text.index("```text") + 3)]
    drawn = set(re.findall(r"^\s*([a-z_]+)/", picture, re.MULTILINE))
    assert drawn == {place(room) for room in ROOMS if room.parent == ROOT}
