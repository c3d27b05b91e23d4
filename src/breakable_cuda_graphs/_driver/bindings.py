"""Which driver answers, and one shape for its calls on bindings 12.9 and 13.x.

The hard problem: names and tuple shapes of the graph calls differ between the binding majors, the
plain 12.9 forms lose edge data (CUDA_ERROR_LOSSY_QUERY), and a function can exist in the bindings
and be missing in the driver. All of that is known here and nowhere else.

`Driver.cuAnything(...)` is the checked call: it drops the result code and raises `CUDAError`.
`Driver.module.cuAnything(...)` is the raw one, for the two places where a code is an answer
(the end of a capture) or where a microsecond counts (replay).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import cuda.bindings
from cuda.bindings import driver as types

from ..errors import CUDAError
from . import errors, process
from .enums import INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, SUCCESS

__all__ = ["CaptureInfo", "Driver", "binding_version", "current", "types", "use"]

SIMULATOR_VARIABLE = "BREAKABLE_CUDA_GRAPHS_SIMULATOR"

#: What asking for an attribute or an address that a thing does not have is answered with.
_NO_SUCH_THING = (INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED)

#: How many nodes to ask for at first: small graphs are read in one call instead of two.
_GUESS = 4

_Made = TypeVar("_Made")


@dataclass(slots=True)  # made in half the time of a named tuple
class CaptureInfo:
    """What a stream says of its capture: `status` 0 none, 1 active, 2 invalidated."""

    status: int
    id: int
    graph: Any
    dependencies: list[Any]
    edges: list[Any]


class Driver:
    """One driver, real or simulated, with its calls checked and of one shape."""

    def __init__(self, module: Any, *, simulated: bool = False) -> None:
        self.module = module
        self.simulated = simulated
        #: what other modules keep for as long as this driver lives, by a key of theirs
        self.cache: dict[object, Any] = {}
        #: who owns a handle of a simulated driver, so that a leak can be told from what is in use
        self.owners: weakref.WeakSet[Any] | None = weakref.WeakSet() if simulated else None
        self.version = int(self.cuDriverGetVersion())
        self.cuInit(0)
        self._capture_info_name = self._newest("cuStreamGetCaptureInfo", "_v3")
        self._capture_info = self.raw(self._capture_info_name)  # raw: once for each segment
        self._graph_nodes = self.raw("cuGraphGetNodes")
        self._update_dependencies = self._newest("cuStreamUpdateCaptureDependencies", "_v2")
        self._get_edges = self._newest("cuGraphGetEdges", "_v2")
        self._get_dependencies = self._newest("cuGraphNodeGetDependencies", "_v2")
        self._get_dependents = self._newest("cuGraphNodeGetDependentNodes", "_v2")
        self._add_dependencies = self._newest("cuGraphAddDependencies", "_v2")
        self._remove_dependencies = self._newest("cuGraphRemoveDependencies", "_v2")
        self._add_node = self._newest("cuGraphAddNode", "_v2")

    def once(self, make: Callable[[Driver, Any], _Made], where: Any) -> _Made:
        """What is made once for this driver and a device, a context or a module, and kept."""
        key = (make, where)
        if key not in self.cache:
            self.cache.setdefault(key, make(self, where))
        made: _Made = self.cache[key]
        return made

    # ---- calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The checked form of a driver function; made once and then found as an attribute."""
        if not name.startswith("cu"):
            raise AttributeError(name)

        function = self.raw(name)

        def checked(*args: Any) -> Any:
            try:
                values = function(*args)
            except RecursionError:
                raise
            except RuntimeError as error:  # the bindings know the function, the driver does not
                raise errors.driver_call_missing(name, error) from error
            if values[0]:
                raise self.error(name, values[0])
            return values[1] if len(values) == 2 else values[1:] or None

        checked.__name__ = name
        setattr(self, name, checked)
        return checked

    def raw(self, name: str) -> Callable[..., Any]:
        """The bindings' function itself, whose tuple begins with the result code."""
        try:
            function: Callable[..., Any] = getattr(self.module, name)
        except AttributeError as error:
            raise errors.driver_call_missing(name, error) from error
        return function

    def has(self, name: str) -> bool:
        """Whether the bindings know the function (the driver may still lack it: see `version`)."""
        return hasattr(self.module, name)

    def ask(self, name: str, *args: Any) -> tuple[Any, ...] | None:
        """The values of a call, or None where the driver answers that there is no such thing.

        Any other error is one: what is not known must not count as "no".
        """
        code, *values = self.raw(name)(*args)
        if not code:
            return tuple(values)
        if int(code) in _NO_SUCH_THING:
            return None
        raise self.error(name, code)

    def _call(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of a call, however many there are; for the shims below."""
        values = getattr(self, name)(*args)
        return values if isinstance(values, tuple) else () if values is None else (values,)

    def error(self, call: str, code: Any) -> CUDAError:
        """The exception for a result code that a raw call of this driver returned."""
        number = int(code)
        name, sentence = f"CUDA_ERROR_{number}", "no description"
        try:
            result = types.CUresult(number)
            name = str(result.name)
            status, text = self.module.cuGetErrorString(result)
            if int(status) == SUCCESS and text:
                sentence = text.decode()
        except ValueError:  # a code that these bindings do not know
            pass
        return errors.driver_call_failed(call, number, name, sentence)

    # ---- one shape for 12.9 and 13.x

    def _newest(self, name: str, suffix: str) -> str:
        """12.9 keeps the edge-data form under a suffix, 13.x gives it the bare name."""
        return name + suffix if hasattr(self.module, name + suffix) else name

    def capture_info(self, stream: Any) -> CaptureInfo:
        """The capture that a stream is in. Never raises for an invalidated one."""
        code, status, identity, graph, dependencies, edges, count = self._capture_info(stream)
        if code:
            raise self.error(self._capture_info_name, code)
        if status != 1:
            return CaptureInfo(int(status), 0, None, [], [])
        nodes = dependencies[:count] if count else []
        return CaptureInfo(1, int(identity), graph, nodes, edges[:count] if edges else [])

    def update_capture_dependencies(
        self, stream: Any, nodes: list[Any], *, replace: bool = True
    ) -> None:
        """Make `nodes` what the next captured work of the stream waits for (or add them to it)."""
        self._call(
            self._update_dependencies,
            (stream, nodes or None, None, len(nodes), 1 if replace else 0),
        )

    def graph_edges(self, graph: Any) -> list[tuple[Any, Any, Any]]:
        """All edges as (from, to, edge data)."""
        *_, count = self._call(self._get_edges, (graph, 0))
        if not count:
            return []
        sources, targets, data, count = self._call(self._get_edges, (graph, count))
        return list(zip(sources, targets, data, strict=True))[:count]

    def graph_nodes(self, graph: Any) -> list[Any]:
        """All nodes in the order in which they were added."""
        code, nodes, count = self._graph_nodes(graph, _GUESS)
        if code:
            raise self.error("cuGraphGetNodes", code)
        if count == _GUESS:  # there may be more
            _, count = self.cuGraphGetNodes(graph, 0)
            nodes, count = self.cuGraphGetNodes(graph, count)
        found: list[Any] = nodes[:count]
        return found

    def allocation(self, address: int) -> tuple[int, int] | None:
        """(start, bytes) of the device allocation that an address lies in; None outside of all."""
        found = self.ask("cuMemGetAddressRange", types.CUdeviceptr(address))
        return None if found is None else (int(found[0]), int(found[1]))

    def node_dependencies(self, node: Any) -> list[Any]:
        """The nodes that this one waits for."""
        return self._nodes_of(self._get_dependencies, node)

    def node_dependents(self, node: Any) -> list[Any]:
        """The nodes that wait for this one."""
        return self._nodes_of(self._get_dependents, node)

    def _nodes_of(self, name: str, node: Any) -> list[Any]:
        *_, count = self._call(name, (node, 0))
        if not count:
            return []
        nodes, *_, count = self._call(name, (node, count))
        return list(nodes)[:count]

    def add_dependencies(
        self, graph: Any, sources: list[Any], targets: list[Any], data: list[Any] | None = None
    ) -> None:
        """Add edges from each source to the target at the same place."""
        self._call(self._add_dependencies, (graph, sources, targets, data, len(sources)))

    def remove_dependencies(
        self, graph: Any, sources: list[Any], targets: list[Any], data: list[Any] | None = None
    ) -> None:
        """Remove edges; `data` has to be what they were made with."""
        self._call(self._remove_dependencies, (graph, sources, targets, data, len(sources)))

    def add_node(self, graph: Any, after: list[Any], params: Any) -> Any:
        """Add a node of any kind from a `CUgraphNodeParams`."""
        return self._call(self._add_node, (graph, after or None, None, len(after), params))[0]


# ---------------------------------------------------------------- which driver is in use


def _no_substitute() -> Driver | None:
    return None


#: Makes what stands in for the real driver, or nothing; set by the package, some room of which has one.
substitute: Callable[[], Driver | None] = _no_substitute

_current: Driver | None = None
_lock = threading.Lock()


def current() -> Driver:
    """The driver in use. The first use makes it; no import of this package does."""
    global _current
    driver = _current
    if driver is None:
        with _lock:
            if _current is None:
                _current = _first_driver()
            driver = _current
    if process.driver_lost_in_fork() and not driver.simulated:
        raise errors.driver_lost_in_fork()
    return driver


def started() -> bool:
    """Whether a driver has been used yet (asking does not start one)."""
    return _current is not None


def use(driver: Driver | None) -> Driver | None:
    """Use this driver from now on; returns the one before (None: none was in use yet)."""
    global _current
    previous, _current = _current, driver
    return previous


def is_simulator_wanted() -> bool:
    """Whether the environment asks for the simulated driver."""
    return os.environ.get(SIMULATOR_VARIABLE, "") not in ("", "0")


def _first_driver() -> Driver:
    stand_in = substitute()
    if stand_in is not None:
        return stand_in
    if process.driver_lost_in_fork():
        raise errors.driver_lost_in_fork()
    try:
        driver = Driver(types)
    except CUDAError as error:
        raise errors.no_driver(SIMULATOR_VARIABLE, error) from error
    process.note_driver_use()
    return driver


def binding_version() -> tuple[int, ...]:
    """The version of cuda-bindings as numbers, for the feature gates."""
    text = getattr(cuda.bindings, "__version__", "0")
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())
