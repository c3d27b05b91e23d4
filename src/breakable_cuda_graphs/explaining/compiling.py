"""Compilation and autotuning while a function is watched.

The hard problem: torch.compile looks at the stacks of modes. Under a dispatch mode it runs a function
uncompiled, and under a function mode it compiles it anew; either way the watched run would not be the
one that the user will capture. So the modes come off while compiled code runs, which the profile
function sees by the name of its wrapper, and what compiles says so through hooks of its own.

Names: torch/_dynamo/eval_frame.py (`compile_wrapper`), torch/_dynamo/callback.py; Triton's
`knobs.runtime.jit_post_compile_hook` and `Autotuner._bench`, triton/runtime/{jit,autotuner}.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

from .frames import Stack
from .watching import Watch

_WRAPPER = "compile_wrapper"
_FILE = "_dynamo/eval_frame.py"


class WatchModes(Protocol):
    """What has to be off in compiled code."""

    def on(self) -> None: ...

    def off(self) -> bool: ...


class CompiledCode:
    """Takes the modes off while a function of torch.compile runs."""

    def __init__(self, watch: Watch, modes: WatchModes) -> None:
        self._watch, self._modes = watch, modes
        self._outermost: FrameType | None = None
        self.was_seen = False
        self.caller: Stack | None = None  # who called the compiled function that runs now

    def profile(self, frame: FrameType, event: str) -> None:
        """For `Watch.returns_noted`."""
        if event == "call":
            if self._outermost is None and _is_wrapper(frame):
                self.was_seen = True
                if self._modes.off():
                    self._outermost, self.caller = frame, self._watch.stack()
        elif frame is self._outermost:
            self._outermost = self.caller = None
            self._modes.on()


def _is_wrapper(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name == _WRAPPER and code.co_filename.replace("\\", "/").endswith(_FILE)


@contextlib.contextmanager
def compilations_noted(watch: Watch, compiled: CompiledCode) -> Iterator[None]:
    """Inside, what compiles or tunes is found."""
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(_dynamo(watch, compiled))
        triton = sys.modules.get("triton")
        if triton is not None:
            stack.enter_context(_triton(watch, triton))
        yield


@contextlib.contextmanager
def _dynamo(watch: Watch, compiled: CompiledCode) -> Iterator[None]:
    from torch._dynamo.callback import callback_handler

    def started(*_: Any) -> None:
        watch.note("compile", "torch.compile", stack=compiled.caller, unless_known=True)

    callback_handler.register_start_callback(started)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(started)


@contextlib.contextmanager
def _triton(watch: Watch, triton: Any) -> Iterator[None]:
    runtime = triton.knobs.runtime
    hook = runtime.jit_post_compile_hook

    def compiled(*args: Any, **named: Any) -> Any:
        name = getattr(named.get("fn"), "name", "")
        watch.note("compile", "Triton", f"the kernel {name}" if name else "", unless_known=True)
        return hook(*args, **named) if hook is not None else None

    runtime.jit_post_compile_hook = compiled
    try:
        with _tuning(watch, triton.runtime.autotuner.Autotuner):
            yield
    finally:
        runtime.jit_post_compile_hook = hook


@contextlib.contextmanager
def _tuning(watch: Watch, autotuner: Any) -> Iterator[None]:
    bench: Callable[..., Any] = autotuner._bench

    def noted(*args: Any, **named: Any) -> Any:
        watch.note("compile", "Triton autotuning", unless_known=True)
        return bench(*args, **named)

    autotuner._bench = noted
    try:
        yield
    finally:
        autotuner._bench = bench
