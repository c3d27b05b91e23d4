"""What a watched run has shown so far: findings by line, and what functions returned.

The hard problem: one line of the user's may show up many times and in many ways, as a call of
Python's, as an operator and as a wait of the driver's. The first and most telling one is kept; the
others count. And a mark is right only where a function returns nothing but tensors, so what each of
the user's functions returned is noted too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from ..sequence import pytree
from . import errors, frames
from .report import KINDS, Finding


class Returns:
    """What a function returned, over all of its calls."""

    __slots__ = ("only_tensors", "requires_grad", "tensors")

    def __init__(self) -> None:
        self.tensors = False  # some tensor of the device
        self.only_tensors = True  # nothing else but None
        self.requires_grad = False


class Watch:
    """One watched run. `owns` tells the tensors of the watched device."""

    def __init__(self, home: CodeType, owns: Callable[[Any], bool]) -> None:
        self.home, self.owns = home, owns
        self.thread = threading.get_ident()
        self.findings: list[Finding] = []
        self.returns: dict[CodeType, Returns] = {}
        self.saw_other_threads = False  # autograd's
        self._profile: Callable[[FrameType, str, Any], None] | None = None
        #: generators that were drawn from and have to be named
        self.generators: list[Any] = []

    def stack(self) -> frames.Stack:
        """The stack of the present call."""
        return frames.stack(self.home, self.thread)

    def note(
        self, kind: str, operator: str, detail: str = "", stack: frames.Stack | None = None,
        *, unless_known: bool = False,
    ) -> None:  # fmt: skip
        """Something was seen that breaks a capture, in the present call or in that of `stack`.

        `unless_known`: it is only another view of what the line is known for already.
        """
        stack = stack or self.stack()
        place = stack.user
        if stack.is_in_break or stack.is_ours or place is None:
            return
        if threading.get_ident() != self.thread:
            self._come_along()
        known = next((f for f in self.findings if (f.file, f.line) == place[:2]
                      and (f.kind == kind or unless_known)), None)  # fmt: skip
        if known is not None:
            if not unless_known:
                known.count += 1
            if stack.places not in known.stacks:
                known.stacks.append(stack.places)
            return
        inner = stack.places[0]
        self.findings.append(
            Finding(
                kind,
                operator,
                place.file,
                place.line,
                place.function,
                place.source,
                inside="" if inner is place else f"{inner} ({inner.function})",
                detail=detail,
                advice=KINDS[kind].cure,
                stacks=[stack.places],
            )
        )

    # ---- what functions return

    @contextmanager
    def returns_noted(self, also: Callable[[FrameType, str], None] | None = None) -> Iterator[None]:
        """Inside, the returns of this thread's functions are looked at; `also` sees calls too."""
        if sys.getprofile() is not None:
            raise errors.explain_under_a_profiler()

        def profile(frame: FrameType, event: str, value: Any) -> None:
            if self._profile is not profile:  # autograd's thread, and the run is over
                sys.setprofile(None)
                return
            is_home = threading.get_ident() == self.thread
            if also is not None and is_home and event in ("call", "return"):
                also(frame, event)
            if event == "return":
                whose = frames.owner(frame.f_code.co_filename)
                if whose in (frames.CodeOwner.USER, frames.CodeOwner.LIBRARY):
                    self._note_return(frame.f_code, value)

        try:
            self._profile = profile
            sys.setprofile(profile)
            yield
        finally:
            sys.setprofile(None)
            self._profile = None

    def _come_along(self) -> None:
        """In a thread of autograd's: note from now on what functions return here too."""
        self.saw_other_threads = True
        if self._profile is not None and sys.getprofile() is None:
            sys.setprofile(self._profile)

    def _note_return(self, code: CodeType, value: Any) -> None:
        returns = self.returns.setdefault(code, Returns())
        for _, leaf in pytree.leaves(value):
            if self.owns(leaf):
                returns.tensors = True
                returns.requires_grad |= bool(getattr(leaf, "requires_grad", False))
            elif leaf is not None:
                returns.only_tensors = False
