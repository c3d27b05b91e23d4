"""Ranks on real devices: NCCL in segments and in breaks, gloo between ranks of one device.

The ranks are processes (rank_programs.py); one run of each program makes the report that the tests
look into.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph
from breakable_cuda_graphs._driver import bindings
from helping import as_nccl_captures
from ranks import run_ranks

from .helpers import bump, check_replays, dev

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gpu

PROGRAM = "gpu/rank_programs.py"
NCCL = "cpu:gloo,cuda:nccl"
TOLERANCE = 1e-4  # of float32 sums in another order; eager ones differ by some 1e-6
WAYS = (
    "in_a_break",
    "captured",
    "captured_asynchronous",
    "over_two_breaks",
    "captured_and_split",
    "both",
)


def run(name: str, world: int, folder: Any, backend: str) -> Any:
    reports = run_ranks(PROGRAM, name, world, folder, backend=backend, timeout=60)
    print(json.dumps(reports, indent=1))
    return reports


@pytest.fixture(scope="module", params=[1, 2], ids=["world 1", "world 2"])
def nccl(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    world = request.param
    if not torch.distributed.is_nccl_available():
        pytest.skip("torch is built without NCCL")
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices")
    return run("nccl", world, tmp_path_factory.mktemp("nccl"), NCCL)


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if not torch.distributed.is_gloo_available():
        pytest.skip("torch is built without gloo")
    return run("gloo", 2, tmp_path_factory.mktemp("gloo"), "gloo")


# ---------------------------------------------------------------- NCCL


@pytest.mark.parametrize("way", WAYS)
def test_tensor_parallel_layers_are_right_over_many_replays(nccl: Any, way: str) -> None:
    for report in nccl:
        assert report[f"{way} problem"] == ""
        assert report[way] < TOLERANCE


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_they_are_in_every_mode_with_a_barrier_of_nccls(nccl: Any, mode: str) -> None:
    for report in nccl:
        assert report[f"{mode} problem"] == ""
        assert report[mode] < TOLERANCE


def test_a_captured_collective_is_a_kernel_of_nccls(nccl: Any) -> None:
    if len(nccl) == 1:
        pytest.skip("NCCL launches nothing for one rank in place")
    for report in nccl:
        assert any("nccl" in label.lower() for label in report["captured nodes"])
        assert not any("nccl" in label.lower() for label in report["in_a_break nodes"])


def test_random_numbers_beside_a_captured_collective_are_those_of_eager_code(nccl: Any) -> None:
    for report in nccl:
        assert report["random problem"] == ""
        assert report["random"] is True


@pytest.mark.parametrize(
    "where", ["begun in a segment, waited for in a break", "begun in a segment, never waited for"]
)
def test_an_asynchronous_collective_that_a_segment_leaves_is_refused(nccl: Any, where: str) -> None:
    for report in nccl:
        assert report[where].startswith("UnjoinedStreamError")
        if len(nccl) > 1:
            assert "nccl" in report[where].lower()
            assert "wait()" in report[where]


def test_waiting_in_a_segment_for_what_a_break_began_is_refused_with_advice(nccl: Any) -> None:
    for report in nccl:
        error = report["begun in a break, waited for in a segment"]
        assert "async_op=True" in error
        assert "in a break" in error


def test_a_rank_that_fails_beside_captured_collectives_is_heard_of(nccl: Any) -> None:
    for which in range(len(nccl)):
        for rank, report in enumerate(nccl):
            error = report[f"rank {which} fails"]
            assert error.startswith("KeyError" if rank == which else f"RankError rank {which}")
            assert report[f"rank {which} fails seconds"] < 15
            assert report[f"after {which}"] < TOLERANCE


def test_a_difference_between_captured_ranks_is_named(nccl: Any) -> None:
    if len(nccl) == 1:
        pytest.skip("one rank has nothing to differ from")
    for report in nccl:
        assert report["different"].startswith("RankError ranks 0 and 1")
        assert "in segment 0" in report["different"]


@pytest.mark.parametrize("part", ["borders", "failures", "last"])
def test_no_part_of_the_program_ended_early(nccl: Any, part: str) -> None:
    assert [report[f"{part} problem"] for report in nccl] == [""] * len(nccl)


def test_a_process_group_ends_once_the_sequences_are_reset(nccl: Any) -> None:
    for report in nccl:
        assert report["at last"] < TOLERANCE
        assert report["left"] == [0, 0], "captures open, releases queued"
        assert report["destroy_process_group"] == "at once"


def test_what_nccl_adds_to_a_capture_by_hand_is_no_unjoined_work() -> None:
    driver = bindings.current()
    own, event = torch.cuda.Stream(), driver.cuEventCreate(2)
    side = bindings.types.CUstream(own.cuda_stream)

    def body(t: Any) -> Any:
        y = t * 2
        current = bindings.types.CUstream(torch.cuda.current_stream().cuda_stream)
        with as_nccl_captures(current, side, event):
            y = y + 1
        bump(y)
        return y * 2

    x, seq = dev(1), CUDAGraphSequence()
    with breakable_graph(seq):
        out = body(x)
    check_replays(seq, x, out, lambda t: (t * 2 + 2) * 2)
    torch.cuda.synchronize()
    seq.reset()
    driver.cuEventDestroy(event)


# ---------------------------------------------------------------- gloo, two ranks on one device


def test_ranks_of_one_device_sum_over_gloo_in_a_break(gloo: Any) -> None:
    assert gloo[0]["fingerprint"] == gloo[1]["fingerprint"]
    for report in gloo:
        assert report["error"] < TOLERANCE
        assert report["at last"] < TOLERANCE


def test_the_barrier_comes_between_a_segment_and_the_body_at_capture_only(gloo: Any) -> None:
    for report in gloo:
        assert report["order"] == ["segment", "barrier", "break"]
        assert report["order of a replay"] == ["break"]


@pytest.mark.parametrize("which", [0, 1])
def test_a_failure_of_one_rank_is_an_error_on_the_other(gloo: Any, which: int) -> None:
    for rank, report in enumerate(gloo):
        error = report[f"rank {which} fails"]
        assert error.startswith("KeyError" if rank == which else f"RankError rank {which} failed")
        assert report[f"rank {which} fails seconds"] < 15
        assert "capture it again" in report[f"rank {which} fails, replay"]
        assert report[f"after {which}"] < TOLERANCE


def test_captures_of_two_processes_are_compared(gloo: Any) -> None:
    for report in gloo:
        assert report["different"].startswith("RankError ranks 0 and 1")
        assert "in segment 0, node" in report["different"]


def test_a_collective_of_the_host_cannot_be_in_a_segment(gloo: Any) -> None:
    for report in gloo:
        assert report["captured"] != ""
