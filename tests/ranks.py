"""Several processes that are ranks of one process group, for tests.

The hard problem: a rank that hangs must not hang the test. So each rank is a process of its own with
a deadline; what it returns comes back as JSON, and what it raised as text.

    results = run_ranks("rank_programs.py", "a_function", 2, folder)

calls `a_function(rank, world)` of a file in tests/ in each process.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

#: How long a collective waits for the others, in seconds; also what NCCL's watchdog goes by.
COLLECTIVE_TIMEOUT = 30


def run_ranks(
    program: str, name: str, world: int, folder: Path, *,
    timeout: float = 60, backend: str = "gloo", **environment: str,
) -> list[Any]:  # fmt: skip
    """Run a function in `world` processes; what each returned, in the order of the ranks.

    A rank that raises, dies or does not end in time fails the test, with the end of what it said.
    """
    path = os.pathsep.join(part for part in sys.path if part)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    processes, logs = [], []
    for rank in range(world):
        log = folder / f"rank{rank}.log"
        arguments = [program, name, str(rank), str(world), str(folder), backend, str(timeout)]
        with log.open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / "ranks.py"), *arguments],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            )
        logs.append(log)
    try:
        _wait(processes, timeout)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    said = [log.read_text(errors="replace")[-4000:] for log in logs]
    assert all(p.returncode == 0 for p in processes), "\n".join(
        f"--- rank {rank} ended with {p.returncode}\n{text}"
        for rank, (p, text) in enumerate(zip(processes, said, strict=True))
    )
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


def torchrun(program: Path, ranks: int, *, timeout: float = 90, **environment: str) -> str:
    """What a program prints that is started once for each rank; `ranks` 0: alone, not by torchrun."""
    path = os.pathsep.join(part for part in sys.path if part)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *(launcher if ranks else []), str(program)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        if any(p.poll() not in (None, 0) for p in processes):
            deadline = min(deadline, time.monotonic() + 5)  # the others hear of it, or hang
        time.sleep(0.02)


def text_of(error: BaseException) -> str:
    """What a user reads of an error."""
    return " ".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])


@contextlib.contextmanager
def told(report: dict[str, Any], key: str) -> Any:
    """Note under a key which error the block ended with, and how long it took; "" for none."""
    begin = time.monotonic()
    try:
        yield
        report[key] = ""
    except Exception as error:
        report[key] = text_of(error)
    report[f"{key} seconds"] = time.monotonic() - begin


def end_here(rank: int, report: Any) -> None:
    """End this rank's process at once, as one that dies; only its report is left."""
    _write(rank, report)
    os._exit(0)


def _write(rank: int | str, report: Any) -> None:
    Path(sys.argv[5], f"rank{rank}.json").write_text(json.dumps(report))


def main(
    program: str, name: str, rank: str, world: str, folder: str, backend: str, timeout: str
) -> None:
    """One rank."""
    faulthandler.dump_traceback_later(float(timeout) * 0.9, exit=True)
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(world),
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT),
    )
    spec = importlib.util.spec_from_file_location("program", HERE / program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _write(rank, getattr(module, name)(int(rank), int(world)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without waiting for the others, as a rank that dies does
