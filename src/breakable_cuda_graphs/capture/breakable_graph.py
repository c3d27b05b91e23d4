"""`breakable_graph`: the context manager that people use; checks what it is given and makes a block.

The hard problem: it may be left by an exception, never be left, or be left when another has ended its block
already; each has to end in a block that is put back exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NoReturn

from .._driver import release, stream_capture, unfinished, user_objects
from ..errors import bad_choice, bad_type, not_callable, not_copyable
from ..graph.errors import block_not_open
from ..sequence.memory import Rules
from ..sequence.state import SequenceState
from .block import Block

_MODES = tuple(stream_capture.MODES)

_HOST_NODES = ("refuse", "allow")


class breakable_graph:
    """Capture the block as a sequence of CUDA graphs with eager Python between them.

        sequence = CUDAGraphSequence()
        with breakable_graph(sequence):
            y.copy_(x * 2)
            step(y)             # a function marked @no_graph: a break
            z.copy_(y + 1)
        sequence.replay()

    Work on the capture stream, and on streams forked from it and joined again, is captured and does
    not run. A call of a function marked `@no_graph` ends the segment, runs, and begins the next.

    cuda_graph: the sequence to append to.
    stream: where to capture: a torch, CuPy, Numba or cuda.core stream, an object with
        `__cuda_stream__`, or a handle. Default: `cuda_graph.stream`. It is current inside the block
        for torch, and for CuPy when that is loaded; pass it by hand to anything else, work on other
        streams (the default stream too) is not captured.
    capture_error_mode: "global", "thread_local" or "relaxed", as in `torch.cuda.graph`. Breaks that
        autograd's thread calls need "relaxed".
    barrier_fn: called without arguments after each segment has ended and before the break's body
        runs; at capture only.
    generators: random generators, beside the device's default one, that captured work draws from.
    keep_inputs: own all memory that the sequence reads or writes until `reset()`.
    check_input_liveness: watch it, and refuse to replay once some of it is gone.
    record_stacks: keep the user's Python line of each captured node.
    host_nodes: "refuse" a segment with host callbacks, or "allow" them (NCCL's proxies need it).

    Raises `CaptureError` where a capture cannot begin, go on or end, and `UnjoinedStreamError` for
    forked work that was not joined. An exception of the body's own always surfaces as it is.
    """

    def __init__(
        self,
        cuda_graph: SequenceState,
        stream: Any = None,
        capture_error_mode: str = "global",
        barrier_fn: Callable[[], object] | None = None,
        *,
        generators: Iterable[Any] = (),
        keep_inputs: bool = False,
        check_input_liveness: bool = True,
        record_stacks: bool = False,
        host_nodes: Literal["refuse", "allow"] = "refuse",
    ) -> None:
        if not isinstance(cuda_graph, SequenceState):
            raise bad_type("cuda_graph", cuda_graph, "a CUDAGraphSequence")
        if capture_error_mode not in _MODES:
            raise bad_choice("capture_error_mode", capture_error_mode, _MODES)
        if barrier_fn is not None and not callable(barrier_fn):
            raise not_callable("barrier_fn", barrier_fn)
        if host_nodes not in _HOST_NODES:
            raise bad_choice("host_nodes", host_nodes, _HOST_NODES)
        self._cuda_graph = cuda_graph
        self._stream = stream
        self._mode = capture_error_mode
        self._barrier_fn = barrier_fn
        if not isinstance(generators, Iterable):
            raise bad_type("generators", generators, "generators in a list or the like")
        self._generators = tuple(generators)
        self._rules = Rules(keep_inputs=keep_inputs, check_liveness=check_input_liveness)
        self._record_stacks = record_stacks
        self._host_nodes = host_nodes
        self._block: Block | None = None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copyable(type(self).__name__)

    def __enter__(self) -> None:
        release.guard_collections()
        release.put_thread_back()
        unfinished.sweep()
        release.drain()
        user_objects.sweep()
        block = Block(
            self._cuda_graph,
            self._stream,
            self._mode,
            self._barrier_fn,
            self._generators,
            self._rules,
            self._host_nodes,
        )
        block.open(self._record_stacks)
        self._block = block
        block.is_abandoned = False  # from here on it is left by `__exit__`

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        block = self._block
        if block is None:
            raise block_not_open()
        if block.is_home() and block not in unfinished.pending:  # the block around it has ended it
            self._block = None
            if error is None:
                raise block_not_open()
            return
        block.is_abandoned = True
        self._block = None
        block.close(error)

    def __del__(self) -> None:
        """A block that was entered by hand and never left: the next use of the library ends it."""
        block = getattr(self, "_block", None)
        if block is not None:
            block.is_abandoned = True
