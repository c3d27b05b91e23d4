"""User objects: reference counts with a C destructor at the end.

The hard problem: references are held by the caller and by graphs, clones and executables, and move
between them; the destructor runs when the last one goes, once, on a thread that may not call the
driver. Here it runs at the end of the call that dropped the last reference.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .world import (
    INVALID_VALUE,
    Calls,
    Handle,
    Refusal,
    Registry,
    World,
    address_of,
    as_int,
    call,
    new_address,
    types,
)

if TYPE_CHECKING:
    from .graphs import Graphs

_NO_DESTRUCTOR_SYNC = 1
_MOVE = 1


@dataclass(eq=False)
class UserObject:
    """One user object; `owned` of its references are the caller's."""

    pointer: int
    destructor: int
    references: int
    owned: int
    address: int = field(default_factory=new_address)

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
        thing = UserObject(pointer, destructor, count, count)
        self.live.add(thing.address, thing)
        return thing

    def retain(self, address: int, count: int) -> None:
        """More references by a graph."""
        self.live.get(address).references += count

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


class UserObjectCalls(Calls):
    """cuUserObject*, cuGraphRetainUserObject, cuGraphReleaseUserObject."""

    users: UserObjects
    graphs: Graphs

    @call(1)
    def cuUserObjectCreate(
        self, ptr: Any, destroy: Handle, initialRefcount: int, flags: int
    ) -> Any:
        if not as_int(destroy) or initialRefcount < 1 or int(flags) != _NO_DESTRUCTOR_SYNC:
            raise Refusal(INVALID_VALUE)
        thing = self.users.create(address_of(ptr), as_int(destroy), initialRefcount)
        return types.CUuserObject(thing.address)

    @call()
    def cuUserObjectRetain(self, object: Handle, count: int) -> None:
        if count < 1:
            raise Refusal(INVALID_VALUE)
        thing = self.users.live.get(object)
        thing.references += count
        thing.owned += count

    @call()
    def cuUserObjectRelease(self, object: Handle, count: int) -> None:
        thing = self.users.live.get(object)
        if count < 1 or count > thing.owned:
            self.world.find(f"cuUserObjectRelease gave back more references than {count} owned")
            raise Refusal(INVALID_VALUE)
        thing.owned -= count
        self.users.release(thing.address, count)

    @call()
    def cuGraphRetainUserObject(
        self, graph: Handle, object: Handle, count: int, flags: int
    ) -> None:
        target = self.graphs.live.get(graph)
        thing = self.users.live.get(object)
        moved = int(flags) == _MOVE
        if count < 1 or int(flags) not in (0, _MOVE) or (moved and count > thing.owned):
            raise Refusal(INVALID_VALUE)
        if moved:
            thing.owned -= count
        else:
            thing.references += count
        target.user_objects[thing.address] = target.user_objects.get(thing.address, 0) + count

    @call()
    def cuGraphReleaseUserObject(self, graph: Handle, object: Handle, count: int) -> None:
        target = self.graphs.live.get(graph)
        thing = self.users.live.get(object)
        held = target.user_objects.get(thing.address, 0)
        if count < 1 or count > held:
            raise Refusal(INVALID_VALUE)
        target.user_objects[thing.address] = held - count
        if held == count:
            del target.user_objects[thing.address]
        self.users.release(thing.address, count)
