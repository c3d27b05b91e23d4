"""Why a segment is refused, and what to say of an error that comes out of one.

The hard problem: the driver captures all of it without a word. A host callback of Python is freed
after its first call; memory of a stream-ordered allocation is there only while its own graph runs;
a copy from ordinary host memory reads that address again at each replay, whatever lies there by
then. All of them show in the graph, just before the segment ends.
"""

from __future__ import annotations

import gc
from typing import Any

from .._driver import bindings, enums, kernel_params
from .._driver.bindings import Driver
from .._driver.survey import Survey, pageable_copy
from ..errors import CUDAError
from ..frameworks.streams import DEFAULT_STREAMS
from ..graph.errors import unjoined
from ..sequence.source_lines import raised_by_a_library
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


def reason(
    index: int, where: str, mode: str, cause: CUDAError, names: list[str], streams: list[int]
) -> Exception:
    """What the driver's answer to the end of a capture means; `names` are of what dangled.

    A leaf is no error by itself: NCCL records an event by a node that it adds by hand. Work is one, even
    where the driver does not mind: it takes what NCCL began with `async_op=True` for joined, and a
    `wait()` in a break then fails with no more than "invalid argument".
    """
    if cause.code == enums.CAPTURE_UNJOINED:
        return unjoined(index, where, names, streams)
    return errors.capture_lost(index, where, mode, cause)


# ---------------------------------------------------------------- what to say of the user's own error


def advice(
    error: BaseException, index: int, mode: str, *, company: bool, is_lost: bool
) -> list[str]:
    """Notes for an exception of a block's body that has to do with the capture; none for any other.

    `company`: other captures were open meanwhile. `is_lost`: the capture is invalidated.
    """
    texts = []
    if company and _speaks_of_draws(error):
        texts = [errors.advice_on_draws()]
    elif is_lost or speaks_of_capture(error):
        texts = errors.advice(mode, error)
    if texts or raised_by_a_library(error):
        texts.insert(0, errors.place(index))
    return texts


def holds_host_node(driver: Driver, stream: Any) -> bool:
    """Whether the open capture of a stream holds a host callback."""
    graph = driver.capture_info(stream).graph
    nodes = [] if graph is None else driver.graph_nodes(graph)
    return any(kernel_params.node_type(driver, node) == enums.HOST for node in nodes)


def speaks_of_capture(error: BaseException) -> bool:
    """Whether an error looks as if it were about a capture."""
    return isinstance(error, RuntimeError) and "captur" in str(error).lower()


def _speaks_of_draws(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and (
        "generator" in str(error) or "Offset increment" in str(error)
    )


# ---------------------------------------------------------------- streams

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
