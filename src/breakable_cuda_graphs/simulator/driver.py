"""The simulated driver: a stand-in for the module `cuda.bindings.driver`.

The hard problem: names and tuple shapes are those of one binding major at a time. The groups of
calls are written once, in the 13.x shape; `shape="12.9"` shows them under the names and in the
shapes of 12.9 (`bindings129.py`). What is not simulated does not exist here: types, enums and
structs are the bindings' own, but a real driver function is never reached by accident.

What is modelled: captures, graphs, executables, memory, streams, events, contexts, kernels, user
objects, with the driver's result codes. What is not: asynchrony (work has happened when the call
returns), arrays and textures, modules and libraries, external semaphores.
"""

from __future__ import annotations

import random
from collections.abc import Container
from typing import Any

from ..errors import too_few
from .bindings129 import Shape129
from .calls.capture_calls import CaptureCalls
from .calls.context_calls import ContextCalls
from .calls.exec_calls import ExecCalls
from .calls.function_calls import FunctionCalls
from .calls.graph_calls import TemplateCalls
from .calls.launch_calls import LaunchCalls
from .calls.memory_calls import MemoryCalls
from .calls.param_calls import ParameterCalls
from .calls.stream_calls import StreamCalls
from .calls.user_calls import UserObjectCalls
from .captures import Captures
from .contexts import Contexts
from .execs import Execs
from .graphs import Graphs
from .kernels import SimulatedKernel
from .memory import SimulatedMemory
from .setters import SETTERS
from .streams import StreamTable
from .structs import Structs
from .users import UserObjects
from .world import World, types

VERSIONS = {"13": 13000, "12.9": 12090}


class SimulatedDriver(
    ContextCalls,
    StreamCalls,
    CaptureCalls,
    MemoryCalls,
    LaunchCalls,
    FunctionCalls,
    TemplateCalls,
    ParameterCalls,
    ExecCalls,
    UserObjectCalls,
):
    """A driver without a device, in the shape of the 13.x bindings.

    `seed` chooses the orders in which executables run their nodes (`driver.seed` tells which one it
    was); `runtime=False` takes away the CUDA runtime's habit of making a primary context current.
    """

    simulated = True

    def __new__(
        cls, seed: int | None = None, shape: str = "13", *_: Any, **__: Any
    ) -> SimulatedDriver:
        if shape not in VERSIONS:
            raise ValueError(f"shape has to be one of {', '.join(VERSIONS)}, not {shape!r}")
        return object.__new__(SimulatedDriver129 if shape == "12.9" else cls)

    def __init__(
        self,
        seed: int | None = None,
        shape: str = "13",
        devices: int = 1,
        *,
        driver_version: int | None = None,
        runtime: bool = True,
    ) -> None:
        self.seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
        if devices < 1:
            raise too_few("devices", devices, 1)
        self.shape = shape
        self._setters: dict[str, SimulatedKernel] = {}
        self.world = World(driver_version or VERSIONS[shape])
        self.contexts = Contexts(self.world, devices, runtime)
        self.memory = SimulatedMemory(self.world)
        self.users = UserObjects(self.world)
        self.graphs = Graphs(self.world, self.users)
        self.captures = Captures(self.world, self.graphs)
        self.streams = StreamTable(self.world, self.contexts, self.memory, self.captures)
        self.structs = Structs(self.contexts, self.streams)
        self.execs = Execs(
            self.world, self.contexts, self.graphs, self.memory, random.Random(self.seed)
        )

    def __getattr__(self, name: str) -> Any:
        """Types, enums and constants are the bindings' own; functions that are not here are not."""
        value = getattr(types, name, None)
        if value is None or name.startswith("_"):
            raise AttributeError(f"the simulated driver has no {name}")
        if name.startswith("cu") and not isinstance(value, type):
            raise AttributeError(f"{name} is not simulated")
        return value

    def setter_kernel(self, name: str, layout: tuple[Any, ...]) -> SimulatedKernel:
        """The kernel of a name that gives a conditional its value (see `setters`)."""
        if name not in self._setters:
            self._setters[name] = SimulatedKernel(SETTERS[name], layout, name=name)
        return self._setters[name]

    def __repr__(self) -> str:
        return f"<SimulatedDriver shape={self.shape!r} seed={self.seed}>"

    @property
    def findings(self) -> list[str]:
        """Every misuse seen so far, one sentence each."""
        return self.world.findings

    def leaks(self, owned: Container[int] = ()) -> list[str]:
        """What is live, should have been released, and is not among the handles in `owned`."""
        return self.world.leaks(owned) + self.memory.leaks() + self.contexts.leaks()

    def open_captures(self) -> int:
        """How many captures are open."""
        return len(self.captures.open)


class SimulatedDriver129(Shape129, SimulatedDriver):
    """The same driver under the names and in the tuple shapes of the 12.9 bindings."""
