"""Imports point down, and only the lowest floor knows the bindings.

The picture is in DESIGN.md; here it is read off the source, imports inside of functions included.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "breakable_cuda_graphs"
ROOT = Path(__file__).resolve().parents[1] / "src" / PACKAGE

#: The floors, from the lowest up. A module may import its own floor and those below.
LEAVES, DRIVER, SIMULATOR, FRAMEWORKS, PUBLIC = range(5)
FLOORS = {
    "errors": LEAVES,
    "streams": LEAVES,
    "structures": LEAVES,
    "_driver": DRIVER,
    "simulator": SIMULATOR,
    "frameworks": FRAMEWORKS,
}

#: The arrows that point up, and why.
EXCEPTIONS = {
    # The first use of a driver makes the simulated one, if the environment says so.
    ("_driver.bindings", "simulator"),
}


class Import(NamedTuple):
    module: str  # who imports, without the package's name
    target: str  # what, absolute
    line: int
    at_run_time: bool  # not only for the type checker

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of a file, relative ones made absolute."""
    tree = ast.parse(path.read_text())
    for_checker = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    here = [PACKAGE, *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            # `from .x import y`: y may be a module of x, or a name in it.
            targets = [resolve(stem, alias.name) for alias in node.names]
        else:
            continue
        for target in targets:
            yield Import(name_of(path), target, node.lineno, id(node) not in for_checker)


def resolve(stem: str, name: str) -> str:
    if not stem.startswith(PACKAGE):
        return stem
    inside = ROOT.joinpath(*stem.split(".")[1:])
    is_module = (inside / f"{name}.py").exists() or (inside / name / "__init__.py").exists()
    return f"{stem}.{name}" if is_module else stem


def floor(module: str) -> int:
    """The floor of a module of the package, given without the package's name."""
    return FLOORS.get(module.split(".")[0], PUBLIC)


FILES = sorted(ROOT.rglob("*.py"))
IMPORTS = [each for path in FILES for each in imports_of(path)]
INSIDE = [
    each._replace(target=each.target.removeprefix(PACKAGE).lstrip("."))
    for each in IMPORTS
    if each.target == PACKAGE or each.target.startswith(f"{PACKAGE}.")
]


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 30
    assert len(INSIDE) > 100
    assert {floor(name_of(path)) for path in FILES} == set(range(5))


def test_imports_point_down() -> None:
    upward = [
        each
        for each in INSIDE
        if floor(each.target) > floor(each.module) and (each.module, each.target) not in EXCEPTIONS
    ]
    assert not upward, "\n".join(map(str, upward))


def test_every_exception_is_needed() -> None:
    assert {(each.module, each.target) for each in INSIDE} >= EXCEPTIONS


def test_only_the_lowest_floor_imports_the_bindings() -> None:
    strangers = [
        each
        for each in IMPORTS
        if each.target.split(".")[0] == "cuda" and floor(each.module) != DRIVER
    ]
    assert not strangers, "\n".join(map(str, strangers))
    assert any(each.target.startswith("cuda.bindings") for each in IMPORTS)


@pytest.mark.parametrize("library", ["torch", "cupy", "numba"])
def test_the_lowest_floors_know_no_framework(library: str) -> None:
    allowed = {"simulator.tensors"}  # the one part of the simulator that needs torch
    strangers = [
        each
        for each in IMPORTS
        if each.target.split(".")[0] == library
        and floor(each.module) < FRAMEWORKS
        and each.module not in allowed
    ]
    assert not strangers, "\n".join(map(str, strangers))


def test_no_module_imports_itself_by_a_detour() -> None:
    """Imports at the top of a file, those for the type checker left out, have no cycle."""
    top = {name_of(path): set[str]() for path in FILES}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            lines = {node.lineno} if isinstance(node, (ast.Import, ast.ImportFrom)) else set()
            for each in INSIDE:
                if each.module == name_of(path) and each.line in lines and each.target in top:
                    top[each.module].add(each.target)
    # A package's __init__ is imported by all that is in it: only modules count.
    packages = {name_of(path) for path in FILES if path.name == "__init__.py"}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above, module])
        if module in done:
            return
        for target in sorted(top[module] - packages):
            visit(target, (*above, module))
        done.add(module)

    for module in sorted(set(top) - packages):
        visit(module, ())


def test_each_file_says_what_its_hard_problem_is() -> None:
    """The house rule: a file has one job, and begins by saying what is hard about it."""
    silent = [
        path.relative_to(ROOT)
        for path in FILES
        if path.name != "__init__.py"
        and "hard problem" not in (ast.get_docstring(ast.parse(path.read_text())) or "")
    ]
    assert not silent


# ---------------------------------------------------------------- the picture's words

_TABLES = ("The files of the public floor", "Each file says in its first lines")


def test_design_names_every_file_of_its_tables() -> None:
    """A file that comes, goes or is renamed changes the tables of layers with it."""
    text = (ROOT.parents[1] / "DESIGN.md").read_text()
    begin, end = (text.index(words) for words in _TABLES)
    named = {name.strip("/") for name in re.findall(r"`([a-z_]+/?)`", text[begin:end])}
    leaves = {name for name, floor in FLOORS.items() if floor == LEAVES}
    files = {
        path.stem if path.is_file() else path.name
        for folder in (ROOT, ROOT / "frameworks", ROOT / "frameworks" / "pytorch")
        for path in folder.iterdir()
        if path.suffix == ".py" or path.is_dir()
    }
    folders = {"_driver", "simulator", "frameworks", "pytorch", "__pycache__"}
    assert files - named - leaves - folders - {"__init__"} == set()
    known = files | {path.stem for path in ROOT.rglob("*.py")}
    assert named - known == {"capture_if", "capture_while", "rebind"}  # calls, not files


@pytest.mark.parametrize(
    "folder", ["_driver", "frameworks", "frameworks/pytorch", "simulator", "explaining", "pages"]
)
def test_a_folder_says_what_each_of_its_files_is_for(folder: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    named = set(re.findall(r"(?:^|  )([a-z0-9_]+\.py)  ", text, re.MULTILINE))
    assert named == {path.name for path in (ROOT / folder).glob("*.py")} - {"__init__.py"}
