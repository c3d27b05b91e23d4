"""`explain` in processes without torch: what CuPy's and Numba's calls show, and trial captures tell."""

from __future__ import annotations

import pytest

from .libraries import ROOT, run_program

pytestmark = pytest.mark.gpu

PROGRAMS = ROOT / "tests" / "gpu" / "programs"


@pytest.mark.parametrize("library", ["cupy", "numba"])
def test_each_blocker_is_found_in_its_function(library: str) -> None:
    assert run_program(PROGRAMS / f"explain_{library}.py", library).endswith("ok\n")
