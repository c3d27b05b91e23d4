"""What we are compared with; the hard problem is to give each rival exactly the same work.

Same tensors' shapes, same kernel, same stream, same number of launches, and the same executables
for all who launch torch's graphs. A rival that is not installed or fails to start is written down
as absent with the reason (`Report.absent`), never silently left out.

The floor is a C loop over `cuGraphLaunch`, compiled when it is needed. Meta's package has the
import name of ours: it is unpacked from the file that `--meta-wheel` names into a temporary
folder and imported as `META_NAME`. None of its code is in this repository.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from .harness import Call
from .record import Report, Settings

META_NAME = "meta_breakable_cuda_graphs"
OUR_NAME = "breakable_cuda_graphs"

LABELS = {
    "ours": "breakable_cuda_graphs",
    "ours-watching": "breakable_cuda_graphs, inputs watched",
    "ours-unwatched": "breakable_cuda_graphs, inputs not watched",
    "meta": "Meta 0.1.0",
    "floor": "C loop over cuGraphLaunch",
    "bare": "bare Python loop over cuGraphLaunch",
    "bare-call": "the same, a no-op Python call between",
    "torch": "torch.cuda.CUDAGraph.replay() a segment",
    "cupy": "cupy.cuda.Graph.launch() a segment",
    "core": "cuda.core Graph.launch() a segment",
    "eager": "eager",
    "whole": "one torch.cuda.graph",
}


def scratch(prefix: str) -> Path:
    """A temporary folder that goes with the process."""
    folder = tempfile.mkdtemp(prefix=prefix)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def noop() -> None:
    """The break that does nothing."""


# --- libraries with breaks ----------------------------------------------------------------------


@dataclass(frozen=True)
class Breakable:
    """A library with the interface `breakable_graph(sequence)`: ours, or Meta's."""

    key: str
    module: Any
    options: dict[str, Any] = field(default_factory=dict)

    def sequence(self, pool: Any = None) -> Any:
        return self.module.BreakableCUDAGraph(pool=pool)

    def block(self, sequence: Any, **options: Any) -> AbstractContextManager[Any]:
        block: AbstractContextManager[Any] = self.module.breakable_graph(
            sequence, **self.options, **options
        )
        return block

    def no_graph(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        decorator = self.module.no_graph(**options) if options else self.module.no_graph
        decorated: Callable[..., Any] = decorator(function)
        return decorated

    def split(self) -> None:
        self.module.force_no_graph()

    @property
    def is_ours(self) -> bool:
        return is_ours(self.key)

    def stream_for(self, sequence: Any) -> tuple[Any, dict[str, Any]]:
        """The torch stream that captures will run on (warm up there), and `block`'s options.

        Ours says so itself; Meta's is told, since it only has torch's shared capture stream."""
        import torch

        if not self.is_ours:
            stream = torch.cuda.Stream()
            return stream, {"stream": stream}
        stream = sequence.stream
        if not isinstance(stream, torch.cuda.Stream):
            stream = torch.cuda.ExternalStream(int(stream))
        return stream, {}


def ours(**options: Any) -> Breakable:
    import breakable_cuda_graphs

    return Breakable("ours", breakable_cuda_graphs, options)


def ours_both() -> list[Breakable]:
    """Ours without and with watching of inputs, as two rivals."""
    import breakable_cuda_graphs

    return [
        Breakable("ours-unwatched", breakable_cuda_graphs, {"check_input_liveness": False}),
        Breakable("ours-watching", breakable_cuda_graphs, {"check_input_liveness": True}),
    ]


def meta(settings: Settings, report: Report) -> list[Breakable]:
    """Meta's package as a list of one, or none with the reason written into the report."""
    if settings.meta is None:
        report.absent["meta"] = "no --meta-wheel given"
        return []
    try:
        return [Breakable("meta", load_meta(settings.meta))]
    except Exception as error:  # a foreign package: whatever it raises, the run goes on
        report.absent["meta"] = f"{type(error).__name__}: {error}"
        return []


_OWN_IMPORT = re.compile(rf"^(\s*(?:from|import)\s+){OUR_NAME}(?=[\s.,]|$)", flags=re.MULTILINE)


def load_meta(archive: Path) -> ModuleType:
    """Import the package in `archive` (wheel, sdist, folder or file) as `META_NAME`.

    Imports of itself by its full name are renamed in the unpacked copy: they would find ours."""
    if META_NAME in sys.modules:
        return sys.modules[META_NAME]
    folder = scratch("bench-meta-")
    _unpack(archive, folder)
    origin = _find_module(folder)
    sources = [origin] if origin.name != "__init__.py" else sorted(origin.parent.rglob("*.py"))
    for source in sources:
        text = source.read_text(encoding="utf-8")
        source.write_text(_OWN_IMPORT.sub(rf"\g<1>{META_NAME}", text), encoding="utf-8")
    is_package = origin.name == "__init__.py"
    spec = importlib.util.spec_from_file_location(
        META_NAME, origin, submodule_search_locations=[str(origin.parent)] if is_package else None
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{origin} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[META_NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[META_NAME]
        raise
    return module


def _unpack(archive: Path, folder: Path) -> None:
    if archive.is_dir():
        shutil.copytree(archive, folder, dirs_exist_ok=True)
    elif archive.suffix == ".py":
        shutil.copy(archive, folder / f"{OUR_NAME}.py")
    elif zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as bundle:
            bundle.extractall(folder)
    else:
        with tarfile.open(archive) as bundle:
            bundle.extractall(folder, filter="data")


def _find_module(folder: Path) -> Path:
    found = [*folder.rglob(f"{OUR_NAME}/__init__.py"), *folder.rglob(f"{OUR_NAME}.py")]
    if not found:
        raise ImportError(f"no module {OUR_NAME} in that archive")
    return min(found, key=lambda path: (len(path.parts), str(path)))


# --- the driver's floor -------------------------------------------------------------------------

FLOOR_SOURCE = r"""
#include <dlfcn.h>
#include <stddef.h>

typedef int (*launch_function)(void *executable, void *stream);
static launch_function launch;

int floor_open(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return 1;
    launch = (launch_function)dlsym(library, "cuGraphLaunch");
    return launch ? 0 : 2;
}

int floor_launch(void *const *executables, size_t count, void *stream) {
    for (size_t i = 0; i < count; ++i) {
        int status = launch(executables[i], stream);
        if (status) return status;
    }
    return 0;
}
"""


def compile_c(source: str, name: str) -> Path:
    """A shared library from C source, in a temporary folder."""
    folder = scratch("bench-floor-")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("no C compiler (cc or gcc)")
    (folder / f"{name}.c").write_text(source)
    library = folder / f"{name}.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), f"{name}.c", "-ldl"]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    return library


class FloorLauncher:
    """`cuGraphLaunch` in a C loop; what ctypes adds is paid once a replay, not once a graph."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(compile_c(FLOOR_SOURCE, "floor")))
        status = library.floor_open()
        if status:
            raise RuntimeError(f"libcuda.so.1 could not be opened (step {status})")
        self._launch = library.floor_launch
        self._launch.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

    def loop(self, executables: Sequence[int], stream: int) -> Call:
        array = (ctypes.c_void_p * len(executables))(*executables)
        launch, address, count = self._launch, ctypes.addressof(array), len(executables)

        def replay(keep: Any = array) -> None:
            status = launch(address, count, stream)
            if status:
                raise RuntimeError(f"cuGraphLaunch: {status}")

        return replay


def bare_loop(executables: Sequence[int], stream: int) -> Call:
    """The fastest loop that Python can make over the bindings' call, with its error check."""
    from cuda.bindings import driver

    launch, handles, on = _launch_arguments(driver, executables, stream)

    def replay() -> None:
        for handle in handles:
            if launch(handle, on)[0]:
                raise RuntimeError("cuGraphLaunch failed")

    return replay


def bare_loop_with_calls(executables: Sequence[int], stream: int) -> Call:
    """The same with a no-op Python call between each two launches."""
    from cuda.bindings import driver

    launch, handles, on = _launch_arguments(driver, executables, stream)
    *head, last = handles
    between = noop

    def replay() -> None:
        for handle in head:
            if launch(handle, on)[0]:
                raise RuntimeError("cuGraphLaunch failed")
            between()
        if launch(last, on)[0]:
            raise RuntimeError("cuGraphLaunch failed")

    return replay


def _launch_arguments(driver: Any, executables: Sequence[int], stream: int) -> Any:
    handles = [driver.CUgraphExec(executable) for executable in executables]
    return driver.cuGraphLaunch, handles, driver.CUstream(stream)


# --- one graph a segment ------------------------------------------------------------------------


def torch_graphs(count: int, work: Call) -> list[Any]:
    """`count` torch graphs of `work`, by `capture_begin` and `capture_end` alone.

    Not by `torch.cuda.graph`: its synchronisations would only make the set-up slow."""
    import torch

    pool = torch.cuda.graph_pool_handle()
    graphs = []
    with side_stream():
        for _ in range(count):
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            graph.capture_begin(pool=pool)
            work()
            graph.capture_end()
            graph.instantiate()
            graphs.append(graph)
    return graphs


@contextmanager
def side_stream() -> Iterator[Any]:
    """A torch stream of its own, joined with the current one at both ends."""
    import torch

    ambient, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(ambient)
    with torch.cuda.stream(stream):
        yield stream
    ambient.wait_stream(stream)


def warm_up(work: Call, stream: Any = None, times: int = 3) -> None:
    """Run `work` eagerly on the stream that it will be captured on."""
    import torch

    ambient = torch.cuda.current_stream()
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(ambient)
    with torch.cuda.stream(stream):
        for _ in range(times):
            work()
    ambient.wait_stream(stream)


def executables(graphs: Sequence[Any]) -> list[int]:
    return [int(graph.raw_cuda_graph_exec()) for graph in graphs]


def call_each(calls: Sequence[Call]) -> Call:
    """Call one after the other with the no-op break between: a region split by hand."""
    *head, last = calls
    between = noop

    def replay() -> None:
        for call in head:
            call()
            between()
        last()

    return replay


def cupy_launches(count: int, stream: int) -> tuple[list[Call], Any]:
    """`count` CuPy graphs that add one to an array; the array comes along to be checked."""
    import cupy

    on = cupy.cuda.ExternalStream(stream)
    array = cupy.zeros(32, dtype=cupy.float32)
    graphs = []
    with on:
        array += 1  # compiles the kernel, which a capture may not
        on.synchronize()
        for _ in range(count):
            on.begin_capture()
            array += 1
            graphs.append(on.end_capture())

    def launcher(graph: Any) -> Call:
        launch = graph.launch
        return lambda: launch(on)

    return [launcher(graph) for graph in graphs], array


def core_launches(count: int, work: Call) -> list[Call]:
    """`count` cuda.core graphs of `work`, a call on torch's current stream."""
    import torch
    from cuda.core import Device

    device = Device(torch.cuda.current_device())
    device.set_current()
    on = device.create_stream(torch.cuda.current_stream())
    built = [_core_graph(on, work) for _ in range(count)]

    def launcher(graph: Any) -> Call:
        launch = graph.launch
        return lambda: launch(on)

    return [launcher(graph) for graph in built]


def _core_graph(stream: Any, work: Call) -> Any:
    import torch

    builder = stream.create_graph_builder().begin_building()
    with torch.cuda.stream(torch.cuda.ExternalStream(int(builder.stream.handle))):
        work()
    return builder.end_building().complete()


def is_ours(rival: str) -> bool:
    return rival.startswith("ours")


NEEDED = ("floor", "bare", "bare-call", "books", "control", "whole", "graphs", "eager")


@contextmanager
def tolerated(report: Report, rival: str) -> Iterator[None]:
    """Others may fail to build or give wrong results: then they are absent, and it says why.

    Our own failures, and those of what figures are relative to, end the benchmark."""
    try:
        yield
    except Exception as error:  # whatever a rival raises, the others are measured
        if is_ours(rival) or rival in NEEDED:
            raise
        report.absent[rival] = f"{type(error).__name__}: {error}"
