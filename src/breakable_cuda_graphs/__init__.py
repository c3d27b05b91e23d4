"""Breakable CUDA graphs: one block captures a sequence of CUDA graphs with eager Python between them.

    from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph

Importing this package touches no driver and imports no torch; the first use does.
"""

from .breaks import force_no_graph, is_in_breakable_graph, no_graph
from .capture import breakable_graph
from .errors import (
    CaptureError,
    CUDAError,
    EscapedWorkWarning,
    ProcessError,
    ReplayError,
    StaleInputError,
    UnjoinedStreamError,
    UpdateError,
    WorkspaceWarning,
)
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
    "GraphSegment",
    "ProcessError",
    "ReplayError",
    "StaleInputError",
    "UnjoinedStreamError",
    "UpdateError",
    "WorkspaceWarning",
    "breakable_graph",
    "force_no_graph",
    "is_in_breakable_graph",
    "no_graph",
]
