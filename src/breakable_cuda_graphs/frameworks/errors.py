"""What is said where a framework cannot do what a capture or a replay needs of it, and its warnings.

The hard problem: a warning has to point at the user's line, and how many calls of this package, and of
contexts that it leaves, lie between differs from framework to framework. So they are passed over by where
their code lies, not by their number.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from types import FrameType

from ..errors import CaptureError, ReplayError

# ---------------------------------------------------------------- streams


def not_a_stream(given: object) -> TypeError:
    return TypeError(
        f"{type(given).__name__} is not a stream: give a torch, CuPy, Numba or cuda.core stream, an "
        "object with __cuda_stream__, or the handle as an int"
    )


def capture_on_default_stream(which: str) -> CaptureError:
    return CaptureError(
        f"the {which} stream cannot be captured: give a stream of your own, or none, and one is made"
    )


# ---------------------------------------------------------------- pools


def pool_in_capture() -> CaptureError:
    return CaptureError(
        "another capture is open in this memory pool, in another thread: captures that share a pool "
        "come one after the other"
    )


def allocator_without_pools(backend: str) -> CaptureError:
    return CaptureError(
        f"torch's allocator {backend} has no private pools: what a segment makes would be gone, or "
        "somebody else's, at a replay. Use torch's native one: no `backend` in PYTORCH_ALLOC_CONF or "
        "PYTORCH_CUDA_ALLOC_CONF, no pluggable allocator."
    )


def pool_of_other_device(pool: int, device: int) -> ValueError:
    return ValueError(f"the pool belongs to cuda:{pool}, and the capture is on cuda:{device}")


def pool_of_other_context() -> ValueError:
    return ValueError("the pool belongs to another CUDA context (another device) than the capture")


def pool_of_no_use(given: object) -> TypeError:
    return TypeError(
        f"pool must be another sequence's pool(), not {type(given).__name__}: torch's pools are used where "
        "its CUDA is initialised and the stream is in its context, which is not so here"
    )


# ---------------------------------------------------------------- random numbers


def generators_of_no_use(given: object) -> TypeError:
    return TypeError(
        f"generators are torch's, whose CUDA is not at work here, and a {type(given).__name__} was given: "
        "give none (CuPy's and Numba's random states need not be named)"
    )


def generator_of_other_device(given: object, device: int) -> ValueError:
    return ValueError(
        f"generators must be torch.Generator objects of the captured device cuda:{device}, not {given}"
    )


def two_captures_draw() -> CaptureError:
    return CaptureError(
        "this segment draws random numbers while another capture is open on the device, and on "
        "torch 2.11 and older a generator can serve one capture at a time. (A kernel whose arguments "
        "only look like a generator's state, as a norm's may, counts as one that draws: beside another "
        "thread's capture that cannot be told.) Capture one after the other, or draw in a break."
    )


def generator_not_found(version: str) -> CaptureError:
    return CaptureError(
        "this segment may draw random numbers, and a kernel of torch "
        f"{version} does not show where the generator has its seed and its offset on the device. Draw in "
        "a break, and report this, please."
    )


def draw_during_capture() -> ReplayError:
    return ReplayError(
        "a segment that draws random numbers cannot be replayed while another thread captures on the "
        "device: on torch 2.11 and older both would write into the generator's tensors. Replay when the "
        "capture has ended."
    )


# ---------------------------------------------------------------- arrays


def tensor_without_memory() -> CaptureError:
    return CaptureError(
        "a tensor that a break was given or has returned has no memory that a replay could find again: "
        "it stands for others inside of torch.func.vmap, grad or another transform. Call the break "
        "outside of the transform, or transform inside of the break."
    )


def result_not_dense(dtype: str, shape: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"a static result of Numba ({dtype} {list(shape)}) is not contiguous, or has other strides than "
        "at capture, and Numba copies no such array: return a contiguous one"
    )


# ---------------------------------------------------------------- other libraries


def library_came_late(name: str) -> CaptureError:
    return CaptureError(
        f"{name} was loaded inside a segment: what it allocated there could not be made private to the "
        f"sequence. Import {name} before the block, or in a break."
    )


def numba_allocates() -> CaptureError:
    return CaptureError(
        "Numba allocates memory here, inside a segment, and it has no pool that a capture could use "
        "(host arrays as arguments of kernels are copied to new memory too). Make device arrays before "
        "the block, or in a break (@no_graph)."
    )


# ---------------------------------------------------------------- warnings


def escaped_work(function: str) -> str:
    return (
        f"{function} ran on a stream that the capture does not include: it ran once, now, and replays "
        "will not do it. Work on the capture stream, or fork from it (side.wait_stream(current)) and "
        "join again; or do it in a break (@no_graph)."
    )


def escaped_launch(what: str) -> str:
    return (
        f"{what} was launched on a stream that the capture does not include: it ran once, now, and "
        "replays will not do it. Work on the block's stream, or do it in a break (@no_graph)."
    )


NOTHING_CAPTURED = (
    "nothing was captured in this block: if it launched work, that went to other streams, ran once, and "
    "replays will not do it. Pass the block's own stream (`.stream` of the sequence, or of the part of a "
    "graph) to each launch."
)

WORKSPACE_ELSEWHERE = (
    "the stream of this capture was used for matrix products before, so its cuBLAS workspace lies in "
    "torch's ordinary memory: if anything clears the workspaces of the process (torch.compile may), "
    "replays would write into memory of others. Warm up on sequence.stream, or capture first."
)


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def warn(text: str, category: type[Warning]) -> None:
    """Warn of the first line outside of this package that led here."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(
        (_PACKAGE, contextlib.__file__)
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
