"""What works on this machine, and what to do about what does not.

The hard problem: every check here looks at something that may be missing, half installed or broken
in a way of its own. So each is a function that yields findings, and one that fails is itself a
finding; what can be tried is tried, not concluded from a version.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

from . import __version__, demo
from ._driver import bindings
from .simulator import simulated_device

__all__ = ["Finding", "State", "examine", "main"]


Version = tuple[int, ...]


#: What the library has run on; everything else that it admits was only read in the sources.
RUN_ON_A_DEVICE = "torch 2.11, CuPy 14.2, numba-cuda 0.30, driver 13.0, cuda-bindings 13.3.1"

ONLY_READ = "torch 2.10 and 2.12 to 2.14, cuda-bindings 12.9.7 to 12.9.10 and 13.5"


_OLDEST_DRIVER = 12040  # cuFuncGetParamInfo: reading the arguments of captured kernels

_OLDEST_TORCH = (2, 10)

_NEWEST_TORCH_READ = (2, 14)

_SHARED_GENERATORS_BEFORE = (2, 12)

_PINNED_POOLS_SINCE = (2, 11)

_OLDEST_CUPY = (14,)


class State(Enum):
    """How a finding is marked. Only BAD makes the exit status 1."""

    OK = "ok"
    ABSENT = "--"
    BAD = "!!"


class Finding(NamedTuple):
    """One line of the report, and what to do if it is not well."""

    state: State
    what: str
    detail: str = ""
    advice: str = ""


def main() -> int:
    """Print the report; 1 if something that is installed cannot be used."""
    print(f"breakable_cuda_graphs {__version__}, Python {platform.python_version()}")
    is_bad = False
    for title, findings in examine():
        print(f"\n{title}")
        for finding in findings:
            is_bad |= finding.state is State.BAD
            detail = f": {finding.detail}" if finding.detail else ""
            print(f"  {finding.state.value}  {finding.what}{detail}")
            if finding.advice:
                print(f"        -> {finding.advice}")
    print(f"\nRun on a device: {RUN_ON_A_DEVICE}.")
    print(f"On a device not run, only read: {ONLY_READ}.")
    return 1 if is_bad else 0


def examine() -> Iterator[tuple[str, list[Finding]]]:
    """Every part of the report as (title, findings). No check can end it."""
    driver = _Driver()
    parts: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("Needed", lambda: [*_python(), *_bindings(), *_numpy(), *driver.findings()]),
        ("Features of driver and bindings", driver.features),
        ("torch", _torch),
        ("Other libraries", lambda: [*_cupy(), *_numba()]),
        ("Tried here", driver.trials),
        ("Environment", _environment),
    ]
    for title, check in parts:
        yield title, _safely(title, check)


def _safely(title: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except Exception as error:
        findings.append(
            Finding(
                State.BAD,
                f"the check of {title!r} failed",
                f"{type(error).__name__}: {error}",
                "This is a fault of the doctor or of a half-installed package: please report it.",
            )
        )
    return findings


# ---------------------------------------------------------------- needed


def _python() -> Iterator[Finding]:
    yield Finding(State.OK, f"Python {platform.python_version()}", sys.executable)


def _bindings() -> Iterator[Finding]:
    version = bindings.binding_version()
    name = f"cuda-bindings {_dotted(version)}"
    if bindings_are_sound(version):
        yield Finding(State.OK, name, "reads edge data rightly (12.9.7 and later, 13.3 and later)")
    else:
        yield Finding(
            State.BAD,
            name,
            "this release is outside of what the library was made for: up to 12.9.6 and 13.2 the "
            "edge data of a graph is read after it was freed",
            "pip install 'cuda-bindings>=13.3,<14' (or >=12.9.7,<13 for a driver of CUDA 12)",
        )


def bindings_are_sound(version: Version) -> bool:
    """12.9.7 to 12.x, or 13.3 to 13.x."""
    return (12, 9, 7) <= version < (13,) or (13, 3) <= version < (14,)


def _numpy() -> Iterator[Finding]:
    yield _distribution("numpy", State.BAD, "pip install numpy")


class _Driver:
    """The real driver, if one answers; not the simulated one."""

    def __init__(self) -> None:
        self.driver: bindings.Driver | None = None
        self.problem = ""
        try:
            self.driver = bindings.Driver(bindings.types)
        except Exception as error:
            self.problem = demo.reason(error)

    @property
    def version(self) -> int:
        return int(self.driver.version) if self.driver is not None else 0

    def findings(self) -> Iterator[Finding]:
        if self.driver is None:
            yield Finding(
                State.ABSENT,
                "CUDA driver",
                self.problem,
                "Install the NVIDIA driver (a container needs the GPU passed through). Without a GPU, "
                f"use the simulated device: {bindings.SIMULATOR_VARIABLE}=1 or simulated_device().",
            )
            return
        if self.version < _OLDEST_DRIVER:
            yield Finding(
                State.BAD,
                f"CUDA driver {_cuda(self.version)}",
                "too old to read the arguments of captured kernels",
                f"Install a driver for CUDA {_cuda(_OLDEST_DRIVER)} or newer.",
            )
        else:
            yield Finding(State.OK, f"CUDA driver {_cuda(self.version)}")
        yield from self._devices(self.driver)

    def _devices(self, driver: bindings.Driver) -> Iterator[Finding]:
        count = int(driver.cuDeviceGetCount())
        if not count:
            yield Finding(
                State.ABSENT, "devices", "none", "Look at CUDA_VISIBLE_DEVICES and nvidia-smi."
            )
        attribute = bindings.types.CUdevice_attribute
        for index in range(count):
            device = driver.cuDeviceGet(index)
            name = driver.cuDeviceGetName(100, device).split(b"\0")[0].decode()
            major, minor = (
                driver.cuDeviceGetAttribute(getattr(attribute, kind), device)
                for kind in (
                    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
                    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
                )
            )
            gib = driver.cuDeviceTotalMem(device) / 2**30
            yield Finding(State.OK, f"device {index}", f"{name}, sm_{major}{minor}, {gib:.0f} GiB")

    # ---- feature gates

    def features(self) -> Iterator[Finding]:
        for gate in GATES:
            yield gate.judge(bindings.types, self.version)

    # ---- trials

    def trials(self) -> Iterator[Finding]:
        with simulated_device():
            yield _trial("simulated device", demo.run_neutral)
        torch = demo._torch()
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


def _trial(what: str, run: Callable[[], Iterable[demo.Outcome]]) -> Finding:
    """Capture, break and replay, once."""
    what = f"capture, break, replay: {what}"
    try:
        wrong = [outcome for outcome in run() if outcome[1] != outcome[2]]
    except Exception as error:
        return Finding(
            State.BAD,
            what,
            f"{type(error).__name__}: {error}",
            "See the lines above, then report it.",
        )
    if wrong:
        value, result, expected = wrong[0]
        return Finding(State.BAD, what, f"{result:g} for {value:g}, where {expected:g} is right",
                       "Please report it.")  # fmt: skip
    return Finding(State.OK, what)


# ---------------------------------------------------------------- feature gates


class Gate(NamedTuple):
    """Something that needs functions in the bindings and a driver of some version."""

    what: str
    functions: tuple[str, ...]
    driver: int
    use: str

    def judge(self, module: Any, driver_version: int) -> Finding:
        """Whether the bindings know the functions and the driver is new enough."""
        lacking = [name for name in self.functions if not hasattr(module, name)]
        if lacking:
            return Finding(
                State.ABSENT,
                self.what,
                f"these cuda-bindings have no {', '.join(lacking)}",
                f"{self.use} A newer cuda-bindings (13.3 or later) brings it.",
            )
        if not driver_version:  # the missing driver has its own line, with advice
            return Finding(State.ABSENT, self.what, f"needs a driver of CUDA {_cuda(self.driver)}")
        if driver_version < self.driver:
            return Finding(
                State.ABSENT,
                self.what,
                f"needs a driver of CUDA {_cuda(self.driver)}; here it is {_cuda(driver_version)}",
                self.use,
            )
        return Finding(State.OK, self.what)


GATES = (
    Gate("kernel arguments", ("cuFuncGetParamInfo", "cuKernelGetParamInfo"), 12040,
         "Needed to tell which segments draw random numbers."),
    Gate("capture into a graph", ("cuStreamBeginCaptureToGraph",), 12030,
         "Fills the bodies of conditional nodes."),
    Gate("conditional nodes: IF, WHILE", ("cuGraphConditionalHandleCreate",), 12040,
         "Control flow on the device; breaks do without."),
    Gate("conditional nodes: ELSE, SWITCH", ("cuGraphConditionalHandleCreate",), 12080,
         "Control flow on the device; breaks do without."),
    Gate("conditional nodes: ELSE in child graphs", ("cuGraphConditionalHandleCreate",), 13000,
         "Drivers before 13.0 misplace nodes of a body; two IF nodes do instead."),
    Gate("graph, node and tools ids", ("cuGraphGetId", "cuGraphNodeGetToolsId"), 13010,
         "Names nodes to profilers."),
    Gate("cuGraphNodeGetParams", ("cuGraphNodeGetParams",), 13020,
         "Reads conditional nodes that somebody else made."),
    Gate("updates of copies without a context", ("cuGraphNodeSetParams",), 13020,
         "Older drivers take the current context instead of the node's."),
)  # fmt: skip


# ---------------------------------------------------------------- frameworks


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ModuleNotFoundError:
        yield Finding(
            State.ABSENT,
            "torch",
            "not installed",
            "pip install 'torch>=2.10' to capture torch work; CuPy, Numba and raw streams need none.",
        )
        return
    except (ImportError, OSError) as error:
        yield Finding(State.BAD, "torch", f"cannot be imported: {error}", "Install torch anew.")
        return
    version = numbers(torch.__version__)
    if version[:2] < _OLDEST_TORCH:
        yield Finding(
            State.BAD,
            f"torch {torch.__version__}",
            "cannot set the state of a generator inside a capture",
            "pip install 'torch>=2.10'",
        )
        return
    newer = "newer than any that was read" if version[:2] > _NEWEST_TORCH_READ else ""
    yield Finding(State.OK, f"torch {torch.__version__}", newer)
    yield _torch_device(torch)
    yield from _torch_features(version)
    if torch.cuda.is_available() and torch.cuda.get_allocator_backend() != "native":
        yield Finding(
            State.BAD,
            "torch's allocator",
            f"{torch.cuda.get_allocator_backend()} has no private pools that outlive a capture",
            "Unset `backend` in PYTORCH_CUDA_ALLOC_CONF.",
        )


def _torch_device(torch: Any) -> Finding:
    if torch.version.cuda is None:
        return Finding(
            State.ABSENT,
            "torch's CUDA",
            "this build is for the CPU only",
            "Install a CUDA build of torch to capture on a GPU; the simulated device works as it is.",
        )
    if not torch.cuda.is_available():
        return Finding(
            State.ABSENT,
            "torch's CUDA",
            f"built for {torch.version.cuda}, but it finds no device",
            "See the driver's lines above, and CUDA_VISIBLE_DEVICES.",
        )
    return Finding(
        State.OK,
        "torch's CUDA",
        f"built for {torch.version.cuda}, {torch.cuda.device_count()} device(s)",
    )


def _torch_features(version: Version) -> Iterator[Finding]:
    if version[:2] < _SHARED_GENERATORS_BEFORE:
        yield Finding(
            State.OK,
            "random numbers",
            "one capture at a time may draw from a generator (torch before 2.12 shares its tensors)",
        )
    else:
        yield Finding(State.OK, "random numbers", "each capture has its own (torch 2.12 and later)")
    if version[:2] >= _PINNED_POOLS_SINCE:
        yield Finding(State.OK, "pinned memory in captures", "kept in a pool of the capture")
    else:
        yield Finding(
            State.ABSENT,
            "pinned memory in captures",
            "not kept for certain by this torch",
            "Make pinned buffers before the capture and keep them, or use torch 2.11 or later.",
        )


def _cupy() -> Iterator[Finding]:
    try:
        import cupy
    except ModuleNotFoundError:
        advice = "pip install cupy-cuda13x to capture CuPy's work; nothing else needs it."
        yield Finding(State.ABSENT, "CuPy", "not installed", advice)
        return
    except Exception as error:
        yield Finding(State.BAD, "CuPy", f"cannot be imported: {error}", "Install CuPy anew.")
        return
    version = str(cupy.__version__)
    if numbers(version)[:1] < _OLDEST_CUPY:
        yield Finding(
            State.BAD, f"CuPy {version}", "older than 14", "pip install -U 'cupy-cuda13x>=14'"
        )
    else:
        yield Finding(State.OK, f"CuPy {version}")


def _numba() -> Iterator[Finding]:
    yield _distribution(
        "numba-cuda",
        State.ABSENT,
        "pip install numba-cuda to capture Numba's kernels; nothing else needs it.",
    )


def _distribution(name: str, otherwise: State, advice: str) -> Finding:
    try:
        return Finding(State.OK, f"{name} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
        return Finding(otherwise, name, "not installed", advice)


# ---------------------------------------------------------------- environment

_VARIABLES = {
    bindings.SIMULATOR_VARIABLE: "chooses the simulated driver at first use",
    "BREAKABLE_CUDA_GRAPHS_DEBUG": "adds stream ids to errors of unjoined streams",
    "CUDA_VISIBLE_DEVICES": "hides devices",
    "PYTORCH_CUDA_ALLOC_CONF": "configures torch's allocator",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "torch cannot capture with it",
}


def _environment() -> Iterator[Finding]:
    found = False
    for name, meaning in _VARIABLES.items():
        value = os.environ.get(name)
        if value is None:
            continue
        found = True
        if name == "PYTORCH_NO_CUDA_MEMORY_CACHING":
            yield Finding(State.BAD, f"{name}={value}", meaning, f"Unset {name}.")
        else:
            yield Finding(State.OK, f"{name}={value}", meaning)
    if not found:
        yield Finding(State.OK, "no variable is set that changes anything here")


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


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def _cuda(version: int) -> str:
    """12040 as "12.4"."""
    return f"{version // 1000}.{version % 1000 // 10}"
