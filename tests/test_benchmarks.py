"""The benchmarks' harness, records and page, without a GPU.

The hard problem: a broken benchmark still prints figures. So these tests feed the harness data
whose right answer is known, and ask whether a fault would show.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import math
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks/ belongs to the repository, not to the package

from benchmarks import REGISTRY, harness, page, rivals  # noqa: E402
from benchmarks.__main__ import parse, summary  # noqa: E402
from benchmarks.harness import Case, Spread, spread  # noqa: E402
from benchmarks.record import Report, commit  # noqa: E402

ENVIRONMENT: dict[str, Any] = {
    "date": "2026-01-02T03:04:05+00:00",
    "argv": ["-m", "benchmarks", "--quick"],
    "commit": {"id": "0123abcd", "dirty": True},
    "versions": {"python": "3.12.3", "torch": "2.11.0"},
    "driver": "CUDA 13.0",
    "kernel_driver": None,
    "device": "Made-up GPU",
    "device_memory": 1,
    "cpu": "Made-up CPU",
    "cpus": 2,
    "system": "test",
    "clock_us": {"median": 0.05, "q1": 0.05, "q3": 0.06, "best": 0.05, "count": 10},
}


# --- statistics ---------------------------------------------------------------------------------


def test_spread_gives_median_and_quartiles_of_the_data() -> None:
    assert spread([5, 1, 3, 2, 4]) == Spread(median=3, q1=2, q3=4, best=1, count=5)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0, 7.0, 1)


def test_no_samples_are_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        spread([])


def test_a_line_is_found_exactly() -> None:
    line = harness.fit_line([(n, 1.5 + 2.0 * n) for n in (1, 2, 4, 512)])
    assert line.slope == pytest.approx(2.0)
    assert line.intercept == pytest.approx(1.5)


def test_noise_of_a_long_replay_does_not_drown_the_fixed_cost() -> None:
    """Three percent at 512 segments is thirty microseconds: equal weights would see nothing."""
    points = [(n, 1.0 + 2.0 * n) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    points.append((512, (1.0 + 2.0 * 512) * 1.03))
    line = harness.fit_line(points)
    assert line.intercept == pytest.approx(1.0, abs=0.1)
    assert line.slope == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("points", [[(1, 1.0)], [(4, 1.0), (4, 2.0)], [(1, 0.0), (2, 1.0)]])
def test_a_line_through_too_little_is_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match=r"line|weights"):
        harness.fit_line(points)


def test_a_drift_that_both_rivals_share_cancels() -> None:
    drift = [1.0, 1.5, 0.7, 3.0, 2.0]
    first, second = [2.2 * d for d in drift], [2.0 * d for d in drift]
    found = harness.ratio(first, second)
    assert found.q1 == pytest.approx(1.1)
    assert found.q3 == pytest.approx(1.1)


def test_slopes_are_fitted_round_by_round() -> None:
    sizes = {1.0: [3.0, 6.0], 2.0: [5.0, 10.0], 4.0: [9.0, 18.0]}
    lines = harness.lines_by_round(sizes)
    assert [line.slope for line in lines] == pytest.approx([2.0, 4.0])
    assert [line.intercept for line in lines] == pytest.approx([1.0, 2.0])


# --- turns and rounds ---------------------------------------------------------------------------


def test_a_round_visits_every_case_once_in_changing_order() -> None:
    log: list[str] = []

    def turn(name: str) -> harness.Turn:
        def visit() -> float:
            log.append(name)
            return float(len(log))

        return visit

    cases = [Case(name, 1, turn(name)) for name in "abcdef"]
    ticks: list[int] = []
    harness.interleave(cases, 20, lambda: ticks.append(1), warm=1)
    assert len(ticks) == 20
    assert all(len(case.samples) == 20 for case in cases)
    rounds = ["".join(log[6 * r : 6 * r + 6]) for r in range(1, 21)]
    assert all(sorted(visited) == list("abcdef") for visited in rounds)
    assert len(set(rounds)) > 15


def test_warming_up_leaves_no_samples() -> None:
    case = Case("a", 1, lambda: 1.0)
    harness.interleave([case], 0, warm=3)
    assert case.samples == []


def test_the_collector_is_off_while_timing_and_on_again_after_a_failure() -> None:
    seen: list[bool] = []

    def turn() -> float:
        seen.append(gc.isenabled())
        raise RuntimeError("a rival failed")

    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="a rival failed"):
        harness.interleave([Case("a", 1, turn)], 1)
    assert seen == [False]
    assert gc.isenabled()


class Device:
    """A device of which waiting takes long, to see what is inside of the timed part."""

    def __init__(self, call_s: float, sync_s: float) -> None:
        self.call_s, self.sync_s, self.log = call_s, sync_s, ""

    def call(self) -> None:
        self.log += "c"
        time.sleep(self.call_s)

    def sync(self) -> None:
        self.log += "s"
        time.sleep(self.sync_s)


def test_a_shallow_turn_waits_before_each_call_and_does_not_time_the_wait() -> None:
    device = Device(call_s=0.0, sync_s=0.05)
    us = harness.shallow(device.call, device.sync, repeats=2)()
    assert device.log == "scscscs"
    assert us < 25_000


def test_a_saturated_turn_calls_without_waiting() -> None:
    device = Device(call_s=0.002, sync_s=0.05)
    us = harness.saturated(device.call, device.sync, 5)()
    assert device.log == "sccccccs"
    assert 2_000 <= us < 12_000


def test_a_finished_turn_counts_the_wait_for_the_device() -> None:
    device = Device(call_s=0.0, sync_s=0.04)
    us = harness.finished(device.call, device.sync, 4)()
    assert device.log == "sccccs"
    assert us >= 10_000


def test_what_a_capture_made_is_dropped_outside_of_the_time() -> None:
    dropped: list[str] = []

    def drop(made: str) -> None:
        time.sleep(0.05)
        dropped.append(made)

    us = harness.elapsed(lambda: "made", drop, lambda: None)()
    assert dropped == ["made"]
    assert us < 25_000


# --- records ------------------------------------------------------------------------------------


def made_up_report(slope: float = 1.25) -> Report:
    report = Report("replay", "What does it cost?", labels={"ours": "this library"})
    report.plot("shallow", "A plot", x="breaks", y="microseconds")
    cases = [
        Case(rival, n, lambda: 0.0, [factor * (n + 1), factor * (n + 1) * 1.1])
        for rival, factor in (("ours", slope), ("floor", 1.0))
        for n in (1, 2, 4)
    ]
    report.add_cases("shallow", cases, per={1: 2, 2: 3, 4: 5})
    report.figure("shallow", "slope a segment", "ours", spread([slope, slope * 1.2]))
    report.aim("slope against the floor", spread([slope]), at_most=1.3)
    report.aim("against a rival that is missing", None, at_least=2.0)
    report.absent["meta"] = "no --meta-wheel given"
    return report


def test_an_aim_is_met_only_by_a_measured_value_inside_its_bound() -> None:
    report = Report("x", "?")
    report.aim("low enough", spread([1.0]), at_most=1.0)
    report.aim("too high", spread([1.01]), at_most=1.0)
    report.aim("high enough", spread([2.0]), at_least=2.0)
    report.aim("too low", spread([1.9]), at_least=2.0)
    report.aim("not measured", None, at_most=100.0)
    assert [aim["met"] for aim in report.aims] == [True, False, True, False, False]


def test_the_json_says_what_was_measured_and_where(tmp_path: Path) -> None:
    path = made_up_report().write(tmp_path / "new", ENVIRONMENT)
    assert path.name == "replay.json"
    document = json.loads(path.read_text())
    assert document["environment"] == ENVIRONMENT
    assert document["absent"] == {"meta": "no --meta-wheel given"}
    ours = document["series"][0]
    assert ours["rival"] == "ours"
    assert [point["x"] for point in ours["points"]] == [1, 2, 4]
    assert ours["points"][0]["median"] == pytest.approx(1.25 * 2 * 1.05)
    assert document["figures"][0]["count"] == 2


def test_a_figure_that_is_no_number_is_not_published(tmp_path: Path) -> None:
    report = made_up_report()
    report.figure("shallow", "broken", "ours", spread([math.nan]))
    with pytest.raises(ValueError, match="JSON"):
        report.write(tmp_path, ENVIRONMENT)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("abc123", {"id": "abc123", "dirty": False}),
        ("abc123-dirty", {"id": "abc123", "dirty": True}),
    ],
)
def test_the_commit_may_be_given(given: str, expected: dict[str, Any], tmp_path: Path) -> None:
    assert commit(tmp_path, {"BENCH_COMMIT": given}) == expected


def test_outside_of_a_repository_the_commit_is_unknown(tmp_path: Path) -> None:
    assert commit(tmp_path, {}) == {"id": None, "dirty": None}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_read_from_git_and_figures_do_not_make_it_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", *identity, *arguments]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    head = git("rev-parse", "HEAD")
    assert commit(tmp_path, {}) == {"id": head, "dirty": False}
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    (tmp_path / "docs" / "benchmarks" / "replay.json").write_text("{}\n")
    assert commit(tmp_path, {}) == {"id": head, "dirty": False}
    (tmp_path / "code.py").write_text("2\n")
    assert commit(tmp_path, {}) == {"id": head, "dirty": True}


# --- rivals -------------------------------------------------------------------------------------


def test_only_others_may_be_missing() -> None:
    report = Report("x", "?")
    with rivals.tolerated(report, "meta"):
        raise RuntimeError("no breaks in here")
    assert report.absent == {"meta": "RuntimeError: no breaks in here"}
    for needed in ("ours", "ours-static", "floor"):
        with pytest.raises(RuntimeError, match="broken"), rivals.tolerated(report, needed):
            raise RuntimeError("broken")


@pytest.fixture
def no_meta_loaded() -> Any:
    yield
    for name in [name for name in sys.modules if name.startswith(rivals.META_NAME)]:
        del sys.modules[name]


@pytest.mark.usefixtures("no_meta_loaded")
def test_a_package_of_our_name_is_loaded_from_its_wheel_beside_ours(tmp_path: Path) -> None:
    wheel = tmp_path / "other-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as bundle:
        bundle.writestr(
            f"{rivals.OUR_NAME}/__init__.py",
            f"from {rivals.OUR_NAME}.inner import where\nfrom .inner import where as again\n",
        )
        bundle.writestr(f"{rivals.OUR_NAME}/inner.py", "def where():\n    return __name__\n")
    before = sys.modules.get(rivals.OUR_NAME)
    module = rivals.load_meta(wheel)
    assert module.where() == module.again() == f"{rivals.META_NAME}.inner"
    assert sys.modules.get(rivals.OUR_NAME) is before


@pytest.mark.usefixtures("no_meta_loaded")
def test_an_archive_without_the_package_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("")
    with pytest.raises(ImportError, match="no module"):
        rivals.load_meta(tmp_path)
    assert rivals.META_NAME not in sys.modules


FAKE_LIBCUDA = """
int launched;
int cuGraphLaunch(void *executable, void *stream) {
    if (!executable) return 400;
    launched += stream == (void *)7;
    return 0;
}
"""

USE_THE_FLOOR = """
import ctypes, sys
from benchmarks.rivals import FloorLauncher
fake = ctypes.CDLL(sys.argv[1])
floor = FloorLauncher()
replay = floor.loop([11, 12, 13], 7)
replay()
replay()
assert ctypes.c_int.in_dll(fake, "launched").value == 6
try:
    floor.loop([11, 0], 7)()
except RuntimeError as error:
    assert "400" in str(error), error
else:
    raise SystemExit("a failed launch went unnoticed")
"""


@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="needs a C compiler")
def test_the_floor_launches_each_graph_once_and_notices_errors(tmp_path: Path) -> None:
    """In a process of its own, with a made-up libcuda under the real one's name."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    library = tmp_path / "libcuda.so.1"
    (tmp_path / "fake.c").write_text(FAKE_LIBCUDA)
    named = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([str(compiler), *named, str(tmp_path / "fake.c")], check=True)
    done = subprocess.run(
        [sys.executable, "-c", USE_THE_FLOOR, str(library)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- rebinding against copying ------------------------------------------------------------------


def test_the_size_from_which_copying_is_dearer_is_found_between_two_sizes() -> None:
    rebind = pytest.importorskip("benchmarks.rebind", reason="torch is not installed")
    moved = {1024.0: [10.0, 20.0], 4096.0: [10.0, 20.0], 16384.0: [10.0, 20.0]}
    copied = {1024.0: [4.0, 4.0], 4096.0: [8.0, 18.0], 16384.0: [12.0, 22.0]}
    found = rebind.crossings(moved, copied)
    assert found.best == pytest.approx(8.0), "half way between 4 and 16 KiB, in logarithms"
    assert found.count == 2
    assert found.q1 == found.q3


def test_where_one_way_is_always_cheaper_no_size_is_made_up() -> None:
    rebind = pytest.importorskip("benchmarks.rebind", reason="torch is not installed")
    dear, cheap = {1.0: [9.0] * 3, 2.0: [9.0] * 3}, {1.0: [1.0] * 3, 2.0: [2.0] * 3}
    assert rebind.crossings(dear, cheap) is None
    assert rebind.crossings(cheap, dear) is None
    seldom = {1.0: [1.0, 1.0, 1.0], 2.0: [99.0, 1.0, 1.0]}
    assert rebind.crossings(dear, seldom) is None


def test_a_break_even_that_noise_makes_twice_counts_from_the_right() -> None:
    rebind = pytest.importorskip("benchmarks.rebind", reason="torch is not installed")
    moved = {float(1 << n): [10.0] for n in range(10, 14)}
    copied = dict(zip(moved, ([11.0], [9.0], [9.0], [11.0]), strict=True))
    assert rebind.crossings(moved, copied).median == pytest.approx(2**12.5 / 1024)


# --- the command --------------------------------------------------------------------------------


def test_names_are_chosen_and_checked() -> None:
    assert parse([])[0] == list(REGISTRY)
    names, settings = parse(["--only", "splits,replay", "--quick"])
    assert names == ["splits", "replay"]
    assert settings.quick
    with pytest.raises(SystemExit):
        parse(["--only", "replay,nonsense"])
    with pytest.raises(SystemExit):
        parse(["--meta-wheel", "/nowhere/at/all.whl"])


@pytest.mark.parametrize("name", REGISTRY)
def test_every_benchmark_can_be_run_and_says_its_question(name: str) -> None:
    pytest.importorskip("torch")
    module = importlib.import_module(f"benchmarks.{REGISTRY[name]}")
    assert callable(module.run)
    assert module.QUESTION.endswith((".", "?"))


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all benchmarks write down on the simulated device (see `dry_run.py`)."""
    pytest.importorskip("torch")
    names = [name for name in REGISTRY if not lacks(name)]
    out = tmp_path_factory.mktemp("dry")
    command = [sys.executable, str(ROOT / "tests" / "dry_run.py"), "--only", ",".join(names)]
    done = subprocess.run(
        [*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: json.loads((out / f"{name}.json").read_text()) for name in names}


#: What cannot be there without a GPU or on a quick run.
ABSENT = {"core", "cupy", "compiled"}


def lacks(name: str) -> str:
    """What a benchmark cannot do without and this machine does not have."""
    if name in ("decoder", "diffusion") and importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    return "a GPU for each rank" if name == "ranks" else ""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", REGISTRY)
def test_every_benchmark_runs_and_every_rival_is_checked_and_measured(
    dry: dict[str, Any], name: str
) -> None:
    if lacks(name):
        pytest.skip(lacks(name))
    document = dry[name]
    assert document["error"] is None
    assert set(document["absent"]) <= ABSENT
    assert document["figures"] or document["tables"]
    for plot in document["plots"]:
        drawn = [series["rival"] for series in document["series"] if series["plot"] == plot]
        assert drawn
        assert any(rival.startswith("ours") or rival in OUR_WAYS for rival in drawn)
        assert len(drawn) == len(set(drawn))


#: Lines of ours that go by what they do.
OUR_WAYS = {"arguments", "read", "one"}


def test_the_summary_hides_neither_failures_nor_missed_aims() -> None:
    report = made_up_report(slope=1.5)
    report.error = "RuntimeError: it broke"
    told = summary(report)
    assert "FAILED: RuntimeError: it broke" in told
    assert "[NOT] slope against the floor: 1.5 (aim 1.3)" in told
    assert "not measured" in told
    assert "meta: no --meta-wheel given" in told


# --- the page -----------------------------------------------------------------------------------


def page_text(tmp_path: Path, report: Report) -> str:
    report.write(tmp_path, ENVIRONMENT)
    return page.text(page.load(tmp_path))


def test_the_page_tells_figures_aims_origin_and_what_is_missing(tmp_path: Path) -> None:
    text = page_text(tmp_path, made_up_report())
    assert "| this library | 1.38 (1.31 to 1.44) |" in text
    assert "| slope against the floor | at most 1.3 | 1.25 (1.25 to 1.25) | met |" in text
    assert "| against a rival that is missing | at least 2 | not measured |  |" in text
    assert "Made-up GPU" in text
    assert "`0123abcd`, with uncommitted changes" in text
    assert "- meta: no --meta-wheel given" in text
    assert "(benchmarks/replay-shallow.svg)" in text


def test_other_figures_give_another_page(tmp_path: Path) -> None:
    text = page_text(tmp_path, made_up_report(slope=1.5))
    assert "| slope against the floor | at most 1.3 | 1.5 (1.5 to 1.5) | **not met** |" in text


def test_an_aim_that_is_not_met_comes_with_the_reason_and_others_with_none(tmp_path: Path) -> None:
    assert set(page.REASONS) <= set(REGISTRY)
    reason = page.REASONS["replay"].splitlines()[0]
    assert f"**Why not.** {reason}" in page_text(tmp_path / "short", made_up_report(1.5))
    assert "Why not" not in page_text(tmp_path / "met", made_up_report(1.25))


def test_a_failed_or_quick_benchmark_is_shown_as_such(tmp_path: Path) -> None:
    report = made_up_report()
    report.error, report.quick = "AssertionError: wrong\nresult", True
    text = page_text(tmp_path, report)
    assert "**Failed:** `AssertionError: wrong result`" in text
    assert "quick run" in text


def test_benchmarks_measured_apart_each_say_where(tmp_path: Path) -> None:
    made_up_report().write(tmp_path, ENVIRONMENT)
    other = Report("splits", "And splits?")
    other.write(tmp_path, {**ENVIRONMENT, "device": "Another GPU"})
    text = page.text(page.load(tmp_path))
    assert "- replay: Made-up GPU" in text
    assert "- splits: Another GPU" in text
    assert text.index("## replay") < text.index("## splits")


def test_json_of_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "replay.json").write_text('{"name": "replay", "schema": 99}')
    with pytest.raises(ValueError, match="schema 99"):
        page.load(tmp_path)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (1.0, "1"), (0.1234, "0.123"), (12345.6, "12,346"), (0.00001234, "0.000012")],
)
def test_numbers_are_written_without_exponents(value: float, expected: str) -> None:
    assert page.number(value) == expected


def test_drawing_needs_figures(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no JSON"):
        page.draw(tmp_path, tmp_path / "docs")


def test_the_same_figures_draw_the_same_bytes_and_others_do_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def drawn(name: str, slope: float) -> tuple[bytes, bytes]:
        docs = tmp_path / name
        report = made_up_report(slope)
        report.plot("bars", "Bars", x="", y="MiB", bars=True)
        report.add_cases("bars", [Case("ours", 0, lambda: 0.0, [slope])], names={0.0: "pool"})
        report.write(docs / "benchmarks", ENVIRONMENT)
        page.draw(docs / "benchmarks", docs)
        lines, bars = (docs / "benchmarks" / f"replay-{key}.svg" for key in ("shallow", "bars"))
        assert "this library" in lines.read_text()
        assert "pool" in bars.read_text()
        return lines.read_bytes(), (docs / "benchmarks.md").read_bytes()

    first = drawn("first", 1.25)
    assert drawn("second", 1.25) == first
    third = drawn("third", 1.5)
    assert third[0] != first[0]
    assert third[1] != first[1]
