"""Ranks that capture together: the failure of one is an error on all, and captures are compared.

    from breakable_cuda_graphs.distributed import capture_together, compare

    with capture_together(sequence):     # breakable_graph, in step with the other ranks
        model(x)
    compare(sequence)                    # raises where a rank has captured other work

The hard problem: all ranks have to come to the same verdict, and a rank that fails never comes to the
barrier or the collective that the others wait in. So nothing here is a collective. At each break and at the
end each rank writes to the store of the process group where it is, or that it has failed, and reads what the
others say, with a time limit; of a block that one of them has not finished none keeps anything. What ranks
have captured is compared by a digest first, and node by node only where that differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import errors
from .capture import open_blocks
from .capture.breakable_graph import breakable_graph
from .errors import RankError, said
from .graph.diff import Described, described
from .graph.view import look_at
from .replay.sequence import CUDAGraphSequence
from .sequence.segments import EagerSegment

__all__ = ["capture_together", "compare"]


class capture_together(breakable_graph):
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
        **options: Any,
    ) -> None:
        if barrier_fn is not None and not callable(barrier_fn):
            raise errors.not_callable("barrier_fn", barrier_fn)
        self._users_barrier = barrier_fn
        self._meetings = Meetings(group, timeout)
        super().__init__(cuda_graph, stream, capture_error_mode, self._before_break, **options)

    def __enter__(self) -> None:
        self._meetings.begin()
        try:
            super().__enter__()
        except BaseException as error:
            self._meetings.tell_failure(error)
            raise
        assert self._block is not None
        self._block.before_commit = lambda: self._meetings.meet("the end of the block")

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            super().__exit__(kind, error, traceback)
        except BaseException as problem:
            self._meetings.tell_failure(problem)
            raise
        if error is not None:
            self._meetings.tell_failure(error)
            return
        try:
            self._meetings.meet("the finished capture")
        except BaseException as problem:
            self._cuda_graph._give_up()
            self._meetings.tell_failure(problem)
            raise

    def _before_break(self) -> None:
        block = open_blocks.find()
        name = "a break" if block is None else f"the break {block.in_break}"
        has_barrier = self._meetings.exchange(name, self._users_barrier is not None)
        if self._users_barrier is not None:
            self._users_barrier()
        if any(has_barrier):  # one of them may have failed
            self._meetings.meet(f"{name}, behind barrier_fn")
        self._meetings.require_all(name)


# ---------------------------------------------------------------- captures compared


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
    parts = [_ComparedSegment(segment) for segment in sequence.segments]
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
    meetings: Meetings, parts: list[_ComparedSegment], of_ranks: list[list[list[str]]]
) -> errors.RankError:
    """The first place where a rank differs from the first rank; the same answer on all ranks."""
    first = of_ranks[0]
    which = next(number for number, other in enumerate(of_ranks) if other != first)
    other = of_ranks[which]
    ranks = meetings.ranks[0], meetings.ranks[which]
    segment = _first_difference(first, other)
    if segment is None:
        return ranks_differ(ranks, None, None, "segments", str(len(first)), str(len(other)))
    if first[segment][0] != other[segment][0]:
        return ranks_differ(ranks, segment, None, "kind", first[segment][0], other[segment][0])
    place = _first_difference(first[segment][1:], other[segment][1:])
    if place is None:
        counts = (str(len(each[segment]) - 1) for each in (first, other))
        return ranks_differ(ranks, segment, None, "nodes", *counts)
    own = parts[segment].detail(place) if segment < len(parts) else None
    details = meetings.exchange("compare nodes", own)
    one, two = details[0], details[which]
    field, old, new = _field(one, two)
    return ranks_differ(ranks, segment, one[0], field, old, new)


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


class _ComparedSegment:
    """One segment or break, as other ranks are told of it."""

    def __init__(self, segment: Any) -> None:
        self.nodes: list[Described] = []
        if isinstance(segment, EagerSegment):
            self.name = f"the break {segment.name}"
        else:
            self.name = "a graph"
            self.nodes = list(described(look_at(segment.graph)))
        self.digests = [_digest(node.fields)[:12] for node in self.nodes]
        self.digest = _digest([self.name, *self.digests])

    def detail(self, place: int) -> tuple[str, Any] | None:
        """A node in full; None where there is none (on a rank that is not looked at)."""
        if place >= len(self.nodes):
            return None
        return self.nodes[place].label, self.nodes[place].fields


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


# ---------------------------------------------------------------- meetings

_FAILED = "failed"

#: For each group, by name: the store that its meetings were counted in, the attempt, and how many there
#: were in it.
_counted: dict[str, tuple[Any, int, int]] = {}


@contextlib.contextmanager
def _store_asked(place: str) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise store_lost(place, error) from error


class Meetings:
    """Where the ranks of a group tell each other how far they are.

    Each meeting has a number, the same on all ranks: they meet in the same order. A rank writes what
    it has to say once, and reads what the others say; one that has failed writes that for the next
    meeting and does not wait.

    After a failure the numbers need not agree: a rank may have failed before it came to the first
    meeting, or not have come at all. So a rank that fails ends the attempt, and what begins afterwards
    counts from zero in the next one.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise no_process_group()
        group = dist.group.WORLD if group is None else group
        if dist.get_rank(group) < 0:
            raise not_in_the_group()
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise bad_timeout(timeout)
        self._timeout = float(timeout)
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank()
        self._group = str(group.group_name)
        # Private, but there is no other way to the store, and it has been there in all versions.
        self._store: Any = distributed_c10d._get_default_store()
        self._attempt = 0
        self._is_over = False  # all ranks know of the failure, or will look where it is written

    def begin(self) -> None:
        """Before the first meeting: join the present attempt of all ranks."""
        self._is_over = False
        store, attempt, count = _counted.get(self._group, (None, 0, 0))
        if store is not self._store:
            attempt = count = 0
        self._attempt = attempt
        with _store_asked("the beginning of the block"):
            now = self._present_attempt()
            # One in which a rank has failed where this one comes only now is what this rank means.
            while self._attempt < now and not self._failure(count):
                self._attempt, count = self._attempt + 1, 0
        _counted[self._group] = self._store, self._attempt, count

    def meet(self, place: str) -> None:
        """Wait for all ranks; raise `RankError` unless all are at the same place."""
        self.exchange(place, None)

    def exchange(self, place: str, value: Any) -> list[Any]:
        """Tell all ranks something at a place that they all come to; returns what each says."""
        number = self._say({"at": place, "value": value})
        with _store_asked(place):
            said = self._hear(number)
        self._raise_failure(said, place)
        missing = next((rank for rank in self.ranks if rank not in said), None)
        if missing is not None:
            self.require_all(place)
            raise rank_missing(missing, place, self._timeout)
        places = [(rank, str(one["at"])) for rank, one in said.items()]
        if any(at != place for _, at in places):
            self.end_attempt()
            raise ranks_apart(places)
        self._tidy(number)
        return [one["value"] for one in said.values()]

    def require_all(self, place: str) -> None:
        """Raise `RankError` if another rank has left after the last meeting, or while it was on.

        One that comes late finds there what the others said before they gave up waiting.
        """
        _, _, count = _counted[self._group]
        with _store_asked(place):
            if self._present_attempt() != self._attempt:
                self._raise_failure(self._words(count), place)

    def tell_failure(self, error: BaseException) -> None:
        """Tell the others, where they look next, that this rank will not come."""
        if self._is_over:
            return
        text = errors.said(error)
        try:
            self._say({_FAILED: text[:1000]})
        except Exception as problem:  # the store is gone: so are the others, or they will time out
            errors.note(error, others_not_told(problem))
        self.end_attempt()

    def end_attempt(self) -> None:
        """What the ranks begin from here on is another attempt. The first of them counts it."""
        self._is_over = True
        _counted[self._group] = self._store, self._attempt + 1, 0
        before = str(self._attempt) if self._attempt else ""  # in a store, nothing is ""
        with contextlib.suppress(Exception):
            self._store.compare_set(self._attempt_key(), before, str(self._attempt + 1))

    def _present_attempt(self) -> int:
        key = self._attempt_key()
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _raise_failure(self, said: dict[int, dict[str, Any]], place: str) -> None:
        for rank, one in said.items():
            if _FAILED in one:
                self.end_attempt()
                raise rank_failed(rank, one[_FAILED], place)

    def _failure(self, *numbers: int) -> bool:
        """Whether a rank has said that it failed instead of coming to one of these meetings."""
        return any(_FAILED in one for each in numbers for one in self._words(each).values())

    def _say(self, what: dict[str, Any]) -> int:
        store, attempt, number = _counted[self._group]
        _counted[self._group] = store, attempt, number + 1
        self._store.set(self._key(number, self._rank), zlib.compress(json.dumps(what).encode()))
        return number

    def _hear(self, number: int) -> dict[int, dict[str, Any]]:
        """What the ranks say at a meeting; those that do not come in time are not in it."""
        keys = [self._key(number, rank) for rank in self.ranks]
        deadline, pause = time.monotonic() + self._timeout, 0.0005
        while not self._store.check(keys) and time.monotonic() < deadline:
            if self._present_attempt() != self._attempt and self._failure(number, number + 1):
                break  # a rank has failed, or has given up waiting for another
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return self._words(number)

    def _words(self, number: int) -> dict[int, dict[str, Any]]:
        """What has been said at a meeting until now."""
        keys = {rank: self._key(number, rank) for rank in self.ranks}
        if not self._store.check([*keys.values()]):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        if self._store.has_extended_api():
            values = self._store.multi_get([*keys.values()]) if keys else []
        else:
            values = [self._store.get(key) for key in keys.values()]
        return {
            rank: json.loads(zlib.decompress(bytes(value)))
            for rank, value in zip(keys, values, strict=True)
        }

    def _tidy(self, number: int) -> None:
        """Everybody is here, so everybody has read what was said at the meeting before."""
        if number:
            self._store.delete_key(self._key(number - 1, self._rank))

    def _key(self, number: int, rank: int) -> str:
        return f"breakable_cuda_graphs/{self._group}/{self._attempt}/{number}/{rank}"

    def _attempt_key(self) -> str:
        return f"breakable_cuda_graphs/{self._group}/attempt"


# ---------------------------------------------------------------- what is said


def no_process_group() -> RuntimeError:
    return RuntimeError(
        "there is no process group: call torch.distributed.init_process_group() on every rank first"
    )


def not_in_the_group() -> ValueError:
    return ValueError("this process is not a rank of the given process group")


def bad_timeout(given: object) -> ValueError:
    return ValueError(f"timeout must be a positive number of seconds, not {given!r}")


def rank_failed(rank: int, text: str, place: str) -> RankError:
    error = RankError(
        f"rank {rank} failed in its capture ({text}), and this one, which had come to {place}, stops "
        "too: no rank keeps anything of the block. See the error on that rank."
    )
    error.rank = rank
    return error


def rank_missing(rank: int, place: str, seconds: float) -> RankError:
    error = RankError(
        f"rank {rank} did not come to {place} within {seconds:g} seconds: it has died, hangs, is slower "
        "than timeout= allows, or makes other calls than this one"
    )
    error.rank = rank
    return error


def store_lost(place: str, cause: BaseException) -> RankError:
    return RankError(
        f"the store of the process group does not answer at {place} ({cause}): the process that holds "
        "it, rank 0 or the launcher, has likely ended. Nothing of the block is kept here."
    )


def ranks_apart(places: Sequence[tuple[int, str]]) -> RankError:
    shown = "; ".join(f"rank {rank} is at {place}" for rank, place in places[:8])
    error = RankError(
        f"the ranks have come to different places: {shown}. Every rank has to come to the same "
        "breaks and calls in the same order."
    )
    error.rank = next(rank for rank, place in places if place != places[0][1])
    return error


def ranks_differ(
    ranks: tuple[int, int], segment: int | None, node: str | None, field: str, old: str, new: str
) -> RankError:
    place = "" if segment is None else f" in segment {segment}"
    place += "" if node is None else f", node {node}"
    error = RankError(
        f"ranks {ranks[0]} and {ranks[1]} have captured different work{place}: {field} is {old} on rank "
        f"{ranks[0]} and {new} on rank {ranks[1]}"
    )
    error.rank, error.segment, error.node, error.field = ranks[1], segment, node, field
    return error


def others_not_told(problem: BaseException) -> str:
    return f"and the other ranks could not be told: {said(problem)}"
