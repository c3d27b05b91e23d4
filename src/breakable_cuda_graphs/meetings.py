"""Where the ranks of a process group tell each other how far they are.

The hard problem: a rank that fails in a capture never comes to the barrier or the collective that
the others wait in. So nothing here is a collective: each rank writes to the store of the process group
what it has to say, and reads what the others say, polling with a time limit. One that has failed says
that where the others will look next, and nothing waits for a rank that is gone.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import errors

__all__ = ["Meetings"]

_FAILED = "failed"

#: For each group, by name: the store that its meetings were counted in, the attempt, and how many there
#: were in it.
_counted: dict[str, tuple[Any, int, int]] = {}


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
            raise errors.no_process_group()
        group = dist.group.WORLD if group is None else group
        if dist.get_rank(group) < 0:
            raise errors.not_in_the_group()
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise errors.bad_timeout(timeout)
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
        try:
            now = self._present_attempt()
            # One in which a rank has failed where this one comes only now is what this rank means.
            while self._attempt < now and not self._failure(count):
                self._attempt, count = self._attempt + 1, 0
        except dist.DistError as error:
            raise errors.store_lost("the beginning of the block", error) from error
        _counted[self._group] = self._store, self._attempt, count

    def meet(self, place: str) -> None:
        """Wait for all ranks; raise `RankError` unless all are at the same place."""
        self.exchange(place, None)

    def exchange(self, place: str, value: Any) -> list[Any]:
        """Tell all ranks something at a place that they all come to; returns what each says."""
        number = self._say({"at": place, "value": value})
        try:
            said = self._hear(number)
        except dist.DistError as error:
            raise errors.store_lost(place, error) from error
        self._raise_failure(said, place)
        missing = next((rank for rank in self.ranks if rank not in said), None)
        if missing is not None:
            self.require_all(place)
            raise errors.rank_missing(missing, place, self._timeout)
        places = [(rank, str(one["at"])) for rank, one in said.items()]
        if any(at != place for _, at in places):
            self.end_attempt()
            raise errors.ranks_apart(places)
        self._tidy(number)
        return [one["value"] for one in said.values()]

    def require_all(self, place: str) -> None:
        """Raise `RankError` if another rank has left after the last meeting, or while it was on.

        One that comes late finds there what the others said before they gave up waiting.
        """
        _, _, count = _counted[self._group]
        try:
            if self._present_attempt() != self._attempt:
                self._raise_failure(self._words(count), place)
        except dist.DistError as error:
            raise errors.store_lost(place, error) from error

    def tell_failure(self, error: BaseException) -> None:
        """Tell the others, where they look next, that this rank will not come."""
        if self._is_over:
            return
        text = errors.said(error)
        try:
            self._say({_FAILED: text[:1000]})
        except Exception as problem:  # the store is gone: so are the others, or they will time out
            errors.note(error, errors.others_not_told(problem))
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
                raise errors.rank_failed(rank, one[_FAILED], place)

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
