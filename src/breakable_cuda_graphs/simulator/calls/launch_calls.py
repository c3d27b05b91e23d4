"""The calls that give work to a stream: kernels, copies, fills, writes of words, host functions.

The hard problem: the synchronous forms look like the asynchronous ones and are not. They work on
the legacy stream and wait for it, so while a blocking stream captures they are an implicit dependency
(906). While none does they are allowed, and run at once.
"""

from __future__ import annotations

from typing import Any

from ..._driver.enums import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    INVALID_VALUE,
    PRIORITY,
    UNIFIED_MEMORY,
    WRITE_64,
)
from ..._driver.node_params import Dim, End, MemoryOperation
from ..captures import Captures
from ..contexts import Contexts
from ..nodes import BatchMemOp, Host, Memcpy, Memset
from ..stream_state import Stream
from ..streams import StreamTable
from ..structs import OutsideLimits, Structs, attribute_bytes
from ..world import DriverCalls, Handle, Refusal, address_of, as_int, call


class LaunchCalls(DriverCalls):
    """cuLaunchKernel*, cuLaunchHostFunc, cuMemcpy*, cuMemset*, and one stream memory operation."""

    streams: StreamTable
    structs: Structs
    contexts: Contexts
    captures: Captures

    # ---- kernels and host functions

    @call()
    def cuLaunchKernel(
        self,
        f: Handle,
        gridDimX: int,
        gridDimY: int,
        gridDimZ: int,
        blockDimX: int,
        blockDimY: int,
        blockDimZ: int,
        sharedMemBytes: int,
        hStream: Handle,
        kernelParams: Any,
        extra: Any,
    ) -> None:
        grid, block = (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ)
        self._launch(hStream, f, grid, block, sharedMemBytes, kernelParams, extra, {})

    @call()
    def cuLaunchKernelEx(self, config: Any, f: Handle, kernelParams: Any, extra: Any) -> None:
        if config is None:
            raise Refusal(INVALID_VALUE)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        attributes = (config.attrs or [])[: config.numAttrs]
        given = {int(each.id): attribute_bytes(each.value) for each in attributes}
        rest = (config.sharedMemBytes, kernelParams, extra, given)
        self._launch(config.hStream, f, grid, block, *rest)

    def _launch(
        self,
        handle: Handle,
        function: Handle,
        grid: Dim,
        block: Dim,
        shared_bytes: int,
        arguments: Any,
        extra: Any,
        given: dict[int, bytes],
    ) -> None:
        stream = self.streams.usable(handle)
        attributes = tuple((_attributes_of(stream.priority) | given).items())
        context = stream.context.address
        try:
            work = self.structs.launch(
                (function,), grid, block, shared_bytes, arguments, extra, context, attributes
            )
        except OutsideLimits:
            if stream.capture is not None:
                self.captures.invalidate(stream.capture)
            raise
        self.streams.submit(stream, work)

    @call()
    def cuLaunchHostFunc(self, hStream: Handle, fn: Handle, userData: Any) -> None:
        self.streams.submit(self.streams.usable(hStream), Host(as_int(fn), address_of(userData)))

    # ---- copies

    def _copy(self, stream: Stream, dst: End, src: End, size: int) -> None:
        if size < 0 or (size and not (dst.address and src.address)):
            raise Refusal(INVALID_VALUE)
        if size:
            work = Memcpy(src, dst, size, context=stream.context.address)
            if stream.capture is not None and not self.structs.copy_fits(work):
                raise Refusal(INVALID_VALUE)
            self.streams.submit(stream, work)

    def _synchronous(self) -> Stream:
        stream = self.streams.get(0)
        self.captures.guard_legacy(stream.context)
        return stream

    @call()
    def cuMemcpyAsync(self, dst: Handle, src: Handle, ByteCount: int, hStream: Handle) -> None:
        self._copy(self.streams.usable(hStream), _unified(dst), _unified(src), ByteCount)

    @call()
    def cuMemcpyHtoDAsync(
        self, dstDevice: Handle, srcHost: Any, ByteCount: int, hStream: Handle
    ) -> None:
        self._copy(self.streams.usable(hStream), _device(dstDevice), _host(srcHost), ByteCount)

    @call()
    def cuMemcpyDtoHAsync(
        self, dstHost: Any, srcDevice: Handle, ByteCount: int, hStream: Handle
    ) -> None:
        self._copy(self.streams.usable(hStream), _host(dstHost), _device(srcDevice), ByteCount)

    @call()
    def cuMemcpyDtoDAsync(
        self, dstDevice: Handle, srcDevice: Handle, ByteCount: int, hStream: Handle
    ) -> None:
        self._copy(self.streams.usable(hStream), _device(dstDevice), _device(srcDevice), ByteCount)

    @call()
    def cuMemcpy3DAsync(self, pCopy: Any, hStream: Handle) -> None:
        stream = self.streams.usable(hStream)
        work = self.structs.memcpy(pCopy, stream.context.address)
        if work.width and work.height and work.depth:
            self.streams.submit(stream, work)

    @call()
    def cuMemcpy(self, dst: Handle, src: Handle, ByteCount: int) -> None:
        self._copy(self._synchronous(), _unified(dst), _unified(src), ByteCount)

    @call()
    def cuMemcpyHtoD(self, dstDevice: Handle, srcHost: Any, ByteCount: int) -> None:
        self._copy(self._synchronous(), _device(dstDevice), _host(srcHost), ByteCount)

    @call()
    def cuMemcpyDtoH(self, dstHost: Any, srcDevice: Handle, ByteCount: int) -> None:
        self._copy(self._synchronous(), _host(dstHost), _device(srcDevice), ByteCount)

    @call()
    def cuMemcpyDtoD(self, dstDevice: Handle, srcDevice: Handle, ByteCount: int) -> None:
        self._copy(self._synchronous(), _device(dstDevice), _device(srcDevice), ByteCount)

    # ---- fills

    def _fill(
        self, stream: Stream, target: Handle, value: int, size: int, width: int, height: int = 1,
        pitch: int = 0,
    ) -> None:  # fmt: skip
        address = as_int(target)
        null = width and not address and stream.capture is None  # a capture takes it
        if address % size or null or (height > 1 and width and pitch < width):
            raise Refusal(INVALID_VALUE)
        if width and height:
            work = Memset(address, value, size, width, height, pitch, stream.context.address)
            self.streams.submit(stream, work)

    @call()
    def cuMemsetD8Async(self, dstDevice: Handle, uc: int, N: int, hStream: Handle) -> None:
        self._fill(self.streams.usable(hStream), dstDevice, uc, 1, N)

    @call()
    def cuMemsetD16Async(self, dstDevice: Handle, us: int, N: int, hStream: Handle) -> None:
        self._fill(self.streams.usable(hStream), dstDevice, us, 2, N)

    @call()
    def cuMemsetD32Async(self, dstDevice: Handle, ui: int, N: int, hStream: Handle) -> None:
        self._fill(self.streams.usable(hStream), dstDevice, ui, 4, N)

    @call()
    def cuStreamWriteValue64(self, stream: Handle, addr: Handle, value: int, flags: int) -> None:
        target, address = self.streams.usable(stream), as_int(addr)
        if address % 8:
            raise Refusal(INVALID_VALUE)
        word = MemoryOperation(WRITE_64, address, int(value), int(flags))
        self.streams.submit(target, BatchMemOp((word,), target.context.address))

    @call()
    def cuMemsetD2D8Async(
        self,
        dstDevice: Handle,
        dstPitch: int,
        uc: int,
        Width: int,
        Height: int,
        hStream: Handle,
    ) -> None:
        self._fill(self.streams.usable(hStream), dstDevice, uc, 1, Width, Height, dstPitch)

    @call()
    def cuMemsetD8(self, dstDevice: Handle, uc: int, N: int) -> None:
        self._fill(self._synchronous(), dstDevice, uc, 1, N)

    @call()
    def cuMemsetD16(self, dstDevice: Handle, us: int, N: int) -> None:
        self._fill(self._synchronous(), dstDevice, us, 2, N)

    @call()
    def cuMemsetD32(self, dstDevice: Handle, ui: int, N: int) -> None:
        self._fill(self._synchronous(), dstDevice, ui, 4, N)


def _unified(address: Handle) -> End:
    return End(UNIFIED_MEMORY, as_int(address))


def _device(address: Handle) -> End:
    return End(DEVICE_MEMORY, as_int(address))


def _host(address: Any) -> End:
    return End(HOST_MEMORY, address_of(address))


def _attributes_of(stream_priority: int) -> dict[int, bytes]:
    """What a captured kernel node takes over from its stream."""
    if not stream_priority:
        return {}
    return {PRIORITY: stream_priority.to_bytes(4, "little", signed=True).ljust(64, b"\0")}
