"""Which calls harm which open capture: the table of modes and threads, call by call.

`cuThreadExchangeStreamCaptureMode` speaks of "potentially unsafe" calls and names one. The table here
is what an H200 answered: a call is free, or unsafe, or uses the legacy stream, or waits for the context.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from raw_calls import (
    ACTIVE,
    GLOBAL,
    INVALIDATED,
    RELAXED,
    THREAD_LOCAL,
    code,
    here,
    memset_params,
    mode,
    ok,
    status,
)

MODES = (GLOBAL, THREAD_LOCAL, RELAXED)


class Scene:
    """Things that calls need; nothing of it has to do with the capture."""

    def __init__(self, driver: Any, kernels: Any) -> None:
        self.driver, self.kernels, self.context = driver, kernels, here(driver)
        self.stream = ok(driver.cuStreamCreate(1))
        self.event, self.fresh = ok(driver.cuEventCreate(2)), ok(driver.cuEventCreate(2))
        self.timers = [ok(driver.cuEventCreate(0)) for _ in range(2)]
        for event in (self.event, *self.timers):
            ok(driver.cuEventRecord(event, self.stream))
        self.memory = int(ok(driver.cuMemAlloc(256)))
        self.host = ctypes.create_string_buffer(64)
        self.graph = ok(driver.cuGraphCreate(0))
        ok(driver.cuGraphAddEmptyNode(self.graph, None, 0))
        self.executable = ok(driver.cuGraphInstantiate(self.graph, 0))
        ok(driver.cuLaunchKernel(kernels.nothing.handle, 1, 1, 1, 1, 1, 1, 0, self.stream, 0, 0))
        ok(driver.cuCtxSynchronize())
        #: what calls have made, and how to give it back
        self.made: list[tuple[Callable[[Any], Any], Any]] = []

    def keep(self, release: str, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        """Remember what a call has made."""
        if code(answer) == 0:
            self.made.append((getattr(self.driver, release), answer[1]))
        return answer

    def give_back(self) -> None:
        driver = self.driver
        while self.made:
            release, thing = self.made.pop()
            ok(release(thing))
        ok(driver.cuGraphExecDestroy(self.executable))
        ok(driver.cuGraphDestroy(self.graph))
        ok(driver.cuMemFree(self.memory))
        for event in (self.event, self.fresh, *self.timers):
            ok(driver.cuEventDestroy(event))
        ok(driver.cuStreamDestroy(self.stream))


@pytest.fixture
def scene(driver: Any, kernels: Any) -> Iterator[Scene]:
    made = Scene(driver, kernels)
    yield made
    made.give_back()


Call = Callable[[Scene], tuple[Any, ...]]


class Doomed(NamedTuple):
    """A call that ends something: made before the capture, released by the call or afterwards."""

    make: Call
    release: str

    def __call__(self, scene: Scene) -> tuple[Any, ...]:
        release, thing = scene.made[-1]
        answer = release(thing)
        if code(answer) == 0:
            scene.made.pop()
        return answer  # type: ignore[no-any-return]


def kept(name: str, release: str, *args: Any) -> Call:
    return lambda s: s.keep(release, getattr(s.driver, name)(*args))


FREE: dict[str, Call] = {
    "memory info": lambda s: s.driver.cuMemGetInfo(),
    "address range": lambda s: s.driver.cuMemGetAddressRange(s.memory),
    "pointer attribute": lambda s: s.driver.cuPointerGetAttribute(
        s.driver.CUpointer_attribute(2), s.memory
    ),
    "make an event": kept("cuEventCreate", "cuEventDestroy", 2),
    "destroy an event": Doomed(kept("cuEventCreate", "cuEventDestroy", 2), "cuEventDestroy"),
    "elapsed time": lambda s: s.driver.cuEventElapsedTime(*s.timers),
    "record elsewhere": lambda s: s.driver.cuEventRecord(s.fresh, s.stream),
    "wait elsewhere": lambda s: s.driver.cuStreamWaitEvent(s.stream, s.event, 0),
    "make a stream": kept("cuStreamCreate", "cuStreamDestroy", 1),
    "make a blocking stream": kept("cuStreamCreate", "cuStreamDestroy", 0),
    "destroy a stream": Doomed(kept("cuStreamCreate", "cuStreamDestroy", 1), "cuStreamDestroy"),
    "flags of a stream": lambda s: s.driver.cuStreamGetFlags(s.stream),
    "id of a stream": lambda s: s.driver.cuStreamGetId(s.stream),
    "priority of a stream": lambda s: s.driver.cuStreamGetPriority(s.stream),
    "context of a stream": lambda s: s.driver.cuStreamGetCtx(s.stream),
    "current context": lambda s: s.driver.cuCtxGetCurrent(),
    "priorities": lambda s: s.driver.cuCtxGetStreamPriorityRange(),
    "id of a context": lambda s: s.driver.cuCtxGetId(s.context),
    "state of the primary context": lambda s: s.driver.cuDevicePrimaryCtxGetState(0),
    "attribute of a device": lambda s: s.driver.cuDeviceGetAttribute(
        s.driver.CUdevice_attribute(75), 0
    ),
    "copy elsewhere": lambda s: s.driver.cuMemcpyDtoDAsync(s.memory, s.memory + 64, 4, s.stream),
    "read pageable memory elsewhere": lambda s: s.driver.cuMemcpyHtoDAsync(
        s.memory, ctypes.addressof(s.host), 4, s.stream
    ),
    "fill elsewhere": lambda s: s.driver.cuMemsetD32Async(s.memory, 1, 1, s.stream),
    "kernel elsewhere": lambda s: s.driver.cuLaunchKernel(
        s.kernels.nothing.handle, 1, 1, 1, 1, 1, 1, 0, s.stream, 0, 0
    ),
    "function of a kernel": lambda s: s.driver.cuKernelGetFunction(s.kernels.add.kernel_handle),
    "attribute of a function": lambda s: s.driver.cuFuncGetAttribute(
        s.driver.CUfunction_attribute(0), s.kernels.add.handle
    ),
    "parameter of a function": lambda s: s.driver.cuFuncGetParamInfo(s.kernels.add.handle, 0),
    "make a graph": kept("cuGraphCreate", "cuGraphDestroy", 0),
    "clone a graph": lambda s: s.keep("cuGraphDestroy", s.driver.cuGraphClone(s.graph)),
    "add a node elsewhere": lambda s: s.driver.cuGraphAddEmptyNode(s.graph, None, 0),
    "launch elsewhere": lambda s: s.driver.cuGraphLaunch(s.executable, s.stream),
    "upload elsewhere": lambda s: s.driver.cuGraphUpload(s.executable, s.stream),
    "update an executable": lambda s: s.driver.cuGraphExecUpdate(s.executable, s.graph),
    "exchange the mode": lambda s: s.driver.cuThreadExchangeStreamCaptureMode(
        mode(s.driver, GLOBAL)
    ),
}

UNSAFE: dict[str, Call] = {
    "allocate": kept("cuMemAlloc", "cuMemFree", 64),
    "free": Doomed(kept("cuMemAlloc", "cuMemFree", 64), "cuMemFree"),
    "allocate pinned": kept("cuMemAllocHost", "cuMemFreeHost", 64),
    "allocate pinned with flags": kept("cuMemHostAlloc", "cuMemFreeHost", 64, 0),
    "free pinned": Doomed(kept("cuMemAllocHost", "cuMemFreeHost", 64), "cuMemFreeHost"),
    "allocate in the order of another stream": lambda s: s.keep(
        "cuMemFree", s.driver.cuMemAllocAsync(64, s.stream)
    ),
    "query an event": lambda s: s.driver.cuEventQuery(s.event),
    "query an event that was not recorded": lambda s: s.driver.cuEventQuery(s.fresh),
    "wait for an event": lambda s: s.driver.cuEventSynchronize(s.event),
    "wait for an event that was not recorded": lambda s: s.driver.cuEventSynchronize(s.fresh),
    "query another stream": lambda s: s.driver.cuStreamQuery(s.stream),
    "wait for another stream": lambda s: s.driver.cuStreamSynchronize(s.stream),
    "instantiate": lambda s: s.keep("cuGraphExecDestroy", s.driver.cuGraphInstantiate(s.graph, 0)),
    "destroy an executable": Doomed(
        lambda s: s.keep("cuGraphExecDestroy", s.driver.cuGraphInstantiate(s.graph, 0)),
        "cuGraphExecDestroy",
    ),
}

LEGACY: dict[str, Call] = {
    "copy": lambda s: s.driver.cuMemcpyDtoD(s.memory, s.memory + 64, 4),
    "copy from the host": lambda s: s.driver.cuMemcpyHtoD(s.memory, ctypes.addressof(s.host), 4),
    "copy to the host": lambda s: s.driver.cuMemcpyDtoH(ctypes.addressof(s.host), s.memory, 4),
    "copy between addresses": lambda s: s.driver.cuMemcpy(s.memory, s.memory + 64, 4),
    "fill words": lambda s: s.driver.cuMemsetD32(s.memory, 1, 1),
    "fill bytes": lambda s: s.driver.cuMemsetD8(s.memory, 1, 1),
    "fill on the legacy stream": lambda s: s.driver.cuMemsetD32Async(s.memory, 1, 1, 0),
    "kernel on the legacy stream": lambda s: s.driver.cuLaunchKernel(
        s.kernels.nothing.handle, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0
    ),
    "record on the legacy stream": lambda s: s.driver.cuEventRecord(s.fresh, 0),
    "launch on the legacy stream": lambda s: s.driver.cuGraphLaunch(s.executable, 0),
}

#: Calls that the simulator takes for a release inside a capture: it notes them, and answers as a device.
RELEASES = {"destroy an event", "destroy a stream", "destroy an executable"}


def outcome(
    scene: Scene, call: Call, number: int, *, elsewhere: bool, flags: int
) -> tuple[int, int]:
    """(code of the call, status of the capture afterwards) with a capture of that mode open."""
    driver = scene.driver
    if isinstance(call, Doomed):
        ok(call.make(scene))
    stream = ok(driver.cuStreamCreate(flags))
    ok(driver.cuStreamBeginCapture(stream, mode(driver, number)))
    answer = in_thread(scene, call) if elsewhere else call(scene)
    after = status(driver, stream)
    ended = driver.cuStreamEndCapture(stream)
    assert code(ended) == (0 if after == ACTIVE else 901)
    if code(ended) == 0:
        ok(driver.cuGraphDestroy(ended[1]))
    ok(driver.cuStreamDestroy(stream))
    return code(answer), after


def in_thread(scene: Scene, call: Call) -> tuple[Any, ...]:
    answers = []

    def body() -> None:
        ok(scene.driver.cuCtxSetCurrent(scene.context))
        answers.append(call(scene))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return answers[0]


def outcomes(scene: Scene, call: Call, flags: int = 1) -> list[tuple[int, int]]:
    """For each mode the outcome on this thread and on another one."""
    return [
        outcome(scene, call, number, elsewhere=elsewhere, flags=flags)
        for number in MODES
        for elsewhere in (False, True)
    ]


def forgive(scene: Scene, name: str) -> None:
    """The simulator's findings of a rule that is about releases."""
    if scene.driver.is_simulated and name in RELEASES:
        scene.driver.module.world._findings.clear()


HARMLESS, FORBIDDEN = (0, ACTIVE), (900, INVALIDATED)


@pytest.mark.parametrize("name", FREE)
def test_a_free_call_harms_no_capture(scene, name):
    assert outcomes(scene, FREE[name]) == [HARMLESS] * 6
    forgive(scene, name)


@pytest.mark.parametrize("name", UNSAFE)
def test_an_unsafe_call_harms_its_threads_captures_and_global_ones(scene, name):
    for flags in (0, 1):
        found = outcomes(scene, UNSAFE[name], flags)
        assert found == [FORBIDDEN] * 3 + [HARMLESS] * 3
    forgive(scene, name)


@pytest.mark.parametrize("name", LEGACY)
def test_a_use_of_the_legacy_stream_harms_captures_of_blocking_streams_only(scene, name):
    assert outcomes(scene, LEGACY[name]) == [HARMLESS] * 6
    assert outcomes(scene, LEGACY[name], 0) == [(906, INVALIDATED)] * 6


@pytest.mark.parametrize("name", ["cuStreamQuery", "cuStreamSynchronize"])
def test_waiting_for_the_legacy_stream_is_unsafe_too(scene, name):
    def call(s: Scene) -> Any:
        return getattr(s.driver, name)(0)

    assert outcomes(scene, call) == [FORBIDDEN] * 3 + [HARMLESS] * 3
    assert outcomes(scene, call, 0) == [(906, INVALIDATED)] * 6


def test_waiting_for_the_context_harms_every_capture_in_it(scene):
    assert outcomes(scene, lambda s: s.driver.cuCtxSynchronize()) == [FORBIDDEN] * 6


def test_asking_whether_the_legacy_stream_captures_harms_nothing(scene):
    def call(s: Scene) -> Any:
        return s.driver.cuStreamIsCapturing(0)

    assert outcomes(scene, call) == [HARMLESS] * 6
    assert outcomes(scene, call, 0) == [(906, ACTIVE)] * 6


def test_setting_parameters_of_an_executable_is_free(scene, instantiate, graph):
    params = memset_params(scene.driver, scene.memory, 1)
    node = ok(scene.driver.cuGraphAddMemsetNode(graph, None, 0, params, scene.context))
    executable = instantiate(graph)

    def call(s: Scene) -> Any:
        return s.driver.cuGraphExecMemsetNodeSetParams(executable, node, params, s.context)

    assert outcomes(scene, call) == [HARMLESS] * 6
