"""The package without torch: it imports, its tools work, and the tests of its neutral core pass.

Torch is blocked in a process of its own, as if it were not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

_HEAD = """
import runpy, sys
sys.modules.update(dict.fromkeys(("torch", "cupy", "numba", "triton")))
sys.argv[:] = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run(module: str, *arguments: str, simulated: bool = True) -> str:
    """What `python -m module` prints where no framework is installed; it has to end well."""
    places = [str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    if simulated:
        environment["BREAKABLE_CUDA_GRAPHS_SIMULATOR"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", _HEAD, module, *arguments],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_doctor_says_that_torch_is_not_there():
    assert "torch" in run("breakable_cuda_graphs", "doctor")


def test_the_neutral_core_passes_its_tests():
    parts = [
        "_driver",
        "frameworks/test_raw.py",
        "frameworks/test_cupy.py",
        "capture/test_refusals.py",
    ]
    printed = run("pytest", "-q", "-p", "no:cacheprovider", *(str(TESTS / part) for part in parts))
    assert " passed" in printed
    assert " failed" not in printed


def test_every_other_test_is_skipped_by_name():
    """A file that imports torch before it asks for it would end the whole run."""
    printed = run("pytest", "-q", "-p", "no:cacheprovider", "--collect-only", str(TESTS))
    assert "error" not in printed.splitlines()[-1]
