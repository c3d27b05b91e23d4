"""Run the benchmarks without a GPU: this library on the simulated device, torch.cuda make-believe.

    python tests/dry_run.py --only replay,capture --out FOLDER

The hard problem: a benchmark that nobody can run here breaks on its first contact with a device. So all
that the benchmarks ask of `torch.cuda` is made of what a CPU has: a graph notes the operators of a
capture and runs them again, a stream is a number, an event is a reading of the clock. Figures mean
nothing here; that every rival is built, checked and measured is the point.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
os.environ["BREAKABLE_CUDA_GRAPHS_SIMULATOR"] = "1"
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from cuda.bindings import driver  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

META = """
import importlib
theirs = importlib.import_module("breakable_" + "cuda_graphs")
globals().update({name: getattr(theirs, name) for name in theirs.__all__})
"""


class Notes(TorchDispatchMode):
    """Runs each operator and writes it down."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.log.append((function, args, kwargs or {}, result))
        return result


class CUDAGraph:
    """The operators of one capture."""

    executables: dict[int, CUDAGraph] = {}  # noqa: RUF012

    def __init__(self, keep_graph: bool = False) -> None:
        self._log: list[Any] = []
        self._mode: Notes | None = None
        self._pool: Any = None
        CUDAGraph.executables[id(self)] = self

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._pool = pool or (0, id(self))
        self._mode = Notes(self._log)
        self._mode.__enter__()

    def capture_end(self) -> None:
        assert self._mode is not None
        self._mode.__exit__(None, None, None)

    def instantiate(self) -> None:
        """Nothing is left to make."""

    def raw_cuda_graph_exec(self) -> int:
        return id(self)

    def pool(self) -> Any:
        return self._pool

    def reset(self) -> None:
        self._log.clear()

    def replay(self) -> None:
        with torch.no_grad():
            for function, args, kwargs, result in self._log:
                again = tree_leaves(function(*args, **kwargs))
                for old, new in zip(tree_leaves(result), again, strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Stream:
    """A stream that does everything at once."""

    cuda_stream = 7

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...


class Event:
    """A reading of the clock."""

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


class Generator:
    """The device's generator: the CPU's."""

    def get_offset(self) -> int:
        return 0


@contextlib.contextmanager
def graph(made: CUDAGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
    made.capture_begin(pool)
    yield
    made.capture_end()


def make_graphed_callables(function: Callable[..., Any], arguments: Any) -> Callable[..., Any]:
    return function


def on_the_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same with "cuda" read as "cpu"."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*("cpu" if arg == "cuda" else arg for arg in args), **kwargs)

    return called


def pretend_torch() -> None:
    pretended = {
        "CUDAGraph": CUDAGraph,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "graph": graph,
        "make_graphed_callables": make_graphed_callables,
        "current_stream": lambda *_: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda *_: None,
        "graph_pool_handle": lambda: (0, time.perf_counter_ns()),
        "get_allocator_backend": lambda: "native",
        "is_available": lambda: True,
        "init": lambda: None,
        "_sleep": lambda cycles: None,
        "current_device": lambda: 0,
        "default_generators": [Generator()],
        "manual_seed": torch.manual_seed,
        "get_rng_state": torch.get_rng_state,
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (5 << 30, 9 << 30),
        "memory_reserved": lambda: 1 << 30,
        "memory_allocated": lambda: 1 << 20,
        "memory_snapshot": lambda *_: [],
        "get_device_properties": lambda device: types.SimpleNamespace(name="none", total_memory=1),
    }
    for name, value in pretended.items():
        setattr(torch.cuda, name, value)
    for name in ("zeros", "ones", "rand", "randn", "empty", "randint", "arange", "full", "tensor"):
        setattr(torch, name, on_the_cpu(getattr(torch, name)))
    torch.nn.Linear.__init__ = on_the_cpu(torch.nn.Linear.__init__)  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign,assignment]
    torch.nn.Module.to = on_the_cpu(torch.nn.Module.to)  # type: ignore[method-assign]


def pretend_driver() -> None:
    """What the benchmarks themselves call: the floor's launches, captures without torch."""
    graphs: list[CUDAGraph] = []

    def launch(executable: Any, stream: Any) -> tuple[int]:
        CUDAGraph.executables[int(executable)].replay()
        return (0,)

    def begin(stream: Any, mode: Any) -> tuple[int]:
        graphs.append(CUDAGraph())
        graphs[-1].capture_begin()
        return (0,)

    def end(stream: Any) -> tuple[int, CUDAGraph]:
        graphs[-1].capture_end()
        return 0, graphs[-1]

    pretended = {
        "cuGraphLaunch": launch,
        "cuStreamBeginCapture": begin,
        "cuStreamEndCapture": end,
        "cuGraphInstantiate": lambda made, flags: (0, id(made)),
        "cuGraphExecDestroy": lambda executable: (0,),
        "cuGraphDestroy": lambda made: (0,),
        "cuDriverGetVersion": lambda: (0, 13000),
    }
    for name, value in pretended.items():
        setattr(driver, name, value)


class Floor:
    """The loop in C."""

    def loop(self, executables: Any, stream: int) -> Callable[[], None]:
        def replay() -> None:
            for executable in executables:
                CUDAGraph.executables[executable].replay()

        return replay


def shrink() -> None:
    """Sizes for a machine on which each operator of a capture takes a millisecond, and few rounds."""
    from benchmarks import (
        capture,
        decoder,
        diffusion,
        growth,
        memory,
        peers,
        random_numbers,
        rebind,
        replay,
        rivals,
        soak,
        splits,
        training,
        where,
    )
    from benchmarks.record import Settings

    replay.QUICK_BREAKS = peers.QUICK_BREAKS = splits.QUICK_SPLITS = capture.QUICK_BREAKS = (1, 4)
    capture.QUICK_FIRST_BREAKS = (1, 4)
    growth.QUICK_INPUTS, growth.QUICK_NODES, growth.QUICK_ALIVE = (1, 20), (1, 8), (1, 4)
    random_numbers.QUICK_SEGMENTS = (1, 2)
    memory.WIDTH, memory.LAYERS, memory.BUCKETS = 8, 2, (12, 8)
    memory.BATCH = 12
    training.WIDTH, training.LAYERS = 16, 2
    decoder.QUICK_SIZE = decoder.Size(2, 32, 64, 2, 50)
    decoder.QUICK_SHAPES = (decoder.Shape("decode, batch 1", 1, 1, 4),)
    diffusion.QUICK_SIZE = diffusion.Size(3, 2, 32, 2, 8, 4)
    soak.SIZE = 64
    soak.run = lambda settings, report, progress: (
        soak.replays(11, report),
        soak.rounds(11, report),
    )
    memory.settle = lambda: None
    where.SHORT, where.LONG = 1, 4
    memory.pool_bytes = lambda: 1 << 20
    capture.LONGEST_TURN_US = 1e9
    rebind.driver_calls = lambda scene: rivals.noop
    Settings.pick = lambda self, full, quick: (  # type: ignore[method-assign]
        min(quick, 2) if isinstance(quick, int) else quick
    )
    rebind.QUICK_NODES, rebind.QUICK_SIZES = (1, 4), (4 * rebind.KB, 16 * rebind.KB)


def main(arguments: list[str]) -> int:
    pretend_torch()
    from benchmarks import decoder, rivals

    rivals.FloorLauncher = Floor  # type: ignore[assignment,misc]
    rivals.Breakable.stream_for = lambda self, sequence: (Stream(), {})  # type: ignore[method-assign]
    llama = decoder.llama
    decoder.llama = lambda size, device: llama(size, "cpu")
    shrink()
    import breakable_cuda_graphs
    from breakable_cuda_graphs._driver import bindings

    bindings.current()
    assert breakable_cuda_graphs is not None
    pretend_driver()  # after the library has taken the simulated one
    out = Path(arguments[arguments.index("--out") + 1])
    out.mkdir(parents=True, exist_ok=True)
    (out / "meta.py").write_text(META)
    (out / "breakable_cuda_graphs.py").unlink(missing_ok=True)
    from benchmarks.__main__ import main as command

    gc.collect()
    gc.freeze()  # the simulated device looks for tensors among the collector's objects
    return command([*arguments, "--quick", "--meta-wheel", str(out / "meta.py")])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
