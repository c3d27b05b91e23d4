"""Looks into torch's allocator.

The hard problem: `torch.cuda.memory_snapshot(pool)` of torch 2.11 gives up a reference of each
number in the pool's id that it never took. Small numbers are immortal, but ids above 256 are
ordinary objects, freed while the id still holds them: the process crashes much later, anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..._driver import release


def snapshot(pool: tuple[int, int]) -> list[dict[str, Any]]:
    """The segments of one pool; costs about a quarter of a millisecond."""
    for number in pool:
        release.leak(number)  # what the call is going to take
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(pool)
    return segments


def ranges(segments: Iterable[dict[str, Any]]) -> list[tuple[int, int]]:
    """Where segments begin and end."""
    return [(each["address"], each["address"] + each["total_size"]) for each in segments]


def blocks_in_use(device: int) -> set[int]:
    """The first addresses of all blocks of a device that are in use; a microsecond or so a block."""
    return {
        block["address"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def given_back(device: int, addresses: Iterable[int]) -> list[int]:
    """Which addresses lie in memory that the allocator keeps and that nobody has.

    Of private pools nothing is said: the work of a graph may go on writing what no tensor holds.
    """
    free = [
        (block["address"], block["address"] + block["size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device and segment["segment_pool_id"] == (0, 0)
        for block in segment["blocks"]
        if block["state"] != "active_allocated"
    ]
    return [word for word in addresses if any(start <= word < end for start, end in free)]
