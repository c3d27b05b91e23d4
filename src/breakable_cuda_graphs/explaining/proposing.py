"""The smallest set of functions to mark, and what to say of each finding.

The hard problem: a mark can be wrong. A break that hands a plain number back to the captured code
freezes it, and one that hands back tensors with history cannot be captured; so a function is taken
only if it returned nothing but tensors without history, else the one that called it, and never the
explained function itself, of which nothing would be left. Of the functions that remain the innermost
is taken, and those whose findings others cover are left out again.
"""

from __future__ import annotations

from types import CodeType
from typing import NamedTuple

from .frames import CodeOwner, StackLine
from .marking import Callee
from .report import KINDS, Finding, Mark
from .watching import Returns, Watch


class _Need(NamedTuple):
    """One way on which a finding was reached: the functions that would cover it, the best first."""

    number: int  # of the finding, from 1
    cures: tuple[StackLine, ...]

    def is_met_by(self, codes: set[CodeType]) -> bool:
        return any(place.code in codes for place in self.cures)


class Proposal(NamedTuple):
    """Marks, and the numbers of the findings that none of them cures."""

    marks: tuple[Mark, ...]
    unmarked: tuple[int, ...]


def propose(watch: Watch) -> Proposal:
    """What to mark; the findings' advice is completed."""
    needs = [
        _Need(number, _cures(stack, watch.returns))
        for number, finding in enumerate(watch.findings, 1)
        if KINDS[finding.kind].is_marked
        for stack in finding.stacks
    ]
    unmarked = tuple(sorted({need.number for need in needs if not need.cures}))
    chosen = {need.cures[0].code: need.cures[0] for need in needs if need.cures}
    for code in list(chosen):
        if all(need.is_met_by(chosen.keys() - {code}) for need in needs if need.cures):
            del chosen[code]
    marks = []
    for code, place in chosen.items():
        numbers = sorted({need.number for need in needs if need.is_met_by({code})})
        static = watch.returns[code].tensors
        decorator = '@no_graph(outputs="static")' if static else "@no_graph"
        marks.append(
            Mark(
                place.function, place.file, code.co_firstlineno, decorator, tuple(numbers), place,
                _callers(watch.findings, code),
            )
        )  # fmt: skip
    for number, finding in enumerate(watch.findings, 1):
        finding.advice = _advice(finding, [m for m in marks if number in m.findings], watch.returns)
    return Proposal(tuple(marks), unmarked)


def _callers(findings: list[Finding], code: CodeType) -> tuple[Callee, ...]:
    """The functions on all ways to the calls of one."""
    stacks = [stack for finding in findings for stack in finding.stacks]
    return tuple(
        place.callee
        for stack in stacks
        if any(place.code is code for place in stack)
        for place in stack
        if place.callee is not None and place.code is not code
    )


def _cures(stack: tuple[StackLine, ...], returns: dict[CodeType, Returns]) -> tuple[StackLine, ...]:
    """The functions on the way that may be marked: the user's first, then those of libraries."""
    inside = [place for place in stack[:-1] if _may_be_marked(place, returns)]
    inside.sort(key=lambda place: place.whose is not CodeOwner.USER)
    return tuple(inside)


def _may_be_marked(place: StackLine, returns: dict[CodeType, Returns]) -> bool:
    known = returns.get(place.code)
    return (
        place.can_be_marked
        and known is not None
        and known.only_tensors
        and not (known.tensors and known.requires_grad)
    )


def _advice(finding: Finding, marks: list[Mark], returns: dict[CodeType, Returns]) -> str:
    kind = KINDS[finding.kind]
    if not kind.is_marked:
        return kind.cure
    ways = [f"mark {mark.function} {mark.decorator}" for mark in marks]
    if not marks:
        ways.append(_why_unmarked(finding, returns))
    if finding.source.split(" ")[0] in ("if", "elif", "while") and finding.kind == "host read":
        ways.append("capture_if or capture_while, where all that depends on it can be captured")
    if finding.kind == "memory":  # fixed memory is better than a break, whose result may not grow
        return "; or ".join([kind.cure, *ways])
    is_printed = finding.operator.endswith(("__repr__", "__format__"))
    return "; or ".join([*ways, "leave the printing out" if is_printed else kind.cure])


def _why_unmarked(finding: Finding, returns: dict[CodeType, Returns]) -> str:
    inside = [place for stack in finding.stacks for place in stack[:-1]]
    for place in inside:
        known = returns.get(place.code)
        if known is not None and known.requires_grad:
            return (
                f"{place.function} returns a tensor that requires grad: make forward and backward of a "
                "torch.autograd.Function breaks"
            )
    plain = next(
        (p for p in inside if p.code in returns and not returns[p.code].only_tensors), None
    )
    if plain is not None:
        return (
            f"{plain.function} returns plain Python values, which a replay would never see change: "
            "move it, with what uses them, into a function that returns nothing or tensors, and mark "
            "that @no_graph"
        )
    return "move the lines into a function of their own, and mark that @no_graph"
