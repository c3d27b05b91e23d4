"""The tree of exceptions, and what every room says in the same words.

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

The texts that one room alone raises are in that room's `errors.py`; other files write none. This file
imports nothing of the package, so every room may use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

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


def not_copyable(what: str) -> TypeError:
    return TypeError(
        f"a {what} cannot be pickled or copied: it owns CUDA graphs and device addresses, which exist "
        "once and only in this process. Capture again where the copy is needed."
    )


# ---------------------------------------------------------------- arguments


def too_few(name: str, given: int, least: int) -> ValueError:
    return ValueError(f"{name} has to be at least {least}, not {given}")


def not_callable(name: str, given: object) -> TypeError:
    return TypeError(f"`{name}` must be callable, not {type(given).__name__}")


def bad_choice(name: str, given: object, choices: Sequence[str]) -> ValueError:
    what = (
        repr(given) if isinstance(given, str) else type(given).__name__
    )  # to print a tensor is to wait
    return ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {what}")


def bad_type(name: str, given: object, wanted: str) -> TypeError:
    return TypeError(f"{name} must be {wanted}, not {type(given).__name__}")


# ---------------------------------------------------------------- pools and workspaces


class WorkspaceWarning(UserWarning):
    """A capture stream has a cuBLAS workspace that this library cannot protect."""


class EscapedWorkWarning(UserWarning):
    """Work ran during a capture on a stream that is not part of it, and is not in the graph."""


def while_closing(problem: BaseException) -> str:
    return f"and while the capture was closed: {said(problem)}"


def other_context() -> CaptureError:
    return CaptureError(
        "another CUDA context is current in this thread than the one to capture in: make that one "
        "current (the device's primary context for torch), or give a stream of the current context"
    )
