"""Every error says what happened, where, and what to do; and carries the same in its fields."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import breakable_cuda_graphs
from breakable_cuda_graphs import errors
from breakable_cuda_graphs._driver import errors as driver_errors
from breakable_cuda_graphs.capture import errors as capture_errors
from breakable_cuda_graphs.errors import (
    CaptureError,
    CUDAError,
    ProcessError,
    ReplayError,
    StaleInputError,
    UnjoinedStreamError,
    UpdateError,
)
from breakable_cuda_graphs.frameworks import errors as framework_errors
from breakable_cuda_graphs.graph import errors as graph_errors
from breakable_cuda_graphs.replay import errors as replay_errors
from breakable_cuda_graphs.sequence import errors as sequence_errors

ROOMS = (
    errors, driver_errors, framework_errors, graph_errors, sequence_errors, capture_errors, replay_errors,
)  # fmt: skip

#: Every function of a room that makes an error, or a text for one, by its name.
BUILDERS = {
    name: function
    for room in ROOMS
    for name, function in inspect.getmembers(room, inspect.isfunction)
    if not name.startswith("_")
}

CAUSE = CUDAError("cuStreamEndCapture failed with CUDA_ERROR_STREAM_CAPTURE_INVALIDATED (901)")

#: builder, its arguments, the type, its fields, and words that its text has to have.
CASES: dict[str, tuple[tuple[Any, ...], type[BaseException], dict[str, Any], str]] = {
    "driver_call_failed": (
        ("cuGraphLaunch", 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal address"),
        CUDAError,
        {"call": "cuGraphLaunch", "code": 700, "name": "CUDA_ERROR_ILLEGAL_ADDRESS"},
        "cuGraphLaunch|CUDA_ERROR_ILLEGAL_ADDRESS|700|an illegal address",
    ),
    "driver_call_missing": (
        ("cuGraphNew", RuntimeError("not found")),
        CUDAError,
        {"call": "cuGraphNew", "name": "NOT_FOUND"},
        "cuGraphNew|not found|too old|doctor",
    ),
    "no_driver": (
        ("SOME_VARIABLE", CAUSE),
        CUDAError,
        {"call": "cuInit", "name": "NO_DRIVER"},
        "no CUDA driver|Install|SOME_VARIABLE=1|simulated_device",
    ),
    "closed": (("StreamHandle",), RuntimeError, {}, "StreamHandle|closed"),
    "driver_lost_in_fork": ((), ProcessError, {}, "forked|spawn"),
    "used_after_fork": (("sequence",), ProcessError, {}, "sequence|forked|spawn"),
    "not_copyable": (("Sequence",), TypeError, {}, "Sequence|pickled|owns|Capture again"),
    "not_a_stream": ((3.5,), TypeError, {}, "float|__cuda_stream__|int"),
    "not_callable": (("barrier_fn", 3), TypeError, {}, "barrier_fn|callable|int"),
    "bad_choice": (("mode", "x", ("a", "b")), ValueError, {}, "mode|'a', 'b'|'x'"),
    "bad_type": (("pool", 3, "a pool"), TypeError, {}, "pool|a pool|int"),
    "two_captures_draw": ((), CaptureError, {}, "random|one after the other|break"),
    "left_elsewhere": (("block", False), CaptureError, {}, "a block|another thread|next used"),
    "draw_during_capture": ((), ReplayError, {}, "random|Replay when"),
    "allocator_without_pools": (
        ("cudaMallocAsync",), CaptureError, {}, "cudaMallocAsync|private|PYTORCH_CUDA_ALLOC_CONF|plugg",
    ),
    "pool_of_other_device": ((0, 1), ValueError, {}, "cuda:0|cuda:1"),
    "stale_input": (
        ("float32 [2]", "argument 0 of f"),
        StaleInputError,
        {"tensor": "float32 [2]", "role": "argument 0 of f"},
        r"float32 [2]|argument 0 of f|freed|keep_inputs=True|reset\(\)",
    ),
    "break_returns_arrays": (
        ("f", "[0]"),
        CaptureError,
        {"function": "f"},
        'break f|result[0]|outputs="static"|argument',
    ),
    "break_returns_arrays_beside": (
        ("f", "Box"), CaptureError, {"function": "f"}, "break f|Box|fields|keys|static",
    ),
    "result_of_unknown_type": (
        ("f", ".a", "Model"),
        CaptureError,
        {"function": "f"},
        "break f|result.a|Model|tensors|outside",
    ),
    "result_requires_grad": (
        ("f", ""), CaptureError, {"function": "f"}, "break f|requires grad|no_grad|autograd.Function",
    ),
    "history_changed": (
        ("f", "0"), CaptureError, {"function": "f"}, "break f|argument 0|no_grad|autograd.Function",
    ),
    "other_stream_left_current": (
        ("f",), CaptureError, {"function": "f"}, "break f|left another stream|with statement",
    ),
    "argument_filled": (
        ("f", "0['h']", "read in segment 2"), CaptureError, {"function": "f"},
        "break f|argument 0['h']|read in segment 2|static|was there before",
    ),
    "argument_moved": (
        ("f", "0"), CaptureError, {"function": "f"}, "break f|argument 0|shape|copy_|view",
    ),
    "results_overlap": (
        ("f", "[1]"), CaptureError, {"function": "f"}, "break f|result[1]|views|clones",
    ),
    "result_structure_changed": (
        ("f", "tuple(a)", "list(a)"),
        ReplayError,
        {"function": "f"},
        "break f|tuple(a)|list(a)|Nothing after it|same structure",
    ),
    "result_changed": (
        ("f", "[1]", "float32 [2]", "float32 [3]"),
        ReplayError,
        {"function": "f"},
        "break f|result[1]|float32 [2]|float32 [3]|Nothing after it|Pad|capture again",
    ),
    "result_moved": (
        ("f", "[1]"), ReplayError, {"function": "f"}, "break f|result[1]|Nothing after it|clone",
    ),
    "reentered": (("replayed",), ReplayError, {}, r"replayed|own breaks|replay\(\) has returned"),
    "stream_of_other_context": ((), ReplayError, {}, "another CUDA context|replay on a stream"),
    "capture_stream_of_other_device": ((), CaptureError, {}, "another device|its first capture"),
    "break_on_other_device": (
        ("f",), CaptureError, {"function": "f"}, "break f|another device|inside of the break",
    ),
    "graph_of_other_device": ((), ValueError, {}, "on another device|current when you append"),
    "pool_of_other_context": ((), ValueError, {}, "another CUDA context"),
    "generator_of_other_device": (("cuda:1", 0), ValueError, {}, "cuda:0|cuda:1"),
    "other_context": ((), CaptureError, {}, "another CUDA context|make that one current"),
    "replay_while_capturing": ((), ReplayError, {}, "being captured|block ends"),
    "replay_after_failure": ((), ReplayError, {}, r"failed|incomplete|capture it again|reset\(\)"),
    "reset_while_capturing": ((), CaptureError, {}, "reset|inside its own"),
    "capture_while_capturing": ((), CaptureError, {}, "captured already|another"),
    "cannot_embed": (("of this",), ReplayError, {}, "of this|unharmed|@no_graph"),
    "capture_on_default_stream": (("legacy default",), CaptureError, {}, "legacy default|of your own"),
    "nested_block": ((True,), CaptureError, {}, "nested|another breakable_graph|unharmed|outside"),
    "block_not_open": ((), CaptureError, {}, "not open"),
    "capture_lost": (
        (3, "the break f", "global", CAUSE),
        CaptureError,
        {"segment": 3, "__cause__": CAUSE},
        "segment 3|the break f|901|@no_graph|.item()|thread_local",
    ),
    "recording_reads_what_is_gone": (("[2]",), CaptureError, {}, "[2]|gone already|alive until"),
    "left_open_in_a_break": (
        ("f",), CaptureError, {"function": "f"}, "break f|without ending|with statement",
    ),
    "other_thread": (
        (2, "the break f", "global"),
        CaptureError,
        {"segment": 2},
        'segment 2|the break f|another thread|"global"|relaxed',
    ),
    "host_nodes": ((4,), CaptureError, {"segment": 4}, 'segment 4|host callback|@no_graph|"allow"'),
    "unjoined": (
        (1, "the break f", ("mul", "add"), (7, 8)),
        UnjoinedStreamError,
        {"segment": 1, "kernels": ("mul", "add"), "streams": (7, 8)},
        "segment 1|the break f|mul, add|7, 8|wait_stream",
    ),
    "poisoned": ((ValueError("mine"),), CaptureError, {}, "ValueError: mine|Nothing of the block"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_error_says_what_where_and_what_to_do(name):
    arguments, kind, fields, words = CASES[name]
    error = BUILDERS[name](*arguments)
    assert type(error) is kind
    for field, value in fields.items():
        assert getattr(error, field) == value
    text = str(error)
    for word in words.replace("\\", "").split("|"):
        assert word in text, f"{word!r} is not in {text!r}"
    assert "  " not in text


def test_texts_differ_by_mode_and_by_whose_capture_it_is():
    assert "thread_local" not in str(capture_errors.capture_lost(0, "x", "relaxed", CAUSE))
    assert "somebody else" in str(capture_errors.nested_block(False))
    assert (
        len(capture_errors.advice("global", CAUSE))
        == len(capture_errors.advice("relaxed", CAUSE)) + 1
    )


def test_waiting_for_work_of_another_place_has_advice_of_its_own():
    for text in (
        "CUDA error: dependency created on uncaptured work in another stream",
        "CUDA error: operation not permitted on an event last recorded in a capturing stream",
    ):
        (note,) = capture_errors.advice("global", RuntimeError(text))
        assert "async_op=True" in note
        assert "in a break" in note


def test_an_error_of_nccl_has_the_advice_to_make_the_communicator_first():
    notes = capture_errors.advice("relaxed", RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:94"))
    assert any("first collective" in note for note in notes)
    assert len(capture_errors.advice("relaxed", CAUSE)) == len(notes) - 1


def test_an_asynchronous_collective_is_told_by_its_kernel():
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    assert "wait()" in str(graph_errors.unjoined(0, "the break f", (name,), ()))
    assert "wait()" not in str(graph_errors.unjoined(0, "the break f", ("mul",), ()))


def test_long_lists_of_kernels_are_cut_and_say_so():
    error = graph_errors.unjoined(0, "the end", tuple(f"k{i}" for i in range(20)), ())
    assert "k7" in str(error)
    assert "k8" not in str(error)
    assert "..." in str(error)
    assert len(error.kernels) == 20


def test_an_unjoined_stream_without_kernels_says_so():
    assert "no kernel" in str(graph_errors.unjoined(0, "the end", (), ()))


def test_every_exception_of_ours_is_a_runtime_error():
    names = [name for name in errors.__all__ if name.endswith("Error")]
    assert len(names) >= 7
    for name in names:
        assert issubclass(getattr(errors, name), RuntimeError)
        assert getattr(breakable_cuda_graphs, name) is getattr(errors, name)
    assert issubclass(UpdateError, CUDAError)
    assert issubclass(UnjoinedStreamError, CaptureError)
    assert issubclass(StaleInputError, ReplayError)


def test_every_class_shows_its_fields_before_they_are_set():
    assert (CUDAError().call, CUDAError().code, CUDAError().name) == ("", -1, "")
    assert (UpdateError().node, UpdateError().field) == (None, None)
    assert (CaptureError().segment, CaptureError().function) == (None, None)
    assert (UnjoinedStreamError().kernels, UnjoinedStreamError().streams) == ((), ())
    assert (StaleInputError().tensor, StaleInputError().role) == ("", "")


def test_no_other_file_writes_the_text_of_an_exception_of_ours():
    ours = {name for name in errors.__all__ if name.endswith("Error")}
    root = Path(breakable_cuda_graphs.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        if path.name in ("errors.py", "distributed.py") or "simulator" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                if name in ours:
                    found.append(f"{path.name}:{node.lineno} {name}")
    assert found == []


def test_every_builder_of_captures_and_replays_is_tried_here():
    builders = {
        name
        for name, function in BUILDERS.items()
        if "Error" in str(inspect.signature(function).return_annotation)
        and not name.startswith("_")
    }
    #: those of explicit graphs have their own tests, beside the editing that they refuse
    assert set(CASES) <= builders
