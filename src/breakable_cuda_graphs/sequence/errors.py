"""The texts of errors about segments, breaks' results, the memory of a sequence, and rebinding.

The hard problem: most of these speak of a tensor deep inside an argument or a result, so each carries the
path to it and the name of the break.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ..errors import CaptureError, ReplayError, StaleInputError

# ---------------------------------------------------------------- arguments and results of breaks


def stale_input(tensor: str, role: object) -> StaleInputError:
    error = StaleInputError(
        f"the memory of a tensor ({tensor}; {role}) was freed since the capture, so a replay would "
        "read or write memory that is gone. Keep the tensor alive (or let the sequence own it: "
        "keep_inputs=True), or reset() and capture again."
    )
    error.tensor, error.role = tensor, str(role)
    return error


E = TypeVar("E", CaptureError, ReplayError)


def of_break(kind: type[E], name: str, text: str) -> E:
    error = kind(text)
    error.function = name
    return error


def break_returns_arrays(name: str, path: str) -> CaptureError:
    return of_break(
        CaptureError,
        name,
        f"the break {name} returns one or more CUDA tensors (result{path}), and the next segment would "
        'find only the first of them at its address. Declare @no_graph(outputs="static"), or write '
        "the result into an argument.",
    )


def break_returns_hidden_arrays(name: str, path: str, kind: str) -> CaptureError:
    return of_break(
        CaptureError,
        name,
        f"the break {name} returns a {kind} (result{path}) with CUDA tensors in it that it has made, and "
        "the next segment would find only the first of them at its address. Return the tensors, in "
        'tuples, lists, dicts or data classes and with @no_graph(outputs="static"), or write them into '
        "an argument.",
    )


def break_returns_arrays_beside(name: str, kind: str) -> CaptureError:
    return of_break(
        CaptureError,
        name,
        f"the break {name} returns a {kind} with CUDA tensors beside its parts (as attributes that are no "
        "fields, or as keys), and no replay would bring new values there. Return them as items or as "
        'fields, with @no_graph(outputs="static"), or write them into an argument.',
    )


def break_unfinished(name: str, path: str, kind: str) -> CaptureError:
    return of_break(
        CaptureError,
        name,
        f"the break {name} returns a {kind} (result{path}), whose work is still to be done: it would run "
        "in the next segment, and never at a replay. Do the work before the break returns.",
    )


def result_of_unknown_type(name: str, path: str, kind: str) -> CaptureError:
    return of_break(
        CaptureError,
        name,
        f'the break {name} returns a {kind} (result{path}): with outputs="static" a result is made of '
        "tensors, numbers, strings and None in tuples, lists, dicts, named tuples and data classes. "
        "Return those, or keep the object outside of the result.",
    )


def result_requires_grad(name: str, path: str) -> CaptureError:
    return of_break(
        CaptureError,
        name,
        f"the break {name} returns a tensor that requires grad (result{path}): the captured backward "
        "would hold the history of this one call. Run the break under torch.no_grad(), detach the "
        "result, or make forward and backward of a torch.autograd.Function breaks.",
    )


def argument_used_up(name: str, index: int) -> CaptureError:
    return of_break(
        CaptureError,
        name,
        f"the break {name} was given a generator (argument {index}) and went through it to its end: the "
        "replays would find nothing in it. Give a list: `[*model.parameters()]`.",
    )


def argument_filled(name: str, argument: str, role: object) -> CaptureError:
    return of_break(
        CaptureError,
        name,
        f"the break {name} put a new tensor into its argument {argument}, and it is {role}: replays would "
        "find only this first one there. Return it, with "
        '@no_graph(outputs="static"), or write into a tensor that was there before the break.',
    )


def results_overlap(name: str, path: str) -> CaptureError:
    return of_break(
        CaptureError,
        name,
        f"the break {name} returns different views of one piece of memory (result{path}); each result "
        "needs a place of its own. Return the whole once, or clones.",
    )


def result_structure_changed(name: str, before: str, now: str) -> ReplayError:
    return of_break(
        ReplayError,
        name,
        f"the break {name} returned another structure than at capture: {before} then, {now} now. "
        "Nothing after it was launched. Return the same structure every time, or capture again.",
    )


def result_changed(name: str, path: str, before: str, now: str) -> ReplayError:
    return of_break(
        ReplayError,
        name,
        f"the break {name} returned another tensor than at capture (result{path}): shape and type were "
        f"{before}, and are {now} now. Nothing after it was launched. Pad to one shape, or capture "
        "again for this one.",
    )


def result_moved(name: str, path: str) -> ReplayError:
    return of_break(
        ReplayError,
        name,
        f"the break {name} returned memory that it did not return at capture (result{path}): then it "
        "was an argument, a tensor of a captured segment or one tensor twice, which the next segment "
        "reads in place. Nothing after it was launched. Return the same tensor every time, or a clone.",
    )


def no_ranges(what: str, tried: Sequence[str]) -> RuntimeError:
    return RuntimeError(
        f"{what} ranges need one of {', '.join(tried)}, and none of them works here. "
        "`pip install nvtx` brings the smallest."
    )


def graph_of_other_device() -> ValueError:
    return ValueError(
        "the graph was made in another CUDA context (on another device) than the sequence captures in: "
        "make the graph's device current when you append it to an empty sequence, or use another one"
    )


def replay_after_failure() -> ReplayError:
    return ReplayError(
        "the last capture of this sequence failed, so it is incomplete and will not be replayed: "
        "capture it again, or reset() it first to drop what earlier captures left"
    )


def segment_has_no_executable(is_empty: bool) -> RuntimeError:
    why = "nothing was captured in it" if is_empty else "its breakable_graph block has not ended"
    return RuntimeError(f"this segment has no executable: {why}")


def segment_cannot_be_launched() -> ReplayError:
    return ReplayError(
        "this segment cannot be launched alone: it is launched together with others, or draws "
        "random numbers. Replay the sequence."
    )


# ---- rebinding


def cannot_rebind(why: str) -> ValueError:
    return ValueError(f"cannot rebind: {why}. Nothing was changed.")


def rebind_in_capture() -> ReplayError:
    return ReplayError(
        "a sequence cannot be rebound while it is captured, or by one of its own breaks"
    )


# ---------------------------------------------------------------- states of a sequence


def reentered(what: str) -> ReplayError:
    return ReplayError(
        f"a sequence cannot be {what} by one of its own breaks while it replays: do it when replay() "
        "has returned"
    )


def replay_while_capturing() -> ReplayError:
    return ReplayError(
        "this sequence is being captured and cannot be replayed before its breakable_graph block ends"
    )


def reset_while_capturing() -> CaptureError:
    return CaptureError("a sequence cannot be reset inside its own breakable_graph block")


def capture_while_capturing() -> CaptureError:
    return CaptureError("this sequence is being captured already by another breakable_graph block")
