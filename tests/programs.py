"""Programs put together at random, which are captured, replayed and run eagerly, and must agree.

The hard problem: the eager run and the captured one must be the same code, or a difference proves
nothing. So a program is data: actions on a few sequences, and blocks that are lists of named steps
over one `State`. What a step does is written once, a break is simply a marked function of it, and
where it runs is a `Machine`: the simulated device with CPU tensors, or a GPU.

Actions draw from the whole life of a sequence: blocks that come out well or fail in one of several
ways, replays here, on another stream or with a break that fails, resets, rebinds, inputs that die,
sequences that are dropped, threads that replay or capture at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol

import pytest
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")


from breakable_cuda_graphs import (  # noqa: E402
    CUDAGraphSequence,
    StaleInputError,
    UnjoinedStreamError,
    breakable_graph,
    force_no_graph,
    no_graph,
)
from helping import MODES, Boom, together  # noqa: E402
from tallies import tally  # noqa: E402

N = 6


class Machine(Protocol):
    """Where programs run."""

    device: str

    def new_stream(self) -> Any:
        """A stream beside the current one."""

    def forked(self, side: Any, *, join: bool = True) -> contextlib.AbstractContextManager[None]:
        """Work inside goes to a side stream that forks from the current one and joins it again."""

    def on(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        """A stream is current inside, in order behind what was current and before what follows."""

    def delay(self) -> None:
        """Keep the current stream busy for a moment, so that a missing order shows."""

    def settle(self) -> None:
        """Wait until all work is done."""


# ---------------------------------------------------------------- what steps work on


class Fuse:
    """Makes a break fail while it is blown."""

    blown = False


class State:
    """What a program works on: an input, a parameter from before, and what was made on the way."""

    def __init__(self, machine: Machine, side: Any) -> None:
        self.machine, self.side = machine, side
        self.x = torch.ones(N, device=machine.device)
        self.table = self.first_table()
        self.made: list[Any] = []
        self.fuse = Fuse()

    def first_table(self) -> Any:
        return torch.arange(float(N), device=self.machine.device)

    @property
    def y(self) -> Any:
        return self.made[-1] if self.made else self.x

    def push(self, tensor: Any) -> None:
        self.made.append(tensor)

    def eager(self) -> State:
        """A state with the same beginnings that shares nothing."""
        twin = State(self.machine, self.side)
        twin.x, twin.table = self.x.clone(), self.table.clone()
        return twin


# ---------------------------------------------------------------- breaks


@no_graph
def bump(t: Any) -> None:
    t.add_(1)


@no_graph
def branch(t: Any) -> None:
    if t.sum().item() > 0:
        t.mul_(0.5)
    else:
        t.add_(3)


@no_graph
def nested(t: Any) -> None:
    bump(t)
    force_no_graph()
    branch(t)


@no_graph
def mix(target: Any, *, parts: dict[str, list[Any]]) -> None:
    target[::2].sub_(parts["views"][0][1::2])


@no_graph(outputs="static")
def split(t: Any) -> dict[str, Any]:
    return {"positive": t.clamp(min=0), "same": t, "rest": (t.clamp(max=0), 2.0)}


@no_graph(outputs="static")
def sorted_values(t: Any) -> Any:
    return torch.tensor(sorted(t.tolist()), device=t.device)


@no_graph
def draw_eagerly(t: Any) -> None:
    t.add_(torch.rand_like(t))


@no_graph
def fragile(t: Any, fuse: Fuse) -> None:
    t.mul_(0.5)
    if fuse.blown:
        raise Boom
    t.add_(2)


class Layer:
    """A method can be a break too."""

    scale = 0.25

    @no_graph
    def __call__(self, t: Any, *, factor: float = 1.0) -> None:
        t.mul_(self.scale * factor)


layer = Layer()

# ---------------------------------------------------------------- steps


def with_break(act: Callable[[Any], Any]) -> Callable[[State], None]:
    """A step that lets a break work on a copy of the newest tensor."""

    def step(state: State) -> None:
        state.push(state.y.clone())
        act(state.y)

    return step


def use_split(state: State) -> None:
    out = split(state.y.clone())
    negative, factor = out["rest"]
    state.push(out["positive"] * factor + negative - out["same"] * 0.25)


def on_a_side_stream(state: State) -> None:
    with state.machine.forked(state.side):
        state.machine.delay()
        z = state.y + 4
    y = state.y * 0.5
    with state.machine.forked(state.side):
        z = z - y
    state.push(y + z)


def side_stream_writes_the_table(state: State) -> None:
    with state.machine.forked(state.side):
        state.machine.delay()
        state.table.mul_(0.5).add_(1)
    state.push(state.y + state.table)


def in_place_through_views(state: State) -> None:
    y = state.y.clone()
    y.view(2, 3).t()[1:].mul_(0.5)
    y[1:3] = y[3:5] * 0.5
    state.push(y)


def nothing_kept(state: State) -> None:
    for factor in (2, 3):
        state.y * factor
    state.push(state.y.repeat(50).view(50, N)[7] - 1)


def fragile_step(state: State) -> None:
    state.push(state.y.clone())
    fragile(state.y, state.fuse)


STEPS: dict[str, Callable[[State], Any]] = {
    "work": lambda s: s.push((s.y * 0.5 + 1).clamp(-50, 50)),
    "in place": lambda s: s.push(s.y.clone().mul_(0.5).sub_(2)),
    "views": in_place_through_views,
    "temporaries": nothing_kept,
    "reduction": lambda s: s.push(s.y - s.y.mean()),
    "product": lambda s: s.push((s.y.view(2, 3) @ s.y.view(3, 2)).repeat(2, 1).view(-1)[:N] / 64),
    "old result": lambda s: s.push(s.y + (s.made[0] if s.made else s.x) * 0.5),
    "older tensor": lambda s: s.push(s.y + s.table.flip(0)),
    "writes an older tensor": lambda s: s.table.mul_(0.5).add_(s.y),
    "side stream": on_a_side_stream,
    "side stream writes": side_stream_writes_the_table,
    "draw": lambda s: s.push(s.y + torch.rand_like(s.y)),
    "dropout": lambda s: s.push(torch.nn.functional.dropout(s.y, 0.5)),
    "forced": lambda s: force_no_graph(),
    "bump": with_break(bump),
    "branch": with_break(branch),
    "nested": with_break(nested),
    "method": with_break(lambda y: layer(y, factor=2.0)),
    "draw in a break": with_break(draw_eagerly),
    "bump the older": lambda s: bump(s.table),
    "mix": lambda s: (s.push(s.y.clone()), mix(s.y, parts={"views": [s.table.flip(0)]})),
    "mix with the older": lambda s: (s.push(s.y.clone()), mix(s.y, parts={"views": [s.table]})),
    "split": use_split,
    "sorted": lambda s: s.push(sorted_values(s.y) * 2),
    "fragile": fragile_step,
}

DRAWS = {"draw", "dropout", "draw in a break"}

#: Steps after which the table itself, and not only a result of it, has to be alive.
READ_THE_TABLE = {
    "older tensor", "writes an older tensor", "side stream writes", "bump the older", "mix",
    "mix with the older",
}  # fmt: skip


def run_steps(state: State, steps: list[str]) -> None:
    for name in steps:
        STEPS[name](state)


# ---------------------------------------------------------------- actions

FAILURES = ("raises", "break raises", "swallowed", "host read", "unjoined")


class Capture(NamedTuple):
    """One block; a failing one is tried first with its failure, which must leave nothing."""

    which: int
    steps: list[str]
    mode: str
    keep_inputs: bool
    failure: str | None


class Replay(NamedTuple):
    """One replay for new inputs, on the current stream or on another one."""

    which: int
    values: list[float]
    elsewhere: bool


class Trip(NamedTuple):
    """A replay in which the fragile break fails, if there is one."""

    which: int
    values: list[float]


class Rebind(NamedTuple):
    """The input or the table moves to other memory."""

    which: int
    what: str


class Reset(NamedTuple):
    which: int


class Starve(NamedTuple):
    """The table dies: a replay that would read it is refused. Then the sequence is reset."""

    which: int


class Drop(NamedTuple):
    """The sequence goes away, replayed or not, and another one takes its place."""

    which: int


class ReplayTogether(NamedTuple):
    """All sequences replay at once, each in a thread."""

    values: list[float]


class CaptureTogether(NamedTuple):
    """All sequences capture a block at once, each in a thread."""

    steps: list[str]
    mode: str


Action = Capture | Replay | Trip | Rebind | Reset | Starve | Drop | ReplayTogether | CaptureTogether

_which = st.integers(0, 2)
_values = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=N, max_size=N)
_steps = st.lists(st.sampled_from(sorted(STEPS)), max_size=6)
_failure = st.one_of(st.none(), st.none(), st.none(), st.sampled_from(FAILURES))

CAPTURES = st.builds(Capture, _which, _steps, st.sampled_from(MODES), st.booleans(), _failure)
ACTIONS = st.one_of(
    CAPTURES,
    CAPTURES,
    st.builds(Replay, _which, _values, st.booleans()),
    st.builds(Replay, _which, _values, st.booleans()),
    st.builds(Trip, _which, _values),
    st.builds(Rebind, _which, st.sampled_from(["x", "table", "both"])),
    st.builds(Reset, _which),
    st.builds(Starve, _which),
    st.builds(Drop, _which),
    st.builds(ReplayTogether, _values),
    st.builds(CaptureTogether, _steps, st.sampled_from(MODES[1:])),
)


class Program(NamedTuple):
    """How many sequences there are, whether they share one pool, and what happens to them."""

    sequences: int
    share: bool
    actions: list[Any]


PROGRAMS = st.builds(
    Program,
    st.integers(1, 3),
    st.booleans(),
    st.tuples(CAPTURES, st.lists(ACTIONS, max_size=5)).map(lambda pair: [pair[0], *pair[1]]),
)


# ---------------------------------------------------------------- running them


class Subject:
    """One sequence, its state, and the steps that it has captured."""

    def __init__(self, machine: Machine, side: Any, pool: Any) -> None:
        self.machine = machine
        self.seq: Any = CUDAGraphSequence(pool=pool)
        self.state = State(machine, side)
        self.steps: list[str] = []
        self.owning: list[str] = []  # those of blocks that own their inputs

    # ---- captures

    def capture(self, block: Capture) -> None:
        if block.failure is not None:
            self._fail(block)
        self._capture(block.steps, capture_error_mode=block.mode, keep_inputs=block.keep_inputs)
        if block.keep_inputs:
            self.owning += block.steps

    def _capture(self, steps: list[str], **options: Any) -> None:
        with breakable_graph(self.seq, **options):
            run_steps(self.state, steps)
        self.steps += steps
        _counts["captures"] += 1

    def _fail(self, block: Capture) -> None:
        made, table = list(self.state.made), self.state.table.clone()
        expected = {"raises": Boom, "break raises": Boom, "unjoined": UnjoinedStreamError}
        kind = expected.get(block.failure or "", RuntimeError)
        with pytest.raises(kind), breakable_graph(self.seq, capture_error_mode=block.mode):
            run_steps(self.state, block.steps)
            self._failing_end(block.failure)
        self.state.made[:] = made
        self.state.table.copy_(table)
        _counts[f"blocks that fail: {block.failure}"] += 1

    def _failing_end(self, failure: str | None) -> None:
        state = self.state
        if failure == "raises":
            raise Boom
        if failure == "host read":
            (state.y + 1).sum().item()
        if failure == "unjoined":
            with state.machine.forked(state.side, join=False):
                state.y + 1
        if failure in ("break raises", "swallowed"):
            state.fuse.blown = True
            try:
                with contextlib.suppress(Boom) if failure == "swallowed" else _nothing():
                    fragile(state.y.clone(), state.fuse)
            finally:
                state.fuse.blown = False

    # ---- replays

    def replay(self, values: list[float], elsewhere: bool = False, seed: int = 11) -> None:
        """One replay, compared with an eager run from the same beginnings."""
        self.state.x.copy_(self.tensor(values))
        eager = self.state.eager()
        torch.manual_seed(seed)
        run_steps(eager, self.steps)
        for tensor in self.state.made:
            tensor.fill_(float("nan"))
        torch.manual_seed(seed)
        if elsewhere:
            with self.machine.on(self.state.side):
                self.seq.replay()
        else:
            self.seq.replay()
        self.machine.settle()
        self._compare(eager)
        _counts["replays"] += 1

    def tensor(self, values: list[float]) -> Any:
        return torch.tensor(values, device=self.machine.device)

    def _compare(self, eager: State) -> None:
        assert len(eager.made) == len(self.state.made)
        for got, wanted in zip(self.state.made, eager.made, strict=True):
            assert same(got, wanted), (got, wanted)
        assert same(self.state.table, eager.table), "the table"
        assert same(self.state.x, eager.x), "the input"

    def trip(self, values: list[float]) -> None:
        """A break fails at replay: its own error comes out, and the next replay is right."""
        if "fragile" not in self.steps:
            return
        table = self.state.table.clone()
        self.state.x.copy_(self.tensor(values))
        self.state.fuse.blown = True
        try:
            with pytest.raises(Boom):
                self.seq.replay()
        finally:
            self.state.fuse.blown = False
        self.state.table.copy_(table)
        _counts["replays with a break that fails"] += 1

    # ---- the rest of its life

    def rebind(self, what: str) -> None:
        names = ["x", "table"] if what == "both" else [what]
        moves = {getattr(self.state, name): getattr(self.state, name).clone() for name in names}
        self.seq.rebind(list(moves.items()))
        for name in names:
            old = getattr(self.state, name)
            setattr(self.state, name, moves[old])
            old.fill_(float("nan"))
        if "table" in names:
            self.owning = []  # memory that a rebind has brought is watched, not owned
        _counts["rebinds"] += 1

    def reset(self) -> None:
        self.seq.reset()
        self.steps, self.owning, self.state.made = [], [], []
        _counts["resets"] += 1

    def starve(self) -> None:
        self.state.table = self.state.first_table()
        self.machine.settle()
        if READ_THE_TABLE & set(self.steps) and not READ_THE_TABLE & set(self.owning):
            with pytest.raises(StaleInputError):
                self.seq.replay()
        else:
            self.seq.replay()
        _counts["inputs that died"] += 1
        self.reset()

    @property
    def draws(self) -> bool:
        return bool(DRAWS & set(self.steps))


def same(got: Any, wanted: Any) -> bool:
    """Equal bit for bit, where a NaN equals a NaN."""
    return bool(torch.equal(got, wanted)) or bool(
        ((got == wanted) | ((got != got) & (wanted != wanted))).all()
    )


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


class World:
    """The sequences of one program."""

    LAST: ClassVar = [0.5 * number - 1 for number in range(N)]

    def __init__(self, machine: Machine, program: Program) -> None:
        self.machine, self.share = machine, program.share
        # For each sequence a stream to fork to, and one for its thread: no two share any.
        self.sides = [machine.new_stream() for _ in range(program.sequences)]
        self.own = [machine.new_stream() for _ in range(program.sequences)]
        self.subjects: list[Subject] = []
        for side in self.sides:
            self.subjects.append(self._new_subject(side))

    def _new_subject(self, side: Any) -> Subject:
        pool = self.subjects[0].seq.pool() if self.share and self.subjects else None
        return Subject(self.machine, side, pool)

    def run(self, actions: list[Any]) -> None:
        for action in actions:
            self._act(action)
        for subject in self.subjects:
            subject.replay(self.LAST)

    def _act(self, action: Action) -> None:
        if isinstance(action, ReplayTogether):
            self._replay_together(action)
            return
        if isinstance(action, CaptureTogether):
            self._capture_together(action)
            return
        place = action.which % len(self.subjects)
        subject = self.subjects[place]
        if isinstance(action, Capture):
            subject.capture(action)
        elif isinstance(action, Replay):
            subject.replay(action.values, action.elsewhere)
        elif isinstance(action, Trip):
            subject.trip(action.values)
        elif isinstance(action, Rebind):
            subject.rebind(action.what)
        elif isinstance(action, Reset):
            subject.reset()
        elif isinstance(action, Starve):
            subject.starve()
        else:
            self.subjects[place] = self._new_subject(self.sides[place])
            _counts["sequences dropped"] += 1

    def _replay_together(self, action: ReplayTogether) -> None:
        """Sequences of one pool use one memory, and a generator is everybody's: then in turn."""
        works = [lambda s=subject: s.replay(action.values) for subject in self.subjects]
        if self.share or any(subject.draws for subject in self.subjects):
            for work in works:
                work()
            return
        self._at_once(works)
        _counts["replays in threads"] += len(works)

    def _capture_together(self, action: CaptureTogether) -> None:
        steps = [name for name in action.steps if name not in DRAWS]
        if self.share:
            return
        self._at_once(
            [
                lambda s=subject: s.capture(Capture(0, steps, action.mode, False, None))
                for subject in self.subjects
            ]
        )
        _counts["captures in threads"] += len(self.subjects)

    def _at_once(self, works: list[Callable[[], None]]) -> None:
        self.machine.settle()
        pairs = list(zip(self.own, works, strict=True))
        together([lambda p=pair: self._in_a_thread(*p) for pair in pairs])

    def _in_a_thread(self, stream: Any, work: Callable[[], None]) -> None:
        with self.machine.on(stream):
            work()


_counts = tally("programs")


def run_program(machine: Machine, program: Program) -> None:
    """Run a program; raises `AssertionError` where a replay differs from eager code."""
    _counts["programs"] += 1
    World(machine, program).run(program.actions)
