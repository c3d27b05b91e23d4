"""What the package shows, and what importing it does not do."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

import breakable_cuda_graphs
from breakable_cuda_graphs import errors
from breakable_cuda_graphs.sequence.state import SequenceState

PUBLIC = [
    "BreakableCUDAGraph",
    "CUDAError",
    "CUDAGraphSequence",
    "CaptureError",
    "EagerSegment",
    "EscapedWorkWarning",
    "Graph",
    "GraphExec",
    "GraphSegment",
    "ProcessError",
    "RankError",
    "ReplayError",
    "StaleInputError",
    "UnjoinedStreamError",
    "UpdateError",
    "WorkspaceWarning",
    "annotate",
    "breakable_graph",
    "capture_if",
    "capture_while",
    "explain",
    "force_no_graph",
    "is_in_breakable_graph",
    "no_graph",
]


def test_the_public_names_are_these() -> None:
    """A name that comes or goes is a decision: change the list with it."""
    assert sorted(breakable_cuda_graphs.__all__) == PUBLIC


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    for name in PUBLIC:
        thing = getattr(breakable_cuda_graphs, name)
        assert thing.__doc__, f"{name} has no docstring"
        assert thing.__module__.startswith("breakable_cuda_graphs")


#: What the reference shows beside the public names: modules, and classes that one gets, not makes.
SHOWN = {
    "distributed": None,
    "nodes": None,
    "simulator": None,
    "replay.report": ("Profile", "Row", "TimelineEntry"),
    "explaining": ("Check", "Explanation", "Finding", "Mark"),
    "graph.part": ("Part",),
    "graph.diff": ("Change",),
    "sequence.rebinding.report": ("Doubt", "Rebound"),
}


def shown() -> Iterator[tuple[str, object]]:
    """Everything public with its name: functions and classes, and what those have."""
    modules = [(breakable_cuda_graphs, PUBLIC)]
    for name, things in SHOWN.items():
        try:
            module = importlib.import_module(f"breakable_cuda_graphs.{name}")
        except ImportError:  # ranks need torch
            continue
        modules.append((module, module.__all__ if things is None else things))
    for module, names in modules:
        for name in names:
            thing = getattr(module, name)
            yield f"{module.__name__}.{name}", thing
            if inspect.isclass(thing):
                members = dict(vars(thing))
                if issubclass(thing, SequenceState):  # the half of a sequence that others share
                    members |= vars(SequenceState)
                for inner, value in members.items():
                    function = value.fget if isinstance(value, property) else value
                    function = getattr(function, "__func__", function)
                    if not inner.startswith("_") and callable(function):
                        yield f"{module.__name__}.{name}.{inner}", function


def test_everything_that_is_public_says_what_it_does() -> None:
    things = dict(shown())
    assert len(things) > 200
    assert [name for name, thing in things.items() if not thing.__doc__] == []


def test_all_errors_are_runtime_errors_and_public() -> None:
    for name in errors.__all__:
        kind = UserWarning if name.endswith("Warning") else RuntimeError
        assert issubclass(getattr(errors, name), kind)
        assert getattr(breakable_cuda_graphs, name) is getattr(errors, name)


def test_the_version_is_that_of_the_distribution() -> None:
    metadata = pytest.importorskip("importlib.metadata")
    try:
        installed = metadata.version("breakable-cuda-graphs")
    except metadata.PackageNotFoundError:
        pytest.skip("the package is not installed, only found")
    assert breakable_cuda_graphs.__version__ == installed


def run(code: str) -> str:
    """The output of a fresh interpreter that finds the package."""
    path = os.pathsep.join(part for part in sys.path if part)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


LOOK = """
import sys
{before}
import breakable_cuda_graphs
{after}
from breakable_cuda_graphs._driver import bindings
print(sorted({{"torch", "cupy", "numba"}} & set(sys.modules)))
print(bindings.started())
print("libcuda" in open("/proc/self/maps").read())
"""


def test_importing_imports_no_framework_and_touches_no_driver() -> None:
    assert run(LOOK.format(before="", after="")).split("\n")[:3] == ["[]", "False", "False"]


def test_importing_after_torch_touches_no_driver() -> None:
    pytest.importorskip("torch")
    shown = run(LOOK.format(before="import torch", after=""))
    assert shown.split("\n")[:2] == ["['torch']", "False"]


def test_marking_and_calling_a_function_outside_of_a_capture_touches_no_driver() -> None:
    after = """
@breakable_cuda_graphs.no_graph
def f(x):
    return x + 1
assert f(1) == 2 and not breakable_cuda_graphs.is_in_breakable_graph()
breakable_cuda_graphs.force_no_graph()
breakable_cuda_graphs.CUDAGraphSequence().replay()
"""
    assert run(LOOK.format(before="", after=after)).split("\n")[:3] == ["[]", "False", "False"]


def test_the_look_would_see_a_driver_in_use() -> None:
    """The test of the test: with a first use, it answers otherwise."""
    after = "breakable_cuda_graphs.CUDAGraphSequence().pool()"
    before = "import os; os.environ['BREAKABLE_CUDA_GRAPHS_SIMULATOR'] = '1'"
    assert run(LOOK.format(before=before, after=after)).split("\n")[1] == "True"
