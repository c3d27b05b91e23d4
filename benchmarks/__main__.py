"""The command; its hard problem is that one failing benchmark must not hide the others.

A benchmark that raises is written down with its error (the JSON then says so, and so does the
page), the rest still run, and the exit status tells.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import REGISTRY
from .progress import Progress, make_progress
from .record import Report, Settings


def parse(arguments: Sequence[str] | None = None) -> tuple[list[str], Settings]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        metavar="NAMES",
        help=f"comma-separated, of: {', '.join(REGISTRY)}",
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--out", type=Path, default=Settings.out, help="folder for the JSON")
    parser.add_argument(
        "--meta-wheel",
        type=Path,
        metavar="PATH",
        help="Meta's breakable-cuda-graphs 0.1.0 (wheel, sdist, folder or file), if you have it",
    )
    given = parser.parse_args(arguments)
    names = given.only.split(",") if given.only else list(REGISTRY)
    unknown = [name for name in names if name not in REGISTRY]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(REGISTRY)}")
    if given.meta_wheel is not None and not given.meta_wheel.exists():
        parser.error(f"--meta-wheel: {given.meta_wheel} does not exist")
    return names, Settings(quick=given.quick, meta=given.meta_wheel, out=given.out)


def main(arguments: Sequence[str] | None = None) -> int:
    names, settings = parse(arguments)
    import torch

    if not torch.cuda.is_available():
        print("python -m benchmarks needs a CUDA device and torch built for it", file=sys.stderr)
        return 2
    from .record import environment

    torch.cuda.init()
    where = environment()
    reports = []
    with make_progress() as progress:
        for name in names:
            report = measure(name, settings, progress)
            report.write(settings.out, where)
            reports.append(report)
    for report in reports:
        print(summary(report))
    print(f"JSON in {settings.out}; python -m benchmarks.page --data {settings.out} draws it")
    return int(any(report.error for report in reports))


def measure(name: str, settings: Settings, progress: Progress) -> Report:
    """Run one benchmark on a stream of its own; an error ends it and is kept in the report."""
    import torch

    module: Any = importlib.import_module(f"{__package__}.{REGISTRY[name]}")
    report = Report(name, module.QUESTION, quick=settings.quick)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            module.run(settings, report, progress)
        torch.cuda.synchronize()
    except Exception as error:
        report.error = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return report


def summary(report: Report) -> str:
    """A short table for the terminal: the aims, the figures' medians, what was missing."""
    lines = [f"\n== {report.name}{' (quick)' if report.quick else ''}"]
    if report.error:
        lines.append(f"   FAILED: {report.error}")
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for row in report.figures:
        rivals = groups.setdefault(row["group"], {})
        rivals.setdefault(row["rival"], {})[row["name"]] = row["median"]
    for group, rivals in groups.items():
        columns = list(dict.fromkeys(name for row in rivals.values() for name in row))
        lines.append(f" {group}: " + " | ".join(columns))
        for rival, row in rivals.items():
            cells = (f"{row[name]:10.4g}" if name in row else " " * 10 for name in columns)
            lines.append(f"   {rival:<16}" + "".join(cells))
    for aim in report.aims:
        value = f"{aim['value']['median']:.3g}" if aim["value"] else "not measured"
        bound = aim["at_most"] if aim["at_most"] is not None else aim["at_least"]
        lines.append(f"  [{'met' if aim['met'] else 'NOT'}] {aim['text']}: {value} (aim {bound:g})")
    lines += [f"   absent: {rival}: {reason}" for rival, reason in report.absent.items()]
    lines += [f"   note: {note}" for note in report.notes]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
