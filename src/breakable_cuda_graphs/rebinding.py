"""seq.rebind: give a captured sequence other memory.

The hard problem: a graph holds addresses as numbers among numbers. Each 8-byte step of each argument
that lies in an old range is taken for an address, which can be wrong in two ways: a number that only
looks like one, and an address inside something opaque (a tensor map of Hopper's copy engine), whose
encoding is nobody's business. Alignment and bounds guard against the first and are reported; the
second is refused unless `verify`, a second capture at other addresses, shows which words move.

Everything is worked out before the first driver call; if one fails, those before it are taken back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from . import errors, structures
from ._driver import bindings, contexts, process, release, works
from .arguments import array_memory
from .executables import GraphExec, _Retired
from .liveness import describe, nbytes_of
from .moves import Move, moves_of
from .plan import Plan
from .segments import EagerSegment, GraphSegment
from .templates import Template

if TYPE_CHECKING:
    from .sequence import CUDAGraphSequence

__all__ = ["Doubt", "Rebound", "rebind"]

_WORD = 8

#: A tensor map has 128 bytes and is aligned to 64 (CUDA driver API, CUtensorMap).
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_TENSOR_MAPS_FROM = 9  # compute capability
_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR


class Doubt(NamedTuple):
    """A word that was left as it is although it could be taken for an old address."""

    node: str
    argument: int
    offset: int
    value: int
    why: str


@dataclasses.dataclass(frozen=True)
class Rebound:
    """What `rebind` changed: numbers of nodes, of words in them, and of arguments of breaks.

    `changes` says each in a line; `doubts` are words that look like old addresses and were left.
    """

    nodes: int
    words: int
    arguments: int
    changes: tuple[str, ...]
    doubts: tuple[Doubt, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.words} addresses in {self.nodes} nodes and {self.arguments} arguments of breaks",
            *self.changes,
            *(f"left: {doubt.value:#x} in {doubt.node}: {doubt.why}" for doubt in self.doubts),
        ]
        return "\n".join(lines)


class _Hit(NamedTuple):
    """A word of a kernel's argument that lies in a move."""

    argument: int
    offset: int
    value: int
    move: Move


class _Edit(NamedTuple):
    """One node's work before and after."""

    editor: GraphExec
    handle: Any
    before: works.Work
    after: works.Work
    words: int
    label: str


def rebind(
    sequence: CUDAGraphSequence, moves: Any, verify: Callable[..., Any] | None = None
) -> Rebound:
    """See `CUDAGraphSequence.rebind`."""
    driver = bindings.current()
    wanted = moves_of(driver, moves)
    if verify is not None and not callable(verify):
        raise errors.not_callable("verify", verify)
    proof = None if verify is None else _proof(verify, wanted)
    with _turn(sequence):
        work = _Rebinding(sequence, wanted, proof)
        work.prepare()
        work.apply()
        return work.report()


@contextlib.contextmanager
def _turn(sequence: CUDAGraphSequence) -> Iterator[None]:
    """No replay meanwhile; and not from a break of this sequence, whose arguments are in use."""
    if sequence._epoch != process.epoch:
        raise errors.used_after_fork("sequence")
    if sequence._is_capturing or sequence._has_turn:
        raise errors.rebind_in_capture()
    if sequence._memory.stale is not None:
        raise errors.stale_input(*sequence._memory.stale)
    with sequence._turn:
        if sequence._framework is None:
            yield
            return
        driver = bindings.current()
        with contexts.made_current(driver, sequence._framework.context), release.relaxed_thread():
            yield


class _Rebinding:
    """One rebind: what it will change, and then the change."""

    def __init__(
        self, sequence: CUDAGraphSequence, moves: list[Move], proof: list[list[works.Work]] | None
    ) -> None:
        self._sequence, self._moves, self._proof = sequence, moves, proof
        self._driver = bindings.current()
        self._has_maps = _has_tensor_maps(self._driver)
        self._edits: list[_Edit] = []
        self._breaks: list[tuple[EagerSegment, tuple[Any, ...], dict[str, Any]]] = []
        self._changes: list[str] = []
        self._doubts: list[Doubt] = []
        self._arguments = 0
        self._used: set[Move] = set()
        self._bases: dict[Move, int] = {}  # where each old range was in the proof

    # ---- working it out

    def prepare(self) -> None:
        """Find all changes; raises for what cannot be moved, and changes nothing."""
        captured = _with_work(self._sequence._segments)
        works_of = [_works(segment._template) for segment in captured]
        if self._proof is not None:
            self._learn(works_of)
        for number, (segment, found) in enumerate(zip(captured, works_of, strict=True)):
            for place, (handle, work) in enumerate(found):
                other = None if self._proof is None else self._proof[number][place]
                self._node(segment, handle, work, other)
        for part in self._sequence._segments:
            if isinstance(part, EagerSegment):
                self._break(part)

    def _move_of(self, address: int) -> Move | None:
        for move in self._moves:
            if move.start <= address < move.end:
                return move
        return None

    def _node(
        self, segment: GraphSegment, handle: Any, work: works.Work, other: works.Work | None
    ) -> None:
        label = _label(work)
        after: works.Work
        if isinstance(work, works.Kernel):
            after, words = self._kernel(work, label, other)
        elif isinstance(work, works.Copy):
            after, words = self._copy(work, label)
        elif isinstance(work, works.Fill):
            after, words = self._fill(work, label)
        else:
            self._refuse_opaque(work, label)
            return
        if words:
            self._edits.append(_Edit(segment.exec, handle, work, after, words, label))
            self._changes.append(f"segment {segment.index}: {words} in {label}")

    def _refuse_opaque(self, work: works.Work, label: str) -> None:
        if isinstance(work, works.Batch):
            for operation in work.operations:
                if self._move_of(operation.address) is not None:
                    raise errors.cannot_rebind(f"{label} names the memory, and cannot be changed")
        if isinstance(work, works.Conditional) and not work.bodies:
            raise errors.cannot_rebind(
                "a conditional node of another library cannot be looked into"
            )

    # ---- kernels

    def _kernel(
        self, work: works.Kernel, label: str, other: works.Work | None
    ) -> tuple[works.Kernel, int]:
        hits = self._hits(work, label)
        if not hits:
            return work, 0
        if isinstance(other, works.Kernel):
            hits = self._proven(work, label, hits, other)
        else:
            for hit in hits:
                if self._has_maps and _may_be_map(work, hit):
                    raise errors.cannot_rebind(
                        f"argument {hit.argument} of {label} may hold the address inside a tensor map, "
                        "which is opaque: give verify=, a function that captures the same work on other "
                        "buffers and returns that sequence"
                    )
        args = [bytearray(data) for data in work.args]
        for hit in hits:
            self._used.add(hit.move)
            new = (hit.value + hit.move.shift).to_bytes(_WORD, "little")
            args[hit.argument][hit.offset : hit.offset + _WORD] = new
        return dataclasses.replace(work, args=tuple(bytes(data) for data in args)), len(hits)

    def _hits(self, work: works.Kernel, label: str) -> list[_Hit]:
        found = []
        for argument, offset, value in work.words():
            move = self._move_of(value)
            if move is None:
                if any(value == end.end for end in self._moves):
                    self._doubt(
                        label, argument, offset, value, "just past the end of the old memory"
                    )
            elif (value - move.start) % move.old.itemsize:
                self._doubt(label, argument, offset, value, "not aligned as the elements are")
            else:
                found.append(_Hit(argument, offset, value, move))
        return found

    def _doubt(self, label: str, argument: int, offset: int, value: int, why: str) -> None:
        self._doubts.append(Doubt(label, argument, offset, value, why))

    # ---- proof by a second capture

    def _learn(self, works_of: list[list[tuple[Any, works.Work]]]) -> None:
        """Pair the two captures, and find out where each old range was in the second."""
        assert self._proof is not None
        if len(self._proof) != len(works_of):
            raise errors.cannot_rebind("verify captured another number of segments")
        seen: dict[Move, dict[int, int]] = {}
        for mine, theirs in zip(works_of, self._proof, strict=True):
            if [_shape(work) for _, work in mine] != [_shape(work) for work in theirs]:
                raise errors.cannot_rebind(
                    "verify captured other work: kernels or launch shapes differ"
                )
            for (_, work), other in zip(mine, theirs, strict=True):
                if isinstance(work, works.Kernel) and isinstance(other, works.Kernel):
                    self._count_bases(work, other, seen)
        for move, bases in seen.items():
            moved = {base: count for base, count in bases.items() if base != move.start}
            if not moved:
                raise errors.cannot_rebind(
                    "verify captured on the same buffers as this sequence, which proves nothing"
                )
            self._bases[move] = max(moved, key=lambda base: moved[base])

    def _count_bases(
        self, work: works.Kernel, other: works.Kernel, seen: dict[Move, dict[int, int]]
    ) -> None:
        for argument, offset, value in work.words():
            move = self._move_of(value)
            if move is not None:
                base = _word(other, argument, offset) - (value - move.start)
                bases = seen.setdefault(move, {})
                bases[base] = bases.get(base, 0) + 1

    def _proven(
        self, work: works.Kernel, label: str, hits: list[_Hit], other: works.Kernel
    ) -> list[_Hit]:
        """The hits that moved with the memory in the second capture; refuses what moved otherwise."""
        kept = []
        for hit in hits:
            there = _word(other, hit.argument, hit.offset)
            if there == hit.value:
                self._doubt(label, hit.argument, hit.offset, hit.value, "it did not move in verify")
            elif there - (hit.value - hit.move.start) == self._bases[hit.move]:
                kept.append(hit)
            else:
                raise errors.cannot_rebind(
                    f"a word in argument {hit.argument} of {label} changed in verify, but not as the "
                    "memory moved"
                )
        for hit in kept:
            if self._has_maps and _may_be_map(work, hit):
                self._require_explained(work, label, hit.argument, kept, other)
        return kept

    def _require_explained(
        self, work: works.Kernel, label: str, argument: int, hits: list[_Hit], other: works.Kernel
    ) -> None:
        """Beside the moved words, an opaque argument may differ only in addresses of other memory."""
        known = {hit.offset for hit in hits if hit.argument == argument}
        for index, offset, value in work.words():
            there = _word(other, index, offset) if index == argument else value
            if there == value or offset in known:
                continue
            if not (self._is_memory(value) and self._is_memory(there)):
                raise errors.cannot_rebind(
                    f"argument {argument} of {label} is opaque, and changed in verify in a place that "
                    "is no address"
                )

    def _is_memory(self, value: int) -> bool:
        return 0 < value < 1 << 63 and self._driver.allocation(value) is not None

    # ---- copies and fills

    def _copy(self, work: works.Copy, label: str) -> tuple[works.Copy, int]:
        words = 0
        for side in ("src", "dst"):
            end: works.End = getattr(work, side)
            if end.memory_type == works.ARRAY_MEMORY:
                continue
            move = self._move_of(end.start)
            if move is None:
                continue
            self._require_inside(move, end.start, work.span(end), label)
            if not work.is_flat:
                raise errors.cannot_rebind(
                    f"{label} copies in several dimensions, which an executable does not let change"
                )
            self._used.add(move)
            moved = dataclasses.replace(end, address=end.address + move.shift)
            work = dataclasses.replace(work, **{side: moved})  # type: ignore[arg-type]
            words += 1
        return work, words

    def _fill(self, work: works.Fill, label: str) -> tuple[works.Fill, int]:
        move = self._move_of(work.dst)
        if move is None:
            return work, 0
        self._require_inside(move, work.dst, work.span, label)
        self._used.add(move)
        return dataclasses.replace(work, dst=work.dst + move.shift), 1

    def _require_inside(self, move: Move, start: int, nbytes: int, label: str) -> None:
        if not move.covers(start, nbytes):
            raise errors.cannot_rebind(
                f"{label} reaches beyond the old memory, of which {move.nbytes} bytes were given"
            )

    # ---- breaks

    def _break(self, segment: EagerSegment) -> None:
        changed = 0

        def replace(leaf: Any, path: str) -> Any:
            nonlocal changed
            new = self._leaf(leaf, f"argument {path} of the break {segment.name}")
            changed += new is not leaf
            return new

        args, kwargs = structures.rebuilt_call(segment.args, segment.kwargs, replace)
        places = _moved_places(segment, self._leaf)
        if changed or places is not None:
            self._arguments += changed
            self._breaks.append((segment, args, kwargs))
            self._changes.append(f"break {segment.name}: {changed} arguments")

    def _leaf(self, leaf: Any, what: str) -> Any:
        """An array of a break at its new place; anything else as it is."""
        memory = array_memory(leaf)
        if memory is None or not memory.nbytes or (memory.is_host and not self._driver.simulated):
            return leaf
        move = self._move_of(memory.address)
        if move is None:
            return leaf
        self._require_inside(move, memory.address, memory.nbytes, what)
        arrays = self._arrays()
        self._used.add(move)
        if arrays is not None and arrays.owns(leaf) and arrays.can_alias(leaf):
            from .frameworks.pytorch.moving import moved

            return moved(leaf, move.start, move.end, move.shift)
        if memory.kind == move.new.kind and memory.address == move.start:
            return move.new.owner
        raise errors.cannot_rebind(f"{what} is a {type(leaf).__name__} that cannot be moved")

    def _arrays(self) -> Any:
        framework = self._sequence._framework
        return None if framework is None else framework.arrays

    # ---- doing it

    def apply(self) -> None:
        """The driver calls, all or none; then what cannot fail."""
        done: list[_Edit] = []
        try:
            for edit in self._edits:
                edit.editor._write(edit.handle, edit.after)
                done.append(edit)
        except BaseException as error:
            for edit in reversed(done):
                edit.editor._write(edit.handle, edit.before)
            if isinstance(error, errors.CUDAError):
                failed = self._edits[len(done)]
                raise errors.edit_failed(failed.label, "addresses", error) from error
            raise
        for edit in self._edits:
            edit.editor._shadow.works[int(edit.handle)] = edit.after
        self._move_watching()  # first: what is watched may be an argument that is let go below
        self._change_breaks()

    def _change_breaks(self) -> None:
        sequence = self._sequence
        if not self._breaks:
            return
        for segment, args, kwargs in self._breaks:
            segment.args, segment.kwargs = args, kwargs
            places = _moved_places(segment, self._leaf)
            if places is not None and segment._result is not None:
                segment._result._places = places
        if sequence._plan is not None and sequence._framework is not None:
            mark = sequence._mark
            assert mark is not None
            sequence._plan = Plan(self._driver, sequence._framework, mark, sequence._segments)

    def _move_watching(self) -> None:
        """Watch, or own, the new memory as the old was."""
        memory, arrays = self._sequence._memory, self._arrays()
        retired: list[Any] = []
        for move in self._moves:
            owned = [a for a, s in memory._kept.items() if move.covers(a, nbytes_of(s))]
            watched = [a for a, w in memory._watched.items() if move.covers(a, nbytes_of(w[0]()))]
            for address in owned:
                retired.append(memory._kept.pop(address))
            for address in watched:
                retired.append(memory._watched.pop(address)[0]())
        for move in self._moves:
            if move in self._used and move.new.owner is not None:
                self._take_on(memory, arrays, move)
        mark = self._sequence._mark
        if retired and mark is not None:
            release.later(process.epoch, _Retired(mark, retired))

    def _take_on(self, memory: Any, arrays: Any, move: Move) -> None:
        new = move.new.owner
        if arrays is not None and arrays.owns(new):
            address, nbytes, storage = arrays.storage(new)
            if nbytes:
                memory._watch(address, storage, describe(arrays, new), "bound by rebind()")
        else:  # nobody tells when it dies, so it is kept
            memory._kept[move.target] = new

    def report(self) -> Rebound:
        return Rebound(
            len(self._edits),
            sum(edit.words for edit in self._edits),
            self._arguments,
            tuple(self._changes),
            tuple(self._doubts),
        )


# ---------------------------------------------------------------- helpers


def _with_work(segments: Iterable[GraphSegment | EagerSegment]) -> list[GraphSegment]:
    """The graph segments in which something was captured."""
    return [part for part in segments if isinstance(part, GraphSegment) and not part.is_empty]


def _works(template: Template) -> list[tuple[Any, works.Work]]:
    """What every node of a segment does now, those in graphs inside it too."""
    reader, shadow = template.reader(), template.shown
    return [(handle, template.current(handle, reader, shadow)) for _, handle in template.walk()]


def _proof(verify: Callable[..., Any], moves: list[Move]) -> list[list[works.Work]]:
    """What a second capture of the same work does, segment by segment."""
    try:
        inspect.signature(verify).bind()
        other = verify()
    except TypeError:
        other = verify(*(move.new.owner for move in moves))
    segments = getattr(other, "segments", None)
    if segments is None:
        raise errors.bad_type("what verify returns", other, "the sequence that it captured")
    return [[work for _, work in _works(segment._template)] for segment in _with_work(segments)]


def _shape(work: works.Work) -> tuple[Any, ...]:
    """What two captures of the same work agree in."""
    if isinstance(work, works.Kernel):
        return work.name, work.grid, work.block, work.shared_bytes, work.parameters
    if isinstance(work, works.Copy):
        return work.kind, work.width, work.height, work.depth
    if isinstance(work, works.Fill):
        return work.kind, work.value, work.element_size, work.width, work.height
    return (work.kind,)


def _word(work: works.Kernel, argument: int, offset: int) -> int:
    return int.from_bytes(work.args[argument][offset : offset + _WORD], "little")


def _may_be_map(work: works.Kernel, hit: _Hit) -> bool:
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


def _has_tensor_maps(driver: bindings.Driver) -> bool:
    if not contexts.current(driver):
        return True
    attribute = bindings.types.CUdevice_attribute(_CAPABILITY_MAJOR)
    return int(driver.cuDeviceGetAttribute(attribute, driver.cuCtxGetDevice())) >= _TENSOR_MAPS_FROM


def _label(work: works.Work) -> str:
    if isinstance(work, works.Kernel):
        from .demangling import demangled

        return f"the kernel {demangled(work.name)}"
    names = {
        works.MEMCPY: "a copy",
        works.MEMSET: "a fill",
        works.BATCH_MEM_OP: "a batch of writes",
    }
    return names.get(work.kind, "a node")


def _moved_places(segment: EagerSegment, leaf: Callable[[Any, str], Any]) -> Any:
    """The fixed places of a static result after the move; None if none of them moves."""
    result = segment._result
    if result is None:
        return None
    made: dict[int, Any] = {}
    changed = False
    for place in result._places.values():
        if id(place) in made:
            continue
        target = leaf(place.target, f"the result of the break {segment.name}")
        if target is place.target:
            made[id(place)] = place
            continue
        changed = True
        fixed = None if place.fixed is None else place.arrays.place(target)
        made[id(place)] = place._replace(target=target, fixed=fixed)
    if not changed:
        return None
    return {path: made[id(place)] for path, place in result._places.items()}
