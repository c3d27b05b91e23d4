"""What works on this machine, and what to do about what does not.

The hard problem: every check here looks at something that may be missing, half installed or broken
in a way of its own. So each is a function that gives results, and one that fails is itself a
result; what can be tried is tried, not concluded from a version.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

from . import __version__, demo
from ._driver import bindings
from .errors import said
from .simulator import simulated_device

__all__ = ["CheckResult", "Verdict", "examine", "main"]

Version = tuple[int, ...]

#: What the library has run on; everything else that it admits was only read in the sources.
RUN_ON_A_DEVICE = "torch 2.11, CuPy 14.2, numba-cuda 0.30, driver 13.0, cuda-bindings 13.3.1"
ONLY_READ = "torch 2.10 and 2.12 to 2.14, cuda-bindings 12.9.7 to 12.9.10 and 13.5"

_OLDEST_DRIVER = 12040  # cuFuncGetParamInfo: reading the arguments of captured kernels
_NEWEST_TORCH_READ = (2, 14)
_SHARED_GENERATORS_BEFORE = (2, 12)
_PINNED_POOLS_SINCE = (2, 11)
_CAPABILITY = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_"


class Verdict(Enum):
    """How a check has ended. Only BAD makes the exit status 1."""

    OK = "ok"
    ABSENT = "--"
    BAD = "!!"


class CheckResult(NamedTuple):
    """One line of the report, and what to do if it is not well."""

    verdict: Verdict
    what: str
    detail: str = ""
    advice: str = ""


_ok = functools.partial(CheckResult, Verdict.OK)
_absent = functools.partial(CheckResult, Verdict.ABSENT)
_bad = functools.partial(CheckResult, Verdict.BAD)


def main() -> int:
    """Print the report; 1 if something that is installed cannot be used."""
    print(f"breakable_cuda_graphs {__version__}, Python {platform.python_version()}")
    is_bad = False
    for title, results in examine():
        print(f"\n{title}")
        for result in results:
            is_bad |= result.verdict is Verdict.BAD
            detail = f": {result.detail}" if result.detail else ""
            print(f"  {result.verdict.value}  {result.what}{detail}")
            if result.advice:
                print(f"        -> {result.advice}")
    print(f"\nRun on a device: {RUN_ON_A_DEVICE}.")
    print(f"On a device not run, only read: {ONLY_READ}.")
    return 1 if is_bad else 0


def examine() -> Iterator[tuple[str, list[CheckResult]]]:
    """Every part of the report as (title, results). No check can end it."""
    driver = _Driver()
    parts: list[tuple[str, Callable[[], Iterable[CheckResult]]]] = [
        ("Needed", lambda: [_python(), _bindings(), _installed(*_NUMPY), *driver.results()]),
        ("Features of driver and bindings", driver.features),
        ("torch", _torch),
        ("Other libraries", lambda: [CUPY.judge()[1], _installed(*_NUMBA)]),
        ("Tried here", driver.trials),
        ("Environment", _environment),
    ]
    for title, check in parts:
        yield title, _safely(title, check)


def _safely(title: str, check: Callable[[], Iterable[CheckResult]]) -> list[CheckResult]:
    results: list[CheckResult] = []
    try:
        results.extend(check())
    except Exception as error:
        advice = "This is a fault of the doctor or of a half-installed package: please report it."
        results.append(_bad(f"the check of {title!r} failed", said(error), advice))
    return results


# ---------------------------------------------------------------- needed


def _python() -> CheckResult:
    return _ok(f"Python {platform.python_version()}", sys.executable)


def _bindings() -> CheckResult:
    version = bindings.binding_version()
    name = f"cuda-bindings {'.'.join(map(str, version))}"
    if bindings_are_sound(version):
        return _ok(name, "reads edge data rightly (12.9.7 and later, 13.3 and later)")
    return _bad(
        name,
        "this release is outside of what the library was made for: up to 12.9.6 and 13.2 the "
        "edge data of a graph is read after it was freed",
        "pip install 'cuda-bindings>=13.3,<14' (or >=12.9.7,<13 for a driver of CUDA 12)",
    )


def bindings_are_sound(version: Version) -> bool:
    """12.9.7 to 12.x, or 13.3 to 13.x."""
    return (12, 9, 7) <= version < (13,) or (13, 3) <= version < (14,)


def _installed(name: str, otherwise: Verdict, advice: str) -> CheckResult:
    try:
        return _ok(f"{name} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
        return CheckResult(otherwise, name, "not installed", advice)


_NUMPY = "numpy", Verdict.BAD, "pip install numpy"
_NUMBA = (
    "numba-cuda", Verdict.ABSENT,
    "pip install numba-cuda to capture Numba's kernels; nothing else needs it.",
)  # fmt: skip


class _Driver:
    """The real driver, if one answers; not the simulated one."""

    def __init__(self) -> None:
        self.driver: bindings.Driver | None = None
        self.version, self.problem = 0, ""
        try:
            self.driver = bindings.Driver(bindings.types)
            self.version = self.driver.version
        except Exception as error:
            self.problem = demo.reason(error)

    def results(self) -> Iterator[CheckResult]:
        if self.driver is None:
            yield _absent(
                "CUDA driver",
                self.problem,
                "Install the NVIDIA driver (a container needs the GPU passed through). Without a GPU, "
                f"use the simulated device: {bindings.SIMULATOR_VARIABLE}=1 or simulated_device().",
            )
            return
        if self.version < _OLDEST_DRIVER:
            yield _bad(
                f"CUDA driver {_cuda(self.version)}",
                "too old to read the arguments of captured kernels",
                f"Install a driver for CUDA {_cuda(_OLDEST_DRIVER)} or newer.",
            )
        else:
            yield _ok(f"CUDA driver {_cuda(self.version)}")
        yield from self._devices(self.driver)

    def _devices(self, driver: bindings.Driver) -> Iterator[CheckResult]:
        count = int(driver.cuDeviceGetCount())
        if not count:
            yield _absent("devices", "none", "Look at CUDA_VISIBLE_DEVICES and nvidia-smi.")
        attribute = bindings.types.CUdevice_attribute
        for index in range(count):
            device = driver.cuDeviceGet(index)
            name = driver.cuDeviceGetName(100, device).split(b"\0")[0].decode()
            major, minor = (
                driver.cuDeviceGetAttribute(getattr(attribute, _CAPABILITY + which), device)
                for which in ("MAJOR", "MINOR")
            )
            gib = driver.cuDeviceTotalMem(device) / 2**30
            yield _ok(f"device {index}", f"{name}, sm_{major}{minor}, {gib:.0f} GiB")

    def features(self) -> list[CheckResult]:
        return [gate.judge(bindings.types, self.version) for gate in GATES]

    # ---- trials

    def trials(self) -> Iterator[CheckResult]:
        with simulated_device():
            yield _trial("simulated device", demo.run_neutral)
        torch = demo.imported_torch()
        if torch is not None:
            with simulated_device():
                yield _trial("simulated device, CPU tensors", lambda: demo.run_torch(torch, "cpu"))
        if self.driver is not None:
            previous = bindings.use(self.driver)
            try:
                yield _trial("the driver alone", demo.run_neutral)
                if torch is not None and torch.cuda.is_available():
                    yield _trial("torch on the GPU", lambda: demo.run_torch(torch, "cuda"))
            finally:
                bindings.use(previous)


def _trial(what: str, run: Callable[[], Iterable[demo.Outcome]]) -> CheckResult:
    """Capture, break and replay, once."""
    what = f"capture, break, replay: {what}"
    try:
        wrong = [outcome for outcome in run() if outcome[1] != outcome[2]]
    except Exception as error:
        return _bad(what, said(error), "See the lines above, then report it.")
    if wrong:
        value, result, expected = wrong[0]
        wrong_result = f"{result:g} for {value:g}, where {expected:g} is right"
        return _bad(what, wrong_result, "Please report it.")
    return _ok(what)


# ---------------------------------------------------------------- feature gates


class FeatureGate(NamedTuple):
    """Something that needs functions in the bindings and a driver of some version."""

    what: str
    functions: tuple[str, ...]
    driver: int
    use: str

    def judge(self, module: Any, driver_version: int) -> CheckResult:
        """Whether the bindings know the functions and the driver is new enough."""
        lacking = [name for name in self.functions if not hasattr(module, name)]
        if lacking:
            advice = f"{self.use} A newer cuda-bindings (13.3 or later) brings it."
            return _absent(self.what, f"these cuda-bindings have no {', '.join(lacking)}", advice)
        if driver_version >= self.driver:
            return _ok(self.what)
        needs = f"needs a driver of CUDA {_cuda(self.driver)}"
        if not driver_version:  # the missing driver has its own line, with advice
            return _absent(self.what, needs)
        return _absent(self.what, f"{needs}; here it is {_cuda(driver_version)}", self.use)


GATES = (
    FeatureGate("kernel arguments", ("cuFuncGetParamInfo", "cuKernelGetParamInfo"), 12040,
                "Needed to tell which segments draw random numbers."),
    FeatureGate("capture into a graph", ("cuStreamBeginCaptureToGraph",), 12030,
                "Fills the bodies of conditional nodes."),
    FeatureGate("conditional nodes: IF, WHILE", ("cuGraphConditionalHandleCreate",), 12040,
                "Control flow on the device; breaks do without."),
    FeatureGate("conditional nodes: ELSE, SWITCH", ("cuGraphConditionalHandleCreate",), 12080,
                "Control flow on the device; breaks do without."),
    FeatureGate("conditional nodes: ELSE in child graphs", ("cuGraphConditionalHandleCreate",), 13000,
                "Drivers before 13.0 misplace nodes of a body; two IF nodes do instead."),
    FeatureGate("graph, node and tools ids", ("cuGraphGetId", "cuGraphNodeGetToolsId"), 13010,
                "Names nodes to profilers."),
    FeatureGate("cuGraphNodeGetParams", ("cuGraphNodeGetParams",), 13020,
                "Reads conditional nodes that somebody else made."),
    FeatureGate("updates of copies without a context", ("cuGraphNodeSetParams",), 13020,
                "Older drivers take the current context instead of the node's."),
)  # fmt: skip


# ---------------------------------------------------------------- frameworks


class Library(NamedTuple):
    """A library that has to be imported to be judged."""

    title: str
    module: str
    oldest: Version
    fault: str  # of those that are older
    missing: str  # what to do where it is not installed
    upgrade: str

    def judge(self) -> tuple[Any, CheckResult]:
        """The library, if it can be used, and what is said of it."""
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError:
            return None, _absent(self.title, "not installed", self.missing)
        except Exception as error:
            advice = f"Install {self.title} anew."
            return None, _bad(self.title, f"cannot be imported: {error}", advice)
        name = f"{self.title} {module.__version__}"
        if numbers(module.__version__)[: len(self.oldest)] < self.oldest:
            return None, _bad(name, self.fault, self.upgrade)
        return module, _ok(name)


TORCH = Library(
    "torch", "torch", (2, 10), "cannot set the state of a generator inside a capture",
    "pip install 'torch>=2.10' to capture torch work; CuPy, Numba and raw streams need none.",
    "pip install 'torch>=2.10'",
)  # fmt: skip
CUPY = Library(
    "CuPy", "cupy", (14,), "older than 14",
    "pip install cupy-cuda13x to capture CuPy's work; nothing else needs it.",
    "pip install -U 'cupy-cuda13x>=14'",
)  # fmt: skip


def _torch() -> Iterator[CheckResult]:
    torch, result = TORCH.judge()
    if torch is None:
        yield result
        return
    version = numbers(torch.__version__)
    is_newer = version[:2] > _NEWEST_TORCH_READ
    yield result._replace(detail="newer than any that was read" if is_newer else "")
    yield _torch_device(torch)
    yield from _torch_features(version)
    if torch.cuda.is_available() and torch.cuda.get_allocator_backend() != "native":
        yield _bad(
            "torch's allocator",
            f"{torch.cuda.get_allocator_backend()} has no private pools that outlive a capture",
            "Unset `backend` in PYTORCH_CUDA_ALLOC_CONF.",
        )


def _torch_device(torch: Any) -> CheckResult:
    if torch.version.cuda is None:
        return _absent(
            "torch's CUDA",
            "this build is for the CPU only",
            "Install a CUDA build of torch to capture on a GPU; the simulated device works as it is.",
        )
    if not torch.cuda.is_available():
        return _absent(
            "torch's CUDA",
            f"built for {torch.version.cuda}, but it finds no device",
            "See the driver's lines above, and CUDA_VISIBLE_DEVICES.",
        )
    devices = torch.cuda.device_count()
    return _ok("torch's CUDA", f"built for {torch.version.cuda}, {devices} device(s)")


def _torch_features(version: Version) -> Iterator[CheckResult]:
    if version[:2] < _SHARED_GENERATORS_BEFORE:
        yield _ok(
            "random numbers",
            "one capture at a time may draw from a generator (torch before 2.12 shares its tensors)",
        )
    else:
        yield _ok("random numbers", "each capture has its own (torch 2.12 and later)")
    if version[:2] >= _PINNED_POOLS_SINCE:
        yield _ok("pinned memory in captures", "kept in a pool of the capture")
    else:
        yield _absent(
            "pinned memory in captures",
            "not kept for certain by this torch",
            "Make pinned buffers before the capture and keep them, or use torch 2.11 or later.",
        )


# ---------------------------------------------------------------- environment

_VARIABLES = {
    bindings.SIMULATOR_VARIABLE: "chooses the simulated driver at first use",
    "BREAKABLE_CUDA_GRAPHS_DEBUG": "adds stream ids to errors of unjoined streams",
    "CUDA_VISIBLE_DEVICES": "hides devices",
    "PYTORCH_CUDA_ALLOC_CONF": "configures torch's allocator",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "torch cannot capture with it",
}


def _environment() -> Iterator[CheckResult]:
    present = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    for name, value in present.items():
        if name == "PYTORCH_NO_CUDA_MEMORY_CACHING":
            yield _bad(f"{name}={value}", _VARIABLES[name], f"Unset {name}.")
        else:
            yield _ok(f"{name}={value}", _VARIABLES[name])
    if not present:
        yield _ok("no variable is set that changes anything here")


# ---------------------------------------------------------------- versions


def numbers(text: str) -> Version:
    """The leading numbers of a version: "2.13.0+cpu" and "2.13.0a0" are (2, 13, 0)."""
    found = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


def _cuda(version: int) -> str:
    """12040 as "12.4"."""
    return f"{version // 1000}.{version % 1000 // 10}"
