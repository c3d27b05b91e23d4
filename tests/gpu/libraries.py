"""The libraries that the device tests work with, each loaded in one place.

The hard problem: older versions of Numba ask numpy, as they are imported, for a name that it has
dropped. It has to be there first, in this process and in every program that a test starts.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Numba warns of small grids; the tests have no others.
_SMALL_GRIDS = ("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")

#: Run before a program's own code; `runpy` then runs it as a script.
_HEAD = """
import numpy, runpy, sys
if not hasattr(numpy, "row_stack"):
    numpy.row_stack = numpy.vstack
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def numba_cuda() -> Any:
    """`numba.cuda`; skips where it is not installed."""
    import numpy

    os.environ.setdefault(*_SMALL_GRIDS)
    if not hasattr(numpy, "row_stack"):
        numpy.row_stack = numpy.vstack  # type: ignore[attr-defined]
    return pytest.importorskip("numba.cuda")


def cupy() -> Any:
    """CuPy; skips where it is not installed."""
    return pytest.importorskip("cupy")


def triton() -> Any:
    """Triton; skips where it is not installed, or has no compiler to build its launchers with."""
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("needs a C compiler")
    return pytest.importorskip("triton")


def run_program(path: Path, *needs: str, timeout: float = 120) -> str:
    """What a program printed that runs in an interpreter of its own, and has to end well."""
    for name in needs:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    places = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", _HEAD, str(path)],
        env={
            **dict([_SMALL_GRIDS]),
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{path.name} ended with {done.returncode}:\n{done.stderr[-3000:]}"
    return done.stdout
