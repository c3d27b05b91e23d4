"""The README's words are those of the code: its reference, its messages, its two command lines."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import breakable_cuda_graphs
from breakable_cuda_graphs import breakable_graph, doctor, errors, no_graph
from breakable_cuda_graphs._driver import bindings
from breakable_cuda_graphs.capture import refusals
from breakable_cuda_graphs.simulator import simulated_device

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


# ---------------------------------------------------------------- the reference


def reference() -> str:
    return README.read_text().split("\n## Reference\n")[1]


def test_the_reference_names_all_that_is_public() -> None:
    for name in breakable_cuda_graphs.__all__:
        assert re.search(rf"\b{name}\b", reference()), f"{name} is not in the README's reference"


def test_the_reference_has_the_signature_of_breakable_graph() -> None:
    [written] = re.findall(r"^### `breakable_graph\((.*)\)`$", reference(), re.MULTILINE)
    assert described(f"({written})") == described_by(inspect.signature(breakable_graph))


def test_the_reference_has_the_signature_of_no_graph() -> None:
    [written] = re.findall(r"`no_graph\((\*, .*)\)`$", reference(), re.MULTILINE)
    whole = described_by(inspect.signature(no_graph))
    assert described(f"({written})") == [each for each in whole if each[0] != "function"]


def test_the_reference_has_the_signature_of_simulated_device() -> None:
    [written] = re.findall(r"^`simulated_device\((.*)\)`:", reference(), re.MULTILINE)
    assert described(f"({written})") == described_by(inspect.signature(simulated_device))


@pytest.mark.parametrize("thing", [breakable_graph, no_graph])
def test_every_option_is_explained(thing: Any) -> None:
    for name in inspect.signature(thing).parameters:
        if name != "function":
            assert f"\n| `{name}` |" in reference(), f"{name} is not explained"


@pytest.mark.parametrize("name", dir(breakable_cuda_graphs.CUDAGraphSequence))
def test_every_method_of_a_sequence_is_explained(name: str) -> None:
    if not name.startswith("_"):
        assert re.search(rf"^\| `{name}(\(.*\))?` \|", reference(), re.MULTILINE), name


Parameters = list[tuple[str, str, bool]]


def described(signature: str) -> Parameters:
    """(name, default, keyword only) of each parameter as it is written."""
    arguments = ast.parse(f"def f{signature}: ...").body[0].args  # type: ignore[attr-defined]
    plain = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    return [
        (argument.arg, ast.unparse(default) if default is not None else "", only)
        for arguments_, defaults, only in (
            (arguments.args, plain, False),
            (arguments.kwonlyargs, arguments.kw_defaults, True),
        )
        for argument, default in zip(arguments_, defaults, strict=True)
    ]


def described_by(signature: inspect.Signature) -> Parameters:
    """The same of a function."""
    return [
        (
            name,
            "" if parameter.default is parameter.empty else repr(parameter.default),
            parameter.kind is parameter.KEYWORD_ONLY,
        )
        for name, parameter in signature.parameters.items()
    ]


def test_the_tree_of_errors_is_the_one_in_the_code() -> None:
    for name in errors.__all__:
        assert re.search(rf"(\+-- |\| ){name} ", reference()) or name in reference()
        for field in getattr(errors, name).__annotations__:
            assert f".{field}" in reference(), f"{name}.{field}"


def test_the_messages_of_the_table_are_those_of_the_errors() -> None:
    """The README quotes messages, so that a reader finds them: they have to be the real ones."""
    texts = " ".join(
        node.value
        for path in Path(errors.__file__).parent.rglob("errors.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    rows = re.findall(r"^\| `(\w+Error)`: (.*?) \|", README.read_text(), re.MULTILINE)
    assert len(rows) >= 10
    for error, quotes in rows:
        assert hasattr(errors, error)
        for quote in re.findall(r'"([^"]+)"', quotes):
            assert quote.removesuffix(" ...") in texts, f"no {error} says {quote!r}"


def test_the_variables_are_those_that_the_code_reads() -> None:
    variables = set(re.findall(r"^\| `(BREAKABLE_\w+)=1` \|", reference(), re.MULTILINE))
    assert variables == {bindings.SIMULATOR_VARIABLE, refusals.VARIABLE}


def test_the_versions_are_those_of_the_doctor() -> None:
    for part in doctor.RUN_ON_A_DEVICE.split(", "):
        assert part in reference(), part


# ---------------------------------------------------------------- commands


def command(name: str) -> str:
    """The one line that is marked with this name."""
    [found] = re.findall(
        rf"^<!-- command: {name} -->\n```sh\n([^\n]+)\n```$", README.read_text(), re.MULTILINE
    )
    return str(found)


def test_each_command_is_one_line_that_installs_and_runs() -> None:
    for name, last in [("demo", "-m breakable_cuda_graphs demo"), ("tests", "-m pytest")]:
        assert command(name).startswith("python3 -m venv .venv && ")
        assert " -c constraints.txt -e " in command(name)
        assert command(name).endswith(last)


def test_ci_runs_the_readmes_own_line() -> None:
    shown = subprocess.run(
        ["bash", str(ROOT / ".ci" / "run"), "--show"], capture_output=True, text=True, timeout=30
    )
    assert shown.stdout == command("tests") + "\n", shown.stderr


def test_the_constraint_names_one_torch_that_the_package_admits() -> None:
    tomllib = pytest.importorskip("tomllib")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    [pinned] = [line for line in lines if line.startswith("torch==")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [admitted] = project["optional-dependencies"]["torch"]
    oldest = tuple(map(int, admitted.removeprefix("torch>=").split(".")))
    assert tuple(map(int, pinned.removeprefix("torch==").split("."))) >= oldest
