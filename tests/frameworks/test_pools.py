"""When the memory of private pools is given back to the device, with torch's allocator in a model.

The hard problem: on the CPU torch has no such allocator. The model has its rules as far as pools go
(c10/cuda/CUDACachingAllocator.cpp, up to torch 2.12): a count of uses for each pool, routes, and an
`empty_cache` that empties pools that have gone always, and the rest only while no route is open.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import errors  # noqa: E402
from breakable_cuda_graphs._driver import (  # noqa: E402
    bindings,
    release,
    stream_capture,
)
from breakable_cuda_graphs.frameworks.pytorch import pools  # noqa: E402
from helping import Boom, a_stream  # noqa: E402

MIB = 1 << 20


class Pool:
    """One private pool: who uses it, and its segments' sizes with what is in use of each."""

    def __init__(self) -> None:
        self.uses = 0
        self.segments: list[list[int]] = []


class Allocator:
    """Torch's, for two devices; `cache` is what an ordinary cache holds on each."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.pools: dict[Any, Pool] = {}
        self.routes: list[tuple[int, Any]] = []
        self.cache = [7 * MIB, 9 * MIB]
        self.current = 0  # the handle of the current stream
        self.device, self.devices = 1, list[int]()  # the current one, and those of `empty_cache`
        self.pinned_emptied = 0
        self.waiting: list[list[int]] = []  # segments whose blocks other streams have used
        self.asks_for_captures = False  # as torch 2.13 does, instead of for routes

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    def handle(self) -> tuple[int, int]:
        return 0, next(self.numbers)

    def use(self, pool: Any) -> None:
        self.pools.setdefault(pool, Pool()).uses += 1

    def unuse(self, pool: Any) -> None:
        self.pools[pool].uses -= 1
        assert self.pools[pool].uses >= 0

    def begin(self, device: int, pool: Any) -> None:
        self.use(pool)
        self.routes.append((device, pool))

    def end(self, device: int, pool: Any) -> None:
        if (device, pool) not in self.routes:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.routes.remove((device, pool))

    def allocate(self, nbytes: int) -> int:
        """What other streams have used is asked for by an allocation, while no route is open."""
        if not self.routes:
            for segment in self.waiting:
                segment[1] = 0
            self.waiting.clear()
        return 0x7000

    def empty_cache(self) -> None:
        self.devices.append(self.device)
        routed = {device for device, _ in self.routes}
        for device in range(2):
            if self.asks_for_captures or device not in routed:
                self.cache[device] = 0
        for pool in self.pools.values():
            if not pool.uses:
                pool.segments = [each for each in pool.segments if each[1]]

    def snapshot(self, identity: Any) -> list[dict[str, Any]]:
        pool = self.pools.get(identity, Pool())
        return [
            {"address": 0, "device": 0, "total_size": size, "active_size": active}
            for size, active in pool.segments
        ]


class Shell:
    """A captured graph of a pool."""

    def __init__(self, allocator: Allocator, pool: Any) -> None:
        self._allocator, self._pool = allocator, pool
        allocator.use(pool)

    def reset(self) -> None:
        self._allocator.unuse(self._pool)


@pytest.fixture
def allocator(device: Any, monkeypatch: Any) -> Allocator:
    made = Allocator()
    stubs = {
        "_cuda_beginAllocateCurrentThreadToPool": made.begin,
        "_cuda_endAllocateToPool": made.end,
        "_cuda_releasePool": lambda device, pool: made.unuse(pool),
        "_cuda_getCurrentRawStream": lambda device: made.current,
        "_host_emptyCache": lambda: setattr(made, "pinned_emptied", made.pinned_emptied + 1),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch._C, name, stub, raising=False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", made.handle)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.empty_cache)
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", made.allocate)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", lambda address: None)
    monkeypatch.setattr(torch.cuda, "device", made.on)
    monkeypatch.setattr(pools, "snapshot", made.snapshot)
    monkeypatch.setattr(pools, "_CAN_SPARE_CACHE", True)
    monkeypatch.setattr(pools, "_ended", {})
    monkeypatch.setattr(pools, "_reset_anchors", 0)
    return made


def captured(allocator: Allocator, segments: list[list[int]], *, is_anchored: bool = True) -> Any:
    """A pool into which a sequence has been captured."""
    pool = pools.pool_for(bindings.current(), 0, None)
    shell = Shell(allocator, pool.identity)
    if is_anchored:
        pool.take_shell(shell)
    else:
        shell.reset()
    allocator.pools[pool.identity].segments = segments
    return pool


def left(allocator: Allocator) -> int:
    return sum(size for pool in allocator.pools.values() for size, _ in pool.segments)


def test_memory_goes_with_the_last_sequence_and_nobody_elses_does(allocator: Allocator) -> None:
    pool = captured(allocator, [[2 * MIB, 0], [20 * MIB, 0]])
    other = captured(allocator, [[4 * MIB, 0]])
    del pool
    release.drain()
    assert left(allocator) == 4 * MIB
    assert allocator.cache == [7 * MIB, 9 * MIB]
    assert allocator.routes == []
    del other
    release.drain()
    assert left(allocator) == 0
    assert pools._ended == {}
    assert allocator.devices == [0, 0]


def test_it_goes_while_memory_is_routed_to_a_pool_of_the_users(allocator: Allocator) -> None:
    """The end of a `MemPool` would end the process here (seen in many reports)."""
    theirs = allocator.handle()
    allocator.begin(0, theirs)  # `use_mem_pool`, or a capture that failed, up to torch 2.11
    pool = captured(allocator, [[2 * MIB, 0]])
    del pool
    release.drain()
    assert left(allocator) == 0
    assert allocator.cache == [7 * MIB, 9 * MIB]
    assert allocator.routes == [(0, theirs)]


def test_a_shell_that_is_given_up_when_its_pool_has_gone_anchors_nothing(
    allocator: Allocator,
) -> None:
    pool = captured(allocator, [[2 * MIB, 0]])
    late = Shell(allocator, pool.identity)
    pool.discard()
    pool.take_shell(late)
    release.drain()
    assert left(allocator) == 0


def test_what_living_tensors_keep_goes_when_they_have_died(allocator: Allocator) -> None:
    pool = captured(allocator, [[2 * MIB, MIB], [20 * MIB, 0]])
    segment = allocator.pools[pool.identity].segments[0]
    del pool
    release.drain()
    assert left(allocator) == 2 * MIB
    pools.release_ended()
    assert left(allocator) == 2 * MIB
    segment[1] = 0
    pools.release_ended()
    assert left(allocator) == 0
    assert pools._ended == {}
    assert allocator.cache == [7 * MIB, 9 * MIB]


def test_a_pool_without_an_anchor_goes_too(allocator: Allocator) -> None:
    """An interrupt has lost its shell."""
    pool = captured(allocator, [[20 * MIB, 0]], is_anchored=False)
    del pool
    release.drain()
    assert left(allocator) == 0
    assert pools._ended == {}


def test_what_other_streams_have_used_goes_too(allocator: Allocator) -> None:
    """`record_stream`: such a block counts as in use until an allocation asks for its events."""
    pool = captured(allocator, [[20 * MIB, MIB]])
    allocator.waiting.append(allocator.pools[pool.identity].segments[0])
    del pool
    release.drain()
    assert left(allocator) == 0


def test_a_torch_graph_of_the_users_keeps_the_pool(allocator: Allocator) -> None:
    pool = captured(allocator, [[2 * MIB, 0]])
    theirs = Shell(allocator, pool.identity)
    del pool
    release.drain()
    pools.release_ended()
    assert left(allocator) == 2 * MIB
    theirs.reset()
    pools.release_ended()
    assert left(allocator) == 0


def test_inside_a_capture_of_somebody_elses_it_waits_for_the_next_block(
    allocator: Allocator,
) -> None:
    driver = bindings.current()
    with a_stream() as stream:
        allocator.current = int(stream)
        pool = captured(allocator, [[2 * MIB, 0]])
        stream_capture.begin(driver, stream, "global")
        del pool
        release.drain()
        assert left(allocator) == 2 * MIB
        stream_capture.discard(driver, stream)
        pools.release_ended()
        assert left(allocator) == 0


@pytest.mark.parametrize("fails", [1, 2])
def test_no_route_stays_open_whatever_fails(
    allocator: Allocator, monkeypatch: Any, fails: int
) -> None:
    """An interrupt may come right behind torch's call."""
    calls = itertools.count(1)

    def begin(device: int, pool: Any) -> None:
        allocator.begin(device, pool)
        if next(calls) == fails:
            raise Boom

    monkeypatch.setattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", begin)
    with pytest.raises(Boom):
        pools._empty_ended()
    assert allocator.routes == []
    assert all(pool.uses == 0 for pool in allocator.pools.values())


def test_where_the_cache_cannot_be_spared_the_next_block_empties_it_once(
    allocator: Allocator, monkeypatch: Any
) -> None:
    """From torch 2.13 on. A pool in which a graph of the user's lives on is not asked again each time."""
    monkeypatch.setattr(pools, "_CAN_SPARE_CACHE", False)
    allocator.asks_for_captures = True
    pool, other = captured(allocator, [[2 * MIB, 0]]), captured(allocator, [[3 * MIB, 0]])
    theirs = Shell(allocator, other.identity)
    del pool, other
    release.drain()
    assert left(allocator) == 5 * MIB
    assert allocator.cache == [7 * MIB, 9 * MIB]
    pools.release_ended()
    assert left(allocator) == 3 * MIB
    assert allocator.cache == [0, 0]
    allocator.cache = [MIB, MIB]
    pools.release_ended()
    assert allocator.cache == [MIB, MIB]
    assert allocator.routes == []
    theirs.reset()


def test_the_pinned_halves_go_now_and_then(allocator: Allocator) -> None:
    for _ in range(pools._MOST_ANCHORS):
        assert allocator.pinned_emptied == 0
        captured(allocator, [])
        release.drain()
        pools.release_ended()
    assert allocator.pinned_emptied == 1


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_an_allocator_without_pools_is_refused(
    allocator: Allocator, monkeypatch: Any, backend: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    with pytest.raises(errors.CaptureError, match=f"{backend} has no private pools"):
        pools.pool_for(bindings.current(), 0, None)
