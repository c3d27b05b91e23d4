"""The plan of a replay: what is left to do when all that can be decided once has been.

The hard problem: the loop over the steps is the library's speed. A step is a plain pair (executable,
call) of which either half may be None, so that the usual pair of a graph and the break behind it is
one turn of the loop; the call takes nothing, its arguments are bound to it. Empty segments are not in
it; segments with nothing eager between them are joined, as child nodes of one graph, into one launch.

Making a plan changes no segment, since it may fail; `commit()` does, and cannot fail.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .._driver import enums
from .._driver.bindings import Driver
from .._driver.handles import ExecHandle, GraphHandle
from .._driver.stream_order import CompletionMark
from ..frameworks import companions, find
from ..frameworks.protocols import Framework
from . import pytree
from .segments import EagerSegment, GraphSegment, Seat

Step = tuple[Any, Callable[[], object] | None]


class Plan:
    """The steps of one replay."""

    def __init__(
        self,
        driver: Driver,
        framework: Framework,
        mark: CompletionMark,
        segments: Sequence[GraphSegment | EagerSegment],
    ) -> None:
        self._is_lost = mark.is_lost
        # Raw calls of the driver: these are on replay's hot path.
        self.launch = driver.module.cuGraphLaunch
        self.current_context = driver.module.cuCtxGetCurrent
        self.is_free = _check_of_stream(driver, framework)
        self.framework = framework
        self.has_breaks = self.draws = False
        self.modes: Any = None  # of most breaks; others switch by turn
        self.usual: Plan | None = None  # of a plan with named ranges: the one without
        self.steps: list[Step] = []
        self.parts: list[GraphSegment | EagerSegment] = []  # what is embedded in other captures
        self.seats: list[tuple[GraphSegment, Seat]] = []  # what will launch which segments
        try:
            for group in _groups(segments):
                if isinstance(group, EagerSegment):
                    self._add_break(group)
                else:
                    self._add_run(driver, group)
        except BaseException:  # which may keep this half-made object for long
            for _, seat in self.seats:
                seat.executable.close()
            raise
        #: what else has a current stream that breaks must see
        self.follower = companions.follower(framework) if self.has_breaks else None

    def units(self) -> Iterator[tuple[tuple[GraphSegment | EagerSegment, ...], Step]]:
        """What one replay does, a launch or a call at a time, and the segments that each one runs."""
        for group in _groups(self.parts):
            if isinstance(group, EagerSegment):
                yield (group,), (None, self._call_of(group))
                continue
            executable = group[0]._executable
            assert executable is not None
            yield tuple(group), _launch(group[0], executable)

    def with_steps(self, steps: list[Step]) -> Plan:
        """The same replay with other steps: what it does, with something done in between."""
        made = copy.copy(self)
        made.steps = steps
        return made

    def _add_break(self, segment: EagerSegment) -> None:
        if not self.has_breaks:
            self.has_breaks, self.modes = True, segment._modes
        self.parts.append(segment)
        self._add_call(self._call_of(segment))

    def _add_run(self, driver: Driver, run: list[GraphSegment]) -> None:
        self.parts += run
        first = run[0]
        if len(run) > 1:
            self.steps.append((self._joined(driver, run).value, None))
        else:
            self.draws = self.draws or first._runner is not None
            self.steps.append(_launch(first, self._alone(first)))

    def _alone(self, segment: GraphSegment) -> ExecHandle:
        """The executable of a segment that is launched by itself."""
        if segment._seat is not None:
            return segment._seat.executable
        made = ExecHandle.instantiate(segment._handle, is_lost=self._is_lost)
        self._seat(segment, Seat(made))
        return made

    def _joined(self, driver: Driver, run: list[GraphSegment]) -> ExecHandle:
        """One executable for a run of segments: a graph with a chain of child nodes."""
        known = run[0]._executable
        if known is not None and all(segment._executable is known for segment in run):
            return known  # joined when an earlier block of the sequence ended
        parent = GraphHandle.create(driver)
        nodes: list[Any] = []
        try:
            for segment in run:
                after = nodes[-1:]
                nodes.append(
                    driver.cuGraphAddChildGraphNode(
                        parent.value, after or None, len(after), segment._handle.value
                    )
                )
            made = ExecHandle.instantiate(parent, is_lost=self._is_lost)
            for segment, node in zip(run, nodes, strict=True):
                self._seat(segment, Seat(made, node))
        except BaseException:
            parent.close()  # an executable needs no graph to be closed
            raise
        return made

    def _seat(self, segment: GraphSegment, seat: Seat) -> None:
        self.seats.append((segment, seat))
        segment._reapply(seat)  # what was edited in the executable that runs it until now

    def commit(self) -> None:
        """From here on the segments are run by this plan's executables. Can be repeated."""
        for segment, seat in self.seats:
            segment._seat = seat

    def _add_call(self, call: Callable[[], object]) -> None:
        """A call goes into the turn of the launch before it, if that has none yet."""
        executable = None
        if self.steps and self.steps[-1][1] is None:
            executable = self.steps.pop()[0]
        self.steps.append((executable, call))

    def _call_of(self, segment: EagerSegment) -> Callable[[], object]:
        """What replays a break; a call with `*args` and `**kwargs` would cost more than `partial`."""
        body = segment.fn if segment._result is None else segment.call_and_fill
        if segment._modes != self.modes:
            body = _InModes(self.framework, segment._modes, body)
        if not segment.args and not segment.kwargs:
            return body
        is_array = find.finder(self.framework)
        own = segment._own
        renewals = [pytree.renewal(value, is_array, own) for value in segment.args]
        by_name = {k: pytree.renewal(v, is_array, own) for k, v in segment.kwargs.items()}
        if any(renewals) or any(by_name.values()):
            return _WithNewContainers(body, segment, renewals, by_name)
        return functools.partial(body, *segment.args, **segment.kwargs)


def _check_of_stream(driver: Driver, framework: Framework) -> Callable[[Any], bool]:
    """What tells whether the current stream, which is handed over, is in no capture; False: or unknown."""
    ask, status = framework.is_capturing, driver.module.cuStreamIsCapturing
    if ask is None:
        return lambda stream: status(stream)[1] == 0  # None after an error

    def is_free(_: Any) -> bool:
        try:
            return not ask()
        except RuntimeError:
            return False

    return is_free


def _launch(segment: GraphSegment, executable: ExecHandle) -> Step:
    """The step that launches a segment which is not joined with others."""
    runner = segment._runner
    if runner is None:
        return executable.value, None
    return None, functools.partial(runner.launch, executable.value)


_Renewal = Callable[[], Any] | None


class _WithNewContainers:
    """A break with tensors in lists or the like: what one call does to them, the next does not see."""

    def __init__(
        self, body: Callable[..., Any], segment: EagerSegment, args: list[_Renewal],
        kwargs: dict[str, _Renewal],
    ) -> None:  # fmt: skip
        self._body = body
        self._args = list(zip(args, segment.args, strict=True))
        self._kwargs = [(name, make, segment.kwargs[name]) for name, make in kwargs.items()]

    def __call__(self) -> None:
        args = [make() if make else value for make, value in self._args]
        self._body(*args, **{k: make() if make else value for k, make, value in self._kwargs})


class _InModes:
    """A break that was captured under other modes than the rest of its sequence."""

    def __init__(self, framework: Framework, modes: Any, body: Callable[..., Any]) -> None:
        self._framework, self._modes, self._body = framework, modes, body

    def __call__(self, /, *args: Any, **kwargs: Any) -> None:
        with self._framework.in_modes(self._modes):
            self._body(*args, **kwargs)


def _groups(
    segments: Iterable[GraphSegment | EagerSegment],
) -> Iterable[list[GraphSegment] | EagerSegment]:
    """Breaks, and runs of captured segments that one launch can do."""
    run: list[GraphSegment] = []
    for segment in segments:
        if isinstance(segment, EagerSegment):
            if not segment._does_nothing:
                if run:
                    yield run
                run = []
                yield segment
        elif segment._kinds:  # one without work is left out
            if run and not (_joinable(run[-1]) and _joinable(segment)):
                yield run
                run = []
            run.append(segment)
    if run:
        yield run


def _joinable(segment: GraphSegment) -> bool:
    """Not one that draws, that cannot be cloned, or that has an executable of its own already."""
    return (
        segment._runner is None
        and segment._kinds.isdisjoint(enums.NO_CHILDREN)
        and (segment._executable is None or segment._joined is not None)
    )


GRAPH, BREAK = "graph", "break"


@dataclass(frozen=True)
class Unit:
    """One launch ("graph") or one call of Python ("break") of a replay.

    segments: the places in `sequence.segments` of what it runs; several where they are joined.
    name: "segment 2", or the break's function. scope: the `annotate` blocks around it.
    line: where the user's code was at capture ("file.py:12").
    """

    kind: str
    name: str
    scope: str
    line: str
    segments: tuple[int, ...]
    nodes: int
    step: Step

    @property
    def label(self) -> str:
        """Scope and name in one: "layer 3/attend"."""
        return f"{self.scope}/{self.name}" if self.scope else self.name


def units_of(
    segments: Sequence[GraphSegment | EagerSegment], plan: Plan, *, with_nodes: bool = True
) -> list[Unit]:
    """The units of the plan of some segments, in order; counting nodes reads every graph."""
    place = {id(segment): number for number, segment in enumerate(segments)}
    made = []
    for run, step in plan.units():
        numbers = tuple(place[id(segment)] for segment in run)
        first = run[0]
        if isinstance(first, EagerSegment):
            name, scope = short_name(first.name), "/".join(first.scopes)
            made.append(Unit(BREAK, name, scope, first.line, numbers, 0, step))
            continue
        graphs = [segment for segment in run if isinstance(segment, GraphSegment)]
        nodes = sum(1 for graph in graphs for _ in graph._template.walk()) if with_nodes else 0
        made.append(
            Unit(GRAPH, _numbers(numbers), scope_of(graphs), first.line, numbers, nodes, step)
        )
    return made


def short_name(name: str) -> str:
    """A qualified name without the functions that it was defined in."""
    return name.rpartition("<locals>.")[2]


def _numbers(numbers: Sequence[int]) -> str:
    return f"segment{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def scope_of(segments: Sequence[GraphSegment]) -> str:
    """The scopes that all nodes of the segments share, and, where they part, from which to which."""
    paths = [scopes for segment in segments for scopes in _scopes_of(segment)]
    if not any(paths):
        return ""
    shared = 0
    while all(len(path) > shared and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    rest = [path[shared] if len(path) > shared else "" for path in paths]
    ends = dict.fromkeys((rest[0], rest[-1]))
    parts = [" … ".join(ends).strip()] if any(rest) else []
    return "/".join([*paths[0][:shared], *parts])


def _scopes_of(segment: GraphSegment) -> list[tuple[str, ...]]:
    """The scopes of a segment's nodes in the order of capture; read from the notes alone."""
    template: Any = segment._seen  # made at capture where there was something to note
    if template is None:
        return [()]
    notes = template.notes
    nodes = template.driver.graph_nodes(template.value)
    return [notes[int(node)].scopes if int(node) in notes else () for node in nodes]
