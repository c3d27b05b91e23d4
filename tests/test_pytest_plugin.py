"""The pytest fixture: what it gives, what it reports, and that it disturbs nobody's run."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import breakable_cuda_graphs_pytest as plugin
from test_docs import blocks_of

PLUGIN = plugin.__name__


def registered() -> set[str]:
    """The plugins of ours that installed distributions name."""
    found = importlib.metadata.entry_points(group="pytest11")
    return {each.value for each in found if each.value.startswith("breakable_cuda_graphs")}


def run_pytest(folder: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run one test file in a fresh process that has the plugin and warns of everything."""
    (folder / "test_it.py").write_text(test)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -W error\n")
    path = os.pathsep.join(part for part in sys.path if part)
    plugin_option = [] if registered() else ["-p", PLUGIN]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugin_option, "-p", "no:cacheprovider", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""},
    )


GOOD = """
import pytest
from breakable_cuda_graphs._driver import bindings

def test_it_is_in_use(simulated_device):
    assert bindings.current().module is simulated_device.driver

def test_the_seed_is_the_tests_own(simulated_device, request):
    import zlib
    assert simulated_device.seed == zlib.crc32(request.node.nodeid.encode())

@pytest.mark.simulated_device(devices=2, shape="12.9", seed=7)
def test_a_marker_has_its_options(simulated_device):
    driver = bindings.current()
    assert (driver.cuDeviceGetCount(), driver.version, simulated_device.seed) == (2, 12090, 7)
"""


def test_the_fixture_gives_a_device_as_the_marker_says(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, GOOD)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


BAD = """
from breakable_cuda_graphs._driver import bindings
from breakable_cuda_graphs._driver.handles import StreamHandle

def test_wrong_value(simulated_device):
    assert simulated_device.seed == -1

def test_second_release(simulated_device):
    driver = bindings.current()
    stream = driver.cuStreamCreate(1)
    driver.cuStreamDestroy(stream)
    driver.module.cuStreamDestroy(stream)

def test_lost(simulated_device):
    bindings.current().cuStreamCreate(1)

kept = []
def test_kept(simulated_device):
    kept.append(StreamHandle.create(bindings.current()))

def test_open(simulated_device):
    driver = bindings.current()
    stream = StreamHandle.create(driver)
    driver.cuStreamBeginCapture(stream.value, bindings.types.CUstreamCaptureMode(2))
    stream.detach()
"""


def test_misuse_is_an_error_of_the_test_that_did_it(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, BAD, "-rfE")
    assert "1 failed, 4 passed, 3 errors" in done.stdout, done.stdout + done.stderr
    for name in ("second_release", "lost", "open"):
        assert f"ERROR test_it.py::test_{name}" in done.stdout
    assert "a second time (first: cuStreamDestroy)" in done.stdout
    assert "was not released" in done.stdout
    assert "1 captures are open at the end" in done.stdout


def test_a_failed_test_shows_the_seed(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, BAD, "-k", "wrong_value")
    assert "seed=" in done.stdout.partition("simulated device")[2], done.stdout


BYSTANDER = """
import sys

def test_nothing_came_in():
    modules = {"torch", "cupy", "numba", "cuda.bindings", "breakable_cuda_graphs"}
    assert not modules & set(sys.modules)
"""


def test_a_run_that_does_not_ask_for_it_imports_nothing(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, BYSTANDER)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_tests_in_the_guide_pass(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    guide = Path(__file__).resolve().parents[1] / "docs" / "testing.md"
    code = "\n".join(block.code for block in blocks_of(guide))
    wanted = code.count("def test_") + 1  # one of them for two values
    assert f"{wanted} passed" in run_pytest(tmp_path, code).stdout


def test_without_torch_it_works_too(tmp_path: Path) -> None:
    test = "import sys\nsys.modules['torch'] = None\n" + GOOD
    assert "3 passed" in run_pytest(tmp_path, test).stdout


def test_the_distribution_registers_it() -> None:
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads(pyproject.read_text())
    assert list(project["project"]["entry-points"]["pytest11"].values()) == [PLUGIN]
    assert project["tool"]["setuptools"]["py-modules"] == [PLUGIN]


def test_an_installed_distribution_has_the_entry_point() -> None:
    if not registered():
        pytest.skip("installed before the fixture came, or not at all")
    assert registered() == {PLUGIN}


def test_pytest_in_a_process_that_has_imported_the_library_is_not_warned() -> None:
    """pytest warns of packages with plugins that are imported before it, but for marked ones."""
    import breakable_cuda_graphs

    assert "PYTEST_DONT_REWRITE" in (breakable_cuda_graphs.__doc__ or "")
