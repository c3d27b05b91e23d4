"""Private pools, the streams that captures run on, and the cuBLAS workspaces of those streams.

The hard problem: three things outlive a graph without saying so. A pool id must keep one captured
shell (an anchor) or torch's pinned-memory half of it dies before its other half; the allocator
remembers a block's stream for ever, so a capture stream is never destroyed, only used again; and a
cuBLAS workspace, found by (handle, stream), is baked into kernels but can be freed by anybody
(`torch._C._cuda_clearCublasWorkspaces`, which Inductor calls). The workspace of a capture stream is
therefore made inside a capture of its own, routed to one pool that is kept for good and that nobody
else allocates from: a foreign clear then returns it to where nobody takes it.

Sequences that share a pool share its stream, and so their memory; they do not replay at once.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any

import torch

from ... import errors
from ..._driver import process, release
from ..._driver.bindings import Driver
from ..._driver.handles import StreamHandle
from ..._driver.ordering import CompletionMark


class PoolHandle(tuple[int, int]):
    """A torch pool id that also keeps the pool; `torch.cuda.graph(pool=...)` takes it too."""

    pool: TorchPool

    def __new__(cls, pool: TorchPool, identity: tuple[int, int]) -> PoolHandle:
        handle = super().__new__(cls, identity)
        handle.pool = pool
        return handle


class TorchPool:
    """One private pool of one device. Made by `pool_for`."""

    def __init__(self, driver: Driver, device: int, identity: tuple[int, int], keep: Any) -> None:
        self.driver, self.device = driver, device
        self.identity = identity
        self.mark = CompletionMark(driver)
        self._keep = keep  # a MemPool of the user's
        self._streams: _CaptureStream | None = None
        self._anchor: Any = None
        self._ranges: list[tuple[int, int]] = []
        self._epoch = process.epoch

    @property
    def handle(self) -> PoolHandle:
        return PoolHandle(self, self.identity)

    @property
    def stream(self) -> Any:
        """The capture stream, as a `torch.cuda.ExternalStream`."""
        if self._streams is None:
            self._streams = _take_stream(self.driver, self.device)
        return self._streams.external

    def take_shell(self, shell: Any) -> None:
        """Give a closed shell up: the first becomes the pool's anchor, the others are reset."""
        if self._anchor is None:
            self._anchor = shell
        else:
            shell.reset()

    def contains(self, address: int) -> bool:
        """Whether an address lies in the pool's memory, as last looked at."""
        return any(start <= address < end for start, end in self._ranges)

    def look(self) -> None:
        """Read the pool's segments from the allocator (a quarter of a millisecond)."""
        self._ranges = [
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in snapshot(self.identity)
            if segment["device"] == self.device
        ]

    def __del__(self, later: Any = release.later) -> None:
        if _Remains is not None:  # at the end of the interpreter nothing is released
            self.discard(later)

    def discard(self, later: Any = release.later) -> None:
        """Queue all that the pool has for release, ahead of its own end. A second call does nothing."""
        if self._streams is not None or self._anchor is not None or self._keep is not None:
            remains = _Remains(self.identity, self.mark, self._streams, self._anchor, self._keep)
            self._streams = self._anchor = self._keep = None
            later(self._epoch, remains)


class _Remains:
    """What is given back when the last sequence of a pool has gone.

    While tensors still live in the pool its anchor stays: torch refuses to open an id again whose
    last graph has gone but whose memory has not. A sequence that is given the id takes over.
    """

    def __init__(
        self, identity: tuple[int, int], mark: CompletionMark, stream: Any, anchor: Any, keep: Any
    ) -> None:
        self.identity, self._mark = identity, mark
        self.stream, self.anchor, self._keep = stream, anchor, keep

    def __call__(self) -> None:
        self._mark.close()
        if self.anchor is not None and _is_in_use(self.identity):
            _dormant[self.identity] = self
        else:
            self.release()

    def release(self) -> None:
        """No tensor and no sequence is left."""
        if self.stream is not None:
            _idle.setdefault(self.stream.device, []).append(self.stream)
        if self.anchor is not None:
            self.anchor.reset()
        self.stream = self.anchor = self._keep = None


_dormant: dict[tuple[int, int], _Remains] = {}


def _release_dormant() -> None:
    """Give back the pools whose last tensor has died since."""
    for identity, remains in list(_dormant.items()):
        if not _is_in_use(identity) and _dormant.pop(identity, None) is remains:
            remains.release()


def _is_in_use(identity: tuple[int, int]) -> bool:
    return any(segment["active_size"] for segment in snapshot(identity))


_pools: weakref.WeakValueDictionary[tuple[int, int, int], TorchPool] = weakref.WeakValueDictionary()
_pools_lock = threading.Lock()


def pool_for(driver: Driver, device: int, given: Any) -> TorchPool:
    """The pool of a sequence: a fresh one for None, or the one that the given handle names."""
    if isinstance(given, PoolHandle):
        if given.pool.device != device:
            raise errors.pool_of_other_device(given.pool.device, device)
        return given.pool
    keep = None
    if given is None:
        identity = torch.cuda.graph_pool_handle()
    elif isinstance(given, torch.cuda.MemPool):
        identity, keep = given.id, given
    elif isinstance(given, tuple) and len(given) == 2:
        identity = given
    else:
        raise errors.bad_type(
            "pool", given, "a sequence's pool(), a graph_pool_handle() or a torch.cuda.MemPool"
        )
    identity = (int(identity[0]), int(identity[1]))
    with _pools_lock:
        pool = _pools.get((device, *identity))
        if pool is None:
            pool = _pools[(device, *identity)] = TorchPool(driver, device, identity, keep)
            release.drain()
            dormant = _dormant.pop(identity, None)
            if dormant is not None:
                pool._streams, pool._anchor = dormant.stream, dormant.anchor
            elif given is not None and snapshot(identity):
                # Its last graph has gone, its memory has not; torch refuses such an id as it is.
                torch.cuda.empty_cache()
        return pool


# ---------------------------------------------------------------- capture streams


class _CaptureStream:
    """A non-blocking stream of our own; torch's are 32 that everybody shares."""

    def __init__(self, driver: Driver, device: int) -> None:
        self.device = device
        self.handle = StreamHandle.create(driver)
        self.external = torch.cuda.ExternalStream(int(self.handle), device=device)
        release.leak(self)  # blocks of the allocator name it for as long as the process lives


_idle: dict[int, list[_CaptureStream]] = {}


def _take_stream(driver: Driver, device: int) -> _CaptureStream:
    """A stream of a pool that has gone, with its workspace, or a new one."""
    release.drain()
    _release_dormant()
    try:
        return _idle[device].pop()
    except (KeyError, IndexError):
        with torch.cuda.device(device):
            return _CaptureStream(driver, device)


# ---------------------------------------------------------------- cuBLAS


_workspace_pools: dict[int, tuple[int, int]] = {}  # capture stream -> its workspace pool
_workspace_ranges: dict[int, list[tuple[int, int]]] = {}


def own_workspace(device: int, stream: Any) -> None:
    """Make cuBLAS ready for captures on a stream, with a workspace in memory that is kept for good.

    A product of two by two runs on the stream, eagerly and for each block anew: the first product
    of a process cannot happen in a capture, handles belong to threads, and somebody may have
    cleared all workspaces since the last block. With gradients on, autograd's thread, whose handles
    are its own, runs one too. What they allocate on this stream goes to the workspace pool.
    """
    handle = int(stream.cuda_stream)
    pool, before = _workspace_pools.get(handle), -1
    if pool is None:
        pool, before = torch.cuda.graph_pool_handle(), 0
        _workspace_pools[handle] = pool
    with torch.cuda.stream(stream), torch.inference_mode(False):
        torch._C._cuda_beginAllocateCurrentStreamToPool(device, pool)
        try:
            _products(device, torch.is_grad_enabled())
        finally:
            torch._C._cuda_endAllocateToPool(device, pool)
    if before == 0:
        segments = snapshot(pool)
        _workspace_ranges[handle] = [
            (segment["address"], segment["address"] + segment["total_size"]) for segment in segments
        ]
        if not any(segment["active_size"] for segment in segments):
            warnings.warn(errors.WORKSPACE_ELSEWHERE, errors.WorkspaceWarning, stacklevel=6)


def in_workspace(stream: int, address: int) -> bool:
    """Whether an address lies in the workspaces of a capture stream."""
    return any(start <= address < end for start, end in _workspace_ranges.get(stream, ()))


def _products(device: int, grad: bool) -> None:
    """A product through cuBLAS and one through cuBLASLt, and their backward where wanted."""
    with torch.set_grad_enabled(grad), torch.autocast("cuda", enabled=False):
        left = torch.ones(2, 2, device=f"cuda:{device}", requires_grad=grad)
        result = torch.addmm(left[0].detach(), left @ left, left)
        if grad:
            torch.autograd.grad(result.sum(), left)


def snapshot(pool: tuple[int, int]) -> list[dict[str, Any]]:
    """The segments of a pool.

    In torch 2.11 the call gives up a reference of each number in the pool's id that it never took,
    and ids above 256 are ordinary objects, freed too early then. So it is given one each time.
    """
    for number in pool:
        release.leak(number)
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(pool)
    return segments
