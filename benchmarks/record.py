"""What a benchmark found, as JSON; the hard problem: a figure without its origin is a rumour.

Every file says the question, the commit, the versions, the device, the command line, what was
missing and what was checked, beside the figures; `page.py` has no other source. A figure is
always a `Spread`, never a bare number.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from .harness import Case, Spread, by_rival, clock_overhead, spread

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Settings:
    """What the command line asked for."""

    quick: bool = False
    meta: Path | None = None
    out: Path = ROOT / "docs" / "benchmarks"

    def pick(self, full: Any, quick: Any) -> Any:
        return quick if self.quick else full


@dataclass
class Report:
    """One benchmark's findings, filled in while it runs."""

    name: str
    question: str
    quick: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    plots: dict[str, dict[str, Any]] = field(default_factory=dict)
    series: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    aims: list[dict[str, Any]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    error: str | None = None

    def plot(
        self,
        key: str,
        title: str,
        *,
        x: str,
        y: str,
        log_x: bool = True,
        log_y: bool = False,
        bars: bool = False,
    ) -> None:
        """Announce a plot; `add_cases(plot=key, ...)` gives it its lines (or groups of bars)."""
        self.plots[key] = {
            "title": title,
            "x": x,
            "y": y,
            "log_x": log_x,
            "log_y": log_y,
            "bars": bars,
        }

    def add_cases(
        self,
        plot: str,
        cases: Sequence[Case],
        *,
        unit: str = "us",
        per: Mapping[float, float] | None = None,
        names: Mapping[float, str] | None = None,
    ) -> None:
        """Store the samples' spread; the plot shows them divided by `per[size]` where given."""
        for rival, sizes in by_rival(cases).items():
            points = [
                {
                    "x": size,
                    "name": names[size] if names else None,
                    "per": per[size] if per else 1,
                    **asdict(spread(samples)),
                }
                for size, samples in sizes.items()
                if samples
            ]
            self.series.append({"plot": plot, "rival": rival, "unit": unit, "points": points})

    def figure(self, group: str, name: str, rival: str, value: Spread, unit: str = "us") -> None:
        """One row of a table: `group` is the table, `name` the column, `rival` the row."""
        self.figures.append(
            {"group": group, "name": name, "rival": rival, "unit": unit, **asdict(value)}
        )

    def aim(
        self,
        text: str,
        value: Spread | None,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        unit: str = "",
    ) -> None:
        """An aim and whether the median meets it; `None` (a rival was missing) is not met."""
        met = value is not None
        if value is not None and at_most is not None:
            met = met and value.median <= at_most
        if value is not None and at_least is not None:
            met = met and value.median >= at_least
        self.aims.append(
            {
                "text": text,
                "value": asdict(value) if value else None,
                "at_most": at_most,
                "at_least": at_least,
                "unit": unit,
                "met": met,
            }
        )

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.tables.append(
            {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}
        )

    def label(self, rival: str) -> str:
        return self.labels.get(rival, rival)

    def write(self, folder: Path, environment: Mapping[str, Any]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        document = {"schema": SCHEMA, **asdict(self), "environment": dict(environment)}
        # allow_nan=False: a nan in a published figure is a fault of the benchmark
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return path


# --- where the figures come from ----------------------------------------------------------------

PACKAGES = (
    "torch",
    "cuda-bindings",
    "cuda-core",
    "cupy-cuda13x",
    "numpy",
    "triton",
    "transformers",
)


def commit(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The commit measured. `BENCH_COMMIT` wins (a copied tree has no history); a `-dirty` tail,
    as `git describe --always --dirty --abbrev=40` writes it, marks uncommitted changes."""
    given = environ.get("BENCH_COMMIT", "").strip()
    if given:
        return {"id": given.removesuffix("-dirty"), "dirty": given.endswith("-dirty")}
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return {"id": None, "dirty": None}
    # the figures themselves lie in the tree: writing them must not make the next run dirty
    changed = _git(root, "status", "--porcelain", "--", ".", ":(exclude)docs/benchmarks*")
    return {"id": head, "dirty": None if changed is None else bool(changed)}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment(argv: Sequence[str] = sys.argv) -> dict[str, Any]:
    """Everything about the run that is not a figure; asks the device."""
    import torch
    from cuda.bindings import driver

    status, version = driver.cuDriverGetVersion()
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": list(argv),
        "commit": commit(),
        "versions": versions(),
        "driver": f"CUDA {version // 1000}.{version % 1000 // 10}" if not status else None,
        "kernel_driver": _kernel_driver(),
        "device": device.name,
        "device_memory": device.total_memory,
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "clock_us": asdict(clock_overhead()),
    }


def _kernel_driver() -> str | None:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return None


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None
