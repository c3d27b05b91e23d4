"""`explain`: what in a function cannot be captured, and which functions to mark.

    errors.py        what is said where a function cannot be explained
    marking.py       mark a function for a while, wherever it is referred to
    frames.py        which frames are the user's
    report.py        what is handed back, as objects and as a page
    watching.py      what was seen so far, and on whose line
    streams.py       which streams the work of a capture would reach
    entry_points.py  the functions of CuPy and Numba that a user's call enters by
    calls.py         calls that are patched while a function is watched
    compiling.py     compilation and autotuning
    growing.py       memory that a call replaces, moves or keeps (needs torch)
    memory.py        the memory that a function reads and writes: saved, put back, compared (needs torch)
    operators.py     torch's operators, as two modes see them (needs torch)
    proposing.py     the smallest set of functions to mark
    trial.py         capture with the marks, and compare with eager runs
    running.py       one watched eager run: the order of things

What needs torch is imported only by a run with torch.
"""

from __future__ import annotations

from .report import Check, Explanation, Finding, Mark
from .running import explain

__all__ = ["Check", "Explanation", "Finding", "Mark", "explain"]
