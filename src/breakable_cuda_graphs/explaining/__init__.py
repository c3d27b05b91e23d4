"""`explain`: what in a function cannot be captured, and which functions to mark.

    running.py    one watched eager run: the order of things
    watching.py   what was seen so far, and on whose line
    frames.py     which frames are the user's
    calls.py      calls that are patched while a function is watched
    libraries.py  CuPy's and Numba's entry points among them
    operators.py  torch's operators, as two modes see them (needs torch)
    streams.py    which streams the work of a capture would reach
    growing.py    memory that a call replaces, moves or keeps (needs torch)
    compiling.py  compilation and autotuning (needs torch)
    proposing.py  the smallest set of functions to mark
    marking.py    mark a function for a while, wherever it is referred to
    trial.py      capture with the marks, and compare with eager runs
    states.py     the memory that a function reads and writes: saved, put back, compared (needs torch)
    report.py     what is handed back, as objects and as a page
    paths.py      one sequence, explained: what a replay does, and what falls back

Nothing here is imported before `explain` is called, and torch only where it is loaded already.
"""

from __future__ import annotations

from .report import Check, Explanation, Finding, Mark
from .running import explain

__all__ = ["Check", "Explanation", "Finding", "Mark", "explain"]
