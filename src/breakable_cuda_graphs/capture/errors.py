"""The texts of errors that blocks and breaks raise.

The hard problem: a failed capture surfaces far from its cause, so each error carries the segment and the
function that it speaks of, and says what to do about it.
"""

from __future__ import annotations

from ..errors import CaptureError, said
from ..sequence.errors import of_break


def marked_property() -> TypeError:
    return TypeError("@no_graph marks a function: write it below @property, not above")


def marked_unfinished(name: str) -> TypeError:
    return TypeError(
        f"{name} is a generator or an async function: calling it does none of its work, which would run "
        "later, in the segment behind the break, and never at a replay. Mark an ordinary function that "
        "does the work before it returns."
    )


def history_changed(name: str, argument: str) -> CaptureError:
    return of_break(
        CaptureError,
        name,
        f"the break {name} changed the autograd history of its argument {argument}: the captured "
        "backward would hold the history of this one call. Change it under torch.no_grad(), or make "
        "forward and backward of a torch.autograd.Function breaks.",
    )


def other_stream_left_current(name: str) -> CaptureError:
    return of_break(
        CaptureError,
        name,
        f"the break {name} left another stream current than it was called on: at a replay the breaks behind "
        "it would run there, in no order with the segments. Make a stream current by a with statement "
        "(`with torch.cuda.stream(side):`).",
    )


def argument_moved(name: str, argument: str) -> CaptureError:
    return of_break(
        CaptureError,
        name,
        f"the break {name} gave its argument {argument} other memory or another shape (`t.data = other`, "
        "`t.set_()`, `t.resize_()`, `t.t_()` or the like): replays would find it where it was at capture, "
        "and do it again each time. Write the values in place (`t.copy_(other)`), or take a view of it.",
    )


def capture_stream_of_other_device() -> CaptureError:
    return CaptureError(
        "the stream is of another device or CUDA context than the sequence, which belongs to the one of "
        "its first capture: give a stream of that one, or capture into another sequence"
    )


def break_on_other_device(name: str) -> CaptureError:
    return of_break(
        CaptureError,
        name,
        f"the break {name} was called while another device or CUDA context was current than the one "
        "that is captured; replays would call it with the captured one current. Change the device "
        "inside of the break.",
    )


def nested_block(in_ours: bool) -> CaptureError:
    what = "another breakable_graph block" if in_ours else "a capture of somebody else"
    return CaptureError(
        f"nested breakable_graph captures are not supported: the current stream is inside {what}, "
        "which goes on unharmed. Capture outside of it, or in a break on another stream."
    )


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
    return of_break(
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


def break_in_a_body(name: str, where: str) -> CaptureError:
    return of_break(
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
