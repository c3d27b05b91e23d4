"""What is said where a function cannot be explained.

The hard problem: to watch a function the whole process is changed, so much that has nothing to do with the
function can forbid it. Each text therefore says what else has to stop first.
"""

from __future__ import annotations

from ..errors import CaptureError


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
