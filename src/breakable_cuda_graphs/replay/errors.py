"""The texts of errors that a replay, a profile or an embedding raises.

The hard problem: a replay runs long after the code that captured it, so each text says what to do now,
not what went wrong then.
"""

from __future__ import annotations

from ..errors import ReplayError


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


def cannot_embed(why: str) -> ReplayError:
    return ReplayError(
        f"this sequence cannot be replayed inside another capture: {why}. The outer capture is "
        "unharmed; replay the sequence in a break (@no_graph) or outside of it."
    )
