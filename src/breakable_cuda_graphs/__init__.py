"""Breakable CUDA graphs: one block captures a sequence of CUDA graphs with eager Python between them.

    from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph

Importing this package touches no driver and imports no torch; the first use does.

PYTEST_DONT_REWRITE: it comes with a fixture, and so pytest would else warn of it, in a process that has
imported it before pytest began.
"""

from .annotations import annotate
from .breaks import force_no_graph, is_in_breakable_graph, no_graph
from .capture import breakable_graph
from .control import capture_if, capture_while
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
from .explaining import explain
from .graph import Graph, GraphExec
from .segments import EagerSegment, GraphSegment
from .sequence import BreakableCUDAGraph, CUDAGraphSequence

__version__ = "0.2.0"

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
