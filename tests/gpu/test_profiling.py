"""What a profile of a real replay says: it adds up, and it tells work from waiting."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from breakable_cuda_graphs import CUDAGraphSequence, Graph, annotate, breakable_graph, no_graph

from .helpers import bump, busy, check_replays, dev, sync, torch, warm_up

pytestmark = pytest.mark.gpu

HIDDEN, HEADS, BATCH, PAST = 4096, 32, 4, 512


class Block:
    """A decoder block whose attention is a break, over a cache whose length only the host knows."""

    def __init__(self) -> None:
        def weight(rows: int, columns: int) -> Any:
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / rows**0.5

        self.qkv, self.out = weight(HIDDEN, 3 * HIDDEN), weight(HIDDEN, HIDDEN)
        self.up, self.down = weight(HIDDEN, 4 * HIDDEN), weight(4 * HIDDEN, HIDDEN)
        shape = BATCH, HEADS, PAST, HIDDEN // HEADS
        self.keys, self.values = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        self.mixed = torch.empty(BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.length = PAST - 7

    def __call__(self, x: Any) -> Any:
        q = (torch.nn.functional.rms_norm(x, (HIDDEN,)) @ self.qkv)[:, :HIDDEN]
        attend(self, q)
        x = x + self.mixed @ self.out
        hidden = torch.nn.functional.rms_norm(x, (HIDDEN,)) @ self.up
        return x + torch.nn.functional.silu(hidden) @ self.down


@no_graph
def attend(block: Block, q: Any) -> None:
    keys, values = (each[:, :, : block.length] for each in (block.keys, block.values))
    q = q.reshape(BATCH, HEADS, 1, HIDDEN // HEADS)
    mixed = torch.nn.functional.scaled_dot_product_attention(q, keys, values)
    block.mixed.copy_(mixed.reshape(BATCH, HIDDEN))


def decoder(layers: int) -> tuple[Any, Any, Any]:
    blocks = [Block() for _ in range(layers)]
    x = torch.randn(BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16)
    seq = CUDAGraphSequence()

    def body() -> Any:
        y = x
        for number, block in enumerate(blocks):
            with annotate(f"layer {number}"):
                y = block(y)
        return y

    with torch.no_grad():
        warm_up(seq, body)
        with breakable_graph(seq):
            y = body()
    return seq, (x, blocks), y


@pytest.fixture
def profiled() -> Any:
    torch.manual_seed(1)
    seq, inputs, y = decoder(2)
    seq.profile(iterations=20)  # a host that has just woken up is slow
    return seq, inputs, y, seq.profile()


def test_the_units_of_a_decoder_add_up_to_its_replay(profiled: Any) -> None:
    *_, report = profiled
    print(report)
    assert not report.simulated
    total = sum(row.gpu_us + row.gap_us for row in report.rows)
    assert total == pytest.approx(report.replay_us, rel=0.05)
    assert report.overhead_us < 0.15 * report.replay_us


def test_a_segment_takes_as_long_as_its_launches_by_themselves(profiled: Any) -> None:
    """Once in several times: others may be at work on the device."""
    seq, _, _, report = profiled
    alone = Graph()
    alone.child(seq.segments[2].graph)
    execution = alone.instantiate()

    def by_themselves() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(20):
            execution.launch()
        start.record()
        for _ in range(50):
            execution.launch()
        end.record()
        sync()
        return 1e3 * start.elapsed_time(end) / 50

    seen = []
    for _ in range(8):
        seen.append((report.rows[2].gpu_us, by_themselves()))
        if seen[-1][0] == pytest.approx(seen[-1][1], rel=0.15):
            return
        report = seq.profile(iterations=20)
    pytest.fail(f"profiled, and by themselves, in microseconds: {seen}")


def test_names_and_lines_are_the_users(profiled: Any) -> None:
    *_, report = profiled
    labels = [row.label for row in report.rows]
    assert labels == [
        "layer 0/segment 0",
        "layer 0/attend",
        "layer 0 … layer 1/segment 2",
        "layer 1/attend",
        "layer 1/segment 4",
        "start and end",
    ]
    lines = Path(__file__).read_text().splitlines()
    for row in report.rows[1:4:2]:
        file, _, number = row.line.rpartition(":")
        assert file == __file__
        assert lines[int(number) - 1].strip() == "attend(self, q)"


def test_it_says_how_large_things_are(profiled: Any) -> None:
    seq, _, _, report = profiled
    assert report.pool_bytes >= 2 << 20
    # The driver takes memory in large pieces and keeps them: it may not show.
    assert report.executable_bytes is None or report.executable_bytes > 0
    assert [row.nodes for row in report.rows[:5:2]] == [
        len(segment.graph) for segment in seq.segments[::2]
    ]


def test_replays_after_it_are_right(profiled: Any) -> None:
    seq, (x, blocks), y, _ = profiled
    with torch.no_grad():
        want = x
        for block in blocks:
            want = block(want)
        seq.replay()
    sync()
    torch.testing.assert_close(y, want, rtol=0.05, atol=0.05)


def test_the_trace_can_be_read_and_its_tracks_do_not_overlap(profiled: Any, tmp_path: Path) -> None:
    *_, report = profiled
    report.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [each for each in events if each["ph"] == "X"]
    assert {each["tid"] for each in slices} == {1, 2}
    ends: dict[int, float] = {}
    for each in sorted(slices, key=lambda each: (each["tid"], each["ts"])):
        assert each["ts"] >= ends.get(each["tid"], 0) - 0.01
        ends[each["tid"]] = each["ts"] + each["dur"]


def test_where_the_device_is_the_slower_one_there_are_no_gaps() -> None:
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        for _ in range(3):
            busy(1)
            x.add_(1)
            bump(x)
    report = seq.profile(iterations=20)
    print(report)
    assert report.gap_us < 0.05 * report.replay_us
    total = sum(row.gpu_us + row.gap_us for row in report.rows)
    assert total == pytest.approx(report.replay_us, rel=0.05)
    assert all(row.gpu_us > 200 for row in report.rows if row.kind == "graph")


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def two_segments(between: Any) -> Any:
    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        x.add_(1)
        between(x)
        x.mul_(0.5)
    return seq, x


def test_python_in_a_break_is_a_gap() -> None:
    @no_graph
    def think(t: Any) -> None:
        spin(0.0005)
        t.add_(1)

    seq, _x = two_segments(think)
    report = seq.profile(iterations=20)
    print(report)
    (row,) = [each for each in report.rows if each.kind == "break"]
    assert row.gap_us > 400
    assert row.gpu_us < 100
    assert not row.waits
    assert report.worth_removing[0][0] is row


def test_what_a_break_does_after_it_has_waited_for_the_device_is_a_gap() -> None:
    @no_graph
    def look(t: Any) -> None:
        busy(0.2)
        t.sum().item()
        spin(0.0005)

    seq, _x = two_segments(look)
    report = seq.profile(iterations=20)
    print(report)
    (row,) = [each for each in report.rows if each.kind == "break"]
    assert row.waits
    assert row.gap_us > 400
    assert 50 < row.gpu_us < 400
    total = sum(each.gpu_us + each.gap_us for each in report.rows)
    assert total == pytest.approx(report.replay_us, rel=0.05)


def test_it_draws_as_its_replays_do() -> None:
    x = dev(1, 1 << 12)
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        y = torch.nn.functional.dropout(x, 0.5)
        bump(x)
        z = torch.rand_like(y)
    torch.manual_seed(7)
    generator = torch.cuda.default_generators[0]
    before = generator.get_offset()
    seq.replay()
    one = generator.get_offset() - before
    report = seq.profile(iterations=5, warmup=1)
    assert generator.get_offset() == before + (1 + report.replays) * one
    assert [row.kind for row in report.rows] == ["graph", "break", "graph", "replay"]
    del z


def test_a_profile_on_another_stream_leaves_the_sequence_usable() -> None:
    x = dev(0)
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        y = x * 2
        bump(y)
        out = y + 1
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    seq.profile(iterations=5, stream=side)
    torch.cuda.current_stream().wait_stream(side)
    check_replays(seq, x, out, lambda t: t * 2 + 2)


def test_cupy_streams_are_profiled() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.zeros(1 << 16, dtype=cupy.float32)
        seq = CUDAGraphSequence()

        @no_graph
        def add(a: Any) -> None:
            a += 1

        for _ in range(2):  # CuPy compiles at first use
            x *= 2
            add(x)
            x *= 0.5
        stream.synchronize()
        with breakable_graph(seq, stream=stream):
            x *= 2
            add(x)
            x *= 0.5
        report = seq.profile(iterations=10, stream=stream)
    assert [row.kind for row in report.rows] == ["graph", "break", "graph", "replay"]
    assert report.rows[1].name == "add"
