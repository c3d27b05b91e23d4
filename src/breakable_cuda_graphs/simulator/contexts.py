"""Devices and contexts, and which context a thread's calls belong to.

The hard problem: every other call depends on a context that it does not name. The driver keeps a
stack of contexts for each thread and refuses most calls on an empty one (201); the CUDA runtime,
which torch and CuPy use, makes the primary context current by itself. Both worlds exist here:
`runtime=True` behaves like a process in which the runtime is at work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .._driver.enums import CONTEXT_IS_DESTROYED, INVALID_CONTEXT, INVALID_DEVICE
from .world import DriverObject, Handle, Refusal, Registry, World, as_int, new_identity, types

TOTAL_MEMORY = 16 << 30

ATTRIBUTES = {  # CUdevice_attribute -> value; what is not here answers 0
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
class Context(DriverObject):
    """A context, primary or made by `cuCtxCreate`."""

    handle_type = types.CUcontext
    device: Device
    primary: bool
    flags: int = 0
    identity: int = field(default_factory=new_identity)

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
            device.primary = self.live.add(Context(device, primary=True))
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
