"""The calls of the simulated driver: user objects that graphs keep alive.

The hard problem: a reference can be moved, shared by clones and released in any order, and each count
has to come out even.
"""

from __future__ import annotations

from typing import Any

from ..._driver.enums import INVALID_VALUE, MOVE, NO_DESTRUCTOR_SYNC
from ..graphs import Graphs
from ..users import UserObjects
from ..world import DriverCalls, Handle, Refusal, address_of, as_int, call


class UserObjectCalls(DriverCalls):
    """cuUserObject*, cuGraphRetainUserObject, cuGraphReleaseUserObject."""

    users: UserObjects
    graphs: Graphs

    @call(1)
    def cuUserObjectCreate(
        self, ptr: Any, destroy: Handle, initialRefcount: int, flags: int
    ) -> Any:
        if not as_int(destroy) or initialRefcount < 1 or int(flags) != NO_DESTRUCTOR_SYNC:
            raise Refusal(INVALID_VALUE)
        return self.users.create(address_of(ptr), as_int(destroy), initialRefcount).handle

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
        moved = int(flags) == MOVE
        if count < 1 or int(flags) not in (0, MOVE) or (moved and count > thing.owned):
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
