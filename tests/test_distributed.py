"""Two ranks: in step at capture, told of each other's failures, and compared.

They are two processes with gloo between them and a simulated device in each (rank_programs.py); one
run of both makes the report that all tests here look into.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)

from breakable_cuda_graphs import (  # noqa: E402
    CUDAGraphSequence,
    RankError,
    distributed,
    no_graph,
)
from breakable_cuda_graphs.distributed import (  # noqa: E402
    capture_together,
    compare,
)
from helping import assert_nothing_open  # noqa: E402
from ranks import run_ranks  # noqa: E402

RANKS = (0, 1)


@no_graph
def bump(t: Any) -> None:
    t += 1


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks("rank_programs.py", "all_at_once", 2, folder, timeout=110)


@pytest.fixture
def told(reports: Any, request: pytest.FixtureRequest) -> Any:
    """What both ranks report of one program."""
    return [report[request.param] for report in reports]


def program(name: str) -> Any:
    return pytest.mark.parametrize("told", [name], indirect=True, ids=[""])


# ---------------------------------------------------------------- in step


@program("barriers")
def test_barrier_fn_runs_between_a_segment_and_its_break_at_capture_only(told):
    for report in told:
        assert report["plain order"] == ["segment", "barrier", "break", "segment"]
        assert report["order at replay"] == ["break", "break"]


@program("barriers")
@pytest.mark.parametrize("way", ["plain", "together", "appended"])
def test_replays_with_an_all_reduce_as_the_break_are_right(told, way):
    assert [report[way] for report in told] == [[7, 25], [7, 25]]


@program("barriers")
def test_a_barrier_of_the_users_runs_once_the_ranks_have_met(told):
    assert [report["barriers together"] for report in told] == [["barrier"], ["barrier"]]


@program("barriers")
def test_a_group_is_in_step_by_itself(told):
    assert [report["alone"] for report in told] == [[2, 8], [4, 16]]
    assert all("not a rank of the given" in report["not in the group"] for report in told)


# ---------------------------------------------------------------- failures


@program("failures")
@pytest.mark.parametrize("which", RANKS)
def test_a_failure_of_one_rank_is_an_error_on_the_others_at_once(told, which):
    key = f"rank {which} fails in a segment"
    assert told[which][key] == "KeyError 'mine'"
    other = told[1 - which][key]
    assert other.startswith(f"RankError rank {which} failed")
    assert "KeyError: 'mine'" in other
    assert "the break reduce_all" in other
    assert told[1 - which][f"{key} seconds"] < 10  # far from the 60 that it would wait


@program("failures")
@pytest.mark.parametrize("which", RANKS)
def test_after_a_failure_no_rank_replays_and_the_next_capture_is_right(told, which):
    for report in told:
        assert "capture it again" in report[f"rank {which} fails in a segment, replay"]
        assert report[f"after {which}"] == [7, 25]
        assert report["at last"] == [7, 25]


@program("failures")
def test_a_failure_in_the_last_segment_is_heard_before_anything_is_kept(told):
    assert "the end of the block" in told[0]["rank 1 fails in the last segment"]
    assert [report["segments kept"] for report in told] == [0, 0]


@program("failures")
def test_a_failure_when_the_capture_is_finished_leaves_nothing_to_replay(told):
    assert told[0]["rank 0 fails when it commits"].startswith("MemoryError")
    assert told[1]["rank 0 fails when it commits"].startswith("RankError rank 0 failed")
    assert all("capture it again" in report["replay after a failed commit"] for report in told)


@program("failures")
def test_a_block_that_one_rank_cannot_open_is_an_error_on_the_others(told):
    key = "the rank that enters wrongly"
    assert told[0][key].startswith("CaptureError the legacy default stream")
    assert told[1][key].startswith("RankError rank 0 failed")


@program("failures")
def test_ranks_at_different_breaks_are_told_apart(told):
    for report in told:
        assert "rank 0 is at the break other_break" in report["other breaks"]
        assert "rank 1 is at the break reduce_all" in report["other breaks"]
        assert "rank 0 is at the end of the block" in report["one break less"]
        assert "rank 1 is at the break other_break" in report["one break less"]


@program("lateness")
def test_a_rank_that_does_not_come_in_time_is_named_and_hears_of_it(told):
    assert "rank 1 did not come to the break other_break within 0.5 seconds" in told[0]["late"]
    assert "rank 0 failed" in told[1]["late"]
    assert "did not come" in told[1]["late"]
    assert told[0]["late seconds"] < 10
    assert [report["afterwards"] for report in told] == [[7, 25], [7, 25]]


@program("out_of_step")
def test_whoever_fails_late_or_stays_away_leaves_nobody_waiting(told):
    assert told[1]["barrier_fn fails"] == "KeyError 'mine'"
    assert "rank 1 failed" in told[0]["barrier_fn fails"]
    assert [report["only one has a barrier_fn"] for report in told] == ["", ""]
    assert "rank 1 did not come" in told[0]["late for a collective"]
    assert "rank 0 failed" in told[1]["late for a collective"]
    assert "rank 1 did not come" in told[0]["stays away"]
    for which in ("the first of two", "the second of two"):
        assert told[0][which] == "KeyError 'mine'"
        assert "rank 0 failed in its capture (KeyError: 'mine')" in told[1][which]
    assert "rank 0 did not come to compare" in told[1]["does not compare"]
    for report in told:
        assert max(seconds for key, seconds in report.items() if key.endswith("seconds")) < 8


@program("out_of_step")
def test_after_any_failure_the_ranks_are_in_step_again(told):
    assert [report["at last"] for report in told] == [[7, 25], [7, 25]]
    assert told[0]["compared"] == told[1]["compared"]


def test_a_rank_that_dies_is_named(reports):
    assert "rank 1 did not come to the break reduce_all" in reports[0]["death"]
    assert reports[0]["death seconds"] < 20
    assert "death" not in reports[1]


@program("captured_collective")
def test_a_collective_of_the_host_cannot_be_captured(told):
    for report in told:
        assert "c10d" in report["captured"]
        assert "@no_graph" in report["captured"]
        assert report["afterwards"] == [7, 25]


# ---------------------------------------------------------------- comparing


@program("comparisons")
def test_equal_captures_have_one_fingerprint(told):
    assert told[0]["equal"] == told[1]["equal"] == ""
    assert told[0]["equal fingerprint"] == told[1]["equal fingerprint"]
    assert told[0]["values fingerprint"] == told[1]["values fingerprint"]
    assert told[0]["equal fingerprint"] != told[0]["values fingerprint"]


DIFFERENCES = {
    "operator": "in segment 0, node aten::exp: fn is aten::exp on rank 0 and aten::sqrt on rank 1",
    "order": "in segment 0, node aten::sqrt: fn is aten::sqrt on rank 0",
    "nodes": "in segment 0: nodes is 2 on rank 0 and 3 on rank 1",
    "segments": ": segments is 3 on rank 0 and 5 on rank 1",
    "names": "in segment 1: kind is the break reduce_nothing on rank 0",
    "second segment": "in segment 2, node aten::add.Tensor: fn is aten::add.Tensor on rank 0",
}


@program("comparisons")
@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_names_ranks_segment_node_and_field_on_all_ranks(told, name):
    for report in told:
        assert report[name].startswith("RankError ranks 0 and 1")
        assert DIFFERENCES[name] in report[name]
        assert f"{name} fingerprint" not in report


@program("comparisons")
def test_a_comparison_does_not_wait_for_ever(told):
    assert "rank 1 did not come to compare within 0.3 seconds" in told[0]["one does not come"]


# ---------------------------------------------------------------- a group of one, in this process


@pytest.fixture
def alone() -> Any:
    """A process group of one rank, whose store is this."""
    dist = torch.distributed
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


def test_one_rank_alone_is_in_step_and_keeps_nothing(device, alone):
    x, seq = torch.ones(2), CUDAGraphSequence()
    for _ in range(3):
        with capture_together(seq):
            y = x * 2
            bump(y)
    seq.replay()
    assert y.tolist() == [3, 3]
    assert compare(seq) == compare(seq)
    assert alone.num_keys() < 12, "the meetings of before are still in the store"
    seq.reset()


@pytest.mark.parametrize("where", ["segment", "break"])
def test_the_users_own_exception_surfaces_untouched(device, alone, where):
    mine, seq = KeyError("mine"), CUDAGraphSequence()

    def fail() -> None:
        raise mine

    with pytest.raises(KeyError) as info, capture_together(seq):
        no_graph(fail)() if where == "break" else fail()
    assert info.value is mine
    assert mine.__cause__ is None
    assert_nothing_open(device)


def test_others_that_cannot_be_told_are_mentioned_in_a_note(device, alone, monkeypatch):
    def gone(*_: Any) -> None:
        raise torch.distributed.DistNetworkError("connection reset")

    block = capture_together(CUDAGraphSequence())
    monkeypatch.setattr(block._meetings, "_say", gone)
    with pytest.raises(KeyError) as info, block:
        raise KeyError("mine")
    assert "other ranks could not be told: DistNetworkError" in info.value.__notes__[-1]


def test_a_store_that_is_gone_is_an_error_and_not_a_hang(device, alone, monkeypatch):
    class Gone:
        def set(self, *_: Any) -> None:
            """The last thing that went through."""

        def check(self, *_: Any) -> bool:
            raise torch.distributed.DistNetworkError("connection reset")

    block = capture_together(CUDAGraphSequence())
    monkeypatch.setattr(block._meetings, "_store", Gone())
    with (
        pytest.raises(RankError, match="store of the process group does not answer") as info,
        block,
    ):
        bump(torch.ones(2))
    assert isinstance(info.value.__cause__, torch.distributed.DistNetworkError)
    assert_nothing_open(device)


def test_a_new_process_group_counts_its_meetings_anew(device, alone):
    seq = CUDAGraphSequence()
    compare(seq)
    torch.distributed.destroy_process_group()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert compare(seq, timeout=1) == compare(seq, timeout=1)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_is_a_positive_number(alone, timeout):
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        capture_together(CUDAGraphSequence(), timeout=timeout)


# ---------------------------------------------------------------- arguments


def test_without_a_process_group_that_is_said():
    with pytest.raises(RuntimeError, match="init_process_group"):
        capture_together(CUDAGraphSequence())
    with pytest.raises(RuntimeError, match="init_process_group"):
        compare(CUDAGraphSequence())


def test_bad_arguments_are_refused_by_name():
    with pytest.raises(TypeError, match="`barrier_fn` must be callable"):
        capture_together(CUDAGraphSequence(), barrier_fn=3)
    with pytest.raises(TypeError, match="sequence must be a CUDAGraphSequence"):
        compare(3)


def test_errors_of_ranks_carry_what_they_speak_of():
    error = distributed.ranks_differ((0, 3), 2, "gemm", "grid", "(1, 1, 1)", "(2, 1, 1)")
    assert (error.rank, error.segment, error.node, error.field) == (3, 2, "gemm", "grid")
    assert (
        distributed.rank_failed(2, "x", "y").rank == distributed.rank_missing(2, "y", 1).rank == 2
    )
    assert distributed.ranks_apart([(0, "a"), (4, "b")]).rank == 4


def test_a_rank_that_fails_fails_the_test(tmp_path: Path):
    """The test of the tests: it says which rank it was, and why."""
    program = Path(__file__).parent / "rank_programs.py"
    with pytest.raises(AssertionError, match="no_such_program"):
        run_ranks(program.name, "no_such_program", 1, tmp_path, timeout=30)
