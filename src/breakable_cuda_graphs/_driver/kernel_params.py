"""What is in a graph: kinds of nodes, names of kernels, the bytes of their arguments.

The hard problem: the driver hands out kernel arguments as raw addresses in one of two forms
(`kernelParams`, an array of pointers, or `extra`, one packed buffer: cuBLAS's Hopper kernels use
it), with sizes but no types. Reading the wrong form crashes the process, so both are told apart
here, and every byte is copied out at once: the memory belongs to the node.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from . import bindings
from .enums import INVALID_VALUE, KERNEL, PARAM_BUFFER, PARAM_END, PARAM_SIZE

#: Bytes of an argument that is filled as a whole: pointers and numbers, or an array of a few of them.
SMALL = 64

_POINTER = ctypes.sizeof(ctypes.c_void_p)


class Layout:
    """Name and parameter layout of a kernel: `parameters` is ((offset, size), ...)."""

    def __init__(self, name: str, parameters: tuple[tuple[int, int], ...]) -> None:
        self.name, self.parameters = name, parameters
        self._read_pointers = _words_at(len(parameters))
        self._wide = [
            (n, _words_at(size // 8)) for n, (_, size) in enumerate(parameters) if size >= 8
        ]

    def words(self, table: int) -> list[int]:
        """Every 8-byte step of the arguments that an array of pointers at `table` leads to."""
        addresses = self._read_pointers(_MEMORY, table)
        words: list[int] = []
        for number, read in self._wide:
            address = addresses[number]
            if address:
                words += read(_MEMORY, address)
        return words


#: All addresses of this process, to read from: an object of ctypes for each piece would take twice as long.
_MEMORY = (ctypes.c_char * (1 << 62)).from_address(0)


def _words_at(count: int) -> Callable[[Any, int], tuple[int, ...]]:
    """What reads so many words of `_MEMORY` from an address on."""
    return struct.Struct(f"={count}Q").unpack_from


def node_type(driver: bindings.Driver, node: Any) -> int:
    """`CUgraphNodeType` as a number; -1 for a kind that these bindings do not know."""
    try:
        code, kind = driver.module.cuGraphNodeGetType(node)
        if code:
            raise driver.error("cuGraphNodeGetType", code)
        return int(kind)
    except ValueError:
        return -1


class KernelReader:
    """Reads kernel nodes; remembers the layout of each function.

    A reader lives as long as one look at a graph or one capture, not longer: function handles are
    used again by the driver once a module has been unloaded.
    """

    def __init__(self, driver: bindings.Driver) -> None:
        self.driver = driver
        self._layouts: dict[int, Layout] = {}
        self._get_params = driver.module.cuGraphKernelNodeGetParams  # raw: once for each kernel

    def params(self, node: Any) -> Any:
        """The driver's struct for a kernel node. Never print it: its repr may crash the process."""
        code, params = self._get_params(node)
        if code:
            raise self.driver.error("cuGraphKernelNodeGetParams", code)
        return params

    def layout(self, params: Any) -> Layout:
        """Name and parameters of the kernel that a struct launches."""
        handle = int(params.func or 0) or int(params.kern or 0)
        known = self._layouts.get(handle)
        if known is None:
            function = params.func if int(params.func or 0) else params.kern
            known = self._layouts[handle] = _read_layout(self.driver, function)
        return known

    def name(self, node: Any) -> str:
        """The mangled name of a kernel node's kernel."""
        return self.layout(self.params(node)).name

    def arguments(self, params: Any) -> list[bytes]:
        """A copy of each argument of a kernel node, in order."""
        parameters = self.layout(params).parameters
        if not parameters:
            return []
        table = int(params.kernelParams or 0)
        if table:
            addresses = (ctypes.c_void_p * len(parameters)).from_address(table)
            return [
                ctypes.string_at(address, size) if address else bytes(size)
                for address, (_, size) in zip(addresses, parameters, strict=True)
            ]
        packed = packed_buffer(int(params.extra or 0))
        return [packed[offset : offset + size] for offset, size in parameters]

    def words_of(self, node: Any) -> list[int] | None:
        """Every 8-byte step of a kernel node's arguments; None for a node of another kind.

        The driver does not read those as kernels; so a kernel need not be asked for its kind first.
        """
        code, params = self._get_params(node)
        if code:
            if node_type(self.driver, node) == KERNEL:
                raise self.driver.error("cuGraphKernelNodeGetParams", code)
            return None
        table = int(params.kernelParams or 0)
        if table:
            known = self._layouts.get(int(params.func or 0))
            return (known or self.layout(params)).words(table)
        words: list[int] = []
        for data in self.arguments(params):
            words += steps_of(data)
        return words

    def describe(self, node: Any) -> str:
        """One word or name for a node, for messages."""
        kind = node_type(self.driver, node)
        if kind == KERNEL:
            return self.name(node)
        try:
            name = str(bindings.types.CUgraphNodeType(kind).name)
        except ValueError:
            return f"node of kind {kind}"
        return name.removeprefix("CU_GRAPH_NODE_TYPE_").lower().replace("_", " ")


def steps_of(data: bytes) -> memoryview:
    """Every whole 8-byte step of an argument, as an unsigned number."""
    return memoryview(data[: len(data) & ~7]).cast("Q")


def _read_layout(driver: bindings.Driver, function: Any) -> Layout:
    is_kernel = isinstance(function, bindings.types.CUkernel)
    name = (driver.cuKernelGetName if is_kernel else driver.cuFuncGetName)(function)
    call = "cuKernelGetParamInfo" if is_kernel else "cuFuncGetParamInfo"
    info, parameters = driver.raw(call), list[tuple[int, int]]()
    while True:
        code, offset, size = info(function, len(parameters))
        if int(code) == INVALID_VALUE:  # there are no more
            break
        if code:
            raise driver.error(call, code)
        parameters.append((int(offset), int(size)))
    return Layout(name.decode() if isinstance(name, bytes) else str(name), tuple(parameters))


def layout_of(parameters: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """(offset, size) of each ctypes type, aligned as the members of a C structure are."""
    at, layout = 0, []
    for parameter in parameters:
        alignment = ctypes.alignment(parameter)
        at = (at + alignment - 1) // alignment * alignment
        layout.append((at, ctypes.sizeof(parameter)))
        at += ctypes.sizeof(parameter)
    return tuple(layout)


def packed_buffer(extra: int) -> bytes:
    """The buffer of CU_LAUNCH_PARAM_BUFFER_POINTER / _SIZE pairs, or nothing."""
    buffer, size, at = 0, 0, extra
    while at:
        key = ctypes.c_size_t.from_address(at).value
        if key == PARAM_END:
            break
        value = ctypes.c_size_t.from_address(at + _POINTER).value
        if key == PARAM_BUFFER:
            buffer = value
        elif key == PARAM_SIZE:
            size = ctypes.c_size_t.from_address(value).value
        at += 2 * _POINTER
    return ctypes.string_at(buffer, size) if buffer and size else b""


def is_memory(driver: bindings.Driver, word: int) -> bool:
    """Whether a word is the address of device or pinned memory, or only looks like a number.

    The driver knows no address of ordinary host memory (cuPointerGetAttribute: INVALID_VALUE).
    """
    if not 1 << 20 < word < 1 << 57:
        return False
    attribute = bindings.types.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    return driver.ask("cuPointerGetAttribute", attribute, word) is not None
