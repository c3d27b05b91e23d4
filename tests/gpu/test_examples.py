"""Each program in examples/ runs as it stands, in a process of its own."""

from __future__ import annotations

import pytest

from . import libraries
from .libraries import ROOT, run_program

pytestmark = pytest.mark.gpu

EXAMPLES = {
    "with_torch.py": ("torch",),
    "with_cupy.py": ("cupy",),
    "with_numba.py": ("numba",),
    "with_cuda_core.py": ("cuda.core",),
    "with_the_driver.py": (),
    "mixed.py": ("torch", "cupy", "triton"),
}

#: Started once for each rank: tests/gpu/test_tensor_parallel.py.
LAUNCHED = ("tensor_parallel.py",)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_ends_well(name: str) -> None:
    if "triton" in EXAMPLES[name]:
        libraries.triton()
    printed = run_program(ROOT / "examples" / name, *EXAMPLES[name])
    assert printed.endswith("the same as eager\n")


def test_every_example_is_run() -> None:
    """`tensor_parallel.py`, which needs several processes, in test_tensor_parallel.py."""
    named = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert named == {*EXAMPLES, "tensor_parallel.py"}
