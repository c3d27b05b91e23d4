"""What a captured segment must not hold: work that no replay can do right.

The hard problem: the driver captures all of it without a word. A host callback of Python is freed
after its first call; memory of a stream-ordered allocation is there only while its own graph runs;
a copy from ordinary host memory reads that address again at each replay, whatever lies there by
then. All of them show in the graph, just before the segment ends.
"""

from __future__ import annotations

from . import errors
from ._driver import reading
from ._driver.bindings import Driver


def find(
    driver: Driver, survey: reading.Survey, index: int, where: str, *, is_last: bool,
    allows_host_nodes: bool, host_is_device: bool,
) -> Exception | None:  # fmt: skip
    """What is wrong with a segment, which is the last of its block or not; None if nothing is.

    `host_is_device`: host memory stands for device memory (torch's CPU tensors on the simulator).
    """
    if reading.HOST in survey.kinds and not allows_host_nodes:
        return errors.host_nodes(index)
    if survey.allocated and not is_last:
        for address, nbytes in survey.allocated.items():
            if address not in survey.freed:
                return errors.allocation_crosses(index, where, nbytes)
    found = None if host_is_device else pageable_copy(driver, survey)
    return None if found is None else errors.pageable_copy(index, *found)


def pageable_copy(driver: Driver, survey: reading.Survey) -> tuple[int, int, bool] | None:
    """(address, bytes, whether it is read) of a captured copy from or to ordinary host memory."""
    for source, target, nbytes in survey.copies:
        for address in (source, target):
            if _is_pageable(driver, survey, address):
                return address, nbytes, address == source
    return None


def _is_pageable(driver: Driver, survey: reading.Survey, address: int) -> bool:
    """Whether an address lies in host memory of which the driver does not know."""
    if not address or reading.is_memory(driver, address):
        return False
    return not any(  # the driver need not know memory that a node is to allocate
        start <= address < start + nbytes for start, nbytes in survey.allocated.items()
    )
