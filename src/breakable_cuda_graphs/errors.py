"""Every exception of this library, and the one place where its texts are written.

The hard problem: a failed capture surfaces far from its cause, so each error has to carry the
segment, the function or the tensor that it speaks of, and say what to do about it.

    RuntimeError
    +-- CUDAError             a driver call failed                 .call .code .name
    |   +-- UpdateError       an edit of an executable was refused .node .field
    +-- CaptureError          a capture cannot begin, go on or end .segment .function
    |   +-- UnjoinedStreamError   forked work was not joined       .segment .kernels .streams
    +-- ReplayError           a sequence cannot be replayed now    .segment .function
    |   +-- StaleInputError   memory that a replay would read is gone  .tensor .role
    +-- ProcessError          a handle was carried over a fork

Modules raise what the functions below build; they write no texts of their own. This file imports
nothing of the package, so every floor may use it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CUDAError",
    "CaptureError",
    "EscapedWorkWarning",
    "ProcessError",
    "ReplayError",
    "StaleInputError",
    "UnjoinedStreamError",
    "UpdateError",
    "WorkspaceWarning",
]


class CUDAError(RuntimeError):
    """A driver call failed. `call` is its name, `code` the number, `name` the code's own name."""

    call: str = ""
    code: int = -1
    name: str = ""


class UpdateError(CUDAError):
    """An executable graph could not be edited: `node` and `field` say where."""

    node: object = None
    field: str | None = None


class CaptureError(RuntimeError):
    """A capture cannot begin, go on or end. `segment` is its number, `function` the break's name."""

    segment: int | None = None
    function: str | None = None


class UnjoinedStreamError(CaptureError):
    """Work forked to a side stream was not joined. `kernels` dangle; `streams` only when debugging."""

    kernels: tuple[str, ...] = ()
    streams: tuple[int, ...] = ()


class ReplayError(RuntimeError):
    """A sequence cannot be replayed as it is, or not here. Nothing was launched after it was raised."""

    segment: int | None = None
    function: str | None = None


class StaleInputError(ReplayError):
    """Memory that the sequence reads or writes was freed. `tensor` describes it, `role` its use."""

    tensor: str = ""
    role: str = ""


class ProcessError(RuntimeError):
    """A sequence, graph or stream of the parent process was used in a forked child."""


# ---------------------------------------------------------------- driver calls


def driver_call_failed(call: str, code: int, name: str, sentence: str) -> CUDAError:
    error = CUDAError(f"{call} failed with {name} ({code}): {sentence}")
    error.call, error.code, error.name = call, code, name
    return error


def driver_call_missing(call: str, cause: BaseException) -> CUDAError:
    error = CUDAError(
        f"{call} cannot be called: {cause}. The driver or cuda-bindings is missing or too old for it; "
        "`python -m breakable_cuda_graphs doctor` shows both versions."
    )
    error.call, error.name = call, "NOT_FOUND"
    return error


def no_driver(variable: str, cause: BaseException) -> CUDAError:
    error = CUDAError(
        f"no CUDA driver answers on this machine ({cause}). Install the NVIDIA driver, or choose the "
        f"simulated one: {variable}=1, or `with breakable_cuda_graphs.simulator.simulated_device()`."
    )
    error.call, error.name = "cuInit", "NO_DRIVER"
    return error


def closed(what: str) -> RuntimeError:
    return RuntimeError(f"this {what} is closed")


# ---------------------------------------------------------------- processes


def driver_lost_in_fork() -> ProcessError:
    return ProcessError(
        "CUDA was in use when this process was forked, and the driver cannot be used in the child. "
        "Start the child with the 'spawn' method, or fork before the first use of CUDA."
    )


def used_after_fork(what: str) -> ProcessError:
    return ProcessError(
        f"this {what} belongs to the process that was forked; its CUDA handles mean nothing in the "
        "child. Capture in the child (started with 'spawn'), or replay in the parent."
    )


def not_copyable(what: str) -> TypeError:
    return TypeError(
        f"a {what} cannot be pickled or copied: it owns CUDA graphs and device addresses, which exist "
        "once and only in this process. Capture again where the copy is needed."
    )


# ---------------------------------------------------------------- arguments


def not_a_stream(given: object) -> TypeError:
    return TypeError(
        f"{type(given).__name__} is not a stream: give a torch, CuPy, Numba or cuda.core stream, an "
        "object with __cuda_stream__, or the handle as an int"
    )


def not_callable(name: str, given: object) -> TypeError:
    return TypeError(f"`{name}` must be callable, not {type(given).__name__}")


def bad_choice(name: str, given: object, choices: Sequence[str]) -> ValueError:
    return ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {given!r}")


def bad_type(name: str, given: object, wanted: str) -> TypeError:
    return TypeError(f"{name} must be {wanted}, not {type(given).__name__}")


# ---------------------------------------------------------------- random numbers


def two_captures_draw() -> CaptureError:
    return CaptureError(
        "this segment draws random numbers while another capture is open on the device, and on "
        "torch 2.11 and older a generator can serve one capture at a time. Capture one after the "
        "other, or draw in a break."
    )


def draw_during_capture() -> ReplayError:
    return ReplayError(
        "a segment that draws random numbers cannot be replayed while another thread captures on the "
        "device: on torch 2.11 and older both would refill the generator's tensors. Replay when the "
        "capture has ended."
    )


# ---------------------------------------------------------------- pools and workspaces


class WorkspaceWarning(UserWarning):
    """A capture stream has a cuBLAS workspace that this library cannot protect."""


WORKSPACE_ELSEWHERE = (
    "the stream of this capture was used for matrix products before, so its cuBLAS workspace lies in "
    "torch's ordinary memory: if anything clears the workspaces of the process (torch.compile may), "
    "replays would write into memory of others. Warm up on sequence.stream, or capture first."
)


class EscapedWorkWarning(UserWarning):
    """Work ran during a capture on a stream that is not part of it, and is not in the graph."""


def escaped_work(function: str) -> str:
    return (
        f"{function} ran on a stream that the capture does not include: it ran once, now, and replays "
        "will not do it. Work on the capture stream, or fork from it (side.wait_stream(current)) and "
        "join again; or do it in a break (@no_graph)."
    )


def pool_of_other_device(pool: int, device: int) -> ValueError:
    return ValueError(f"the pool belongs to cuda:{pool}, and the capture is on cuda:{device}")


# ---------------------------------------------------------------- arguments and results of breaks


def stale_input(tensor: str, role: str) -> StaleInputError:
    error = StaleInputError(
        f"the memory of a tensor ({tensor}; {role}) was freed since the capture, so a replay would "
        "read or write memory that is gone. Keep the tensor alive (or let the sequence own it: "
        "keep_inputs=True), or reset() and capture again."
    )
    error.tensor, error.role = tensor, role
    return error


def break_returns_arrays(name: str, path: str) -> CaptureError:
    error = CaptureError(
        f"the break {name} returns one or more CUDA tensors (result{path}), and the next segment would "
        'find only the first of them at its address. Declare @no_graph(outputs="static"), or write '
        "the result into an argument."
    )
    error.function = name
    return error


def result_of_unknown_type(name: str, path: str, kind: str) -> CaptureError:
    error = CaptureError(
        f'the break {name} returns a {kind} (result{path}): with outputs="static" a result is made of '
        "tensors, numbers, strings and None in tuples, lists, dicts, named tuples and data classes. "
        "Return those, or keep the object outside of the result."
    )
    error.function = name
    return error


def result_requires_grad(name: str, path: str) -> CaptureError:
    error = CaptureError(
        f"the break {name} returns a tensor that requires grad (result{path}): the captured backward "
        "would hold the history of this one call. Run the break under torch.no_grad(), detach the "
        "result, or make forward and backward of a torch.autograd.Function breaks."
    )
    error.function = name
    return error


def history_changed(name: str, argument: str) -> CaptureError:
    error = CaptureError(
        f"the break {name} changed the autograd history of its argument {argument}: the captured "
        "backward would hold the history of this one call. Change it under torch.no_grad(), or make "
        "forward and backward of a torch.autograd.Function breaks."
    )
    error.function = name
    return error


def results_overlap(name: str, path: str) -> CaptureError:
    error = CaptureError(
        f"the break {name} returns different views of one piece of memory (result{path}); each result "
        "needs a place of its own. Return the whole once, or clones."
    )
    error.function = name
    return error


def result_structure_changed(name: str, before: str, now: str) -> ReplayError:
    error = ReplayError(
        f"the break {name} returned another structure than at capture: {before} then, {now} now. "
        "Nothing after it was launched. Return the same structure every time, or capture again."
    )
    error.function = name
    return error


def result_changed(name: str, path: str, before: str, now: str) -> ReplayError:
    error = ReplayError(
        f"the break {name} returned another tensor than at capture (result{path}): shape and type were "
        f"{before}, and are {now} now. Nothing after it was launched. Pad to one shape, or capture "
        "again for this one."
    )
    error.function = name
    return error


def result_moved(name: str, path: str) -> ReplayError:
    error = ReplayError(
        f"the break {name} returned memory that it did not return at capture (result{path}): then it "
        "was an argument, another tensor from outside or one tensor twice, which the next segment reads "
        "in place. Nothing after it was launched. Return the same tensor every time, or a clone."
    )
    error.function = name
    return error


# ---------------------------------------------------------------- replay


def reentered(what: str) -> ReplayError:
    return ReplayError(
        f"a sequence cannot be {what} by one of its own breaks while it replays: do it when replay() "
        "has returned"
    )


def stream_of_other_context() -> ReplayError:
    return ReplayError(
        "the stream belongs to another CUDA context than the sequence was captured in: replay on a "
        "stream of that context"
    )


def other_context() -> CaptureError:
    return CaptureError(
        "another CUDA context is current in this thread than the one to capture in: make that one "
        "current (the device's primary context for torch), or give a stream of the current context"
    )


def replay_while_capturing() -> ReplayError:
    return ReplayError(
        "this sequence is being captured and cannot be replayed before its breakable_graph block ends"
    )


def replay_after_failure() -> ReplayError:
    return ReplayError(
        "the last capture of this sequence failed, so it is incomplete and will not be replayed: "
        "capture it again, or reset() it first to drop what earlier captures left"
    )


def reset_while_capturing() -> CaptureError:
    return CaptureError("a sequence cannot be reset inside its own breakable_graph block")


def capture_while_capturing() -> CaptureError:
    return CaptureError("this sequence is being captured already by another breakable_graph block")


def cannot_embed(why: str) -> ReplayError:
    return ReplayError(
        f"this sequence cannot be replayed inside another capture: {why}. The outer capture is "
        "unharmed; replay the sequence in a break (@no_graph) or outside of it."
    )


# ---------------------------------------------------------------- captures


def capture_on_default_stream(which: str) -> CaptureError:
    return CaptureError(
        f"the {which} stream cannot be captured: give breakable_graph a stream of your own, or none, "
        "and the sequence makes one"
    )


def nested_block(in_ours: bool) -> CaptureError:
    what = "another breakable_graph block" if in_ours else "a capture of somebody else"
    return CaptureError(
        f"nested breakable_graph captures are not supported: the current stream is inside {what}, "
        "which goes on unharmed. Capture outside of it, or in a break on another stream."
    )


def block_not_open() -> CaptureError:
    return CaptureError("this breakable_graph block is not open: it was left already")


_OTHER_THREAD = (
    "If another thread was using CUDA at the time, its calls may be the cause: "
    'capture_error_mode="thread_local" leaves other threads alone.'
)


def _at(error: CaptureError, segment: int, function: str | None = None) -> CaptureError:
    error.segment, error.function = segment, function
    return error


def capture_lost(segment: int, where: str, mode: str, cause: BaseException) -> CaptureError:
    other = f" {_OTHER_THREAD}" if mode == "global" else ""
    error = CaptureError(
        f"the capture of segment {segment} was invalidated before {where} ({cause}): something in it "
        "cannot be captured (a host read such as .item(), a synchronisation, an allocation by another "
        "library), and its own error was swallowed. Mark the function that does it with @no_graph."
        f"{other}"
    )
    error.__cause__ = cause
    return _at(error, segment)


def other_thread(segment: int, where: str, mode: str) -> CaptureError:
    return _at(
        CaptureError(
            f"segment {segment} would end at {where} on another thread than it began on, which "
            f'capture_error_mode="{mode}" forbids (autograd runs backward on a thread of its own): '
            'use capture_error_mode="relaxed"'
        ),
        segment,
    )


def host_nodes(segment: int) -> CaptureError:
    return _at(
        CaptureError(
            f"segment {segment} contains a host callback, which is not safe to replay from Python: "
            'call it in a break (@no_graph), or pass host_nodes="allow" if a library needs it'
        ),
        segment,
    )


def unjoined(
    segment: int, where: str, kernels: Sequence[str], streams: Sequence[int]
) -> UnjoinedStreamError:
    shown = ", ".join(kernels[:8]) or "no kernel, only a wait" + (
        ", ..." if len(kernels) > 8 else ""
    )
    ids = f" Unjoined side-stream id(s): {', '.join(map(str, streams))}." if streams else ""
    error = UnjoinedStreamError(
        f"work on a side stream was not joined back to the capturing stream before {where} (segment "
        f"{segment}): {shown}.{ids} Let the capture stream wait for it first "
        "(torch.cuda.current_stream().wait_stream(side))."
    )
    error.kernels, error.streams, error.segment = tuple(kernels), tuple(streams), segment
    return error


def poisoned(cause: BaseException) -> CaptureError:
    return CaptureError(
        f"this capture failed in a break or at its border ({type(cause).__name__}: {cause}), and the "
        "body went on as if it had not. Nothing of the block is kept."
    )


def advice_on_draws() -> str:
    return (
        "another capture was open on the device at the time: on torch 2.11 and older a generator "
        "serves one capture at a time. Capture one after the other, or draw in a break."
    )


def place(segment: int) -> str:
    return f"raised while segment {segment} of a breakable_graph block was being captured"


def advice(mode: str) -> list[str]:
    """Notes for an exception of the user's that the capture has to do with."""
    notes = [
        "what reads or waits for the device on the host cannot be captured: mark the function that "
        "does it @no_graph"
    ]
    if mode == "global":
        notes.append(_OTHER_THREAD)
    return notes
