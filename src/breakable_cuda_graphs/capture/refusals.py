"""What a captured segment must not hold: work that no replay can do right.

The hard problem: the driver captures all of it without a word. A host callback of Python is freed
after its first call; memory of a stream-ordered allocation is there only while its own graph runs;
a copy from ordinary host memory reads that address again at each replay, whatever lies there by
then. All of them show in the graph, just before the segment ends.
"""

from __future__ import annotations

import gc
from typing import Any

from .._driver import bindings, enums
from .._driver.bindings import Driver
from .._driver.survey import Survey, pageable_copy
from ..frameworks.streams import DEFAULT_STREAMS
from . import errors


def find_trap(
    driver: Driver, survey: Survey, index: int, where: str, *, is_last: bool,
    allows_host_nodes: bool, host_is_device: bool,
) -> Exception | None:  # fmt: skip
    """What is wrong with a segment, which is the last of its block or not; None if nothing is.

    `host_is_device`: host memory stands for device memory (torch's CPU tensors on the simulator).
    """
    if enums.HOST in survey.kinds and not allows_host_nodes:
        return errors.host_nodes(index)
    if survey.allocated and not is_last:
        for address, nbytes in survey.allocated.items():
            if address not in survey.freed:
                return errors.allocation_crosses(index, where, nbytes)
    found = None if host_is_device else pageable_copy(driver, survey)
    return None if found is None else errors.pageable_copy(index, *found)


#: Read when a capture begins, not at import.
VARIABLE = "BREAKABLE_CUDA_GRAPHS_DEBUG"


def unjoined_streams(
    driver: bindings.Driver, capture: bindings.CaptureInfo, leaves: list[Any]
) -> list[int]:
    """The handles of the streams whose last work is one of the dangling nodes."""
    dangling = {int(node) for node in leaves}
    found = []
    for handle in sorted(_stream_handles()):
        info = driver.capture_info(bindings.types.CUstream(handle))
        if info.id == capture.id and dangling & {int(node) for node in info.dependencies}:
            found.append(handle)
    return found


def _stream_handles() -> set[int]:
    """The handles of all stream objects of torch and CuPy that are alive."""
    handles = set()
    for thing in gc.get_objects():
        kind = type(thing)
        if not kind.__name__.endswith("Stream"):
            continue
        module = kind.__module__
        if module.startswith("torch"):
            handles.add(int(getattr(thing, "cuda_stream", 0) or 0))
        elif module.startswith("cupy"):
            handles.add(int(getattr(thing, "ptr", 0) or 0))
    return handles - set(DEFAULT_STREAMS)
