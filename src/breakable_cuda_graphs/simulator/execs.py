"""Executables: snapshots of graphs that can be launched, edited and updated.

The hard problem: a missing dependency must show. A device runs independent nodes in any order, so a
launch here runs the nodes in a random order that the edges allow (a seeded generator picks), the
nodes of child graphs mixed with their siblings: two nodes that share data without an edge will soon
give a wrong value. And an executable is a snapshot: it keeps its own copy of the whole tree, which
edits of the template never reach.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

from .._driver.enums import (
    AUTO_FREE,
    CHILD,
    DEVICE_LAUNCH,
    IN_BODIES,
    INVALID_VALUE,
    KERNEL,
    LAUNCH_FAILED,
    MEM_ALLOC,
    MEM_FREE,
    MEMCPY,
    MEMSET,
    NOT_SUPPORTED,
    UPDATE_FAILURE,
    WHILE,
    UpdateResult,
)
from .contexts import Contexts
from .graphs import ChildOp, ConditionalOp, GraphData, Graphs, NodeData, Op, Run
from .memory import SimulatedMemory
from .nodes import MemAlloc
from .updates import UpdateRefused, UpdateRules, keep_attributes
from .world import Code, DriverObject, Handle, Refusal, Registry, World, new_identity, types

# CUgraphInstantiateResult
_FINE, _ERROR, _INVALID_STRUCTURE, _UNSUPPORTED_NODE, _, _HANDLE_UNUSED = range(6)

_MOST_ROUNDS = 1_000_000


@dataclass(eq=False)
class Step:
    """One node of a plan; no node: the entry or exit of a child graph."""

    node: NodeData | None
    waits: int = 0
    followers: list[Step] = field(default_factory=list)

    def then(self, follower: Step) -> None:
        """`follower` comes after this."""
        self.followers.append(follower)
        follower.waits += 1


def make_plan(graph: GraphData) -> list[Step]:
    """The steps of a graph, child graphs opened up."""
    steps: list[Step] = []
    _add_steps(graph, steps)
    return steps


def _add_steps(graph: GraphData, steps: list[Step]) -> tuple[list[Step], list[Step]]:
    """Append a graph's steps; returns its first and its last ones."""
    ends: dict[NodeData, tuple[Step, Step]] = {}
    for node in graph.nodes:
        ends[node] = _node_steps(node, steps)
    for source, target, _ in graph.edges():
        ends[source][1].then(ends[target][0])
    return [ends[node][0] for node in graph.roots()], [ends[node][1] for node in graph.leaves()]


def _node_steps(node: NodeData, steps: list[Step]) -> tuple[Step, Step]:
    if not isinstance(node.work, ChildOp):
        step = Step(node)
        steps.append(step)
        return step, step
    entry, leave = Step(None), Step(None)
    steps += [entry, leave]
    first, last = _add_steps(node.work.graph, steps)
    for step in first or [leave]:
        entry.then(step)
    for step in last:
        step.then(leave)
    return entry, leave


@dataclass(eq=False)
class Exec(DriverObject):
    """An executable: its own copy of the tree, and what was changed in it."""

    handle_type = types.CUgraphExec
    graph: GraphData
    template: GraphData
    flags: int
    twins: dict[int, NodeData]
    plans: dict[GraphData, list[Step]]
    identity: int = field(default_factory=new_identity)
    disabled: set[NodeData] = field(default_factory=set)
    conditionals: dict[int, int] = field(default_factory=dict)
    running: threading.Lock = field(default_factory=threading.Lock)


@dataclass(eq=False)
class Execs:
    """All executables of one driver."""

    world: World
    contexts: Contexts
    graphs: Graphs
    memory: SimulatedMemory
    rng: random.Random

    def __post_init__(self) -> None:
        self.live: Registry[Exec] = Registry(self.world, "executable")

    # ---- making

    def instantiate(self, graph: GraphData, flags: int) -> Exec:
        """A new executable; refuses with (result, node) for InstantiateWithParams to show."""
        self.contexts.current()
        self._check(graph, flags)
        copy = self.graphs.copy(graph)
        copy.lent = True
        pairs = zip(graph.walk(), copy.walk(), strict=True)
        twins = {node.address: twin for node, twin in pairs}
        bodies = [body for work in copy.conditional_works() for body in work.bodies]
        plans = {each: make_plan(each) for each in (copy, *bodies)}
        made = Exec(copy, graph, flags, twins, plans)
        made.conditionals = {
            handle: default if assign else 0
            for handle, (default, assign) in copy.conditionals.items()
        }
        graph.execs += 1
        return self.live.add(made)

    def _check(self, graph: GraphData, flags: int) -> None:
        if graph.owner is not None:
            raise NotInstantiable(NOT_SUPPORTED, _ERROR)
        if flags & ~0xF or (flags & AUTO_FREE and flags & DEVICE_LAUNCH):
            raise NotInstantiable(INVALID_VALUE, _ERROR)
        if graph.holds({MEM_ALLOC, MEM_FREE}) and graph.execs:
            raise NotInstantiable(NOT_SUPPORTED, _ERROR)
        looped = graph.node_in_cycle()
        if looped is not None:
            raise NotInstantiable(INVALID_VALUE, _INVALID_STRUCTURE, looped)
        self._check_bodies(graph)
        if flags & DEVICE_LAUNCH:
            self._check_device_launch(graph)
        used = {work.handle for work in graph.conditional_works()}
        if not used.issuperset(graph.conditionals):
            raise NotInstantiable(INVALID_VALUE, _HANDLE_UNUSED)

    def _check_bodies(self, graph: GraphData) -> None:
        """Conditional bodies hold few kinds of nodes.

        (And no copies of pageable memory; but here memory of the process counts as the device's.)
        """
        for node in graph.walk():
            if node.graph.is_body() and node.work.kind not in IN_BODIES:
                raise NotInstantiable(INVALID_VALUE, _UNSUPPORTED_NODE, node)

    def _check_device_launch(self, graph: GraphData) -> None:
        for node in graph.nodes:
            if node.work.kind not in (KERNEL, MEMCPY, MEMSET, CHILD):
                raise NotInstantiable(INVALID_VALUE, _UNSUPPORTED_NODE, node)
        if not graph.nodes:
            raise NotInstantiable(INVALID_VALUE, _ERROR)

    def destroy(self, handle: Handle) -> None:
        """The executable and its copy are gone."""
        gone = self.live.release(handle)
        gone.template.execs -= 1
        self.graphs.destroy(gone.graph)

    # ---- running

    def launch(self, executable: Exec) -> None:
        """Run all nodes once the current call has let go of the lock."""
        self._free_leftovers(executable)
        self.world.afterwards(lambda: self._run(executable))

    def _free_leftovers(self, executable: Exec) -> None:
        works = [node.work for node in executable.graph.walk()]
        addresses = [work.address for work in works if isinstance(work, MemAlloc)]
        out = [each for each in addresses if self.memory.is_allocated_by_graph(each)]
        if out and not executable.flags & AUTO_FREE:
            raise Refusal(INVALID_VALUE)
        for address in out:
            self.memory.graph_frees(address)

    def _run(self, executable: Exec) -> Code:
        with executable.running:
            for handle, (default, assign) in executable.graph.conditionals.items():
                if assign:
                    executable.conditionals[handle] = default
            run = Run(self.world, self.memory, executable.conditionals)
            self._run_plan(executable, executable.graph, run)
            return run.code

    def _run_plan(self, executable: Exec, graph: GraphData, run: Run) -> None:
        plan = executable.plans[graph]
        waits = {step: step.waits for step in plan}
        ready = [step for step in plan if not step.waits]
        while ready:
            step = ready.pop(self.rng.randrange(len(ready)))
            if step.node is not None and step.node not in executable.disabled:
                self._run_node(executable, step.node.work, run)
            for follower in step.followers:
                waits[follower] -= 1
                if not waits[follower]:
                    ready.append(follower)

    def _run_node(self, executable: Exec, work: Op, run: Run) -> None:
        if not isinstance(work, ConditionalOp):
            work.run(run)
            return
        for _ in range(_MOST_ROUNDS):
            chosen = work.chosen(run.conditionals[work.handle])
            if chosen is None or run.code:
                return
            self._run_plan(executable, work.bodies[chosen], run)
            if work.choice != WHILE:
                return
        self.world.find(f"a WHILE node ran {_MOST_ROUNDS} times: its condition is never cleared")
        run.fail(LAUNCH_FAILED)

    # ---- changing

    def twin(self, executable: Exec, node: NodeData) -> NodeData:
        """The executable's copy of a node of its template."""
        twin = executable.twins.get(node.address)
        if twin is None:
            raise Refusal(INVALID_VALUE)
        return twin

    def change(self, executable: Exec, node: NodeData, work: Op) -> None:
        """Give one node of an executable other parameters, if the rules allow it."""
        twin = self.twin(executable, node)
        rules = UpdateRules(self.memory, executable.flags)
        new = keep_attributes(twin.work, work)
        if rules.refusal(twin.work, new) != UpdateResult.SUCCESS:
            raise Refusal(INVALID_VALUE)
        twin.replace(new)

    def change_child(self, executable: Exec, node: NodeData, graph: GraphData) -> None:
        """Give all nodes of a child graph the parameters of another graph's."""
        twin = self.twin(executable, node)
        if not isinstance(twin.work, ChildOp):
            raise Refusal(INVALID_VALUE)
        try:
            changes = UpdateRules(self.memory, executable.flags).plan(twin.work.graph, graph)
        except UpdateRefused:
            raise Refusal(UPDATE_FAILURE) from None
        for change in changes:
            change.node.replace(change.work)

    def update(self, executable: Exec, graph: GraphData) -> None:
        """`cuGraphExecUpdate`: all parameters of another graph, or none; raises UpdateRefused."""
        for change in UpdateRules(self.memory, executable.flags).plan(executable.graph, graph):
            change.node.replace(change.work)
        _update_defaults(executable.graph, graph)
        self._swap_user_objects(executable.graph, graph)

    def _swap_user_objects(self, mine: GraphData, theirs: GraphData) -> None:
        before = mine.user_objects
        mine.user_objects = self.graphs.users.retained(theirs.user_objects)
        self.graphs.users.release_all(before)


class NotInstantiable(Refusal):
    """A refusal with what InstantiateWithParams tells besides the code."""

    def __init__(self, code: Code, why: int, node: NodeData | None = None) -> None:
        super().__init__(code)
        self.why, self.node = why, node


def _update_defaults(mine: GraphData, theirs: GraphData) -> None:
    for old, new in zip(mine.conditional_works(), theirs.conditional_works(), strict=True):
        mine.conditionals[old.handle] = theirs.root().conditionals[new.handle]
