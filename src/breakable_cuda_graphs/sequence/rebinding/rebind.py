"""seq.rebind: give a captured sequence other memory.

The hard problem: a graph holds addresses as numbers among numbers. Each 8-byte step of each argument
that lies in an old range is taken for an address, which can be wrong in two ways: a number that only
looks like one, and an address inside something opaque (a tensor map of Hopper's copy engine), whose
encoding is nobody's business. Alignment and bounds guard against the first and are reported; the
second is refused unless `verify`, a second capture at other addresses, shows which words move (see
`proofs.py`).

Everything is worked out before the first driver call; if one fails, those before it are taken back.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from ..._driver import bindings, contexts, enums, node_params, process, release, set_params
from ..._driver.errors import used_after_fork
from ..._driver.node_params import label_of
from ...errors import CUDAError, not_callable
from ...frameworks import find
from ...frameworks.protocols import Arrays
from ...graph.arguments import array_memory
from ...graph.errors import edit_failed
from .. import pytree
from ..errors import cannot_rebind, rebind_in_capture, stale_input
from ..memory import Memory, Use, describe, nbytes_of
from ..plan import Plan
from ..segments import EagerSegment, GraphSegment
from ..state import SequenceState
from .address_index import Entry, Hit, inventory_of
from .moves import Move, move_of, moves_of
from .report import Doubt, Rebound
from .verify import Proof, Works, has_tensor_maps, may_be_map, second_capture, with_work

_WORD = 8


class _Part:
    """One segment: what its nodes do, and, for the calls, which executable runs them."""

    __slots__ = ("_executable", "_set", "_twins", "driver", "editor", "index", "inventory")

    def __init__(self, segment: GraphSegment) -> None:
        self.index, self.editor = segment.index, segment.exec
        self.inventory = inventory_of(segment._template)
        self.driver = segment._handle.driver
        self._set: Any = None

    def set_kernel(self, handle: Any, writer: set_params.KernelWriter) -> None:
        """The driver's call for one kernel; what is the same for all of them is asked for once."""
        if self._set is None:
            target = self.editor._target
            self._executable, self._twins = target.executable(), target.twins()
            self._set = self.driver.raw("cuGraphExecKernelNodeSetParams")
        node = handle if self._twins is None else self._twins[int(handle)]
        (code,) = self._set(self._executable, node, writer.params)
        if code:
            raise self.driver.error("cuGraphExecKernelNodeSetParams", code)


class _Edit:
    """One node and what it is to do; `words`: (argument, offset, place, new) of a kernel's."""

    __slots__ = ("after", "count", "entry", "part", "words")

    def __init__(
        self, part: _Part, entry: Entry, after: node_params.Work, count: int,
        words: list[tuple[int, int, int, int]] | None = None,
    ) -> None:  # fmt: skip
        self.part, self.entry, self.after = part, entry, after
        self.count, self.words = count, words

    def do(self) -> None:
        """The driver's call."""
        entry, words = self.entry, self.words
        if words is None:
            self.part.editor._write(entry.handle, self.after)
            return
        writer = entry.writer
        if writer is None:
            assert isinstance(entry.work, node_params.Kernel)
            writer = set_params.KernelWriter(entry.work)
        entry.writer = None  # should this fail, what is written is not what the node does
        for argument, offset, _, new in words:
            writer.put(argument, offset, new)
        self.part.set_kernel(entry.handle, writer)
        entry.writer = writer

    def undo(self) -> None:
        """Take it back: the node still does what its entry says."""
        self.entry.writer = None
        self.part.editor._write(self.entry.handle, self.entry.work)

    def record(self) -> None:
        """What cannot fail, when all calls have worked."""
        self.part.editor._shadow.works[int(self.entry.handle)] = self.after
        self.part.inventory.record(self.entry, self.after, self.words or ())


def rebind(
    sequence: SequenceState, moves: Any, verify: Callable[..., Any] | None = None
) -> Rebound:
    """See `CUDAGraphSequence.rebind`."""
    driver = bindings.current()
    wanted = moves_of(driver, moves)
    if verify is not None and not callable(verify):
        raise not_callable("verify", verify)
    second = None if verify is None else second_capture(verify, wanted)
    _require_at_rest(sequence)
    with sequence._turn:
        framework = sequence._framework
        if framework is None or contexts.current(driver) == framework.context:
            with release.relaxed_thread():
                return _rebound(sequence, wanted, second)
        with contexts.made_current(driver, framework.context), release.relaxed_thread():
            return _rebound(sequence, wanted, second)


def _require_at_rest(sequence: SequenceState) -> None:
    """Not from a break of this sequence, whose arguments are in use, and not in its capture."""
    if sequence._epoch != process.epoch:
        raise used_after_fork("sequence")
    if sequence._is_capturing or sequence._has_turn:
        raise rebind_in_capture()
    if sequence._memory.stale is not None:
        raise stale_input(*sequence._memory.stale)


def _rebound(sequence: SequenceState, moves: list[Move], second: Works | None) -> Rebound:
    work = _Rebinding(sequence, moves, second)
    work.prepare()
    work.apply()
    return work.report()


class _Rebinding:
    """One rebind: what it will change, and then the change."""

    def __init__(self, sequence: SequenceState, moves: list[Move], second: Works | None) -> None:
        self._sequence, self._moves, self._second = sequence, moves, second
        self._driver = bindings.current()
        self._has_maps = has_tensor_maps(self._driver)
        self._edits: list[_Edit] = []
        self._breaks: list[tuple[EagerSegment, tuple[Any, ...], dict[str, Any]]] = []
        self._moved: list[tuple[Any, ...]] = []  # see `_line`
        self._doubts: list[Doubt] = []
        self._arguments = 0
        self._used: set[Move] = set()

    # ---- working it out

    def prepare(self) -> None:
        """Find all changes; raises for what cannot be moved, and changes nothing."""
        parts = [_Part(segment) for segment in with_work(self._sequence._segments)]
        proof = None
        if self._second is not None:
            mine = [[entry.work for entry in part.inventory.entries] for part in parts]
            proof = Proof(self._driver, self._moves, mine, self._second)
        for part in parts:
            for entry, hits in part.inventory.kernels_in(self._moves):
                self._kernel(part, entry, hits, proof)
            for entry in part.inventory.others:
                self._other(part, entry)
        for segment in self._sequence._segments:
            if isinstance(segment, EagerSegment):
                self._break(segment)

    def _move_of(self, address: int) -> Move | None:
        return move_of(self._moves, address)

    def _note(self, edit: _Edit) -> None:
        self._edits.append(edit)
        self._moved.append((edit.part.index, edit.count, edit.after))

    def _other(self, part: _Part, entry: Entry) -> None:
        """A node that is no kernel."""
        work, label = entry.work, label_of(entry.work)
        after: node_params.Work
        if isinstance(work, node_params.Copy):
            after, words = self._copy(work, label)
        elif isinstance(work, node_params.Fill):
            after, words = self._fill(work, label)
        elif isinstance(work, node_params.Batch):
            after, words = self._batch(work, label)
        else:
            self._refuse_opaque(work)
            return
        if words:
            self._note(_Edit(part, entry, after, words))

    def _refuse_opaque(self, work: node_params.Work) -> None:
        if isinstance(work, node_params.Conditional) and not work.bodies:
            raise cannot_rebind("a conditional node of another library cannot be looked into")

    # ---- kernels

    def _kernel(self, part: _Part, entry: Entry, found: list[Hit], proof: Proof | None) -> None:
        work = entry.work
        assert isinstance(work, node_params.Kernel)
        hits = self._addresses(work, found)
        if proof is not None:
            hits, unmoved = proof.sift(work, label_of(work), hits)
            for hit in unmoved:
                self._doubt(work, hit, "it did not move in verify")
        elif self._has_maps:
            self._refuse_maps(work, hits)
        if not hits:
            return
        args, words = list(work.args), []
        for argument, offset, value, move, place in hits:
            assert move is not None
            self._used.add(move)
            new, data = value + move.shift, args[argument]
            args[argument] = data[:offset] + new.to_bytes(_WORD, "little") + data[offset + _WORD :]
            words.append((argument, offset, place, new))
        after = work.with_args(tuple(args))
        self._note(_Edit(part, entry, after, len(hits), words))

    def _addresses(self, work: node_params.Kernel, found: list[Hit]) -> list[Hit]:
        """The words that are taken for addresses; the others are doubtful, and left."""
        hits = []
        for hit in found:
            if hit.move is None:
                if not self._sequence._memory.begins(hit.value):
                    self._doubt(work, hit, "just past the end of the old memory")
            elif (hit.value - hit.move.start) % hit.move.old.itemsize:
                self._doubt(work, hit, "not aligned as the elements are")
            else:
                hits.append(hit)
        return hits

    def _refuse_maps(self, work: node_params.Kernel, hits: list[Hit]) -> None:
        for hit in hits:
            if may_be_map(work, hit):
                raise cannot_rebind(
                    f"argument {hit.argument} of {label_of(work)} may hold the address inside a tensor map, "
                    "which is opaque: give verify=, a function that captures the same work on other "
                    "buffers and returns that sequence"
                )

    def _doubt(self, work: node_params.Kernel, hit: Hit, why: str) -> None:
        self._doubts.append(Doubt(label_of(work), hit.argument, hit.offset, hit.value, why))

    # ---- copies and fills

    def _copy(self, work: node_params.Copy, label: str) -> tuple[node_params.Copy, int]:
        words = 0
        for side in ("src", "dst"):
            end: node_params.End = getattr(work, side)
            if end.memory_type == enums.ARRAY_MEMORY:
                continue
            move = self._move_of(end.start)
            if move is None:
                continue
            self._require_inside(move, end.start, work.span(end), label)
            if not work.is_flat:
                raise cannot_rebind(
                    f"{label} copies in several dimensions, which an executable does not let change"
                )
            self._used.add(move)
            moved = dataclasses.replace(end, address=end.address + move.shift)
            work = dataclasses.replace(work, **{side: moved})  # type: ignore[arg-type]
            words += 1
        return work, words

    def _fill(self, work: node_params.Fill, label: str) -> tuple[node_params.Fill, int]:
        move = self._move_of(work.dst)
        if move is None:
            return work, 0
        self._require_inside(move, work.dst, work.span, label)
        self._used.add(move)
        return dataclasses.replace(work, dst=work.dst + move.shift), 1

    def _batch(self, work: node_params.Batch, label: str) -> tuple[node_params.Batch, int]:
        made, words = [], 0
        for operation in work.operations:
            move = self._move_of(operation.address) if operation.address else None
            if move is not None:
                self._require_inside(move, operation.address, operation.nbytes, label)
                self._used.add(move)
                address = operation.address + move.shift
                operation = dataclasses.replace(operation, address=address)
                words += 1
            made.append(operation)
        return dataclasses.replace(work, operations=tuple(made)), words

    def _require_inside(self, move: Move, start: int, nbytes: int, label: str) -> None:
        if not move.covers(start, nbytes):
            raise cannot_rebind(
                f"{label} reaches beyond the old memory, of which {move.nbytes} bytes were given"
            )

    # ---- breaks

    def _break(self, segment: EagerSegment) -> None:
        changed = 0
        known: dict[int, Any] = {}  # one array given twice stays one

        def replace(leaf: Any, path: str) -> Any:
            nonlocal changed
            new = known.get(id(leaf))
            if new is None:
                what = f"argument {path} of the break {segment.name}"
                new = known[id(leaf)] = self._leaf(leaf, what)
            changed += new is not leaf
            return new

        args, kwargs = pytree.rebuilt_call(segment.args, segment.kwargs, replace)
        places = _moved_places(segment, self._leaf)
        if changed or places is not None:
            self._arguments += changed
            self._breaks.append((segment, args, kwargs))
            self._moved.append((None, changed, segment.name))

    def _leaf(self, leaf: Any, what: str) -> Any:
        """An array of a break at its new place; anything else as it is."""
        memory = array_memory(leaf)
        if memory is None or not memory.nbytes or (memory.is_host and not self._driver.simulated):
            return leaf
        move = self._move_of(memory.address)
        if move is None:
            return leaf
        self._require_inside(move, memory.address, memory.nbytes, what)
        arrays = self._find(leaf)
        self._used.add(move)
        if arrays is not None and arrays.can_alias(leaf):
            return arrays.moved(leaf, move.start, move.end, move.shift)
        if memory.kind == move.new.kind and memory.address == move.start:
            return move.new.owner
        raise cannot_rebind(f"{what} is a {type(leaf).__name__} that cannot be moved")

    def _find(self, value: Any) -> Arrays | None:
        """Who knows a value as a device array."""
        framework = self._sequence._framework
        return None if framework is None else find.finder(framework)(value)

    # ---- doing it

    def apply(self) -> None:
        """The driver calls, all or none; then what cannot fail."""
        done: list[_Edit] = []
        try:
            for edit in self._edits:
                edit.do()
                done.append(edit)
        except BaseException as error:
            for edit in reversed(done):
                edit.undo()
            if isinstance(error, CUDAError):
                failed = label_of(self._edits[len(done)].entry.work)
                raise edit_failed(failed, "addresses", error) from error
            raise
        for edit in self._edits:
            edit.record()
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
            plan = Plan(self._driver, sequence._framework, mark, sequence._segments)
            sequence._plan = sequence._ready(plan)

    def _move_watching(self) -> None:
        """Watch, or own, the new memory as the old was."""
        memory = self._sequence._memory
        retired: list[Any] = []
        owned: set[Move] = set()
        words: dict[Move, str] = {}  # what is said of the old memory is right for the new
        for move in self._moves:
            gone, was_owned, described = memory.let_go(functools.partial(_lies_in, move))
            retired += gone
            if described is not None:
                words[move] = described
            if was_owned:
                owned.add(move)
        for move in self._moves:  # a swap moves to what another move has just let go of
            if move in self._used and move.new.owner is not None:
                self._take_on(memory, move, words.get(move), is_owned=move in owned)
        mark = self._sequence._mark
        if retired and mark is not None:
            mark.hold(retired)

    def _take_on(self, memory: Memory, move: Move, words: str | None, *, is_owned: bool) -> None:
        new = move.new.owner
        arrays = self._find(new)
        if arrays is None:
            memory.hold(move.target, new)  # nobody tells when it dies
            return
        address, nbytes, storage = arrays.storage(new)
        if is_owned or storage is None:
            memory.hold(move.target, arrays.keeper(new))
        elif nbytes:
            described = words or describe(arrays, new)
            memory.watch(address, storage, described, Use("bound by rebind()"))

    def report(self) -> Rebound:
        return Rebound(
            len(self._edits),
            sum(edit.count for edit in self._edits),
            self._arguments,
            tuple(self._doubts),
            tuple(self._moved),
        )


def _lies_in(move: Move, start: int, storage: Any) -> bool:
    return move.start <= start < move.end and move.covers(start, nbytes_of(storage))


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
