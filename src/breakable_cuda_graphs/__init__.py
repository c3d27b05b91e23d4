"""Breakable CUDA graphs: one block captures a sequence of CUDA graphs with eager Python between them.

    from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph

Importing this package touches no driver and imports no torch; the first use does.

PYTEST_DONT_REWRITE: it comes with a fixture, and so pytest would else warn of it, in a process that has
imported it before pytest began.
"""

from __future__ import annotations

from ._driver import bindings
from .capture.annotate import annotate
from .capture.breakable_graph import breakable_graph
from .capture.breaks import force_no_graph, is_in_breakable_graph, no_graph
from .capture.conditional import capture_if, capture_while
from .errors import (
    CaptureError,
    CUDAError,
    EscapedWorkWarning,
    ProcessError,
    RankError,
    ReplayError,
    StaleInputError,
    UnjoinedStreamError,
    UpdateError,
    WorkspaceWarning,
)
from .explaining.running import explain
from .graph.exec import GraphExec
from .graph.graph import Graph
from .replay.sequence import BreakableCUDAGraph, CUDAGraphSequence
from .sequence.segments import EagerSegment, GraphSegment

__all__ = [
    "BreakableCUDAGraph",
    "CUDAError",
    "CUDAGraphSequence",
    "CaptureError",
    "EagerSegment",
    "EscapedWorkWarning",
    "Graph",
    "GraphExec",
    "GraphSegment",
    "ProcessError",
    "RankError",
    "ReplayError",
    "StaleInputError",
    "UnjoinedStreamError",
    "UpdateError",
    "WorkspaceWarning",
    "annotate",
    "breakable_graph",
    "capture_if",
    "capture_while",
    "explain",
    "force_no_graph",
    "is_in_breakable_graph",
    "no_graph",
]


def _simulated() -> bindings.Driver | None:
    if not bindings.is_simulator_wanted():
        return None
    from .simulator import new_driver  # only where the environment asks for it

    return new_driver()


bindings.substitute = _simulated

__version__ = "0.2.0"
