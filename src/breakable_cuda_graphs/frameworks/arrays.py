"""Arrays of any library: who knows a value as a device array, and whose memory it lies in.

The hard problem: an array may be a window onto memory that another library made (DLPack,
`__cuda_array_interface__`), so who made the array is not who ends the memory. Owners are followed to
the one that does. Where the way ends at something that tells nobody of its end, such as a DLPack
capsule, the array itself has to be kept.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from .protocols import ArrayKind

_INTERFACE = "__cuda_array_interface__"

#: CuPy's memory objects that stand for memory of others.
_WINDOWS = ("UnownedMemory", "DLPackMemory")


class MemoryPiece(NamedTuple):
    """The whole piece of memory that an array lies in.

    `storage` lives exactly as long as the memory, None: nothing does; holding `keeper` keeps it.
    """

    address: int
    nbytes: int
    storage: Any
    keeper: Any


def interface_of(value: Any) -> dict[str, Any] | None:
    """What `__cuda_array_interface__` of a value says; None if it is no device array.

    Torch's tensors are not asked: theirs raises for tensors on the CPU, and torch knows its own. Nor is
    an object that makes up its attributes as it is asked for them.
    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    """
    kind = type(value)
    if isinstance(value, type) or kind.__module__.partition(".")[0] == "torch":
        return None
    if not hasattr(kind, _INTERFACE) and _INTERFACE not in getattr(value, "__dict__", ()):
        return None
    try:
        found = getattr(value, _INTERFACE)
    except Exception:  # freed, on the host, or not to be had for another reason of its own
        return None
    return found if isinstance(found, dict) and "data" in found else None


# ---------------------------------------------------------------- whose memory


def piece_of(value: Any) -> MemoryPiece | None:
    """The memory that an array of CuPy, Numba or torch lies in; None if nobody here knows it."""
    return _of_torch(value) or _of_cupy(value) or _of_numba(value)


def _of_torch(value: Any) -> MemoryPiece | None:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    storage = value.untyped_storage()
    return MemoryPiece(storage.data_ptr(), storage.nbytes(), storage, storage)


def _of_cupy(value: Any) -> MemoryPiece | None:
    """A CuPy array: memory of a pool ends with the array that was made in it, the root of its views.

    The memory objects of CuPy's pools take no weak references; arrays do.
    """
    memory = getattr(getattr(value, "data", None), "mem", None)
    if memory is None or not hasattr(memory, "device_id"):
        return None
    root = value if value.base is None else value.base
    owner = getattr(memory, "_owner", None)
    if owner is not None:
        below = piece_of(owner)
        if below is not None:
            return below
    is_window = type(memory).__name__ in _WINDOWS
    return MemoryPiece(int(memory.ptr), int(memory.size), None if is_window else root, root)


def _of_numba(value: Any) -> MemoryPiece | None:
    """A Numba array: `gpu_data.owner` is the allocation, or the object that the memory came from.

    The allocation counts who uses it: a reference to it keeps the object, not the memory. An array
    keeps both.
    """
    owner = getattr(getattr(value, "gpu_data", None), "owner", None)
    if owner is None:
        return None
    if not hasattr(owner, "device_pointer"):
        below = piece_of(owner)
        if below is not None:
            return below
        return MemoryPiece(
            int(value.gpu_data.device_pointer), int(value.gpu_data.size), None, value
        )
    storage = owner if getattr(owner, "is_managed", False) else None
    return MemoryPiece(int(owner.device_pointer), int(owner.size), storage, value)


# ---------------------------------------------------------------- what arrays have in common


class ArraysWithoutHistory:
    """Arrays of a library that has no autograd."""

    def detached(self, value: Any) -> Any:
        return value

    def history(self, value: Any) -> Any:
        return None

    def requires_grad(self, value: Any) -> bool:
        return False

    def new_views(self, values: list[Any]) -> list[Any] | None:
        return None


class ArraysWithAliases(ArraysWithoutHistory, ABC):
    """Arrays whose memory `piece_of` knows, and of which an alias can be made."""

    @abstractmethod
    def moved(self, value: Any, start: int, end: int, shift: int) -> Any:
        """See `Arrays.moved`."""

    def alias(self, value: Any) -> Any:
        """The same memory, type, shape and strides; keeps nothing."""
        return self.moved(value, 0, 0, 0)

    def storage(self, value: Any) -> tuple[int, int, Any]:
        return self._piece(value)[:3]

    def keeper(self, value: Any) -> Any:
        return self._piece(value).keeper

    def _piece(self, value: Any) -> MemoryPiece:
        found = piece_of(value)
        assert found is not None
        return found


# ---------------------------------------------------------------- arrays that only their type knows


def _known_interface(value: Any) -> dict[str, Any]:
    interface = interface_of(value)
    assert interface is not None
    return interface


class ForeignArrays(ArraysWithoutHistory):
    """Objects with `__cuda_array_interface__` of a library that is not known here.

    Nobody but that library can make another one, so a break is given the very object again, and the
    sequence keeps it.
    """

    def owns(self, value: Any) -> bool:
        return interface_of(value) is not None

    def can_alias(self, value: Any) -> bool:
        return False

    def alias(self, value: Any) -> Any:
        return value

    def moved(self, value: Any, start: int, end: int, shift: int) -> Any:
        raise NotImplementedError  # never asked: `can_alias` says no

    def storage(self, value: Any) -> tuple[int, int, Any]:
        return int(_known_interface(value)["data"][0]), 0, None

    def keeper(self, value: Any) -> Any:
        return value

    def place(self, value: Any) -> tuple[Any, ...]:
        interface = _known_interface(value)
        return interface["data"][0], interface.get("strides")

    def kind(self, value: Any) -> ArrayKind:
        interface = _known_interface(value)
        return interface["typestr"], tuple(interface["shape"]), "cuda"

    def new_buffer(self, value: Any) -> Any:
        raise NotImplementedError

    def copy(self, target: Any, source: Any) -> None:
        raise NotImplementedError
