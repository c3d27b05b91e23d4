"""Private pools: the memory that captured work makes, shared by sequences that want to share it.

The hard problem: torch refuses to open a pool id again whose last graph has gone while it still owns
memory, on the device or pinned. So a pool keeps one captured shell un-reset, its anchor, for as long
as anybody may open it; and an id that came from the user may be opened again at any time.

And torch keeps the memory of a pool that has gone in its cache, where no other pool takes from it: many
captures would take more and more of the device. So it is given back when the last sequence has gone, and
what living tensors have kept from that later. The end of a `torch.cuda.MemPool` does that too, but up to
torch 2.12 it ends the process if memory is routed to any pool at that moment, in whatever thread: by
`torch.cuda.graph`, by `use_mem_pool`, or for ever, by a capture of the user's that failed.

Sequences that share a pool share its stream, and so their memory; they do not replay at once.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ..._driver import process, release, stream_capture
from ..._driver.bindings import Driver, types
from ..._driver.handles import EventHandle
from ..._driver.stream_capture import Status
from ..._driver.stream_order import CompletionMark
from ...errors import bad_type
from ..errors import allocator_without_pools, pool_in_capture, pool_of_other_device
from . import capture_streams, workspaces
from .allocator import ranges, snapshot
from .capture_streams import CaptureStream


class PoolHandle(tuple[int, int]):
    """A torch pool id that also keeps the pool; `torch.cuda.graph(pool=...)` takes it too."""

    pool: TorchPool

    def __new__(cls, pool: TorchPool, identity: tuple[int, int]) -> PoolHandle:
        handle = super().__new__(cls, identity)
        handle.pool = pool
        return handle


class TorchPool:
    """One private pool of one device. Made by `pool_for`."""

    def __init__(
        self, driver: Driver, device: int, identity: tuple[int, int], *, is_users: bool, keep: Any
    ) -> None:
        self.driver, self.device = driver, device
        self.identity = identity
        self.is_users = is_users  # the id came from the user, who may give it again
        self._keep = keep  # a MemPool of the user's
        self._stream: CaptureStream | None = None  # leased by a block, or kept
        self._last_stream: CaptureStream | None = None  # blocks of this pool belong to it
        self._keeps_stream = False
        self._lessees: set[object] = set()
        self._captured_by: object = None  # the session whose segment is open in this pool
        self._anchor: Any = None  # none yet, or all segments draw: they have their shells still
        self._is_gone = False
        self._ranges: list[tuple[int, int]] = []
        self._epoch = process.epoch
        self.event = EventHandle.create(driver)  # for the dummies that close torch's books
        self.mark = CompletionMark(driver)  # last: made whole, it has to be closed

    @property
    def handle(self) -> PoolHandle:
        return PoolHandle(self, self.identity)

    @property
    def stream(self) -> Any:
        """The capture stream, as a `torch.cuda.ExternalStream`; whoever sees it may rely on it."""
        self._keeps_stream = True
        stream = self._hold_stream()
        workspaces.make_first(self.device, stream)
        return stream

    def lease(self, lessee: object) -> Any:
        """The stream for a block's captures, this pool's alone until `end_lease`."""
        self._lessees.add(lessee)
        return self._hold_stream()

    def _hold_stream(self) -> Any:
        if self._stream is None:
            release.drain()
            release_dormant()
            self._stream = capture_streams.take(self.driver, self.device, self._last_stream)
            self._last_stream = self._stream
        return self._stream.external

    def end_lease(self, lessee: object, keep: bool) -> None:
        """A block is over; `keep` if kernels of its now depend on the stream's workspace.

        Does nothing for somebody who has no lease.
        """
        self._keeps_stream = self._keeps_stream or keep
        self._lessees.discard(lessee)
        if self._stream is not None and not self._keeps_stream and not self._lessees:
            stream, self._stream = self._stream, None  # lost in between, it is one stream less
            capture_streams.give_back(stream)

    def open_capture(self, session: object) -> None:
        """A segment is about to be captured into the pool; torch routes one at a time to an id.

        It would refuse the second too, but in closing that one's books it would end the first's route.
        """
        with _pools_lock:
            if self._captured_by not in (None, session):
                raise pool_in_capture()
            self._captured_by = session

    def close_capture(self, session: object) -> None:
        """The segment has ended."""
        if self._captured_by is session:
            self._captured_by = None

    def take_shell(self, shell: Any) -> None:
        """Give a closed shell up: the first becomes the pool's anchor, the others are reset."""
        if self._anchor is None and not self._is_gone:
            self._anchor = shell
        else:
            shell.reset()

    def contains(self, address: int) -> bool:
        """Whether an address lies in the pool's memory, as last looked at."""
        return any(start <= address < end for start, end in self._ranges)

    def look(self) -> None:
        """Read the pool's segments from the allocator (a quarter of a millisecond)."""
        self._ranges = ranges(
            segment for segment in snapshot(self.identity) if segment["device"] == self.device
        )

    def nbytes(self) -> int:
        """What the allocator has reserved for the pool, in bytes."""
        self.look()
        return sum(end - start for start, end in self._ranges)

    def __del__(self, later: Any = release.later) -> None:
        # At the end of the interpreter nothing is released; without a mark it was never made whole.
        if _EndedPool is not None and hasattr(self, "mark"):
            later(self._epoch, self.mark.close)
            self.discard(later)

    def discard(self, later: Any = release.later) -> None:
        """Queue all that the pool has for release, ahead of its own end. A second call does nothing."""
        if not self._is_gone:
            remains = _EndedPool(self, self._stream, self._anchor)
            self._is_gone, self._stream, self._anchor, self._keep = True, None, None, None
            later(self._epoch, remains)


class _EndedPool:
    """What is given back when the last sequence of a pool has gone.

    Torch refuses to open an id again whose last graph has gone while its memory has not. So while
    tensors live in a pool whose id came from the user, its anchor stays; a sequence that is given
    the id again takes it over.
    """

    def __init__(self, pool: TorchPool, stream: Any, anchor: Any) -> None:
        self._identity, self._is_users, self._mark = pool.identity, pool.is_users, pool.mark
        self._driver, self._device = pool.driver, pool.device
        self._keep = pool._keep
        self._stream, self._anchor = stream, anchor

    def __call__(self) -> None:
        self._mark.wait()
        # Each goes once: after an interrupt this is called again. One lost in between is lost.
        stream, self._stream = self._stream, None
        if stream is not None:
            capture_streams.give_back(stream)
        anchor, self._anchor = self._anchor, None
        if not self._is_users:
            _ended[self._identity] = 0
            _reset(anchor)
            self._give_back()
        elif anchor is not None:
            _dormant[self._identity] = anchor
            release_dormant()
        self._keep = None

    def _give_back(self) -> None:
        """Give the memory back now, unless this is called inside a capture of somebody else's."""
        stream = types.CUstream(torch._C._cuda_getCurrentRawStream(self._device))
        if _CAN_SPARE_CACHE and stream_capture.status(self._driver, stream) is Status.NONE:
            # A thread that has none would begin with device 0.
            with torch.cuda.device(self._device):
                _empty_ended()
            _note(self._identity)


_dormant: dict[tuple[int, int], Any] = {}  # id of the user's -> the anchor of its pool
_reset_ids: set[tuple[int, int]] = set()  # ids of the user's whose anchors are gone


def release_dormant() -> None:
    """Give back the pools of the user's whose last tensor has died since."""
    for identity, anchor in list(_dormant.items()):
        in_use = any(segment["active_size"] for segment in snapshot(identity))
        if not in_use and _dormant.pop(identity, None) is anchor:
            _reset_ids.add(identity)
            _reset(anchor)


def _reopened(identity: tuple[int, int]) -> Any:
    """The anchor of a pool whose id is given again; without one, torch is made to forget the id."""
    release.drain()
    anchor = _dormant.pop(identity, None)
    if anchor is None and identity in _reset_ids:
        _reset_ids.discard(identity)
        with release.relaxed_thread():  # somebody may be capturing
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()
    return anchor


#: Ids of ours that have gone, but for memory of living tensors or of torch graphs of the user's -> how
#: much of it was free, and could not be given back, at the last look.
_ended: dict[tuple[int, int], int] = {}
_LOOKS = 2  # of those, how many one block asks about, at a quarter of a millisecond each

#: Up to torch 2.12, while memory is routed to any pool, `empty_cache` empties but pools that have gone
#: (c10/cuda/CUDACachingAllocator.cpp, release_cached_blocks). Later ones ask for captures instead.
_CAN_SPARE_CACHE = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)

_reset_anchors = 0  # since torch's cache of pinned memory was emptied the last time
_MOST_ANCHORS = 64  # their pinned halves take about 25 KiB of the host each


def _reset(anchor: Any) -> None:
    """Let a pool's last graph go: its anchor, or None where an interrupt has lost the shell."""
    global _reset_anchors
    if anchor is not None:
        anchor.reset()
    _reset_anchors += 1


def release_ended() -> None:
    """Give back the memory of ended pools whose last tensors, or graphs, have died since.

    There is no call for one pool, nor for its pinned half. Where torch's cache cannot be spared it is
    emptied, as `torch.cuda.graph` does each time, but only if that gives something back. Called while no
    capture is open that this would be a part of.
    """
    global _reset_anchors
    turn = list(_ended.items())[:_LOOKS]
    if turn and (_CAN_SPARE_CACHE or any(_free(snapshot(each)) > known for each, known in turn)):
        _empty_ended()
    for identity, _ in turn:
        _note(identity)
    if _reset_anchors >= _MOST_ANCHORS:
        torch._C._host_emptyCache()
        _reset_anchors = 0


def _note(identity: tuple[int, int]) -> None:
    """Look at what an ended pool still has; the next time others have their turn."""
    _ended.pop(identity, None)
    segments = snapshot(identity)
    if segments:
        _ended[identity] = _free(segments)


def _free(segments: list[dict[str, Any]]) -> int:
    return sum(each["total_size"] for each in segments if not each["active_size"])


def _empty_ended() -> None:
    """Give back what is free in pools that have gone, and torch's cache only where it has to be."""
    with contextlib.ExitStack() as routes:
        if _CAN_SPARE_CACHE:
            with contextlib.suppress(RuntimeError):  # out of memory
                # Blocks that other streams used count as free once an allocation has asked for that;
                # not while memory is routed.
                torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(1))
            nowhere = torch.cuda.graph_pool_handle()
            for device in range(torch.cuda.device_count()):
                routes.enter_context(_routed(device, nowhere))
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _routed(device: int, pool: tuple[int, int]) -> Iterator[None]:
    """Inside, what this thread allocates goes to a pool; nothing is allocated."""
    try:  # an interrupt may come right behind the first call
        torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # it has not begun
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)


_pools: weakref.WeakValueDictionary[tuple[int, int, int], TorchPool] = weakref.WeakValueDictionary()
_pools_lock = threading.Lock()


def pool_for(driver: Driver, device: int, given: Any) -> TorchPool:
    """The pool of a sequence: a fresh one for None, or the one that the given handle names."""
    if isinstance(given, PoolHandle):
        if given.pool.device != device:
            raise pool_of_other_device(given.pool.device, device)
        return given.pool
    keep = None
    if torch.cuda.get_allocator_backend() != "native":
        raise allocator_without_pools(torch.cuda.get_allocator_backend())
    if given is None:
        identity = torch.cuda.graph_pool_handle()
    elif isinstance(given, torch.cuda.MemPool):
        identity, keep = given.id, given
    elif isinstance(given, tuple) and len(given) == 2:
        identity = given
    else:
        raise bad_type(
            "pool", given, "a sequence's pool(), a graph_pool_handle() or a torch.cuda.MemPool"
        )
    identity = (int(identity[0]), int(identity[1]))
    with _pools_lock:
        pool = _pools.get((device, *identity))
        if pool is None:
            is_users = given is not None
            pool = TorchPool(driver, device, identity, is_users=is_users, keep=keep)
            _pools[(device, *identity)] = pool
            if is_users:
                pool._anchor = _reopened(identity)
        return pool
