"""Names, sizes, launch shapes and values in few letters, for lines of text, boxes and errors.

The hard problem: a name may have hundreds of letters and an argument hundreds of bytes, and what two of
them differ in may be anywhere. So a name keeps its start and its end, and a size is only put into a larger
unit that divides it: what is left out is never what tells two of them apart at a glance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._driver import node_params

#: Letters of a name: on a line of a page, in a box of a picture.
_ON_A_LINE, IN_A_BOX = 72, 44


def shortened(name: str, limit: int = _ON_A_LINE) -> str:
    """A name that fits on a line: its start and its end."""
    if len(name) <= limit:
        return name
    half = (limit - 3) // 2
    return f"{name[:half]}...{name[-half:]}"


def size_of(number: int) -> str:
    """A number of bytes in the largest unit that divides it."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024 or number % 1024:
            return f"{number} {unit}"
        number //= 1024
    return f"{number} GiB"


def launch_of(work: node_params.Kernel) -> str:
    """The shape of a launch, and what of its attributes is not as usual."""
    grid, attrs = _dim(work.grid), work.attributes
    shared = f" +{work.shared_bytes} B shared" if work.shared_bytes else ""
    cluster = f", cluster {_dim(attrs.cluster)}" if max(attrs.cluster) > 1 else ""
    cooperative = ", cooperative" if attrs.cooperative else ""
    priority = f", priority {attrs.priority}" if attrs.priority else ""
    noun = "block" if grid == "1" else "blocks"
    return f"{grid} {noun} of {_dim(work.block)}{shared}{cluster}{cooperative}{priority}"


def _dim(dim: tuple[int, int, int]) -> str:
    """Without the ones at its end."""
    x, y, z = dim
    return "x".join(map(str, (x, y, z) if z > 1 else (x, y) if y > 1 else (x,)))


def shown(value: Any) -> str:
    """The value of a field: bytes and large numbers in hexadecimal."""
    if isinstance(value, bytes):
        return value[:16].hex(" ") + (" ..." if len(value) > 16 else "")
    if isinstance(value, int) and not isinstance(value, bool) and value > 1 << 20:
        return hex(value)
    return str(value)


def address_of(address: int, resolve: Callable[[int], str | None]) -> str:
    """An address, and whose memory it is in where that is known."""
    what = resolve(address)
    return f"{address:#x}" + (f" ({what})" if what else "")
