"""What a second capture of the same work proves about the words of the first.

The hard problem: an address inside a tensor map is opaque by contract, so what a move may do there has to
be seen, not known. The same work captured on other buffers shows it: a word that lies in the old memory,
and has changed by just as much as the buffer has, is that buffer's address; one that has changed
otherwise, or changed beside it in the same opaque argument without being an address, proves that more
than an address is in there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..._driver import bindings, contexts, node_params
from ...errors import bad_type
from ..errors import cannot_rebind
from ..segments import GraphSegment
from .address_index import Hit, inventory_of
from .moves import Move, move_of

if TYPE_CHECKING:
    from ..segments import EagerSegment


#: What the nodes of each segment do, in the order of `Template.walk`.
Works = list[list[node_params.Work]]

_WORD = 8

#: A tensor map has 128 bytes and is aligned to 64 (CUDA driver API, CUtensorMap).
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_TENSOR_MAPS_FROM = 9  # compute capability
_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR


# ---------------------------------------------------------------- tensor maps


def has_tensor_maps(driver: bindings.Driver) -> bool:
    """Whether the current device's kernels may take tensor maps; yes where that is not known."""
    context = contexts.current(driver)
    key = ("tensor maps", context)
    if key not in driver.cache:
        attribute = bindings.types.CUdevice_attribute(_CAPABILITY_MAJOR)
        device = driver.cuCtxGetDevice() if context else None
        major = driver.cuDeviceGetAttribute(attribute, device) if context else _TENSOR_MAPS_FROM
        driver.cache[key] = int(major) >= _TENSOR_MAPS_FROM
    return bool(driver.cache[key])


def may_be_map(work: node_params.Kernel, hit: Hit) -> bool:
    """Whether a word may be part of a tensor map.

    A map is passed by value, in a parameter aligned to 64 (whose size is then a multiple of 64), or
    anywhere in the one large packed parameter that cuBLAS's Hopper kernels take.
    """
    start, size = work.parameters[hit.argument]
    if size < _MAP_BYTES:
        return False
    if work.packed:
        return True
    aligned = start % _MAP_ALIGNMENT == 0 and size % _MAP_ALIGNMENT == 0
    return aligned and hit.offset % _MAP_ALIGNMENT == 0 and hit.offset + _MAP_BYTES <= size


# ---------------------------------------------------------------- the second capture


def second_capture(verify: Callable[..., Any], moves: list[Move]) -> Works:
    """What the sequence that `verify` captures does, segment by segment.

    A function with parameters is given the new tensors, in the order of the moves.
    """
    given = [move.new.owner for move in moves] if _takes_arguments(verify) else []
    other = verify(*given)
    segments = getattr(other, "segments", None)
    if segments is None:
        raise bad_type("what verify returns", other, "the sequence that it captured")
    return [
        [entry.work for entry in inventory_of(segment._template).entries]
        for segment in with_work(segments)
    ]


def _takes_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # a builtin without a signature
        return False
    return False


def with_work(segments: Iterable[GraphSegment | EagerSegment]) -> list[GraphSegment]:
    """The graph segments in which something was captured."""
    return [part for part in segments if isinstance(part, GraphSegment) and not part.is_empty]


class Proof:
    """Two captures of the same work. Raises `ValueError` where they are not, or where the second
    was made on the buffers of the first.
    """

    def __init__(
        self, driver: bindings.Driver, moves: list[Move], mine: Works, theirs: Works
    ) -> None:
        self._driver, self._moves = driver, moves
        self._has_maps = has_tensor_maps(driver)
        self._partners: dict[int, node_params.Kernel] = {}  # by the identity of my kernel's value
        self._bases: dict[Move, int] = {}  # where each old range was in the second capture
        self._pair(mine, theirs)

    def _pair(self, mine: Works, theirs: Works) -> None:
        if len(mine) != len(theirs):
            raise cannot_rebind("verify captured another number of segments")
        seen: dict[Move, dict[int, int]] = {}
        for some, others in zip(mine, theirs, strict=True):
            if [_shape(work) for work in some] != [_shape(work) for work in others]:
                raise cannot_rebind("verify captured other work: kernels or launch shapes differ")
            for work, other in zip(some, others, strict=True):
                if isinstance(work, node_params.Kernel) and isinstance(other, node_params.Kernel):
                    self._partners[id(work)] = other
                    self._count_bases(work, other, seen)
        for move, bases in seen.items():
            moved = {base: count for base, count in bases.items() if base != move.start}
            if not moved:
                raise cannot_rebind(
                    "verify captured on the same buffers as this sequence, which proves nothing"
                )
            self._bases[move] = max(moved, key=lambda base: moved[base])

    def _count_bases(
        self, work: node_params.Kernel, other: node_params.Kernel, seen: dict[Move, dict[int, int]]
    ) -> None:
        for argument, offset, value in work.words():
            move = move_of(self._moves, value)
            if move is not None:
                base = _word(other, argument, offset) - (value - move.start)
                bases = seen.setdefault(move, {})
                bases[base] = bases.get(base, 0) + 1

    def sift(
        self, work: node_params.Kernel, label: str, hits: list[Hit]
    ) -> tuple[list[Hit], list[Hit]]:
        """The hits that moved with their memory, and those that did not move at all.

        Raises `ValueError` for a word that changed otherwise. `work` is one of those that the proof
        was made with.
        """
        other = self._partners[id(work)]
        kept, unmoved = [], []
        for hit in hits:
            there = _word(other, hit.argument, hit.offset)
            if there == hit.value:
                unmoved.append(hit)
            elif hit.move and there - (hit.value - hit.move.start) == self._bases[hit.move]:
                kept.append(hit)
            else:
                raise cannot_rebind(
                    f"a word in argument {hit.argument} of {label} changed in verify, but not as the "
                    "memory moved"
                )
        for hit in kept:
            if self._has_maps and may_be_map(work, hit):
                self._require_explained(work, label, hit.argument, kept, other)
        return kept, unmoved

    def _require_explained(
        self,
        work: node_params.Kernel,
        label: str,
        argument: int,
        hits: list[Hit],
        other: node_params.Kernel,
    ) -> None:
        """Beside the moved words, an opaque argument may differ only in addresses of other memory."""
        known = {hit.offset for hit in hits if hit.argument == argument}
        for index, offset, value in work.words():
            there = _word(other, index, offset) if index == argument else value
            if there == value or offset in known:
                continue
            if not (self._is_memory(value) and self._is_memory(there)):
                raise cannot_rebind(
                    f"argument {argument} of {label} is opaque, and changed in verify in a place that "
                    "is no address"
                )

    def _is_memory(self, value: int) -> bool:
        return 0 < value < 1 << 63 and self._driver.allocation(value) is not None


def _shape(work: node_params.Work) -> tuple[Any, ...]:
    """What two captures of the same work agree in."""
    if isinstance(work, node_params.Kernel):
        return work.name, work.grid, work.block, work.shared_bytes, work.parameters
    if isinstance(work, node_params.Copy):
        return work.kind, work.width, work.height, work.depth
    if isinstance(work, node_params.Fill):
        return work.kind, work.value, work.element_size, work.width, work.height
    return (work.kind,)


def _word(work: node_params.Kernel, argument: int, offset: int) -> int:
    return int.from_bytes(work.args[argument][offset : offset + _WORD], "little")
