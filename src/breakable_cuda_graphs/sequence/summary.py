"""One sequence on one page: captured or not and when, what a replay does, and what falls back and why.

The hard problem: which path a replay takes was decided in many places: by the plan (what is joined),
by the frameworks (what draws), by the memory (what is watched, owned, unknown) and by the
kinds of nodes (what cannot be a child). Each reason is read from where it was decided, so that the
page cannot say something else than what runs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from .._driver import enums
from .memory import nbytes_of
from .plan import Plan, Unit, units_of
from .segments import EagerSegment, GraphSegment
from .state import SequenceState

_STEPS = 40  # of a replay on the page
_LINES = 8  # of watched memory and of addresses

_KINDS = {
    enums.MEM_ALLOC: "allocates memory",
    enums.MEM_FREE: "frees memory",
    enums.CONDITIONAL: "has a conditional node",
    -1: "has a node of a kind that is not known here",
}


def page(sequence: SequenceState) -> str:
    """What there is to say about a sequence, as text."""
    plan = sequence._plan
    usual = None if plan is None else plan.usual or plan
    lines = [*_state(sequence), *_segments(sequence)]
    if usual is not None:
        units = units_of(sequence.segments, usual)
        lines += ["", *_replay(sequence, units)]
    if sequence.segments:
        lines += ["", *_memory(sequence)]
    if usual is not None:
        reasons = list(_fallbacks(sequence, usual, units))
        lines += ["", "Falls back:" if reasons else "Falls back: nothing", *_indented(reasons)]
    return "\n".join(lines)


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _cut(lines: list[str], most: int) -> list[str]:
    rest = len(lines) - most
    return lines if rest <= 0 else [*lines[:most], f"... and {rest} more"]


def _count(number: int, what: str, many: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else many}"


# ---------------------------------------------------------------- what it is


def _state(sequence: SequenceState) -> list[str]:
    if sequence._is_capturing:
        return ["Being captured now; it can be replayed when its block has ended."]
    if sequence._has_failed:
        return ["Not captured: the last capture failed. Capture again, or reset()."]
    if not sequence.segments:
        return ["Not captured: empty; a replay does nothing."]
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(sequence._captured_at))
    framework = sequence._framework
    where = sequence.segments[-1].line
    lines = [
        f"Captured {at}{f', the last part at {where}' if where else ''}, "
        f"by {framework.name if framework is not None else 'the driver'}."
    ]
    if sequence._memory.stale is not None:
        tensor, role = sequence._memory.stale
        lines.append(f"STALE, so that a replay raises: {tensor}; {role}.")
    elif sequence._plan is None:
        lines.append("Nothing was captured in it: a replay does nothing.")
    if sequence.ranges:
        lines.append(f"Named ranges are on: {', '.join(sequence.ranges)}.")
    return lines


def _segments(sequence: SequenceState) -> list[str]:
    graphs = [s for s in sequence.segments if isinstance(s, GraphSegment)]
    breaks = [s for s in sequence.segments if isinstance(s, EagerSegment)]
    if not graphs:
        return []
    empty = sum(segment.is_empty for segment in graphs)
    borders = sum(segment._does_nothing for segment in breaks)
    left_out = f", {empty} empty and not launched" if empty else ""
    forced = f", {borders} of them force_no_graph" if borders else ""
    return [
        f"{_count(len(graphs), 'graph segment')}{left_out}; {_count(len(breaks), 'break')}{forced}."
    ]


# ---------------------------------------------------------------- what a replay does


def _replay(sequence: SequenceState, units: list[Unit]) -> list[str]:
    launches = sum(unit.kind == "graph" for unit in units)
    calls = len(units) - launches
    lines = [f"{number:>3}. {_unit(sequence, unit)}" for number, unit in enumerate(units, 1)]
    head = f"A replay: {_count(launches, 'launch', 'es')}, {_count(calls, 'call')} of Python"
    return [head, *_cut(lines, _STEPS)]


def _unit(sequence: SequenceState, unit: Unit) -> str:
    segment = sequence.segments[unit.segments[0]]
    at = f"  ({unit.line})" if unit.line else ""
    if isinstance(segment, EagerSegment):
        return f"break {unit.label}{_result(segment)}{at}"
    fused = f", {len(unit.segments)} segments in one launch" if len(unit.segments) > 1 else ""
    draws = ", draws random numbers" if segment._runner is not None else ""
    edited = (
        ", edited" if any(_is_edited(sequence.segments[each]) for each in unit.segments) else ""
    )
    return f"{unit.label}: {_count(unit.nodes, 'node')}{fused}{draws}{edited}{at}"


def _result(segment: EagerSegment) -> str:
    if segment._result is None:
        return ""
    places = segment._result._places.values()
    copied = sum(place.fixed is None for place in places)
    return f", static result of {_count(len(places), 'tensor')}, {copied} copied at each replay"


def _is_edited(segment: Any) -> bool:
    seen = segment._seen
    return seen is not None and seen.shown is not None and not seen.shown.is_empty


# ---------------------------------------------------------------- memory


def _memory(sequence: SequenceState) -> list[str]:
    memory = sequence._memory
    kept = memory.kept()
    nbytes = sum(nbytes_of(storage) for storage in kept)
    watched, unknown = sequence.watched, sequence.unwatched
    return [
        f"Memory owned until reset(): {_count(len(kept), 'piece')}, {nbytes:,} bytes",
        f"Memory watched, a replay raises once some is gone: {_count(len(watched), 'piece')}",
        *_indented(_cut(list(watched), _LINES)),
        f"Addresses in use whose owner is not known, so not watched: {len(unknown)}",
        *_indented(_cut(list(unknown), _LINES)),
    ]


# ---------------------------------------------------------------- what falls back


def _fallbacks(sequence: SequenceState, plan: Plan, units: list[Unit]) -> Iterator[str]:
    for unit in units:
        segment = sequence.segments[unit.segments[0]]
        if isinstance(segment, GraphSegment) and segment._runner is not None:
            yield (
                f"{unit.name} draws random numbers: seed and offset are written for it before each launch, "
                "and the generator moves on"
            )
        if isinstance(segment, EagerSegment) and segment._modes != plan.modes:
            yield f"{unit.name} switches modes at each replay: it was captured under others than most"
    for before, after in itertools.pairwise(units):
        if before.kind == after.kind == "graph":
            yield f"{before.name} and {after.name} are launched one by one: {_why(sequence, before, after)}"
    if plan.draws:
        yield "inside another capture it is refused: its segments draw random numbers"
    elif any(not _has_clone(part) for part in plan.parts):
        yield "inside another capture it is refused: a graph in it has no clones"
    elif plan.has_breaks:
        yield "inside a capture that is no breakable_graph block it is refused: it has breaks"


def _has_clone(part: Any) -> bool:
    return not isinstance(part, GraphSegment) or part._kinds.isdisjoint(enums.NO_CHILDREN)


def _why(sequence: SequenceState, before: Unit, after: Unit) -> str:
    """Why two neighbours with nothing eager between them are not one launch."""
    for number in (before.segments[-1], after.segments[0]):
        segment = sequence.segments[number]
        if segment._runner is not None:  # type: ignore[union-attr]
            return f"segment {number} draws random numbers"
        kinds = segment._kinds & enums.NO_CHILDREN  # type: ignore[union-attr]
        if kinds:
            return f"segment {number} {_KINDS[min(kinds)]}, and the driver cannot copy such a graph"
    return "one of them has an executable of its own, which an earlier block or a hand-built graph made"
