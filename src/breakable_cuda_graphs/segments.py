"""The two kinds of pieces that a sequence is made of: captured ones and eager ones.

The hard problem: what runs a captured segment is not always its own executable: neighbours are
joined into one graph, and a segment with random numbers is launched by torch. A segment therefore
knows its graph (what was captured) and, apart from it, what launches it.
"""

from __future__ import annotations

from typing import Any

from ._driver.handles import ExecHandle, GraphHandle, GraphView
from .frameworks.base import Runner
from .results import StaticResult

__all__ = ["EagerSegment", "GraphSegment"]


class GraphSegment:
    """Work captured between two breaks; it may be empty. Made by a capture, not by users."""

    def __init__(
        self, index: int, graph: GraphHandle | GraphView, node_kinds: frozenset[int],
        runner: Runner | None,
    ) -> None:  # fmt: skip
        self.index = index
        self._handle = graph
        self._kinds = node_kinds
        self._runner = runner
        self._executable: ExecHandle | None = None  # of its own, or the joined one
        self._joined: Any = None  # the child node that stands for it in a joined graph

    @property
    def is_empty(self) -> bool:
        """Whether nothing was captured; such a segment is not launched."""
        return not self._kinds

    def close(self) -> None:
        """Give back what launches the segment. Its graph goes with the last reference to it."""
        if self._executable is not None:
            self._executable.close()
        if self._runner is not None:
            self._runner.close()

    def __repr__(self) -> str:
        what = "empty" if self.is_empty else "drawing" if self._runner else "captured"
        return f"<GraphSegment {self.index}: {what}>"


class EagerSegment:
    """A break: a call that runs as ordinary Python at each replay.

    `fn`, `args` and `kwargs` are what is called; arrays among the arguments are the stand-ins that
    replays see. `name` is the function's qualified name.
    """

    def __init__(
        self, index: int, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str,
        modes: Any = None, result: StaticResult | None = None, does_nothing: bool = False,
    ) -> None:  # fmt: skip
        self.index = index
        self.fn, self.args, self.kwargs = fn, args, kwargs
        self.name = name
        self._modes = modes
        self._result = result
        self._does_nothing = does_nothing  # force_no_graph: a border without a body

    def call_and_fill(self, *args: Any, **kwargs: Any) -> None:
        """The body, and its result brought to its fixed places (what a replay calls)."""
        assert self._result is not None
        self._result.fill(self.fn(*args, **kwargs))

    def __repr__(self) -> str:
        return f"<EagerSegment {self.index}: {self.name}>"
