"""User objects: reference counts with a C destructor at the end.

The hard problem: references are held by the caller and by graphs, clones and executables, and move
between them; the destructor runs when the last one goes, once, on a thread that may not call the
driver. Here it runs at the end of the call that dropped the last reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from .._driver.enums import INVALID_VALUE
from .world import DriverObject, Refusal, Registry, World, types


@dataclass(eq=False)
class UserObject(DriverObject):
    """One user object; `owned` of its references are the caller's."""

    handle_type = types.CUuserObject
    pointer: int
    destructor: int
    references: int
    owned: int

    @property
    def counts_as_leak(self) -> bool:
        return self.owned > 0


class UserObjects:
    """All user objects of one driver."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.live: Registry[UserObject] = Registry(world, "user object")

    def create(self, pointer: int, destructor: int, count: int) -> UserObject:
        """A new one, its references the caller's."""
        return self.live.add(UserObject(pointer, destructor, count, count))

    def retained(self, held: Mapping[int, int]) -> dict[int, int]:
        """What another graph holds too: the same references once more."""
        for address, count in held.items():
            self.live.get(address).references += count
        return dict(held)

    def release_all(self, held: Mapping[int, int]) -> None:
        """The references of a graph that is gone."""
        for address, count in held.items():
            self.release(address, count)

    def release(self, address: int, count: int) -> None:
        """Fewer references; the destructor runs with the last one."""
        thing = self.live.get(address)
        if count > thing.references:
            raise Refusal(INVALID_VALUE)
        thing.references -= count
        if thing.references == 0:
            self.live.forget(address)
            self.world.afterwards(lambda: self._destroy(thing))

    def _destroy(self, thing: UserObject) -> None:
        destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(thing.destructor)
        self.world.run_foreign("a user object's destructor", lambda: destructor(thing.pointer))
