"""The page; the hard problem is that no figure on it may be written by hand.

`python -m benchmarks.page` reads the JSON files and draws `docs/benchmarks.md` and its plots from
them alone: tables, aims, what was missing, and where it all came from. Drawing twice gives the
same bytes, so a changed page means changed figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import REGISTRY
from .record import ROOT, SCHEMA

Document = Mapping[str, Any]

INTRODUCTION = """\
# Benchmarks

Drawn by `python -m benchmarks.page` from the JSON files beside the plots; no figure here is
written by hand. `python -m benchmarks` measures, on a machine with a GPU.

**How.** All rivals of a benchmark run in one process, on one stream, in turns: each round visits
every rival at every size once, in a new random order. A figure is the median over rounds, with
its quartiles behind it; a ratio or a difference is taken in each round before its median is.
*Host time* is what the calling thread spends. *Empty queue*: the device is waited for before each
replay, outside of the time. *Full queue*: replays back to back. *Slope* and *fixed cost* are a
least-squares line over the number of segments, weighted by relative error. Every rival's result
is checked before it is timed. The garbage collector is off while the clock runs.
"""

#: What keeps aims from being met; the figures that show it are those of the page.
REASONS = {
    "replay": """\
The slope is that of the bindings' own call, as the bare loop shows: Python cannot launch with less, and
functions of `ctypes` were no faster. The fixed cost is what a replay asks before it launches and records
behind it, so that it is never silently wrong: each call of it is under `where`.""",
    "splits": """\
However many splits there are, the host pays the fixed cost of one replay, as under `replay`.""",
    "capture": """\
Torch's own books take most of an ideal capture, and a segment needs an executable besides, which has to be
instantiated. What is left is Python: a segment is looked through for what
dangles, for random numbers, for work that no replay can repeat and for memory that has to be watched, and
every step can be taken up again after an interrupt. See `where`.""",
    "growth": """\
A break that is given a list gets a new one at each replay, since what its body does to it must not show
in the next: that copy grows with the list. What watching costs is in the table. A graph with more nodes
keeps the device busy for longer, and calls of the host beside a busy device take longer.""",
    "decoder": """\
Attention is a break, so its kernels are launched one by one at each replay: that is what lies between here
and the whole graph, as long as they are short. Meta's package has the same breaks to run, and what a step
costs besides is small against that in both: see how far the quartiles of their ratio lie apart.""",
    "diffusion": """\
There are so few segments that the fixed cost of a replay weighs as much as what each segment saves.""",
    "training": """\
There are so few segments that the fixed cost of a replay weighs as much as what each segment saves.""",
}

# Colours that stay apart for colour-blind readers; one rival has one colour on every plot.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C564B",
    "#7F7F7F",
    "#BCBD22",
)
FIXED_COLOURS = {
    "ours": 0,
    "ours-split": 0,
    "ours-static": 0,
    "ours-unwatched": 0,
    "ours-watching": 5,
    "ours-buffer": 5,
    "ours-plain": 5,
    "ours-unsplit": 5,
    "meta": 1,
    "meta-split": 1,
    "meta-buffer": 1,
    "floor": 6,
    "control": 6,
    "driver": 6,
    "whole": 2,
    "torch": 3,
    "graphs": 3,
    "context": 3,
    "bare": 4,
    "books": 4,
    "bare-call": 7,
    "eager": 8,
    "cupy": 9,
    "core": 2,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where the page goes")
    parser.add_argument("--data", type=Path, help="folder of the JSON (default: DOCS/benchmarks)")
    given = parser.parse_args(arguments)
    page = draw(given.data or given.docs / "benchmarks", given.docs)
    print(f"{page} drawn")
    return 0


def draw(data: Path, docs: Path) -> Path:
    """Write `docs/benchmarks.md` and the plots under `docs/benchmarks/`."""
    documents = load(data)
    if not documents:
        raise SystemExit(f"no JSON of benchmarks in {data}")
    folder = docs / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    for document in documents:
        for key in document["plots"]:
            if series_of(document, key):
                draw_plot(document, key, folder / plot_name(document, key))
    page = docs / "benchmarks.md"
    page.write_text(text(documents), encoding="utf-8")
    return page


def load(data: Path) -> list[Document]:
    """The benchmarks' documents, in the order in which they run; unknown ones come last."""
    order = {name: index for index, name in enumerate(REGISTRY)}
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in data.glob("*.json")]
    for document in documents:
        if document.get("schema") != SCHEMA:
            raise ValueError(f"{document.get('name')}: schema {document.get('schema')}")
    return sorted(documents, key=lambda d: (order.get(d["name"], len(order)), d["name"]))


# --- text ---------------------------------------------------------------------------------------


def text(documents: Sequence[Document]) -> str:
    parts = [INTRODUCTION, *origins(documents)]
    parts += [section(document) for document in documents]
    return "\n".join(parts).rstrip() + "\n"


def origins(documents: Sequence[Document]) -> list[str]:
    """Where the figures come from, once for all benchmarks that were measured together."""
    groups: dict[str, list[str]] = {}
    for document in documents:
        groups.setdefault(origin(document["environment"]), []).append(document["name"])
    if len(groups) == 1:
        return [f"**Where.** {next(iter(groups))}\n"]
    return [
        "**Where.**\n",
        *(f"- {', '.join(names)}: {where}" for where, names in groups.items()),
        "",
    ]


def origin(environment: Document) -> str:
    commit = environment["commit"]
    state = {True: ", with uncommitted changes", False: "", None: ", state of the tree unknown"}
    versions = ", ".join(f"{name} {number}" for name, number in environment["versions"].items())
    return (
        f"{environment['device']}, {environment['driver']}"
        f" ({environment['kernel_driver'] or 'kernel driver unknown'}); "
        f"{environment['cpus']} x {environment['cpu']}; {versions}; "
        f"commit `{commit['id']}`{state[commit['dirty']]}; {environment['date']}; "
        f"`{' '.join(environment['argv'])}`."
    )


def section(document: Document) -> str:
    lines = [f"## {document['name']}\n", f"{document['question']}\n"]
    if document["quick"]:
        lines.append("*A quick run: few rounds, few sizes.*\n")
    if document["error"]:
        lines.append(f"**Failed:** `{one_line(document['error'])}`\n")
    lines += aims(document)
    for key, plot in document["plots"].items():
        if series_of(document, key):
            lines.append(f"![{plot['title']}](benchmarks/{plot_name(document, key)})\n")
    lines += figures(document)
    for table in document["tables"]:
        lines += [f"**{table['title']}**\n", *markdown(table["columns"], table["rows"]), ""]
    lines += listing("Not measured", document_absent(document))
    lines += listing("Notes", document["notes"])
    lines += listing("Checked", document["checks"])
    return "\n".join(lines)


def document_absent(document: Document) -> list[str]:
    return [
        f"{label(document, rival)}: {one_line(reason)}"
        for rival, reason in document["absent"].items()
    ]


def aims(document: Document) -> list[str]:
    rows = []
    for aim in document["aims"]:
        if aim["at_most"] is not None:
            bound = f"at most {number(aim['at_most'])}"
        else:
            bound = f"at least {number(aim['at_least'])}"
        value = spread_text(aim["value"]) if aim["value"] else "not measured"
        rows.append([aim["text"], bound, f"{value} {aim['unit']}".rstrip(), verdict(aim)])
    if not rows:
        return []
    reason = REASONS.get(document["name"])
    is_short = any(aim["value"] is not None and not aim["met"] for aim in document["aims"])
    why = [f"**Why not.** {reason}\n"] if reason and is_short else []
    return [*markdown(["aim", "bound", "measured (quartiles)", ""], rows), "", *why]


def verdict(aim: Document) -> str:
    if aim["value"] is None:
        return ""
    return "met" if aim["met"] else "**not met**"


def figures(document: Document) -> list[str]:
    """One table a group: rivals down, figures across."""
    lines = []
    for group in dict.fromkeys(row["group"] for row in document["figures"]):
        rows = [row for row in document["figures"] if row["group"] == group]
        columns = {row["name"]: f"{row['name']} ({row['unit']})" for row in rows}
        cells = {(row["rival"], row["name"]): spread_text(row) for row in rows}
        table = [
            [label(document, rival), *(cells.get((rival, name), "") for name in columns)]
            for rival in dict.fromkeys(row["rival"] for row in rows)
        ]
        lines += [f"**{group}**\n", *markdown(["", *columns.values()], table), ""]
    return lines


def listing(title: str, items: Sequence[str]) -> list[str]:
    return [f"{title}:\n", *(f"- {item}" for item in items), ""] if items else []


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "|".join("---" if index == 0 else "---:" for index in range(len(columns))) + "|"
    return [line(columns), rule, *(line(row) for row in rows)]


def spread_text(value: Mapping[str, float]) -> str:
    return f"{number(value['median'])} ({number(value['q1'])} to {number(value['q3'])})"


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    rounded = f"{value:.3g}"
    return rounded if "e" not in rounded else f"{value:.6f}".rstrip("0")


def one_line(reason: str) -> str:
    return " ".join(reason.split())[:300]


def label(document: Document, rival: str) -> str:
    return str(document["labels"].get(rival, rival))


# --- plots --------------------------------------------------------------------------------------


def plot_name(document: Document, key: str) -> str:
    return f"{document['name']}-{key}.svg"


def series_of(document: Document, key: str) -> list[Document]:
    return [series for series in document["series"] if series["plot"] == key and series["points"]]


def colour(rival: str, position: int) -> str:
    return COLOURS[FIXED_COLOURS.get(rival, position) % len(COLOURS)]


def draw_plot(document: Document, key: str, path: Path) -> None:
    """One SVG; fixed identifiers and no date in it, so the same figures give the same bytes."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    plot = document["plots"][key]
    settings: Any = {"svg.hashsalt": path.stem, "svg.fonttype": "none", "font.size": 9}
    with mpl.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
        try:
            (draw_bars if plot["bars"] else draw_lines)(axes, document, key)
            axes.set(title=plot["title"], xlabel=plot["x"], ylabel=plot["y"])
            if plot["log_y"]:
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            axes.grid(True, axis="y", alpha=0.3)
            axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
            figure.savefig(path, format="svg", metadata={"Date": None})
        finally:
            pyplot.close(figure)


def draw_lines(axes: Any, document: Document, key: str) -> None:
    """A line through the medians, a band between the quartiles."""
    sizes: set[float] = set()
    for position, series in enumerate(series_of(document, key)):
        points = series["points"]
        xs = [point["x"] for point in points]
        sizes.update(xs)
        low, middle, high = (
            [point[name] / point["per"] for point in points] for name in ("q1", "median", "q3")
        )
        tint = colour(series["rival"], position)
        style = "o-" if series["rival"].startswith("ours") else "o--"
        axes.plot(
            xs, middle, style, ms=3, lw=1.3, color=tint, label=label(document, series["rival"])
        )
        axes.fill_between(xs, low, high, color=tint, alpha=0.15, lw=0)
    if document["plots"][key]["log_x"]:
        axes.set_xscale("log", base=2 if is_powers_of_two(sizes) else 10)
        axes.set_xticks(sorted(sizes), [f"{size:g}" for size in sorted(sizes)])
        axes.minorticks_off()


def is_powers_of_two(sizes: set[float]) -> bool:
    return all(size >= 1 and int(size) & (int(size) - 1) == 0 for size in sizes)


def draw_bars(axes: Any, document: Document, key: str) -> None:
    """Groups of bars, a group for each named point, whiskers between the quartiles."""
    groups = series_of(document, key)
    names: dict[float, str] = {}
    width = 0.8 / len(groups)
    for position, series in enumerate(groups):
        points = series["points"]
        names.update({point["x"]: point["name"] or f"{point['x']:g}" for point in points})
        order = {x: index for index, x in enumerate(sorted(names))}
        at = [order[point["x"]] + (position - (len(groups) - 1) / 2) * width for point in points]
        heights = [point["median"] / point["per"] for point in points]
        below = [(point["median"] - point["q1"]) / point["per"] for point in points]
        above = [(point["q3"] - point["median"]) / point["per"] for point in points]
        axes.bar(
            at,
            heights,
            width,
            yerr=[below, above],
            color=colour(series["rival"], position),
            error_kw={"lw": 0.8},
            label=label(document, series["rival"]),
        )
    axes.set_xticks(range(len(names)), [names[x] for x in sorted(names)], fontsize=7)


if __name__ == "__main__":
    raise SystemExit(main())
