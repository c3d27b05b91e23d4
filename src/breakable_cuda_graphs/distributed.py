"""Ranks that capture together: the failure of one is an error on all, and captures are compared.

    from breakable_cuda_graphs.distributed import capture_together, compare

    with capture_together(sequence):     # breakable_graph, in step with the other ranks
        model(x)
    compare(sequence)                    # raises where a rank has captured other work

The hard problem: all ranks have to come to the same verdict, each from what it knows and hears. So they
meet at each break and at the end (`meetings.py`), each saying where it is, and of a block that one of
them has not finished none keeps anything. What ranks have captured is compared by a digest first, and
node by node only where that differs: the rank that differs is named on all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from . import blocks, errors
from .capture import breakable_graph
from .comparing import Described, described
from .meetings import Meetings
from .segments import EagerSegment
from .sequence import CUDAGraphSequence

__all__ = ["capture_together", "compare"]


class capture_together:
    """Capture like `breakable_graph`, in step with the other ranks of a process group.

    Every rank of the group opens a block of its own at the same time. The ranks meet before the body
    of each break and at the end, before anything is kept. Where one has failed, has come to another
    break, or does not come at all, `RankError` is raised on the others and names it; the rank that
    failed raises its own exception. Then no rank has captured anything.

    cuda_graph, stream, capture_error_mode: as for `breakable_graph`.
    generators, keep_inputs, check_input_liveness, record_stacks, host_nodes: as there too.
    barrier_fn: called once the ranks have met, before the break's body; then they meet again.
    group: a process group of any backend; None is the default one.
    timeout: how long to wait for a rank, in seconds.

    Meetings use the store of the default process group on the host, and run at capture only. What
    the bodies of breaks wait for themselves is theirs: a collective in a break waits for a rank that
    fails inside of that break as long as its process group does.

    Raises, beside those errors, what `breakable_graph` raises; `RuntimeError` without a process group,
    `ValueError` for a process that is not of the group and for a timeout that is no positive number.
    """

    def __init__(
        self,
        cuda_graph: CUDAGraphSequence,
        stream: Any = None,
        capture_error_mode: str = "global",
        barrier_fn: Callable[[], object] | None = None,
        *,
        group: Any = None,
        timeout: float = 60.0,
        generators: Sequence[Any] = (),
        keep_inputs: bool = False,
        check_input_liveness: bool = True,
        record_stacks: bool = False,
        host_nodes: Literal["refuse", "allow"] = "refuse",
    ) -> None:
        if barrier_fn is not None and not callable(barrier_fn):
            raise errors.not_callable("barrier_fn", barrier_fn)
        self._sequence = cuda_graph
        self._barrier_fn = barrier_fn
        self._meetings = Meetings(group, timeout)
        self._capture = breakable_graph(
            cuda_graph,
            stream,
            capture_error_mode,
            self._before_break,
            generators=generators,
            keep_inputs=keep_inputs,
            check_input_liveness=check_input_liveness,
            record_stacks=record_stacks,
            host_nodes=host_nodes,
        )

    def __enter__(self) -> None:
        self._meetings.begin()
        try:
            self._capture.__enter__()
        except BaseException as error:
            self._meetings.tell_failure(error)
            raise
        block = self._capture._block
        assert block is not None
        block.before_commit = lambda: self._meetings.meet("the end of the block")

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self._capture.__exit__(kind, error, traceback)
        except BaseException as problem:
            self._meetings.tell_failure(problem)
            raise
        if error is not None:
            self._meetings.tell_failure(error)
            return
        try:
            self._meetings.meet("the finished capture")
        except BaseException as problem:
            self._sequence._give_up()
            self._meetings.tell_failure(problem)
            raise

    def _before_break(self) -> None:
        block = blocks.find()
        name = "a break" if block is None else f"the break {block.in_break}"
        has_barrier = self._meetings.exchange(name, self._barrier_fn is not None)
        if self._barrier_fn is not None:
            self._barrier_fn()
        if any(has_barrier):  # one of them may have failed
            self._meetings.meet(f"{name}, behind barrier_fn")
        self._meetings.require_all(name)


def compare(sequence: CUDAGraphSequence, group: Any = None, timeout: float = 60.0) -> str:
    """Compare what the ranks of a process group have captured; every rank has to call it.

    Compared are the segments and breaks in order, and in each segment what `Graph.fingerprint`
    covers: nodes and edges, kernels, launch shapes, sizes of arguments, copies and fills. Addresses
    and the values of arguments are not: they differ from rank to rank.

    group: a process group of any backend; None is the default one.
    timeout: how long to wait for a rank, in seconds.

    Returns a fingerprint of the whole sequence, the same on all ranks. Raises `RankError` on all of
    them if one differs from the first: `.rank`, `.segment`, `.node` and `.field` say where. Raises
    `RankError` too for a rank that does not come.
    """
    if not isinstance(sequence, CUDAGraphSequence):
        raise errors.bad_type("sequence", sequence, "a CUDAGraphSequence")
    meetings = Meetings(group, timeout)
    meetings.begin()
    parts = [_Part(segment) for segment in sequence.segments]
    whole = _digest([part.digest for part in parts])
    try:
        fingerprints = meetings.exchange("compare", whole)
    except errors.RankError:
        meetings.end_attempt()
        raise
    if len(set(fingerprints)) == 1:
        return whole
    mine = [[part.name, *part.digests] for part in parts]
    raise _difference(meetings, parts, meetings.exchange("compare segments", mine))


def _difference(
    meetings: Meetings, parts: list[_Part], of_ranks: list[list[list[str]]]
) -> errors.RankError:
    """The first place where a rank differs from the first rank; the same answer on all ranks."""
    first = of_ranks[0]
    which = next(number for number, other in enumerate(of_ranks) if other != first)
    other = of_ranks[which]
    ranks = meetings.ranks[0], meetings.ranks[which]
    segment = _first_difference(first, other)
    if segment is None:
        return errors.ranks_differ(ranks, None, None, "segments", str(len(first)), str(len(other)))
    if first[segment][0] != other[segment][0]:
        return errors.ranks_differ(
            ranks, segment, None, "kind", first[segment][0], other[segment][0]
        )
    place = _first_difference(first[segment][1:], other[segment][1:])
    if place is None:
        counts = (str(len(each[segment]) - 1) for each in (first, other))
        return errors.ranks_differ(ranks, segment, None, "nodes", *counts)
    own = parts[segment].detail(place) if segment < len(parts) else None
    details = meetings.exchange("compare nodes", own)
    one, two = details[0], details[which]
    field, old, new = _field(one, two)
    return errors.ranks_differ(ranks, segment, one[0], field, old, new)


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """The first place where two lists differ; None where one only ends before the other."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), None)


def _field(one: Any, two: Any) -> tuple[str, str, str]:
    old, new = dict(one[1]), dict(two[1])
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            return name, str(old.get(name)), str(new.get(name))
    return "label", one[0], two[0]


class _Part:
    """One segment or break, as other ranks are told of it."""

    def __init__(self, segment: Any) -> None:
        self.nodes: list[Described] = []
        if isinstance(segment, EagerSegment):
            self.name = f"the break {segment.name}"
        else:
            self.name = "a graph"
            self.nodes = described(segment.graph)
        self.digests = [_digest(node.fields)[:12] for node in self.nodes]
        self.digest = _digest([self.name, *self.digests])

    def detail(self, place: int) -> tuple[str, Any] | None:
        """A node in full; None where there is none (on a rank that is not looked at)."""
        if place >= len(self.nodes):
            return None
        return self.nodes[place].label, self.nodes[place].fields


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]
