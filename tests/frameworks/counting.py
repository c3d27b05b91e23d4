"""Counts what one more segment and break of a torch capture cost: calls, frames and bytecodes.

    python tests/frameworks/counting.py

The hard problem: without a device neither torch nor the driver can capture. Here both are stubs that
answer at once, so that what is counted is this library; the numbers are printed as JSON, each of them the
slope between two lengths. It runs in a process of its own: it replaces half of `torch.cuda`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver as types

SHORT, LONG = 10, 30

calls: Counter[str] = Counter()
GOOD = types.CUresult(0)


class State:
    """What the stubs remember: the current stream, whether it is capturing, the generator's offset."""

    stream = 0
    is_capturing = False
    offset = 8


# ---------------------------------------------------------------- torch


class Generator:
    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self._state = torch.zeros(2, dtype=torch.int64)

    def get_state(self) -> Any:
        calls["Generator.get_state"] += 1
        return self._state

    def set_state(self, state: Any) -> None:
        calls["Generator.set_state"] += 1
        self._state = state

    def graphsafe_get_state(self) -> Generator:
        return self

    def initial_seed(self) -> int:
        return 5

    def get_offset(self) -> int:
        return State.offset

    def set_offset(self, offset: int) -> None:
        State.offset = offset


class CUDAGraph:
    def __init__(self, keep_graph: bool = False) -> None:
        calls["CUDAGraph"] += 1

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        calls["CUDAGraph.capture_begin"] += 1
        State.is_capturing = True

    def capture_end(self) -> None:
        calls["CUDAGraph.capture_end"] += 1
        State.is_capturing = False

    def reset(self) -> None:
        calls["CUDAGraph.reset"] += 1


class Stream:
    def __init__(self, handle: int = 0, device: int = 0) -> None:
        self.cuda_stream, self.device_index = handle, device


@contextlib.contextmanager
def stream(wanted: Stream) -> Iterator[None]:
    before, State.stream = State.stream, wanted.cuda_stream
    try:
        yield
    finally:
        State.stream = before


def stub_torch() -> None:
    numbers = itertools.count(1)
    stubs = {
        "CUDAGraph": CUDAGraph,
        "Stream": Stream,
        "ExternalStream": Stream,
        "stream": stream,
        "device": lambda index: contextlib.nullcontext(),
        "set_stream": lambda wanted: None,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "mem_get_info": lambda device: (9, 10),
        "graph_pool_handle": lambda: (0, next(numbers)),
        "get_allocator_backend": lambda: "native",
        "memory_snapshot": lambda *_: [],
        "default_generators": [Generator()],
    }
    for name, value in stubs.items():
        setattr(torch.cuda, name, value)
    torch._C._cuda_getCurrentRawStream = lambda device: State.stream
    torch._C._cuda_isCurrentStreamCapturing = lambda: State.is_capturing


# ---------------------------------------------------------------- the driver


def answers() -> dict[str, Callable[..., Any]]:
    """One kernel a segment, with a pointer, a struct of two words, and a number."""
    node, graph = types.CUgraphNode(11), types.CUgraph(12)
    values = (ctypes.c_uint64 * 4)(7 << 40, 0, 1, 9)
    first = ctypes.addressof(values)
    table = (ctypes.c_void_p * 3)(first, first + 8, first + 24)
    kernel = types.CUDA_KERNEL_NODE_PARAMS()
    kernel.func, kernel.kernelParams = types.CUfunction(99), ctypes.addressof(table)
    layout = [(0, 8), (8, 16), (24, 8)]
    keep = (values, table)

    def begin(*_: Any) -> Any:
        State.is_capturing = True
        return (GOOD,)

    def end(*_: Any) -> Any:
        State.is_capturing = False
        return GOOD, graph

    def info(*_: Any) -> Any:
        status = types.CUstreamCaptureStatus(int(State.is_capturing))
        if not State.is_capturing:
            return GOOD, status, None, None, None, None, 0
        return GOOD, status, 5, graph, [node], [None], 1

    def parameter(function: Any, index: int) -> Any:
        if index < len(layout):
            return GOOD, *layout[index]
        return types.CUresult(1), 0, 0

    def missing(*_: Any) -> Any:
        return types.CUresult(1), None

    def value(*made: Any) -> Callable[..., Any]:
        return lambda *_: (GOOD, *made)

    return {
        "cuStreamBeginCapture": begin,
        "cuStreamEndCapture": end,
        "cuStreamGetCaptureInfo": info,
        "cuStreamIsCapturing": lambda *_: info()[:2],
        "cuFuncGetParamInfo": parameter,
        "cuPointerGetAttribute": missing,
        "cuMemGetAddressRange": missing,
        "cuGraphGetNodes": value([node], 1),
        "cuGraphGetEdges": value([], [], [], 0),
        "cuGraphNodeGetType": value(types.CUgraphNodeType(0)),
        "cuGraphKernelNodeGetParams": lambda *_: (GOOD, kernel, keep)[:2],
        "cuFuncGetName": value(b"kernel"),
        "cuGraphAddEmptyNode": value(node),
        "cuGraphInstantiate": value(types.CUgraphExec(13)),
        "cuStreamCreate": value(types.CUstream(4)),
        "cuStreamGetCtx": value(types.CUcontext(1)),
        "cuEventCreate": value(types.CUevent(3)),
        "cuCtxGetCurrent": value(types.CUcontext(1)),
        "cuDevicePrimaryCtxRetain": value(types.CUcontext(1)),
        "cuThreadExchangeStreamCaptureMode": value(types.CUstreamCaptureMode(0)),
        "cuDriverGetVersion": value(13000),
    }


class Module:
    """The bindings' module; what is not named in `answers` succeeds and gives nothing."""

    def __init__(self) -> None:
        self._answers = answers()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("cu") or name.endswith(("_v2", "_v3")):
            raise AttributeError(name)
        answer = self._answers.get(name, lambda *_: (GOOD,))

        def counted(*args: Any) -> Any:
            calls[name] += 1
            return answer(*args)

        setattr(self, name, counted)
        return counted


# ---------------------------------------------------------------- counting


def main() -> None:
    stub_torch()
    from breakable_cuda_graphs import CUDAGraphSequence, __file__, breakable_graph, no_graph
    from breakable_cuda_graphs._driver import bindings, release
    from breakable_cuda_graphs.frameworks.pytorch import draws, workspaces

    bindings.use(bindings.Driver(Module()))
    workspaces.make = lambda *_: None
    draws.SHARED_TENSORS = True  # as on torch 2.11, where more has to be done
    source = str(Path(__file__).parent)

    @no_graph
    def nothing() -> None:
        pass

    def capture(breaks: int, watch: bool) -> Any:
        sequence = CUDAGraphSequence()
        with breakable_graph(sequence, check_input_liveness=watch):
            for _ in range(breaks):
                nothing()
        return sequence

    def count(breaks: int, watch: bool) -> Counter[str]:
        found: Counter[str] = Counter()

        def trace(frame: Any, event: str, argument: Any) -> Any:
            if not frame.f_code.co_filename.startswith(source):
                return None
            if event == "call":
                found["frames"] += 1
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "opcode":
                found["bytecodes"] += 1
            return trace

        gc.collect()
        gc.disable()  # it makes calls of its own, wherever it comes
        release.drain()  # what went before is not counted
        calls.clear()
        sys.settrace(trace)
        try:
            sequence = capture(breaks, watch)
        finally:
            sys.settrace(None)
            gc.enable()
        found += calls
        sequence.reset()
        return found

    result = {}
    for watch in (False, True):
        capture(SHORT, watch).reset()
        few, many = count(SHORT, watch), count(LONG, watch)
        slopes = {name: (many[name] - few[name]) / (LONG - SHORT) for name in many}
        result["watching" if watch else "plain"] = {k: v for k, v in slopes.items() if v}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
