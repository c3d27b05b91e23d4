"""The kernels that give conditional nodes their values, for the simulated device.

The hard problem: on a device they are compiled from C (`_driver.conditionals`). Here they are Python with the
same parameters, so that the nodes which launch them are built, read and edited in the same way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from .._driver.conditionals import CHOICE, CONDITION
from .kernels import set_conditional


def _set_condition(
    handle: int, opposite: int, flag: int, mask: int, size: int, has_opposite: int
) -> None:
    yes = bool(int.from_bytes(ctypes.string_at(flag, size), "little") & mask)
    set_conditional(handle, int(yes))
    if has_opposite:
        set_conditional(opposite, int(not yes))


def _set_choice(handle: int, index: int, sign: int, size: int) -> None:
    value = int.from_bytes(ctypes.string_at(index, size), "little")
    outside = value & sign or value > 0xFFFFFFFE
    set_conditional(handle, 0xFFFFFFFF if outside else value)


#: The bodies by the names of the kernels.
SETTERS: dict[str, Callable[..., None]] = {
    CONDITION: _set_condition,
    CHOICE: _set_choice,
}
