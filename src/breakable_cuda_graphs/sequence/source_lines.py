"""Where the user's code is: the line that captured something, and whose file a line is in.

The hard problem: a call passes through this library, torch, the standard library and perhaps a thread that
nobody of the user's has started, and only one of those frames is the user's. Finding a frame is cheap;
its line is worked out only when somebody asks for it.
"""

from __future__ import annotations

import functools
import os
import sys
from types import CodeType, FrameType

#: This package, whatever room a file of it is in.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_PACKAGES = os.sep + "site-packages" + os.sep

#: Libraries that work on a device: what they raise inside a segment likely has to do with it, and what
#: runs in them was asked for by somebody else.
_LIBRARIES = ("torch", "cupy", "numba", "numba_cuda", "triton", "cuda")


@functools.lru_cache(maxsize=4096)
def is_library_file(name: str) -> bool:
    """Whether lines of a file are nobody's: those of this library, of such ones, the standard one."""
    if name.startswith((ROOT, "<frozen")):
        return True
    _, found, inside = name.rpartition(_PACKAGES)
    if found:
        return inside.split(os.sep)[0] in (*_LIBRARIES, "numpy")
    return name.startswith(_STANDARD)


#: A place in running code: of most, nobody ever asks for the line, which takes long to find.
Place = tuple[CodeType, int]


def user_place() -> Place | None:
    """Where the calling thread is in the user's code, or else in code that is not this library's."""
    top: FrameType | None = sys._getframe(1)
    frame = top
    while frame is not None and is_library_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:  # a thread that a library has started
        frame = top
        while frame is not None and frame.f_code.co_filename.startswith(ROOT):
            frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)


def line_of(place: Place | None) -> str:
    """A place as "file:line"; "" for none."""
    if place is None:
        return ""
    code, at = place
    lines = (line for start, end, line in code.co_lines() if start <= at < end)
    return f"{code.co_filename}:{next(lines, None) or code.co_firstlineno}"


def raised_by_a_library(error: BaseException) -> bool:
    """Whether an exception comes out of a library that works on a device, not out of user code."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    module = str(traceback.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] in _LIBRARIES
