"""Devices and contexts, and which context a thread's calls belong to.

The hard problem: every other call depends on a context that it does not name. The driver keeps a
stack of contexts for each thread and refuses most calls on an empty one (201); the CUDA runtime,
which torch and CuPy use, makes the primary context current by itself. Both worlds exist here:
`runtime=True` behaves like a process in which the runtime is at work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .world import (
    CONTEXT_IS_DESTROYED,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_VALUE,
    Calls,
    Handle,
    Refusal,
    Registry,
    World,
    as_int,
    call,
    new_address,
    new_identity,
    types,
)

TOTAL_MEMORY = 16 << 30

_ATTRIBUTES = {  # CUdevice_attribute -> value; what is not here answers 0
    1: 1024,  # threads a block
    8: 48 << 10,  # shared memory a block
    10: 32,  # warp size
    16: 132,  # multiprocessors
    39: 2048,  # threads a multiprocessor
    41: 1,  # unified addressing
    75: 9,  # compute capability, major
    76: 0,  # compute capability, minor
    115: 1,  # memory pools
    122: 1,  # writes of 64 bits in a stream
}


@dataclass(eq=False)
class Device:
    """One simulated device and its primary context."""

    ordinal: int
    retained: int = 0
    retained_by_runtime: bool = False
    primary: Context | None = None


@dataclass(eq=False)
class Context:
    """A context, primary or made by `cuCtxCreate`."""

    device: Device
    primary: bool
    flags: int = 0
    address: int = field(default_factory=new_address)
    identity: int = field(default_factory=new_identity)

    @property
    def handle(self) -> Any:
        return types.CUcontext(self.address)

    @property
    def counts_as_leak(self) -> bool:
        return not self.primary  # retains of a primary context are counted by its device


class Contexts:
    """All devices and contexts of one driver."""

    def __init__(self, world: World, devices: int, runtime: bool) -> None:
        self.world = world
        self.runtime = runtime
        self.devices = [Device(ordinal) for ordinal in range(devices)]
        self.live: Registry[Context] = Registry(world, "context", INVALID_CONTEXT)

    def device(self, handle: Handle) -> Device:
        """The device behind a `CUdevice`."""
        ordinal = as_int(handle)
        if not 0 <= ordinal < len(self.devices):
            raise Refusal(INVALID_DEVICE)
        return self.devices[ordinal]

    def retain(self, device: Device) -> Context:
        """The primary context of a device, made if it is not there."""
        device.retained += 1
        if device.primary is None:
            device.primary = Context(device, primary=True)
            self.live.add(device.primary.address, device.primary)
        return device.primary

    def release(self, device: Device) -> None:
        """Give one retain back; the last one destroys the primary context."""
        if device.retained == 0:
            self.world.find(f"{self.world.thread.call}: device {device.ordinal} is not retained")
            raise Refusal(INVALID_CONTEXT)
        device.retained -= 1
        if device.retained == 0 and device.primary is not None:
            self.live.forget(device.primary.address)
            device.primary = None

    def current(self) -> Context:
        """The calling thread's context; refuses when there is none."""
        found = self.peek()
        if found is None and self.runtime:
            found = self.devices[0].primary or self._retain_by_runtime()
            self.world.thread.contexts.append(found)
        if found is None:
            raise Refusal(INVALID_CONTEXT)
        if not self.is_live(found):
            raise Refusal(CONTEXT_IS_DESTROYED)
        return found

    def _retain_by_runtime(self) -> Context:
        self.devices[0].retained_by_runtime = True
        return self.retain(self.devices[0])

    def is_live(self, context: Context) -> bool:
        """Whether a context has not been destroyed."""
        return context.address in self.live.live

    def peek(self) -> Context | None:
        """The calling thread's context, if it has one."""
        stack = self.world.thread.contexts
        return stack[-1] if stack else None

    def of(self, handle: Handle) -> Context:
        """The context that a parameter names; the current one when it names none."""
        return self.live.get(handle) if as_int(handle) else self.current()

    def leaks(self) -> list[str]:
        """Retains that were not given back, but for the runtime's and the one that this library keeps."""
        return [
            f"primary context of device {device.ordinal} was retained {device.retained} times "
            f"and not released"
            for device in self.devices
            if device.retained > device.retained_by_runtime + 1
        ]


class ContextCalls(Calls):
    """cuInit, cuDevice*, cuCtx*."""

    contexts: Contexts

    @call()
    def cuInit(self, Flags: int) -> None:
        if Flags != 0:
            raise Refusal(INVALID_VALUE)
        self.world.initialised = True

    @call(1)
    def cuDriverGetVersion(self) -> int:
        return self.world.driver_version

    @call(1)
    def cuDeviceGetCount(self) -> int:
        return len(self.contexts.devices)

    @call(1)
    def cuDeviceGet(self, ordinal: int) -> Any:
        return types.CUdevice(self.contexts.device(ordinal).ordinal)

    @call(1)
    def cuDeviceGetName(self, length: int, dev: Handle) -> bytes:
        name = b"Simulated device %d" % self.contexts.device(dev).ordinal
        return name[: max(length - 1, 0)].ljust(length, b"\0")

    @call(1)
    def cuDeviceGetAttribute(self, attrib: int, dev: Handle) -> int:
        self.contexts.device(dev)
        return _ATTRIBUTES.get(int(attrib), 0)

    @call(1)
    def cuDeviceTotalMem(self, dev: Handle) -> int:
        self.contexts.device(dev)
        return TOTAL_MEMORY

    @call(1)
    def cuDevicePrimaryCtxRetain(self, dev: Handle) -> Any:
        return self.contexts.retain(self.contexts.device(dev)).handle

    @call()
    def cuDevicePrimaryCtxRelease(self, dev: Handle) -> None:
        self.contexts.release(self.contexts.device(dev))

    @call(2)
    def cuDevicePrimaryCtxGetState(self, dev: Handle) -> tuple[int, int]:
        primary = self.contexts.device(dev).primary
        return (primary.flags if primary else 0, 1 if primary else 0)

    @call(1)
    def cuCtxCreate(self, ctxCreateParams: Any, flags: int, dev: Handle) -> Any:
        context = Context(self.contexts.device(dev), primary=False, flags=flags)
        self.contexts.live.add(context.address, context)
        self.world.thread.contexts.append(context)
        return context.handle

    @call()
    def cuCtxDestroy(self, ctx: Handle) -> None:
        if not as_int(ctx):
            raise Refusal(INVALID_VALUE)
        if self.contexts.live.get(ctx).primary:
            self.world.find("cuCtxDestroy was called on a primary context")
            raise Refusal(INVALID_CONTEXT)
        context = self.contexts.live.release(ctx)
        if self.contexts.peek() is context:
            self.world.thread.contexts.pop()

    @call(1)
    def cuCtxGetCurrent(self) -> Any:
        context = self.contexts.peek()
        return context.handle if context else types.CUcontext(0)

    @call()
    def cuCtxSetCurrent(self, ctx: Handle) -> None:
        stack = self.world.thread.contexts
        context = self.contexts.live.get(ctx) if as_int(ctx) else None
        if stack:
            stack.pop()
        if context is not None:
            stack.append(context)

    @call()
    def cuCtxPushCurrent(self, ctx: Handle) -> None:
        if not as_int(ctx):
            raise Refusal(INVALID_VALUE)
        self.world.thread.contexts.append(self.contexts.live.get(ctx))

    @call(1)
    def cuCtxPopCurrent(self) -> Any:
        if not self.world.thread.contexts:
            raise Refusal(INVALID_CONTEXT)
        return self.world.thread.contexts.pop().handle

    @call(1)
    def cuCtxGetDevice(self) -> Any:
        return types.CUdevice(self.contexts.current().device.ordinal)

    @call(1)
    def cuCtxGetId(self, ctx: Handle) -> int:
        return self.contexts.of(ctx).identity

    @call(1)
    def cuCtxGetFlags(self) -> int:
        return self.contexts.current().flags

    @call(2)
    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int]:
        self.contexts.current()
        return 0, -5

    @call(1)
    def cuGetErrorName(self, error: int) -> bytes:
        return _result(error).name.encode()  # type: ignore[no-any-return]

    @call(1)
    def cuGetErrorString(self, error: int) -> bytes:
        return _sentence(_result(error).name)


def _result(error: int) -> Any:
    try:
        return types.CUresult(int(error))
    except ValueError:
        raise Refusal(INVALID_VALUE) from None


_SENTENCES = {
    "CUDA_SUCCESS": "no error",
    "CUDA_ERROR_INVALID_VALUE": "invalid argument",
    "CUDA_ERROR_NOT_INITIALIZED": "initialization error",
    "CUDA_ERROR_INVALID_CONTEXT": "invalid device context",
    "CUDA_ERROR_INVALID_HANDLE": "invalid resource handle",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "operation not permitted when stream is capturing",
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": (
        "operation failed due to a previous error during capture"
    ),
    "CUDA_ERROR_STREAM_CAPTURE_MERGE": "operation would result in a merge of separate captures",
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": "capturing stream has unjoined work",
    "CUDA_ERROR_STREAM_CAPTURE_ISOLATION": "dependency on uncaptured work in another stream",
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": (
        "operation would make the legacy stream depend on a capturing blocking stream"
    ),
    "CUDA_ERROR_CAPTURED_EVENT": (
        "operation not permitted on an event last recorded in a capturing stream"
    ),
    "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD": (
        "attempt to terminate a thread-local capture sequence from another thread"
    ),
}


def _sentence(name: str) -> bytes:
    plain = name.removeprefix("CUDA_ERROR_").replace("_", " ").lower()
    return _SENTENCES.get(name, plain).encode()
