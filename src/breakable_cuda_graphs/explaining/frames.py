"""Whose line a call comes from: the user's frames between `explain` and what was called.

The hard problem: most frames of a stack belong to torch, to the standard library and to this
package, and autograd calls from a thread that has none of the user's at all. So each file is judged
once by where it lies, and a stack that does not lead to `explain` is continued in the thread that
called it.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from enum import Enum
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

from ..capture.breaks import no_graph
from .marking import Callee, function_of


class CodeOwner(Enum):
    """Whose code a file is."""

    TOOL = "this folder"
    OURS = "this package"
    FRAMEWORK = "torch, Triton, CuPy, Numba"
    PYTHON = "the standard library, and code without a file"
    LIBRARY = "installed beside them"
    USER = "all else"


_TOOL = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OURS = os.path.dirname(_TOOL.rstrip(os.sep)) + os.sep
_PYTHON = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_FRAMEWORKS = (
    "torch",
    "triton",
    "cupy",
    "cupyx",
    "numba",
    "numba_cuda",
    "cuda.bindings",
    "cuda.core",
    "numpy",
    "functorch",
)

_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

#: What Cython made of a framework has the path that it had where it was compiled.
_COMPILED = (".pyx", ".pxi", ".pxd")

#: The outermost frame of a thread that Python began.
_THREAD = threading.Thread._bootstrap.__code__  # type: ignore[attr-defined]

#: What the user typed has no file either: `python -c`, the prompt, a notebook's cell.
_TYPED = ("<string>", "<stdin>", "<console>", "<python-input", "<ipython-input")

_NO_FUNCTION = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

#: A function marked @no_graph runs inside this one.
_MARKED = no_graph(lambda: None).__code__


@functools.lru_cache(maxsize=4096)
def owner(file: str) -> CodeOwner:
    """Whose code a file is, by its path."""
    for prefix, whose in ((_TOOL, CodeOwner.TOOL), (_OURS, CodeOwner.OURS)):
        if file.startswith(prefix):
            return whose
    if _is_framework(file) or file.endswith(_COMPILED):
        return CodeOwner.FRAMEWORK
    if any(folder in file for folder in _PACKAGES):
        return CodeOwner.LIBRARY
    is_generated = file.startswith("<") and not file.startswith(_TYPED)
    return CodeOwner.PYTHON if is_generated or file.startswith(_PYTHON) else CodeOwner.USER


def _is_framework(file: str) -> bool:
    """Whether a file is one of a framework's, wherever that is installed."""
    for name in _FRAMEWORKS:
        home = getattr(sys.modules.get(name), "__file__", None)
        if home is not None and file.startswith(os.path.dirname(home) + os.sep):
            return True
    return False


class StackLine(NamedTuple):
    """A line in a function, as a stack showed it."""

    file: str
    line: int
    function: str
    code: CodeType
    callee: Callee | None  # the function itself, if it can be found

    @classmethod
    def of(cls, frame: FrameType, line: int | None = None) -> StackLine:
        """Where a frame is now, or was at another line."""
        code, at = frame.f_code, frame.f_lineno if line is None else line
        function = function_of(frame)
        callee = None if function is None else Callee.of(function)
        return cls(code.co_filename, at, code.co_qualname, code, callee)

    @property
    def whose(self) -> CodeOwner:
        """Whose code it is."""
        return owner(self.file)

    @property
    def source(self) -> str:
        """The text of the line, stripped; empty where it cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def can_be_marked(self) -> bool:
        """Whether `@no_graph` can stand before it: a named function that returns, not a generator."""
        is_named = not self.function.rpartition(".")[2].startswith("<")
        return is_named and self.callee is not None and not self.code.co_flags & _NO_FUNCTION

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Stack(NamedTuple):
    """The frames of a call that are not a framework's, the innermost first."""

    places: tuple[StackLine, ...]
    is_in_break: bool  # a function marked @no_graph is among its callers
    is_ours: bool  # this package did it by itself

    @property
    def user(self) -> StackLine | None:
        """The innermost line of the user's own; of a library's, where the user has none."""
        mine = [place for place in self.places if place.whose is CodeOwner.USER]
        return mine[0] if mine else self.places[0] if self.places else None


#: A call that the user's function has nothing to do with.
_NOBODY = Stack((), False, True)


def stack(home: CodeType, thread: int) -> Stack:
    """The present call's stack, up to the frame of `home`, which called the user's function.

    A thread of autograd's goes on in the stack of `thread`, where `home` runs; one that Python began
    has nothing to do with the call.
    """
    found = list(_frames(home, thread))
    if found and found[-1].f_code is _THREAD:
        return _NOBODY
    return _stack((frame, frame.f_lineno) for frame in found)


def stack_of(traceback: TracebackType | None, home: CodeType) -> Stack:
    """The stack of an exception, down from the frame of `home`."""
    steps = []
    while traceback is not None:
        steps.append((traceback.tb_frame, traceback.tb_lineno))
        if traceback.tb_frame.f_code is home:
            steps.clear()
        traceback = traceback.tb_next
    return _stack(reversed(steps))._replace(is_in_break=False, is_ours=False)


def _stack(steps: Iterable[tuple[FrameType, int]]) -> Stack:
    places: list[StackLine] = []
    is_in_break = is_ours = False
    for frame, line in steps:
        whose = owner(frame.f_code.co_filename)
        if frame.f_code is _MARKED:
            is_in_break = True
        if whose is CodeOwner.OURS and not places:
            is_ours = True
        if whose in (CodeOwner.USER, CodeOwner.LIBRARY):
            places.append(StackLine.of(frame, line))
    return Stack(tuple(places), is_in_break, is_ours)


def _frames(home: CodeType, thread: int) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is home:
            return
        yield frame
        if frame.f_code is _THREAD:
            return
        frame = frame.f_back
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not home:
        yield frame
        frame = frame.f_back
