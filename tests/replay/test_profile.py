"""What a profile promises: it replays as `replay` does, its units add up, and it leaves nothing behind."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import (  # noqa: E402
    CUDAGraphSequence,
    ReplayError,
    StaleInputError,
    annotate,
    breakable_graph,
    force_no_graph,
    no_graph,
)
from breakable_cuda_graphs._driver import (  # noqa: E402
    bindings,
    timing,
)
from breakable_cuda_graphs.replay.report import (  # noqa: E402
    Profile,
    Row,
)
from helping import Boom, a_stream, capture, in_thread, settle, watched_driver  # noqa: E402


@no_graph
def attend(t: Any) -> None:
    t.add_(1)


def decoder(x: Any) -> None:
    """Two layers with a break in each, and two segments behind them that are one launch."""
    for number in range(2):
        with annotate(f"layer {number}"):
            x.mul_(2)
            attend(x)
            x.add_(3)
    force_no_graph()
    x.sub_(1)


def captured() -> tuple[Any, Any]:
    """The decoder as a sequence, and its input. No fixture: that would outlive the device's checks."""
    x = torch.ones(8)
    return capture(lambda: decoder(x))[0], x


def captured_around(call: Any) -> tuple[Any, Any]:
    """A sequence with a segment before and one behind a break without arguments, and its input."""
    x = torch.ones(4)

    def body() -> None:
        x.add_(1)
        call()
        x.add_(1)

    return capture(body)[0], x


def line_of(text: str) -> str:
    """ "file.py:12" of the line of this file that has the text."""
    for number, line in enumerate(Path(__file__).read_text().splitlines(), 1):
        if text in line:
            return f"{__file__}:{number}"
    raise AssertionError(f"no line has {text}")


# ---------------------------------------------------------------- what it says


def test_each_launch_and_each_break_has_a_row_with_its_name_and_line(device: Any) -> None:
    seq, x = captured()
    rows = seq.profile(iterations=4, warmup=1).rows
    assert [(row.kind, row.label) for row in rows] == [
        ("graph", "layer 0/segment 0"),
        ("break", "layer 0/attend"),
        ("graph", "layer 0 … layer 1/segment 2"),
        ("break", "layer 1/attend"),
        ("graph", "layer 1 …/segments 4, 6"),
        ("replay", "start and end"),
    ]
    call = line_of("            attend(x)")
    assert [row.line for row in rows[1:4]] == [call] * 3
    assert [row.segments for row in rows] == [(0,), (1,), (2,), (3,), (4, 6), ()]


def test_nodes_and_launches_are_those_of_the_graphs(device: Any) -> None:
    seq, x = captured()
    rows = seq.profile(iterations=2, warmup=0).rows
    assert [row.nodes for row in rows] == [1, None, 2, None, 2, 0]
    assert [row.launches for row in rows] == [1, None, 1, None, 1, 0]


def test_the_units_add_up_to_the_profiled_replay(device: Any) -> None:
    seq, x = captured()
    report = seq.profile(iterations=12)
    total = sum(row.gpu_us + row.gap_us for row in report.rows)
    overhead = max(0.0, report.overhead_us)
    assert total >= report.profiled_us - overhead - 1e-6
    assert total <= report.profiled_us + 1e-6
    if all(row.gpu_us + row.gap_us > 0 for row in report.rows):
        assert total == pytest.approx(report.profiled_us - overhead)
    assert sum(row.share for row in report.rows) == pytest.approx(1)
    assert report.overhead_us == pytest.approx(report.profiled_us - report.replay_us)
    assert report.fastest_us <= report.replay_us <= report.slowest_us
    assert all(row.gpu_us >= 0 and row.gap_us >= 0 and row.cpu_us >= 0 for row in report.rows)


def test_a_slow_break_is_the_one_that_takes_the_hosts_time(device: Any) -> None:
    @no_graph
    def slow() -> None:
        time.sleep(0.003)

    x = torch.ones(4)

    def body() -> None:
        x.add_(1)
        slow()
        x.add_(1)
        attend(x)

    report = capture(body)[0].profile(iterations=3, warmup=0)
    slowest = max(report.rows, key=lambda row: row.cpu_us)
    assert slowest.name == "slow"
    assert slowest.cpu_us > 2900
    assert report.replay_us > 2900
    assert slowest.share > 0.5


def test_it_says_that_the_times_are_the_simulators(device: Any) -> None:
    seq, x = captured()
    report = seq.profile(iterations=2, warmup=0)
    assert report.simulated
    assert "simulated driver: its times are not a device's" in str(report)


def test_the_overhead_is_measured_and_stated(device: Any) -> None:
    seq, x = captured()
    report = seq.profile(iterations=4)
    assert report.mark_us > 0
    assert "profiling added" in str(report).replace("\n", " ")


# ---------------------------------------------------------------- what is worth removing


def row(kind: str, name: str, gpu: float, gap: float) -> Row:
    return Row(
        kind=kind, name=name, scope="", line="/a/b.py:7", segments=(0,), gpu_us=gpu, gap_us=gap,
        cpu_us=1.0, launches=1, nodes=3, share=0.1, waits=False,
    )  # fmt: skip


def report_of(*rows: Row, **fields: Any) -> Profile:
    total = sum(each.gpu_us + each.gap_us for each in rows)
    values: dict[str, Any] = {
        "sequence": "<seq>", "device": "H200", "simulated": False, "iterations": 1, "replays": 3,
        "replay_us": total, "fastest_us": total, "slowest_us": total, "cpu_us": total,
        "profiled_us": total, "mark_us": 1.0, "clock_error_us": 2.0, "pool_bytes": None,
        "executable_bytes": None, "timeline": (),
    }  # fmt: skip
    return Profile(rows=rows, **(values | fields))


def test_the_breaks_worth_removing_are_those_that_the_stream_waits_for() -> None:
    report = report_of(
        row("graph", "segment 0", 100, 0),
        row("break", "cheap", 50, 0.5),
        row("graph", "segment 2", 100, 0),
        row("break", "dear", 10, 40),
        row("graph", "segment 4", 100, 5),
        row("break", "dearer", 0, 60),
        row("replay", "start and end", 0, 2),
    )
    found = [(each.name, gain) for each, gain in report.worth_removing]
    assert found == [("dearer", 60), ("dear", 45)]
    text = str(report)
    assert text.index("dearer at b.py:7: 60.0 us") < text.index("dear at b.py:7: 45.0 us")


def test_where_nothing_waits_it_says_so() -> None:
    report = report_of(row("graph", "segment 0", 100, 0), row("break", "f", 50, 0))
    assert "no break costs the replay a hundredth of its time" in str(report)


# ---------------------------------------------------------------- it replays, and nothing else


def test_every_replay_of_it_is_a_replay(device: Any) -> None:
    seq, x = captured()
    expected = x.clone()
    report = seq.profile(iterations=3, warmup=2)
    for _ in range(report.replays):
        for _ in range(2):
            expected = expected * 2 + 1 + 3
        expected = expected - 1
    assert report.replays > 3 + 2
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)


def test_the_replays_after_it_are_the_same_as_before(device: Any) -> None:
    with watched_driver(device) as driver:
        x = torch.ones(8)
        seq, _ = capture(lambda: decoder(x))
        counts = []
        for _ in range(2):
            seq.replay()
            driver.calls.clear()
            seq.replay()
            counts.append(Counter(driver.calls))
            seq.profile(iterations=2, warmup=0)
        seq.reset()
        del seq
        settle()
    assert counts[0] == counts[1]


def test_the_timed_replays_make_the_same_launches_as_a_replay(device: Any) -> None:
    with watched_driver(device) as driver:
        x = torch.ones(8)
        seq, _ = capture(lambda: decoder(x))
        seq.replay()
        driver.calls.clear()
        seq.replay()
        launches = driver.calls.count("cuGraphLaunch")
        made: list[int] = []

        def answer(_: int, name: str, call: Any) -> Any:
            if name == "cuGraphLaunch":
                made.append(1)
            return call()

        driver.answer = answer
        report = seq.profile(iterations=4, warmup=0)
        driver.answer = None
        assert len(made) == report.replays * launches
        seq.reset()
        del seq
        settle()


def test_it_holds_the_turn_so_that_other_threads_replays_wait(device: Any) -> None:
    seen: list[int] = []
    inside = threading.Event()

    @no_graph
    def look() -> None:
        inside.set()
        seen.append(threading.get_ident())

    seq, _x = captured_around(look)
    me = threading.get_ident()
    inside.clear()

    def other() -> None:
        inside.wait(10)
        seq.replay()

    thread = threading.Thread(target=other)
    thread.start()
    report = seq.profile(iterations=6, warmup=0)
    thread.join(10)
    assert not thread.is_alive()
    ours = [ident for ident in seen if ident == me]
    assert len(ours) == 1 + report.replays  # and one at capture
    assert len(seen) == len(ours) + 1


def test_it_runs_on_the_stream_that_it_is_given(device: Any) -> None:
    seq, x = captured()
    from breakable_cuda_graphs.simulator import tensors

    with a_stream() as stream:
        report = seq.profile(iterations=2, warmup=0, stream=stream)
        assert len(report.rows) == 6
        assert tensors.current_stream() == 0
        seq.replay()  # on the default stream again


def test_it_works_in_another_thread(device: Any) -> None:
    seq, x = captured()
    assert len(in_thread(lambda: seq.profile(iterations=2, warmup=0)).rows) == 6


def test_raw_streams_are_profiled_without_torch(bare_device: Any) -> None:
    from breakable_cuda_graphs._driver import bindings

    driver = bindings.current()
    memory, stream = driver.cuMemAlloc(64), driver.cuStreamCreate(1)
    seq = CUDAGraphSequence()
    with breakable_graph(seq, stream=stream):
        driver.cuMemsetD8Async(memory, 1, 64, stream)
        force_no_graph()
        driver.cuMemsetD8Async(memory, 2, 64, stream)
    report = seq.profile(iterations=2, warmup=0, stream=stream)
    assert [each.label for each in report.rows] == ["segments 0, 2", "start and end"]
    seq.reset()
    driver.cuStreamDestroy(stream)
    driver.cuMemFree(memory)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("options", [{"iterations": 0}, {"warmup": -1}])
def test_numbers_that_are_too_small_are_refused(device: Any, options: dict[str, int]) -> None:
    seq, x = captured()
    with pytest.raises(ValueError, match="has to be at least"):
        seq.profile(**options)


@pytest.mark.parametrize("options", [{"iterations": 2.5}, {"warmup": True}])
def test_what_is_no_number_is_refused(device: Any, options: dict[str, Any]) -> None:
    seq, x = captured()
    with pytest.raises(TypeError):
        seq.profile(**options)


def test_an_empty_sequence_is_refused(device: Any) -> None:
    with pytest.raises(ReplayError, match="nothing to profile"):
        CUDAGraphSequence().profile()


def test_a_capture_is_refused_and_stays_whole(device: Any) -> None:
    seq, x = captured()
    x, outer = torch.ones(2), CUDAGraphSequence()
    with breakable_graph(outer):
        x.add_(1)
        with pytest.raises(ReplayError, match="cannot be profiled while its stream is captured"):
            seq.profile()
    outer.replay()


def test_a_stale_sequence_is_refused(device: Any) -> None:
    x = torch.ones(4)
    seq = capture(lambda: x.add_(1))[0]
    del x
    with pytest.raises(StaleInputError):
        seq.profile()


@pytest.mark.parametrize("at", [2, 8, 15])
def test_a_failing_break_surfaces_and_leaves_nothing_behind(device: Any, at: int) -> None:
    calls = []

    @no_graph
    def fail() -> None:
        calls.append(1)
        if len(calls) == at:
            raise Boom

    x = torch.ones(4)

    def body() -> None:
        x.add_(1)
        fail()

    seq, _ = capture(body)
    with pytest.raises(Boom):
        seq.profile(iterations=5, warmup=1)
    before = len(calls)
    seq.replay()
    assert len(calls) == before + 1


def test_a_break_that_replays_its_sequence_is_refused(device: Any) -> None:
    x, seq = torch.ones(4), CUDAGraphSequence()
    armed = []

    @no_graph
    def again() -> None:
        if armed:
            seq.replay()

    with breakable_graph(seq):
        x.add_(1)
        again()
    armed.append(1)
    with pytest.raises(ReplayError, match="by one of its own breaks"):
        seq.profile(iterations=2)
    armed.clear()
    seq.replay()


def test_a_break_cannot_profile_its_sequence(device: Any) -> None:
    x, seq = torch.ones(4), CUDAGraphSequence()
    armed = []

    @no_graph
    def again() -> None:
        if armed:
            seq.profile(iterations=1, warmup=0)

    with breakable_graph(seq):
        x.add_(1)
        again()
    armed.append(1)
    with pytest.raises(ReplayError, match="profiled by one of its own breaks"):
        seq.replay()
    del again  # it holds the sequence that holds it


# ---------------------------------------------------------------- work and waiting


class FakeDelay:
    """A device that is behind the host by what was launched; `wait` is what a break does to wait for it."""

    def __init__(self) -> None:
        self.launched: list[float] = []
        self.due = 0.0

    def launch(self, microseconds: float) -> None:
        self.launched.append(microseconds)
        self.due = time.perf_counter() + microseconds / 1e6

    def wait(self) -> None:
        time.sleep(max(0.0, self.due - time.perf_counter()))

    def close(self) -> None:
        self.launched.append(-1.0)


@pytest.fixture
def fake(monkeypatch: Any) -> FakeDelay:
    made = FakeDelay()
    monkeypatch.setattr(timing, "delay", lambda driver, stream: made)
    return made


def profile_as_on_a_device(seq: Any, monkeypatch: Any, **options: Any) -> Profile:
    """With all the ways of timing; the simulated driver needs only the first two."""
    monkeypatch.setattr(bindings.current(), "simulated", False)
    try:
        report: Profile = seq.profile(**options)
    finally:
        monkeypatch.setattr(bindings.current(), "simulated", True)
    return report


def test_each_unit_is_behind_a_delay_that_outlasts_the_host(
    device: Any, fake: FakeDelay, monkeypatch: Any
) -> None:
    @no_graph
    def slow() -> None:
        time.sleep(0.004)

    seq, _x = captured_around(slow)
    report = profile_as_on_a_device(seq, monkeypatch, iterations=2, warmup=0)
    assert fake.launched[-1] == -1.0  # it was given back
    rounds = [fake.launched[at : at + 3] for at in range(0, 6, 3)]
    assert rounds[0] == rounds[1]
    assert rounds[0][1] > 4 * 4000
    assert not report.rows[1].waits


def test_a_break_that_waits_for_the_device_is_found_and_its_work_marked(
    device: Any, fake: FakeDelay, monkeypatch: Any
) -> None:
    @no_graph
    def look() -> None:
        fake.wait()
        time.sleep(0.001)

    seq, _x = captured_around(look)
    report = profile_as_on_a_device(seq, monkeypatch, iterations=3, warmup=0)
    waiting = [each.name for each in report.rows if each.waits]
    assert waiting == ["look"]
    assert "look (waits)" in str(report)
    assert threading.active_count() == 1


def test_a_break_that_was_only_slow_for_once_does_not_wait(
    device: Any, fake: FakeDelay, monkeypatch: Any
) -> None:
    @no_graph
    def stumble() -> None:
        if fake.launched and max(fake.launched[-3:]) < 1500:  # the first time with delays
            fake.wait()

    seq, _x = captured_around(stumble)
    report = profile_as_on_a_device(seq, monkeypatch, iterations=3, warmup=0)
    assert max(fake.launched) >= 2000, "it was not even looked at"
    assert not any(each.waits for each in report.rows)


def test_a_device_without_a_compiler_is_delayed_by_fills(bare_device: Any) -> None:
    driver = bindings.current()
    stream = driver.cuStreamCreate(1)
    delay = timing.delay(driver, stream)  # no module can be loaded on the simulated driver
    before = time.perf_counter()
    delay.launch(3000)
    driver.cuStreamSynchronize(stream)
    assert time.perf_counter() - before > 0.001
    delay.close()
    driver.cuStreamDestroy(stream)
    assert bare_device.leaks() == []


# ---------------------------------------------------------------- the forms


def test_the_table_is_the_same_without_rich(device: Any, monkeypatch: Any) -> None:
    seq, x = captured()
    report = seq.profile(iterations=2, warmup=0)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    plain = str(report)
    assert "unit" in plain.splitlines()[2]
    for each in report.rows:
        assert each.label in plain
    assert f"{report.rows[0].gpu_us:,.1f}" in plain


def test_the_table_is_drawn_by_rich_where_it_is(device: Any) -> None:
    seq, x = captured()
    pytest.importorskip("rich")
    report = seq.profile(iterations=2, warmup=0)
    assert "┃" in str(report)
    for each in report.rows:
        assert each.label in str(report)


def test_names_are_not_read_as_markup() -> None:
    text = str(report_of(row("break", "[bold]f[/x]", 1, 1)))
    assert "[bold]f[/x]" in text


def test_json_has_all_figures(device: Any, tmp_path: Path) -> None:
    seq, x = captured()
    report = seq.profile(iterations=15, warmup=0)
    path = tmp_path / "report.json"
    text = report.to_json(path)
    assert path.read_text() == text
    values = json.loads(text)
    assert [each["name"] for each in values["rows"]] == [each.name for each in report.rows]
    assert values["replay_us"] == report.replay_us
    assert values["overhead_us"] == report.overhead_us
    assert len(values["timeline"]) == 3 * 5


def test_a_report_can_be_read_again(device: Any) -> None:
    seq, _x = captured()
    report = seq.profile(iterations=5, warmup=0)
    again = Profile.from_json(report.to_json())
    assert again == report
    assert str(again) == str(report)


@pytest.mark.parametrize("text", ["", "[]", '{"rows": []}', '{"rows": [{"kind": 1}]}'])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no report of a profile"):
        Profile.from_json(text)


def test_the_chrome_trace_has_a_slice_for_each_unit_on_both_tracks(
    device: Any, tmp_path: Path
) -> None:
    seq, x = captured()
    report = seq.profile(iterations=15, warmup=0)
    path = tmp_path / "trace.json"
    report.to_chrome_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    slices = [each for each in events if each["ph"] == "X"]
    for each in slices:
        assert set(each) >= {"pid", "tid", "name", "ts", "dur"}
        assert each["ts"] >= 0
        assert each["dur"] > 0
    host = [each for each in slices if each["tid"] == 1]
    assert [each["name"] for each in host] == [each.label for each in report.rows[:-1]] * 3
    by_track: dict[int, float] = {}
    for each in sorted(slices, key=lambda each: (each["tid"], each["ts"])):
        assert each["ts"] >= by_track.get(each["tid"], 0) - 1e-6, "slices of a track overlap"
        by_track[each["tid"]] = each["ts"] + each["dur"]
