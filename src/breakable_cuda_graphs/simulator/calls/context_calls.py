"""The calls of the simulated driver: devices, contexts, errors and versions.

The hard problem: calls depend on what is current in the calling thread, and some work before anything is.
"""

from __future__ import annotations

from typing import Any

from ..._driver.enums import INVALID_CONTEXT, INVALID_VALUE
from ..contexts import ATTRIBUTES, TOTAL_MEMORY, Context, Contexts
from ..world import DriverCalls, Handle, Refusal, as_int, call, types


class ContextCalls(DriverCalls):
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
        return ATTRIBUTES.get(int(attrib), 0)

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
        made = Context(self.contexts.device(dev), primary=False, flags=flags)
        context = self.contexts.live.add(made)
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
