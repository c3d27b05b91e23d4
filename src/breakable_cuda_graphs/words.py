"""The arguments of a kernel as they are read back: bytes, and the words in them that are addresses.

The hard problem: the driver tells the sizes of a kernel's arguments and no types, so none are guessed.
An argument is bytes, which its reader takes for what they know them to be; what does not fit is refused.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import errors

__all__ = ["Address", "Arg"]


@dataclass(frozen=True)
class Arg:
    """One argument of a kernel: its place, its size in bytes, and a copy of its bytes.

    The driver knows no types. The `as_` methods read the bytes as a type of your choice; without
    `at` the argument must be just that large, with `at` they begin that many bytes into it. What does
    not fit is a `ValueError`.
    """

    index: int
    offset: int
    size: int
    data: bytes

    def _read(self, code: str, at: int | None) -> Any:
        size = struct.calcsize(code)
        start = at or 0
        if (at is None and size != self.size) or start < 0 or start + size > self.size:
            raise errors.argument_read_wrongly(self.index, self.size, size, at)
        return struct.unpack_from("<" + code, self.data, start)[0]

    def as_pointer(self, at: int | None = None) -> int:
        """An address."""
        return int(self._read("Q", at))

    def as_bool(self, at: int | None = None) -> bool:
        """A C++ bool, of one byte."""
        return bool(self._read("?", at))

    def as_int8(self, at: int | None = None) -> int:
        """A signed number of one byte."""
        return int(self._read("b", at))

    def as_int16(self, at: int | None = None) -> int:
        """A signed number of 2 bytes."""
        return int(self._read("h", at))

    def as_int32(self, at: int | None = None) -> int:
        """A signed number of 4 bytes."""
        return int(self._read("i", at))

    def as_int64(self, at: int | None = None) -> int:
        """A signed number of 8 bytes."""
        return int(self._read("q", at))

    def as_uint8(self, at: int | None = None) -> int:
        """An unsigned number of one byte."""
        return int(self._read("B", at))

    def as_uint16(self, at: int | None = None) -> int:
        """An unsigned number of 2 bytes."""
        return int(self._read("H", at))

    def as_uint32(self, at: int | None = None) -> int:
        """An unsigned number of 4 bytes."""
        return int(self._read("I", at))

    def as_uint64(self, at: int | None = None) -> int:
        """An unsigned number of 8 bytes."""
        return int(self._read("Q", at))

    def as_float16(self, at: int | None = None) -> float:
        """A half of 2 bytes."""
        return float(self._read("e", at))

    def as_float32(self, at: int | None = None) -> float:
        """A float of 4 bytes."""
        return float(self._read("f", at))

    def as_float64(self, at: int | None = None) -> float:
        """A double of 8 bytes."""
        return float(self._read("d", at))

    def as_struct(self, kind: Any) -> Any:
        """An instance of a `ctypes` structure of the argument's size."""
        try:
            size = ctypes.sizeof(kind)
        except TypeError:
            raise errors.bad_type("kind", kind, "a ctypes.Structure") from None
        if size != self.size:
            raise errors.argument_read_wrongly(self.index, self.size, size, None)
        return kind.from_buffer_copy(self.data)

    def __repr__(self) -> str:
        shown = self.data[:16].hex(" ") + (" ..." if self.size > 16 else "")
        return f"Arg({self.index}, offset={self.offset}, size={self.size}, {shown})"


class Address(NamedTuple):
    """A word inside an argument that is the address of known memory.

    `offset` is the word's place in the argument, in bytes; `what` says whose memory it is: an
    argument of a break, an input, a block of the pool, or other memory of the device.
    """

    argument: int
    offset: int
    value: int
    what: str
