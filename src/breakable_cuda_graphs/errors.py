"""Every exception of this library, and the one place where its texts are written.

The hard problem: a failed capture surfaces far from its cause, so each error has to carry the
segment, the function or the tensor that it speaks of, and say what to do about it.

    RuntimeError
    +-- CUDAError             a driver call failed                 .call .code .name
    |   +-- UpdateError       an edit of an executable was refused .node .field
    +-- CaptureError          a capture cannot begin, go on or end .segment .function
    |   +-- UnjoinedStreamError   forked work was not joined       .segment .kernels .streams
    |   +-- RankError             ranks capture differently, or one failed  .rank .segment .node .field
    +-- ReplayError           a sequence cannot be replayed now    .segment .function
    |   +-- StaleInputError   memory that a replay would read is gone  .tensor .role
    +-- ProcessError          a handle was carried over a fork

Modules raise what the functions below build; they write no texts of their own. This file imports
nothing of the package, so every floor may use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TypeVar

__all__ = [
    "CUDAError",
    "CaptureError",
    "EscapedWorkWarning",
    "ProcessError",
    "RankError",
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
    """An executable graph could not be edited: `node` and `field` say where, `changes` all that differs."""

    node: object = None
    field: str | None = None
    changes: tuple[object, ...] = ()


class CaptureError(RuntimeError):
    """A capture cannot begin, go on or end.

    `segment` is its place in `sequence.segments`, had the block ended well; `function` the break's name.
    """

    segment: int | None = None
    function: str | None = None


class UnjoinedStreamError(CaptureError):
    """Work forked to a side stream was not joined. `kernels` dangle; `streams` only when debugging."""

    kernels: tuple[str, ...] = ()
    streams: tuple[int, ...] = ()


class RankError(CaptureError):
    """A rank failed or did not come, or has captured other work: `rank`, and `node` and `field`."""

    rank: int | None = None
    node: str | None = None
    field: str | None = None


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


# ---------------------------------------------------------------- errors of others


def said(error: BaseException) -> str:
    """An error in one line, whatever becomes of asking it for its text."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, without a text"


def note(error: BaseException, text: str) -> None:
    """Add a note to an error on its way, which nothing may hinder; once, however often it is raised."""
    with contextlib.suppress(Exception):
        if text not in getattr(error, "__notes__", ()):
            error.add_note(text)


# ---------------------------------------------------------------- driver calls


def driver_call_failed(call: str, code: int, name: str, sentence: str) -> CUDAError:
    error = CUDAError(f"{call} failed with {name} ({code}): {sentence}")
    error.call, error.code, error.name = call, code, name
    return error


def driver_call_missing(call: str, cause: BaseException) -> CUDAError:
    error = CUDAError(
        f"{call} cannot be called ({cause}): the driver or cuda-bindings is missing or too old for it; "
        "`python -m breakable_cuda_graphs doctor` shows both versions."
    )
    error.call, error.name = call, "NOT_FOUND"
    return error


def no_driver(variable: str, cause: BaseException) -> CUDAError:
    error = CUDAError(
        f"no CUDA driver answers on this machine: {cause} Install the NVIDIA driver, or choose the "
        f"simulated one: {variable}=1, or `with breakable_cuda_graphs.simulator.simulated_device()`."
    )
    error.call, error.name = "cuInit", "NO_DRIVER"
    return error


def misused(sentences: Sequence[str], seed: int) -> AssertionError:
    return AssertionError(
        f"misuse on the simulated device (seed {seed}), which a CUDA driver may answer with a crash:"
        + "".join(f"\n  - {sentence}" for sentence in sentences)
    )


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


def too_few(name: str, given: int, least: int) -> ValueError:
    return ValueError(f"{name} has to be at least {least}, not {given}")


def not_a_stream(given: object) -> TypeError:
    return TypeError(
        f"{type(given).__name__} is not a stream: give a torch, CuPy, Numba or cuda.core stream, an "
        "object with __cuda_stream__, or the handle as an int"
    )


def not_callable(name: str, given: object) -> TypeError:
    return TypeError(f"`{name}` must be callable, not {type(given).__name__}")


def marked_property() -> TypeError:
    return TypeError("@no_graph marks a function: write it below @property, not above")


def marked_unfinished(name: str) -> TypeError:
    return TypeError(
        f"{name} is a generator or an async function: calling it does none of its work, which would run "
        "later, in the segment behind the break, and never at a replay. Mark an ordinary function that "
        "does the work before it returns."
    )


def bad_choice(name: str, given: object, choices: Sequence[str]) -> ValueError:
    what = (
        repr(given) if isinstance(given, str) else type(given).__name__
    )  # to print a tensor is to wait
    return ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {what}")


def bad_type(name: str, given: object, wanted: str) -> TypeError:
    return TypeError(f"{name} must be {wanted}, not {type(given).__name__}")


# ---------------------------------------------------------------- random numbers


def two_captures_draw() -> CaptureError:
    return CaptureError(
        "this segment draws random numbers while another capture is open on the device, and on "
        "torch 2.11 and older a generator can serve one capture at a time. (A kernel whose arguments "
        "only look like a generator's state, as a norm's may, counts as one that draws: beside another "
        "thread's capture that cannot be told.) Capture one after the other, or draw in a break."
    )


def generator_not_found(version: str) -> CaptureError:
    return CaptureError(
        "this segment may draw random numbers, and a kernel of torch "
        f"{version} does not show where the generator has its seed and its offset on the device. Draw in "
        "a break, and report this, please."
    )


def draw_during_capture() -> ReplayError:
    return ReplayError(
        "a segment that draws random numbers cannot be replayed while another thread captures on the "
        "device: on torch 2.11 and older both would write into the generator's tensors. Replay when the "
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


def escaped_launch(what: str) -> str:
    return (
        f"{what} was launched on a stream that the capture does not include: it ran once, now, and "
        "replays will not do it. Work on the block's stream, or do it in a break (@no_graph)."
    )


NOTHING_CAPTURED = (
    "nothing was captured in this block: if it launched work, that went to other streams, ran once, and "
    "replays will not do it. Pass the block's own stream (`.stream` of the sequence, or of the part of a "
    "graph) to each launch."
)


def pool_in_capture() -> CaptureError:
    return CaptureError(
        "another capture is open in this memory pool, in another thread: captures that share a pool "
        "come one after the other"
    )


def allocator_without_pools(backend: str) -> CaptureError:
    return CaptureError(
        f"torch's allocator {backend} has no private pools: what a segment makes would be gone, or "
        "somebody else's, at a replay. Use torch's native one: no `backend` in PYTORCH_ALLOC_CONF or "
        "PYTORCH_CUDA_ALLOC_CONF, no pluggable allocator."
    )


def pool_of_other_device(pool: int, device: int) -> ValueError:
    return ValueError(f"the pool belongs to cuda:{pool}, and the capture is on cuda:{device}")


def pool_of_other_context() -> ValueError:
    return ValueError("the pool belongs to another CUDA context (another device) than the capture")


def pool_of_no_use(given: object) -> TypeError:
    return TypeError(
        f"pool must be another sequence's pool(), not {type(given).__name__}: torch's pools are used where "
        "its CUDA is initialised and the stream is in its context, which is not so here"
    )


def generators_of_no_use(given: object) -> TypeError:
    return TypeError(
        f"generators are torch's, whose CUDA is not at work here, and a {type(given).__name__} was given: "
        "give none (CuPy's and Numba's random states need not be named)"
    )


def generator_of_other_device(given: object, device: int) -> ValueError:
    return ValueError(
        f"generators must be torch.Generator objects of the captured device cuda:{device}, not {given}"
    )


# ---------------------------------------------------------------- arguments and results of breaks


def stale_input(tensor: str, role: str) -> StaleInputError:
    error = StaleInputError(
        f"the memory of a tensor ({tensor}; {role}) was freed since the capture, so a replay would "
        "read or write memory that is gone. Keep the tensor alive (or let the sequence own it: "
        "keep_inputs=True), or reset() and capture again."
    )
    error.tensor, error.role = tensor, role
    return error


E = TypeVar("E", CaptureError, ReplayError)


def _of_break(kind: type[E], name: str, text: str) -> E:
    error = kind(text)
    error.function = name
    return error


def break_returns_arrays(name: str, path: str) -> CaptureError:
    return _of_break(
        CaptureError,
        name,
        f"the break {name} returns one or more CUDA tensors (result{path}), and the next segment would "
        'find only the first of them at its address. Declare @no_graph(outputs="static"), or write '
        "the result into an argument.",
    )


def break_returns_hidden_arrays(name: str, path: str, kind: str) -> CaptureError:
    return _of_break(
        CaptureError,
        name,
        f"the break {name} returns a {kind} (result{path}) with CUDA tensors in it that it has made, and "
        "the next segment would find only the first of them at its address. Return the tensors, in "
        'tuples, lists, dicts or data classes and with @no_graph(outputs="static"), or write them into '
        "an argument.",
    )


def break_returns_arrays_beside(name: str, kind: str) -> CaptureError:
    return _of_break(
        CaptureError,
        name,
        f"the break {name} returns a {kind} with CUDA tensors beside its parts (as attributes that are no "
        "fields, or as keys), and no replay would bring new values there. Return them as items or as "
        'fields, with @no_graph(outputs="static"), or write them into an argument.',
    )


def break_unfinished(name: str, path: str, kind: str) -> CaptureError:
    return _of_break(
        CaptureError,
        name,
        f"the break {name} returns a {kind} (result{path}), whose work is still to be done: it would run "
        "in the next segment, and never at a replay. Do the work before the break returns.",
    )


def result_of_unknown_type(name: str, path: str, kind: str) -> CaptureError:
    return _of_break(
        CaptureError,
        name,
        f'the break {name} returns a {kind} (result{path}): with outputs="static" a result is made of '
        "tensors, numbers, strings and None in tuples, lists, dicts, named tuples and data classes. "
        "Return those, or keep the object outside of the result.",
    )


def result_requires_grad(name: str, path: str) -> CaptureError:
    return _of_break(
        CaptureError,
        name,
        f"the break {name} returns a tensor that requires grad (result{path}): the captured backward "
        "would hold the history of this one call. Run the break under torch.no_grad(), detach the "
        "result, or make forward and backward of a torch.autograd.Function breaks.",
    )


def argument_used_up(name: str, index: int) -> CaptureError:
    return _of_break(
        CaptureError,
        name,
        f"the break {name} was given a generator (argument {index}) and went through it to its end: the "
        "replays would find nothing in it. Give a list: `[*model.parameters()]`.",
    )


def tensor_without_memory() -> CaptureError:
    return CaptureError(
        "a tensor that a break was given or has returned has no memory that a replay could find again: "
        "it stands for others inside of torch.func.vmap, grad or another transform. Call the break "
        "outside of the transform, or transform inside of the break."
    )


def history_changed(name: str, argument: str) -> CaptureError:
    return _of_break(
        CaptureError,
        name,
        f"the break {name} changed the autograd history of its argument {argument}: the captured "
        "backward would hold the history of this one call. Change it under torch.no_grad(), or make "
        "forward and backward of a torch.autograd.Function breaks.",
    )


def other_stream_left_current(name: str) -> CaptureError:
    return _of_break(
        CaptureError,
        name,
        f"the break {name} left another stream current than it was called on: at a replay the breaks behind "
        "it would run there, in no order with the segments. Make a stream current by a with statement "
        "(`with torch.cuda.stream(side):`).",
    )


def argument_filled(name: str, argument: str, role: str) -> CaptureError:
    return _of_break(
        CaptureError,
        name,
        f"the break {name} put a new tensor into its argument {argument}, and it is {role}: replays would "
        "find only this first one there. Return it, with "
        '@no_graph(outputs="static"), or write into a tensor that was there before the break.',
    )


def argument_moved(name: str, argument: str) -> CaptureError:
    return _of_break(
        CaptureError,
        name,
        f"the break {name} gave its argument {argument} other memory or another shape (`t.data = other`, "
        "`t.set_()`, `t.resize_()`, `t.t_()` or the like): replays would find it where it was at capture, "
        "and do it again each time. Write the values in place (`t.copy_(other)`), or take a view of it.",
    )


def results_overlap(name: str, path: str) -> CaptureError:
    return _of_break(
        CaptureError,
        name,
        f"the break {name} returns different views of one piece of memory (result{path}); each result "
        "needs a place of its own. Return the whole once, or clones.",
    )


def result_not_dense(dtype: str, shape: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"a static result of Numba ({dtype} {list(shape)}) is not contiguous, or has other strides than "
        "at capture, and Numba copies no such array: return a contiguous one"
    )


def result_structure_changed(name: str, before: str, now: str) -> ReplayError:
    return _of_break(
        ReplayError,
        name,
        f"the break {name} returned another structure than at capture: {before} then, {now} now. "
        "Nothing after it was launched. Return the same structure every time, or capture again.",
    )


def result_changed(name: str, path: str, before: str, now: str) -> ReplayError:
    return _of_break(
        ReplayError,
        name,
        f"the break {name} returned another tensor than at capture (result{path}): shape and type were "
        f"{before}, and are {now} now. Nothing after it was launched. Pad to one shape, or capture "
        "again for this one.",
    )


def result_moved(name: str, path: str) -> ReplayError:
    return _of_break(
        ReplayError,
        name,
        f"the break {name} returned memory that it did not return at capture (result{path}): then it "
        "was an argument, a tensor of a captured segment or one tensor twice, which the next segment "
        "reads in place. Nothing after it was launched. Return the same tensor every time, or a clone.",
    )


# ---------------------------------------------------------------- replay


def reentered(what: str) -> ReplayError:
    return ReplayError(
        f"a sequence cannot be {what} by one of its own breaks while it replays: do it when replay() "
        "has returned"
    )


def nothing_to_profile() -> ReplayError:
    return ReplayError(
        "there is nothing to profile: the sequence is empty. Capture into it first, with "
        "`with breakable_graph(sequence): ...`."
    )


def profile_in_capture() -> ReplayError:
    return ReplayError(
        "a sequence cannot be profiled while its stream is captured: events of a capture have no "
        "times. Call profile() outside of the capture."
    )


def changed_while_profiled() -> ReplayError:
    return ReplayError(
        "the sequence was captured anew or reset while profile() ran, by a break or another thread. "
        "Profile it when nothing changes it."
    )


def not_a_report(cause: BaseException) -> ValueError:
    return ValueError(
        f"this is no report of a profile ({type(cause).__name__}: {cause}): give what "
        "report.to_json() returned, of the same version of this library"
    )


def no_ranges(what: str, tried: Sequence[str]) -> RuntimeError:
    return RuntimeError(
        f"{what} ranges need one of {', '.join(tried)}, and none of them works here. "
        "`pip install nvtx` brings the smallest."
    )


def stream_of_other_context() -> ReplayError:
    return ReplayError(
        "the stream belongs to another CUDA context (another device) than the sequence was captured in: "
        "replay on a stream of that context"
    )


def capture_stream_of_other_device() -> CaptureError:
    return CaptureError(
        "the stream is of another device or CUDA context than the sequence, which belongs to the one of "
        "its first capture: give a stream of that one, or capture into another sequence"
    )


def break_on_other_device(name: str) -> CaptureError:
    return _of_break(
        CaptureError,
        name,
        f"the break {name} was called while another device or CUDA context was current than the one "
        "that is captured; replays would call it with the captured one current. Change the device "
        "inside of the break.",
    )


def graph_of_other_device() -> ValueError:
    return ValueError(
        "the graph was made in another CUDA context (on another device) than the sequence captures in: "
        "make the graph's device current when you append it to an empty sequence, or use another one"
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
        f"the {which} stream cannot be captured: give a stream of your own, or none, and one is made"
    )


def nested_block(in_ours: bool) -> CaptureError:
    what = "another breakable_graph block" if in_ours else "a capture of somebody else"
    return CaptureError(
        f"nested breakable_graph captures are not supported: the current stream is inside {what}, "
        "which goes on unharmed. Capture outside of it, or in a break on another stream."
    )


def block_not_open(what: str = "breakable_graph block") -> CaptureError:
    return CaptureError(f"this {what} is not open: it was left already")


_OTHER_THREAD = (
    "If another thread was using CUDA at the time, its calls may be the cause: "
    'capture_error_mode="thread_local" leaves other threads alone.'
)


_EXPLAIN = "explain(fn, *args) lists all that cannot be captured in a function, with lines"


def _at(error: CaptureError, segment: int, function: str | None = None) -> CaptureError:
    error.segment, error.function = segment, function
    return error


def capture_lost(segment: int, where: str, mode: str, cause: BaseException) -> CaptureError:
    other = f" {_OTHER_THREAD}" if mode == "global" else ""
    error = CaptureError(
        f"the capture of segment {segment} was invalidated before {where} ({cause}): something in it "
        "cannot be captured (a host read such as .item(), a synchronisation, an allocation by another "
        "library), and its own error was swallowed. Mark the function that does it with @no_graph; "
        f"{_EXPLAIN}.{other}"
    )
    error.__cause__ = cause
    return _at(error, segment)


def left_open_in_a_break(name: str) -> CaptureError:
    return _of_break(
        CaptureError,
        name,
        f"the break {name} began a capture (breakable_graph, or a capture into a graph) and returned "
        "without ending it: it was ended, and nothing of it is kept. Leave it inside of the break, by a "
        "with statement.",
    )


def other_thread(segment: int, where: str, mode: str) -> CaptureError:
    return _at(
        CaptureError(
            f"segment {segment} would end at {where} on another thread than it began on, which "
            f'capture_error_mode="{mode}" forbids (autograd runs backward on a thread of its own): '
            'use capture_error_mode="relaxed"'
        ),
        segment,
    )


def left_elsewhere(what: str, is_in_parent: bool) -> CaptureError | ProcessError:
    if is_in_parent:
        return used_after_fork(what)
    return CaptureError(
        f"a {what} was left on another thread than it was entered on: it is given up, and ended when the "
        "library is next used on the thread that began it, or on any other once that has ended"
    )


def host_nodes(segment: int) -> CaptureError:
    return _at(
        CaptureError(
            f"segment {segment} contains a host callback, which is not safe to replay from Python: "
            'call it in a break (@no_graph), or pass host_nodes="allow" if a library needs it'
        ),
        segment,
    )


def allocation_crosses(segment: int, where: str, nbytes: int) -> CaptureError:
    return _at(
        CaptureError(
            f"segment {segment} holds a stream-ordered allocation (cuMemAllocAsync, cudaMallocAsync, "
            f"{nbytes} bytes) that is not freed before {where}: the memory belongs to the graph of that "
            "segment and is there only while its replay runs, so neither the break nor a later segment "
            "may use it. Free it in the same segment, allocate before the block, or use an allocator "
            "that this library can make private (torch's own, CuPy's pools)."
        ),
        segment,
    )


def pageable_copy(segment: int, address: int, nbytes: int, is_source: bool) -> CaptureError:
    does, again = ("reads", "read") if is_source else ("writes", "write")
    return _at(
        CaptureError(
            f"segment {segment} holds a copy that {does} {nbytes} bytes of ordinary (pageable) host memory "
            f"at {address:#x}: each replay would {again} that address again, long after an array there "
            "may be gone. Copy in a break (@no_graph), or use pinned memory that outlives the sequence."
        ),
        segment,
    )


def library_came_late(name: str) -> CaptureError:
    return CaptureError(
        f"{name} was loaded inside a segment: what it allocated there could not be made private to the "
        f"sequence. Import {name} before the block, or in a break."
    )


def numba_allocates() -> CaptureError:
    return CaptureError(
        "Numba allocates memory here, inside a segment, and it has no pool that a capture could use "
        "(host arrays as arguments of kernels are copied to new memory too). Make device arrays before "
        "the block, or in a break (@no_graph)."
    )


def unjoined(
    segment: int, where: str, kernels: Sequence[str], streams: Sequence[int]
) -> UnjoinedStreamError:
    shown = ", ".join(kernels[:8]) + (", ..." if len(kernels) > 8 else "")
    shown = shown or "no kernel, only a wait"
    ids = f" Unjoined side-stream id(s): {', '.join(map(str, streams))}." if streams else ""
    wait = (
        "Let the capture stream wait for it first (torch.cuda.current_stream().wait_stream(side))."
    )
    if any("nccl" in kernel.lower() for kernel in kernels):
        wait += " A collective begun with async_op=True is joined by its wait(): call that first."
    error = UnjoinedStreamError(
        f"work on a side stream was not joined back to the capturing stream before {where} (segment "
        f"{segment}): {shown}.{ids} {wait}"
    )
    error.kernels, error.streams, error.segment = tuple(kernels), tuple(streams), segment
    return error


def poisoned(cause: BaseException) -> CaptureError:
    return CaptureError(
        f"this capture failed in a break or at its border ({said(cause)}), and the "
        "body went on as if it had not. Nothing of the block is kept."
    )


def advice_on_draws() -> str:
    return (
        "another capture was open on the device at the time: on torch 2.11 and older a generator "
        "serves one capture at a time. Capture one after the other, or draw in a break."
    )


def while_closing(problem: BaseException) -> str:
    return f"and while the capture was closed: {said(problem)}"


def place(segment: int) -> str:
    return f"raised while segment {segment} of a breakable_graph block was being captured"


_NOT_OF_THIS_CAPTURE = ("uncaptured work", "event last recorded in a capturing stream")

_WAITS_OUTSIDE = (
    "the segment waits for work that is not part of it, begun in a break or in an earlier segment (a "
    "collective with async_op=True, a side stream): wait for it where it was begun, or in a break"
)

_COMMUNICATOR = (
    "a process group makes its communicator at its first collective, which cannot be captured: run "
    "one of the same kind on the group before the capture"
)


def advice(mode: str, error: BaseException) -> list[str]:
    """Notes for an exception of the user's that the capture has to do with."""
    text = str(error)
    if any(words in text for words in _NOT_OF_THIS_CAPTURE):
        return [_WAITS_OUTSIDE]
    notes = [
        "what reads or waits for the device on the host cannot be captured: mark the function that "
        "does it @no_graph",
        "what a library does only the first time (compile or load a kernel, make a handle) is captured "
        "once it was run before the block",
        _EXPLAIN,
    ]
    if "NCCL" in text:
        notes.append(_COMMUNICATOR)
    if mode == "global":
        notes.append(_OTHER_THREAD)
    return notes


# ---------------------------------------------------------------- explain


def explain_in_capture() -> CaptureError:
    return CaptureError(
        "explain runs the function eagerly, and the current stream is being captured: call it outside "
        "of the capture"
    )


def explain_unfinished(kind: str) -> TypeError:
    return TypeError(
        f"the explained function returned a {kind}, whose work is still to be done, so nothing of it was "
        "seen: explain a function that does the work before it returns"
    )


def explain_is_running() -> RuntimeError:
    return RuntimeError(
        "another function is being explained in this process: explain one at a time, and not inside of "
        "a function that is explained"
    )


def explain_under_a_profiler() -> RuntimeError:
    return RuntimeError(
        "explain needs the interpreter's profile function, which somebody else has set "
        "(sys.setprofile; cProfile does): call it without a profiler"
    )


# ---------------------------------------------------------------- ranks


def no_process_group() -> RuntimeError:
    return RuntimeError(
        "there is no process group: call torch.distributed.init_process_group() on every rank first"
    )


def not_in_the_group() -> ValueError:
    return ValueError("this process is not a rank of the given process group")


def bad_timeout(given: object) -> ValueError:
    return ValueError(f"timeout must be a positive number of seconds, not {given!r}")


def rank_failed(rank: int, text: str, place: str) -> RankError:
    error = RankError(
        f"rank {rank} failed in its capture ({text}), and this one, which had come to {place}, stops "
        "too: no rank keeps anything of the block. See the error on that rank."
    )
    error.rank = rank
    return error


def rank_missing(rank: int, place: str, seconds: float) -> RankError:
    error = RankError(
        f"rank {rank} did not come to {place} within {seconds:g} seconds: it has died, hangs, is slower "
        "than timeout= allows, or makes other calls than this one"
    )
    error.rank = rank
    return error


def store_lost(place: str, cause: BaseException) -> RankError:
    return RankError(
        f"the store of the process group does not answer at {place} ({cause}): the process that holds "
        "it, rank 0 or the launcher, has likely ended. Nothing of the block is kept here."
    )


def ranks_apart(places: Sequence[tuple[int, str]]) -> RankError:
    shown = "; ".join(f"rank {rank} is at {place}" for rank, place in places[:8])
    error = RankError(
        f"the ranks have come to different places: {shown}. Every rank has to come to the same "
        "breaks and calls in the same order."
    )
    error.rank = next(rank for rank, place in places if place != places[0][1])
    return error


def ranks_differ(
    ranks: tuple[int, int], segment: int | None, node: str | None, field: str, old: str, new: str
) -> RankError:
    place = "" if segment is None else f" in segment {segment}"
    place += "" if node is None else f", node {node}"
    error = RankError(
        f"ranks {ranks[0]} and {ranks[1]} have captured different work{place}: {field} is {old} on rank "
        f"{ranks[0]} and {new} on rank {ranks[1]}"
    )
    error.rank, error.segment, error.node, error.field = ranks[1], segment, node, field
    return error


def others_not_told(problem: BaseException) -> str:
    return f"and the other ranks could not be told: {said(problem)}"


# ---------------------------------------------------------------- graphs, nodes and edits


class FieldError(ValueError):
    """A value does not fit a field of a node. `field` is the field's name, as in "args[2]"."""

    field: str | None = None


def _field(field: str, text: str) -> FieldError:
    error = FieldError(text)
    error.field = field
    return error


def _named(node: object) -> str:
    label = str(getattr(node, "label", node))
    return label if len(label) <= 120 else f"{label[:60]}...{label[-57:]}"


# ---- graphs and executables that cannot be used so


def graph_is_closed() -> RuntimeError:
    return RuntimeError(
        "this graph is closed, or its sequence was reset: its nodes are gone, and an executable of it "
        "can no longer be edited"
    )


def graph_is_fixed() -> RuntimeError:
    return RuntimeError(
        "nothing can be added to or taken out of this graph: it belongs to a sequence, or is a copy "
        "inside another graph. Edit the executable (segment.exec.update), or build a Graph() of your own."
    )


def graph_is_inside() -> RuntimeError:
    return RuntimeError("this graph is inside a node of another: use the outer graph")


def only_its_sequence_draws() -> RuntimeError:
    return RuntimeError(
        "this segment draws random numbers, and what they begin with is written before each launch: only "
        "its sequence can replay it"
    )


def exec_is_closed() -> RuntimeError:
    return RuntimeError(
        "this executable is closed, or its sequence was reset: it can be neither launched nor edited"
    )


def segment_has_no_executable(is_empty: bool) -> RuntimeError:
    why = "nothing was captured in it" if is_empty else "its breakable_graph block has not ended"
    return RuntimeError(f"this segment has no executable: {why}")


def segment_cannot_be_launched() -> ReplayError:
    return ReplayError(
        "this segment cannot be launched alone: it is launched together with others, or draws "
        "random numbers. Replay the sequence."
    )


def launch_in_a_capture() -> ReplayError:
    return ReplayError(
        "an executable cannot be launched on a stream that is being captured; the capture is unharmed. "
        "Put the graph in as a node (Graph.child), append it to the sequence, or launch it in a break."
    )


def child_of_itself() -> ValueError:
    return ValueError("a graph cannot be a child of itself or of a graph inside it")


def cannot_be_a_child(node: object) -> ValueError:
    return ValueError(
        f"this graph has a {getattr(node, 'kind', 'node')} node, and the driver cannot copy graphs with "
        "allocations or conditional nodes: capture or build its work in the outer graph itself"
    )


def bodies_unknown(node: object) -> RuntimeError:
    return RuntimeError(
        "what is inside this conditional node is not known: it was made by another library, and only "
        "drivers from 13.2 on can be asked"
    )


def no_second_body(node: object) -> RuntimeError:
    return RuntimeError(
        f"the node {_named(node)} has no second body that could run when the flag is zero: make it with "
        "if_(flag, orelse=True)"
    )


def copy_differs() -> RuntimeError:
    return RuntimeError(
        "the driver's copy of a captured graph has other nodes than the original, so they cannot be "
        "edited. Please report this with the driver's version."
    )


def no_such_edge(source: object, target: object) -> ValueError:
    return ValueError(f"{_named(target)} does not wait for {_named(source)}: there is no such edge")


# ---- edits that are refused


def _update(node: object, field: str | None, text: str) -> UpdateError:
    error = UpdateError(text)
    error.node, error.field = node, field
    return error


def edit_refused(node: object, field: str | None, why: str) -> UpdateError:
    where = f"{field} of " if field else ""
    return _update(
        node,
        field or None,
        f"{where}the node {_named(node)} cannot be changed so: {why}. Nothing was changed.",
    )


def edit_failed(node: object, field: str, cause: CUDAError) -> UpdateError:
    error = _update(
        node,
        field,
        f"the driver refused to change {field} of the node {_named(node)} ({cause}). Nothing was "
        "changed. What an executable lets change is listed with cuGraphExecNodeSetParams.",
    )
    error.call, error.code, error.name = cause.call, cause.code, cause.name
    return error


_UPDATE_REASONS = {
    "TOPOLOGY_CHANGED": "nodes or edges (its topology) differ",
    "NODE_TYPE_CHANGED": "a node is of another type",
    "FUNCTION_CHANGED": "a kernel's function differs",
    "PARAMETERS_CHANGED": "a parameter that may not change differs",
    "NOT_SUPPORTED": "a node of this kind cannot be updated",
    "UNSUPPORTED_FUNCTION_CHANGE": "a kernel's function changed in a way that is not allowed",
    "ATTRIBUTES_CHANGED": "a launch attribute that may not change differs",
}


def update_refused(
    result: str, node: object, change: object, changes: Sequence[object], code: int = 910,
    cause: BaseException | None = None, about: str | None = None,
) -> UpdateError:  # fmt: skip
    """`change` is the difference that explains it (see `comparing.Change`), if one was found; `about`
    is the field otherwise.
    """
    if node is None and change is not None:
        node = getattr(change, "node", None)
    field = str(getattr(change, "field", "")) or about
    why = _UPDATE_REASONS.get(result, "the driver does not say why")
    told = f" ({change})" if change is not None else ""
    where = f" at the node {_named(node)}" if node is not None else ""
    text = (
        f"the executable cannot take over this graph{where}: {why}{told}; {result}. Nothing was "
        "changed. Instantiate the new graph, or build it with the same nodes and edges in the same order."
    )
    error = _update(node, field, text)
    error.call, error.code, error.name = "cuGraphExecUpdate", code, result
    error.changes = tuple(changes)
    error.__cause__ = cause
    return error


def node_of_another_graph(node: object) -> UpdateError:
    return _update(
        node,
        None,
        f"the node {_named(node)} belongs to another graph: give a node of the graph that this "
        "executable or graph was made from",
    )


def node_was_removed(node: object) -> UpdateError:
    return _update(node, None, f"the node {_named(node)} was removed from its graph")


def cannot_be_switched(node: object) -> UpdateError:
    return _update(
        node,
        "enabled",
        f"only kernels, copies and fills can be disabled, not the node {_named(node)}",
    )


def not_one_node(node: object, labels: Sequence[str]) -> UpdateError:
    what = ", ".join(labels[:5]) or "nothing"
    return _update(
        node,
        None,
        f"capture_update for the node {_named(node)} has to capture just one operation, and captured "
        f"{len(labels)}: {what}. Nothing was changed.",
    )


def from_node_and_more(fields: Sequence[str]) -> TypeError:
    return TypeError(
        f"from_node= takes everything from the other node; {', '.join(fields)} came too"
    )


def not_a_field(kind: str, label: str, name: str, allowed: Sequence[str]) -> FieldError:
    known = ", ".join(allowed) or "nothing"
    return _field(name, f"a {kind} node has no {name}; of {label} can be changed: {known}")


def nothing_to_change(label: str) -> FieldError:
    return _field("", f"nothing was given to change in {label}")


# ---- kernels and their arguments


def not_a_kernel(given: object) -> TypeError:
    return TypeError(
        f"{type(given).__name__} is not a kernel: give a CUfunction or CUkernel, a cuda.core Kernel, a "
        "CuPy RawKernel, or a Numba or Triton kernel that has been compiled"
    )


def kernel_not_compiled_once(count: int) -> TypeError:
    how = "not been compiled yet: call it once, or give it signatures" if not count else (
        f"been compiled for {count} signatures: give one of its .overloads"
    )  # fmt: skip
    return TypeError(f"this Numba kernel has {how}")


def argument_count(kernel: str, given: int, wanted: int) -> FieldError:
    return _field("args", f"the kernel {kernel} takes {wanted} arguments, and {given} were given")


def argument_size(kernel: str, index: int, value: object, given: int, wanted: int) -> FieldError:
    return _field(
        f"args[{index}]",
        f"argument {index} of the kernel {kernel} has a size of {wanted} bytes, and the value given "
        f"({type(value).__name__}) has {given} bytes",
    )


def no_such_argument(kernel: str, index: int, count: int) -> FieldError:
    return _field(
        f"args[{index}]", f"the kernel {kernel} has {count} arguments, and none with index {index}"
    )


def argument_without_size(kernel: str, index: int, value: object) -> TypeError:
    return TypeError(
        f"argument {index} of the kernel {kernel} is a bare Python {type(value).__name__}, whose size "
        "is unknown: give a typed number, such as ctypes.c_int(n) or numpy.float32(x)"
    )


def argument_on_the_host(kernel: str, index: int, value: object) -> TypeError:
    return TypeError(
        f"argument {index} of the kernel {kernel} is an array in host memory "
        f"({type(value).__name__}): kernels take device arrays, or an address as ctypes.c_void_p"
    )


def argument_of_unknown_type(kernel: str, index: int, value: object) -> TypeError:
    return TypeError(
        f"argument {index} of the kernel {kernel} cannot be a {type(value).__name__}: give an array, a "
        "typed number (ctypes, numpy), a ctypes structure, or bytes of the argument's size"
    )


def argument_read_wrongly(index: int, size: int, wanted: int, at: int | None) -> ValueError:
    where = "" if at is None else f" at byte {at}"
    return ValueError(f"argument {index} has {size} bytes; {wanted} cannot be read{where}")


def launch_shape(kernel: str, name: str, dim: Sequence[int], limits: Sequence[int]) -> FieldError:
    return _field(
        name,
        f"the kernel {kernel} cannot be launched with {name} {tuple(dim)}: each of the three has to be "
        f"from 1 to {tuple(limits)}",
    )


def too_many_threads(kernel: str, block: Sequence[int], threads: int, most: int) -> FieldError:
    return _field(
        "block",
        f"the kernel {kernel} cannot be launched with block {tuple(block)}: {threads} threads a block, "
        f"and {most} are the most",
    )


def too_much_shared_memory(kernel: str, given: int, most: int) -> FieldError:
    return _field(
        "shared_bytes",
        f"the kernel {kernel} cannot be launched with {given} bytes of dynamic shared memory; at most "
        f"{most} are set for it",
    )


# ---- copies and fills


def null_address(field: str) -> FieldError:
    return _field(field, f"{field} is the null address")


def too_small(field: str, given: int, wanted: int) -> FieldError:
    return _field(field, f"{field} is an array of {given} bytes, and {wanted} bytes are needed")


def negative_size(field: str, number: int) -> FieldError:
    return _field(field, f"{field} must not be negative, and is {number}")


def nothing_to_copy(field: str) -> FieldError:
    return _field(
        field,
        f"{field} must not be zero: the driver has no empty copies, fills, switches or allocations",
    )


def only_flat_copies() -> FieldError:
    return _field("src", "an executable lets only copies of one dimension change")


def only_flat_fills(field: str) -> FieldError:
    return _field(field, "an executable lets only fills of one dimension change their size")


def memory_kind_changes(field: str, before: str, after: str) -> FieldError:
    return _field(
        field, f"{field} is {before}, and cannot become {after}: the kind of memory has to stay"
    )


def rows_overlap(field: str, given: int, least: int) -> FieldError:
    return _field(
        field, f"{field} is {given}, and what lies between is {least}: rows would overlap"
    )


def no_operations() -> FieldError:
    return _field("operations", "operations are empty: give at least one (what, ptr, value)")


def no_such_operation(field: str, what: object, choices: Sequence[str]) -> FieldError:
    return _field(field, f"{field} is to do {what!r}; there are: {', '.join(choices)}")


def word_size(field: str, size: int) -> FieldError:
    return _field(field, f"{field} has a value of {size} bytes; words of memory have 4 or 8")


def word_alignment(field: str, address: int, size: int) -> FieldError:
    return _field(field, f"{field} is at {address:#x}, which is not a multiple of its {size} bytes")


def operations_change(before: int, after: int) -> FieldError:
    return _field(
        "operations",
        f"the number of operations ({before}, given {after}) and the type and size of each stay; their "
        "addresses and values, and how waits compare, can change",
    )


def fill_element(size: int) -> FieldError:
    return _field("value", f"the element of a fill has 1, 2 or 4 bytes, not {size}")


def fill_value(value: int, size: int) -> FieldError:
    return _field(
        "value",
        f"{value} does not fit an element of {size} bytes (0 to {(1 << 8 * size) - 1}); a typed number, "
        "such as numpy.float32(1), brings its own size",
    )


def fill_size(nbytes: int, size: int) -> FieldError:
    return _field("nbytes", f"{nbytes} bytes are not a whole number of elements of {size} bytes")


def fill_alignment(address: int, size: int) -> FieldError:
    return _field("dst", f"{address:#x} is not a multiple of the element's size, {size} bytes")


# ---- captures into graphs


def stream_is_captured() -> CaptureError:
    return CaptureError(
        "this stream is being captured already, and that capture is unharmed: capture on another one"
    )


def part_is_used_up() -> CaptureError:
    return CaptureError("this capture was entered before: call graph.capture() for each")


def recording_reads_what_is_gone(words: str) -> CaptureError:
    return CaptureError(
        f"the capture into the graph reads or writes memory that is gone already ({words}): the graph could "
        "not keep it. Keep the tensor alive until the capture has ended. The graph is as it was."
    )


def recording_lost(cause: BaseException) -> CaptureError:
    error = CaptureError(
        f"the capture into the graph was lost ({cause}): something in it cannot be captured (a host "
        "read such as .item(), a synchronisation, an allocation by another library). The graph is as "
        "it was."
    )
    error.__cause__ = cause
    return error


def recording_has_host_nodes() -> CaptureError:
    return CaptureError(
        "a host callback was captured, which is not safe to launch from Python: use Graph.host. The "
        "graph is as it was."
    )


def recording_copies_pageable(address: int, nbytes: int, is_source: bool) -> CaptureError:
    does, again = ("reads", "read") if is_source else ("writes", "write")
    return CaptureError(
        f"a copy that {does} {nbytes} bytes of ordinary (pageable) host memory at {address:#x} was "
        f"captured, and each launch would {again} that address again: use pinned memory that outlives "
        "the graph. The graph is as it was."
    )


def recording_draws() -> CaptureError:
    return CaptureError(
        "random numbers of torch were drawn in a capture into a graph, or in the body of a conditional "
        "node: what they begin with has to be written before each launch, which only a segment of a "
        "sequence has. Draw before it, or in the segment around it."
    )


def not_in_a_body(label: str) -> CaptureError:
    return CaptureError(
        f"the body of a conditional node cannot hold a {label} node: only kernels, copies and fills of "
        "the device, child graphs and conditional nodes"
    )


# ---- conditionals


def no_compiler(cause: BaseException) -> RuntimeError:
    return RuntimeError(
        f"conditional nodes need a small kernel that is compiled at run time, and NVRTC cannot be "
        f"loaded ({cause}): install the CUDA toolkit's nvrtc (pip install nvidia-cuda-nvrtc)"
    )


def does_not_compile(code: int, log: str) -> RuntimeError:
    return RuntimeError(
        f"NVRTC could not compile this library's kernels (code {code}): {log[:500]}"
    )


def not_a_flag(given: object, why: str) -> TypeError:
    return TypeError(
        f"the flag of a conditional has to be one number in device memory, and {type(given).__name__} "
        f"{why}"
    )


def break_in_a_body(name: str, where: str) -> CaptureError:
    return _of_break(
        CaptureError,
        name,
        f"the break {name} was called in the body of {where}: a body runs on the device, where nothing "
        "can be eager. Call it outside, or write the choice as ordinary Python in a break.",
    )


def body_elsewhere(where: str) -> CaptureError:
    return CaptureError(
        f"the body of {where} has launched on the stream of the capture around it, where that work would "
        "run whatever the flag says. A body is captured on a stream of its own, which is current for torch "
        "and CuPy: launch on the current stream; or build the node by hand (Graph.if_, Graph.while_), give "
        "`.stream` of `body.capture()` to each launch, and append the graph to the sequence."
    )


def body_returns(where: str) -> TypeError:
    return TypeError(
        f"the functions of {where} have to return None: which of them runs is not known at capture. "
        "Write results into existing tensors."
    )


# ---- rebinding


def cannot_rebind(why: str) -> ValueError:
    return ValueError(f"cannot rebind: {why}. Nothing was changed.")


def rebind_in_capture() -> ReplayError:
    return ReplayError(
        "a sequence cannot be rebound while it is captured, or by one of its own breaks"
    )
