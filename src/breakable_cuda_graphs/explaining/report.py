"""What `explain` hands back: findings, marks, a check, and a page of text.

The hard problem: a reader wants to know what to change, not what was seen. So each finding names the
line, says why it breaks a capture and what to do about it in terms of that line, and the page ends
with the few marks that cure all that marks can cure.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import NamedTuple

from .frames import StackLine
from .marking import Callee


class Kind(NamedTuple):
    """A way to break a capture: what it is called, why it breaks one, and what helps."""

    name: str
    why: str
    cure: str
    is_marked: bool = True  # whether @no_graph around it is a cure


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "host read",
            "the host waits for a value of the device, and a graph has no host",
            "keep the value on the device (torch.where, masked arithmetic)",
        ),
        Kind(
            "sync",
            "the host waits for the device, or asks about it, which no capture allows",
            "leave it out of the captured code",
        ),
        Kind(
            "pageable copy",
            "a copy between the device and pageable host memory waits for the host",
            "make the tensor on the device, or copy into a static tensor before the replay; inside, "
            "from pinned memory with non_blocking=True",
        ),
        Kind(
            "memory",
            "the memory is not the same at the next call, and a replay uses that of the capture",
            "make it before the capture, at its largest size, and write into it in place",
        ),
        Kind(
            "stream",
            "the capture does not include that stream, or does not get it back",
            "fork and join it: side.wait_stream(current) before, current.wait_stream(side) after",
        ),
        Kind(
            "generator",
            "the capture does not know this random generator",
            "name it: breakable_graph(..., generators=[generator])",
            is_marked=False,
        ),
        Kind(
            "compile",
            "code was compiled or tuned by this call, which synchronises and loads modules",
            "call the function once before the capture (this run has done it for these shapes)",
            is_marked=False,
        ),
        Kind(
            "collective",
            "ranks wait for each other, and only NCCL can do so in a graph",
            'NCCL: warm up, and host_nodes="allow" if it adds host nodes',
        ),
        Kind(
            "callback",
            "a function of the host in a graph is not safe to replay from Python",
            'host_nodes="allow" for libraries that need it',
        ),
        Kind(
            "graph",
            "a graph of torch is captured or launched, and the driver refuses that in a capture",
            "replay a CUDAGraphSequence without breaks there: it becomes part of the capture",
        ),
        Kind(
            "optimizer",
            "the optimizer keeps numbers of its own on the host, which a graph would freeze; torch "
            "refuses to capture it",
            "construct it with capturable=True",
        ),
        Kind(
            "refused",
            "a trial capture was refused here",
            "see the error's own words",
        ),
    )
}


@dataclass
class Finding:
    """One thing that would break a capture, at one line.

    kind: a key of `report.KINDS`: "host read", "sync", "pageable copy", "memory", "stream",
        "generator", "compile", "collective", "callback", "graph", "optimizer" or "refused".
    operator: what was called, as torch or the driver names it.
    file, line, function, source: the user's innermost line; of a library's where the user has none.
    inside: the library's line that did it, if that is another, as "file:line (function)"; else "".
    detail: more about this one; may be empty.
    advice: what to do.
    count: how often it happened in the run.
    """

    kind: str
    operator: str
    file: str
    line: int
    function: str
    source: str
    inside: str = ""
    detail: str = ""
    advice: str = ""
    count: int = 1
    stacks: list[tuple[StackLine, ...]] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        lines = [
            f"{self.kind}: {self.operator}{times}",
            f"at {_short(self.file)}:{self.line} in {self.function}",
        ]
        lines += [f"    {self.source}"] if self.source else []
        lines += [f"inside {self.inside}"] if self.inside else []
        lines += [f"why: {KINDS[self.kind].why}" + (f" ({self.detail})" if self.detail else "")]
        return "\n".join([*lines, f"do:  {self.advice}"])


@dataclass(frozen=True)
class Mark:
    """A function to mark, and how. `findings` are the numbers of those that the mark cures, from 1."""

    function: str
    file: str
    line: int
    decorator: str
    findings: tuple[int, ...]
    place: StackLine = field(repr=False, compare=False)
    callers: tuple[Callee, ...] = field(repr=False, compare=False)  # on the ways to it

    def __str__(self) -> str:
        return f"{self.decorator} on {self.function} ({_short(self.file)}:{self.line})"


@dataclass(frozen=True)
class Check:
    """What came of capturing with the marks.

    captured: whether the capture succeeded.
    equal: whether its replays gave what eager runs give; None if that was not compared.
    difference, tolerance: the largest difference to eager, and the largest one that was accepted,
        which is measured: four times the largest between eager runs.
    segments: how many captured segments and breaks there were.
    text: all of it in words.
    """

    captured: bool
    equal: bool | None
    difference: float | None
    tolerance: float | None
    segments: int
    text: str

    def __bool__(self) -> bool:
        return self.captured and bool(self.equal)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found out. It is true where nothing was found, and no check failed.

    findings: what would break a capture.
    marks: the smallest set of functions whose marking cures what marking can cure.
    unmarked: numbers (from 1) of findings that no mark cures: in the body of the explained function
        itself, or in functions that return plain Python values.
    check: what a trial capture said, with `check=True`.
    notes: what could not be seen in this run.
    """

    function: str
    findings: tuple[Finding, ...]
    marks: tuple[Mark, ...]
    unmarked: tuple[int, ...]
    check: Check | None
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.findings and (self.check is None or bool(self.check))

    def __str__(self) -> str:
        many = f"{len(self.findings)} finding{'' if len(self.findings) == 1 else 's'}"
        lines = [
            f"{self.function}: {many if self.findings else 'nothing found that breaks a capture'}"
        ]
        for number, finding in enumerate(self.findings, 1):
            first, *rest = str(finding).split("\n")
            lines += [f"{number:>3}. {first}", *(f"     {line}" for line in rest)]
        if self.marks:
            lines.append("Mark:")
            for mark in self.marks:
                lines.append(f"     {mark}, for {_numbers(mark.findings)}")
        if self.unmarked:
            lines.append(
                f"Not cured by a mark: {_numbers(self.unmarked)}. Move those lines, with all that uses "
                "their values on the host, into a function that returns nothing or tensors; mark that."
            )
        if self.check is not None:
            lines.append(f"Check: {self.check.text}")
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])


def _numbers(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _short(file: str) -> str:
    """A path from the working directory, if it is in there."""
    inside = os.path.relpath(file) if os.path.isabs(file) else file
    return file if inside.startswith("..") else inside
