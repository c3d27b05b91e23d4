"""Run tests of capture and replay under compute-sanitizer's memcheck, and say how many errors it saw.

    python tests/gpu/memcheck.py              # about a minute on an H200
    python tests/gpu/memcheck.py tests/gpu/test_memory.py -k pool

The hard problem: memcheck slows kernels and torch's start so much that a whole suite takes an hour. So
a few tests are chosen that capture, replay, edit and free in all the usual ways, and random programs,
few of them. Errors of calls are not counted (`--report-api-errors no`): tests provoke them on purpose;
what memcheck is for are accesses of kernels to memory that is not theirs. And no call stacks are shown: to
have them, compute-sanitizer (2025.3) keeps the Python frames of launches for good, with all that lives in
them, so that no tensor of a test would ever be freed.

compute-sanitizer comes with the CUDA toolkit, or from pip as nvidia-cuda-sanitizer-api; a path to it
can be given in COMPUTE_SANITIZER. The exit status is 0 only if tests passed and no error was seen.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SELECTION = [
    "tests/gpu/test_programs.py",
    "tests/gpu/test_quick_start.py",
    "tests/gpu/test_pools.py",
    "tests/conformance/test_executables.py",
    "tests/conformance/test_conditionals.py",
]

#: Random programs under memcheck, in place of the usual hundreds.
PROGRAMS = "12"

ERROR_STATUS = 86


def sanitizer() -> str | None:
    """The path of compute-sanitizer, or nothing."""
    given = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer")
    places = [
        "/usr/local/cuda*/bin/compute-sanitizer",
        "/usr/local/cuda*/compute-sanitizer/compute-sanitizer",
        *(f"{path}/nvidia/cu*/bin/compute-sanitizer" for path in sys.path),
        *(f"{path}/nvidia/cu*/compute-sanitizer/compute-sanitizer" for path in sys.path),
    ]
    found = [path for pattern in places for path in sorted(glob.glob(pattern))]
    return given or (found[-1] if found else None)


def command(tool: str, selection: list[str]) -> list[str]:
    """memcheck over pytest over the selected tests."""
    check = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--leak-check", "no"]
    check += ["--show-backtrace", "no"]
    check += ["--error-exitcode", str(ERROR_STATUS), "--print-limit", "20"]
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--timeout", "600", *selection]
    return [*check, *tests]


def errors_seen(output: str) -> int | None:
    """The number in memcheck's summary; nothing if there is none."""
    found = re.findall(r"ERROR SUMMARY: (\d+) error", output)
    return sum(map(int, found)) if found else None


def main(arguments: list[str]) -> int:
    tool = sanitizer()
    if tool is None:
        print("memcheck: no compute-sanitizer here (pip install nvidia-cuda-sanitizer-api)")
        return 2
    environment = {"BREAKABLE_CUDA_GRAPHS_PROGRAMS": PROGRAMS, **os.environ}
    done = subprocess.run(
        command(tool, arguments or SELECTION),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout[-6000:])
    seen = errors_seen(done.stdout)
    print(
        f"memcheck: {'no summary' if seen is None else f'{seen} errors'}, status {done.returncode}"
    )
    return 0 if done.returncode == 0 and seen == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
