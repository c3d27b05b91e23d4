"""GraphExec: an executable graph, its launches and its edits.

The hard problem: an executable can be changed but not read, and its nodes are named by those of the
graph that it was made from. So every change is worked out from a record of what was changed before (the
shadow), is one driver call, and is recorded only when that has worked. Which executable that call goes
to is the business of a `Target`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from .._driver import contexts, enums, node_params, release, set_params, stream_capture
from .._driver.bindings import Driver, types
from .._driver.handles import ExecHandle
from .._driver.stream_order import CompletionMark
from ..errors import CUDAError, UpdateError, bad_type, not_copyable
from ..frameworks import choose
from ..frameworks.streams import DEFAULT_STREAMS, as_handle
from . import edit, errors
from .checks import Edited, Owned
from .diff import differences
from .node import Node
from .recording import Recording
from .snapshot import Snapshot
from .state import Shadow, Template
from .target import OwnTarget, Target
from .view import GraphReader, template_of

_NOTHING = contextlib.nullcontext()

_SWITCHABLE = (enums.KERNEL, enums.MEMCPY, enums.MEMSET)


class GraphExec:
    """An executable graph. Made by `Graph.instantiate()`, or found as `segment.exec`.

    Nodes are given as the nodes of the graph that it was made from. An edit changes what later
    launches do; those that were launched before keep what they had. Calls from several threads run
    one after the other.
    """

    __slots__ = ("__weakref__", "_keep", "_shadow", "_target", "_template")

    def __init__(
        self, template: Template, target: Target, shadow: Shadow, keep: list[object]
    ) -> None:
        self._template, self._target, self._shadow = template, target, shadow
        self._keep = keep  # what the template's nodes named when this was made

    # ---- running

    def launch(self, stream: Any = None) -> None:
        """Run the graph once on a stream (a stream-like object or a handle; default: the current).

        Raises `CUDAError` if the driver refuses, `ReplayError` on a stream that is capturing.
        """
        with _at_home(self._template):
            handle, stream = self._stream(stream)
            with self._target.turn():
                self._target.launch(handle, stream)

    def upload(self, stream: Any = None) -> None:
        """Bring the graph to the device now, so that the first launch need not; see `launch`."""
        with _at_home(self._template):
            _, stream = self._stream(stream)
            with self._target.turn():
                self._template.driver.cuGraphUpload(self._target.executable(), stream)

    def _stream(self, stream: Any) -> tuple[int, Any]:
        driver = self._template.driver
        if stream is None:
            handle = choose.framework_for(driver, None).current_stream()
        else:
            handle = as_handle(stream)
            home = self._template.root.context
            if (
                home
                and handle not in DEFAULT_STREAMS
                and contexts.of_stream(driver, handle) != home
            ):
                raise errors.stream_of_other_context()
        made = types.CUstream(handle)
        if stream_capture.status(driver, made) is not stream_capture.Status.NONE:
            raise errors.launch_in_a_capture()
        return handle, made

    # ---- editing one node

    def update(
        self, node: Node, *, fn: Any = None, grid: Any = None, block: Any = None,
        shared_bytes: Any = None, args: Mapping[int, Any] | None = None, src: Any = None,
        dst: Any = None, nbytes: Any = None, value: Any = None, event: Any = None,
        operations: Any = None, from_node: Node | None = None,
    ) -> None:  # fmt: skip
        """Change what a node does from the next launch on. What is not given stays as it is now.

        Of a kernel: `grid` and `block` (one to three ints), `shared_bytes`, `args` (index -> value:
        arrays, typed numbers, structures or bytes of the argument's size), and `fn`, another kernel,
        with all its arguments. Of a copy: `src` and `dst` (arrays or addresses) and `nbytes`. Of a
        fill: `dst`, `value` (an int that fits the element, or a typed number) and `nbytes`. Of an
        event record or wait: `event`. Of a host node: `fn`. Of a batch mem op: `operations`, all of
        them, as many and of the same types. `from_node`: everything from a node of any graph.

        Arrays are kept alive for as long as the executable names them. Everything is checked before
        the one driver call; when this raises, nothing has changed. Raises `UpdateError`, with
        `.node` and `.field`, or `TypeError` for values of the wrong type.
        """
        given = {
            "fn": fn, "grid": grid, "block": block, "shared_bytes": shared_bytes, "args": args,
            "src": src, "dst": dst, "nbytes": nbytes, "value": value, "event": event,
            "operations": operations,
        }  # fmt: skip
        changes = {name: what for name, what in given.items() if what is not None}
        with self._target.turn():
            before = self._work(node)
            made = worked_out(self._template.driver, node, before, changes, from_node)
            self._set(node, made, "fn" if "fn" in changes else "/".join(changes) or "from_node")

    def _set(self, node: Node, made: Edited, field: str) -> None:
        """The driver call, and then, when nothing can fail any more, the record of it."""
        try:
            self._write(node._handle, made.work)
        except CUDAError as error:
            raise errors.edit_failed(node, field, error) from error
        self._shadow.works[node.handle] = made.work
        self._retire(self._shadow.owners.put(node.handle, made.owners))

    def _write(self, handle: Any, work: node_params.Work) -> None:
        target = self._target
        set_params.set_in_exec(self._template.driver, target.executable(), self._twin(handle), work)

    def _twin(self, handle: Any) -> Any:
        """The node by which the executable that runs knows a node of the template."""
        twins = self._target.twins()
        return handle if twins is None else twins[int(handle)]

    def _retire(self, things: list[object]) -> None:
        """Let go of what launches that are still running may read, when they have ended."""
        mark = self._target.mark
        if things and mark is not None:
            with release.relaxed_thread():
                mark.hold(things)

    def _work(self, node: Node) -> node_params.Work:
        """What a node of this executable does now; refuses any other node."""
        self._check(node)
        return self._template.current(node._handle, self._template.reader(), self._shadow)

    def _check(self, node: Node) -> None:
        if self._target.closed:
            raise errors.exec_is_closed()
        self._template.check(node)

    # ---- switching nodes off and on

    def disable(self, node: Node) -> None:
        """Skip a kernel, copy or fill from the next launch on; its parameters stay, and can be edited.

        Raises `UpdateError` for a node of another kind or graph.
        """
        self._switch(node, False)

    def enable(self, node: Node) -> None:
        """Let a disabled node run again; see `disable`."""
        self._switch(node, True)

    def _switch(self, node: Node, enabled: bool) -> None:
        with self._target.turn():
            self._check(node)
            if node.type_id not in _SWITCHABLE:
                raise errors.cannot_be_switched(node)
            try:
                self._write_enabled(node._handle, enabled)
            except CUDAError as error:
                raise errors.edit_failed(node, "enabled", error) from error
            if enabled:
                self._shadow.disabled.discard(node.handle)
            else:
                self._shadow.disabled.add(node.handle)

    def _write_enabled(self, handle: Any, enabled: bool) -> None:
        target = self._target
        twin = self._twin(handle)
        set_params.set_enabled(self._template.driver, target.executable(), twin, enabled)

    def is_enabled(self, node: Node) -> bool:
        """Whether a node will run."""
        self._check(node)
        return node.handle not in self._shadow.disabled

    # ---- editing from elsewhere

    def update_from(self, graph: GraphReader) -> None:
        """Take all parameters from a graph of the same topology, or change nothing.

        Nodes are paired in the order in which they were added. Nodes that are disabled stay so.
        Raises `UpdateError`, whose `.node` (of `graph`) and `.field` say what cannot change, and
        whose `.changes` are all differences. Raises `RuntimeError` for the graph of another segment,
        if that draws random numbers.
        """
        other = template_of("graph", graph)
        with self._target.turn():
            if self._target.closed:
                raise errors.exec_is_closed()
            if other.root.draws and other.root is not self._template.root:
                raise errors.only_its_sequence_draws()
            other.finish()
            changes = differences(self._snapshot(), other.snapshot())
            for change in changes:
                if change.field == "attrs.cluster":
                    # Some drivers take it and go on with the old one (ml-explore/mlx#2813).
                    raise errors.update_refused("ATTRIBUTES_CHANGED", None, change, changes)
            refusal = self._target.update_from(other.value)
            if refusal is not None:
                raise self._refused(refusal, other, changes)
            self._take_over(other)

    def _snapshot(self) -> Snapshot:
        """The template with this executable's own changes laid over it."""
        root = self._template.root
        before, root.shown = root.shown, self._shadow
        try:
            return self._template.snapshot()
        finally:
            root.shown = before

    def _refused(
        self, refusal: set_params.UpdateRefusal, other: Template, changes: list[Any]
    ) -> UpdateError:
        cause = (
            None
            if refusal.result > 1
            else self._template.driver.error("cuGraphExecUpdate", refusal.code)
        )
        node = None
        for template, handle in other.walk():
            if int(handle) == refusal.node:
                node = template.node(handle)
        result = set_params.UPDATE_RESULTS.get(refusal.result, f"result {refusal.result}")
        chosen = _explaining(result, node, changes)
        about = _ABOUT.get(result)
        return errors.update_refused(result, node, chosen, changes, refusal.code, cause, about)

    def _take_over(self, other: Template) -> None:
        """The record of a whole-graph update: each node does what its partner does."""
        shadow, reader = self._shadow, other.reader()
        for (_, mine), (_, theirs) in zip(self._template.walk(), other.walk(), strict=True):
            work = reader.read(theirs)
            if work.kind not in (enums.CHILD, enums.CONDITIONAL):
                shadow.works[int(mine)] = work
        before = self._shadow.owners.all()
        shadow.owners = type(shadow.owners)()
        self._retire([*before, shadow.sources])
        shadow.sources = other.kept()
        for _, handle in self._template.walk():
            if int(handle) in shadow.disabled:
                self._write_enabled(handle, False)

    @contextlib.contextmanager
    def capture_update(self, node: Node, stream: Any = None) -> Iterator[Any]:
        """Capture one operation in the block, and let a node do that from the next launch on.

        `stream` is where to capture: it is yielded, and current for torch and CuPy inside. What was
        captured does not run. Raises `UpdateError` unless it was just one node of the same kind.
        """
        with self._target.turn():
            self._check(node)
        recording = Recording(self._template.driver, stream)
        with recording:
            yield recording.stream
        captured = recording.template
        nodes = captured.snapshot().by_insertion
        if len(nodes) != 1:
            raise errors.not_one_node(node, [each.label for each in nodes])
        with self._target.turn():
            before = self._work(node)
            work = _same_kind(node, before, nodes[0]._work)
            owners: Owned = {"captured": (recording.keep, recording.inputs[0])}
            self._set(node, Edited(work, owners), "capture_update")

    # ---- for segments

    def _reapply(self) -> None:
        """Bring an executable that was made anew from the template to where the old one was."""
        for _, handle in self._template.walk():
            work = self._shadow.works.get(int(handle))
            if work is not None:
                self._write(handle, work)
            if int(handle) in self._shadow.disabled:
                self._write_enabled(handle, False)

    # ---- end

    @property
    def closed(self) -> bool:
        """Whether it can no longer be launched or edited."""
        return self._target.closed

    def close(self) -> None:
        """Give the executable back once its launches have ended. A second call does nothing.

        That of a segment belongs to its sequence: closing it here does nothing.
        """
        self._target.close()
        self._keep = []
        if self._template.root.shown is not self._shadow:  # not a segment's
            self._shadow = Shadow()

    def __enter__(self) -> GraphExec:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        count = len(self._shadow.works)
        state = "closed" if self.closed else f"{count} node{'' if count == 1 else 's'} edited"
        return f"<GraphExec {state}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copyable("GraphExec")


#: Which differences a reason of the driver's is about.
_EXPLAINS = {
    "TOPOLOGY_CHANGED": ("topology", "edges"),
    "NODE_TYPE_CHANGED": ("kind",),
    "FUNCTION_CHANGED": ("fn",),
    "UNSUPPORTED_FUNCTION_CHANGE": ("fn",),
    "ATTRIBUTES_CHANGED": ("attrs.cooperative", "attrs.priority", "attrs.cluster"),
    # what of copies, fills, conditionals and batches stays; addresses and values may change
    "PARAMETERS_CHANGED": (
        "nbytes", "element_size", "pitch", "src_pitch", "dst_pitch", "src_memory", "dst_memory", "bodies",
        "type", "count",
    ),
}  # fmt: skip

#: What a reason is about where the two graphs show no difference: two functions of one name, say.
_ABOUT = {
    "FUNCTION_CHANGED": "fn",
    "UNSUPPORTED_FUNCTION_CHANGE": "fn",
    "ATTRIBUTES_CHANGED": "attrs",
}


def _explaining(result: str, node: Node | None, changes: list[Any]) -> Any:
    """The difference that explains a refusal: of the reason's kind if there is one, of the node."""
    of_node = [c for c in changes if node is not None and c.after == node] or (
        changes if node is None else []
    )
    of_kind = [c for c in of_node if c.field in _EXPLAINS.get(result, ())]
    if node is None or result == "TOPOLOGY_CHANGED":  # which the driver may note at a neighbour
        of_kind = of_kind or [c for c in changes if c.field in _EXPLAINS.get(result, ())]
    return next(iter([*of_kind, *of_node]), None)


def worked_out(
    driver: Driver, node: Node, before: node_params.Work, changes: Mapping[str, Any],
    from_node: Node | None,
) -> Edited:  # fmt: skip
    """What a node is to do after a change of some fields, or after taking everything from another."""
    if from_node is None:
        try:
            return edit.edited(driver, node.label, node.kind, before, changes)
        except ValueError as error:
            raise errors.edit_refused(node, getattr(error, "field", None), str(error)) from None
    if changes:
        raise errors.from_node_and_more(sorted(changes))
    if not isinstance(from_node, Node):
        raise bad_type("from_node", from_node, "a node of a graph")
    return Edited(_same_kind(node, before, from_node._work), _kept(from_node))


def _kept(node: Node) -> Owned:
    """What owns the memory that another graph's node names: that graph's owners."""
    return {"from_node": node._template.kept()}


def _same_kind(node: Node, before: node_params.Work, after: node_params.Work) -> node_params.Work:
    """Another node's work for this node; launch attributes stay, as the driver keeps them."""
    if before.kind != after.kind:
        raise errors.edit_refused(node, "kind", "the other node is of another kind")
    if isinstance(before, node_params.Kernel) and isinstance(after, node_params.Kernel):
        if before.attributes.cluster != after.attributes.cluster:
            raise errors.edit_refused(node, "attrs.cluster", "cluster dimensions cannot change")
        return dataclasses.replace(after, attributes=before.attributes)
    if isinstance(before, node_params.Copy) and not (before.is_flat and after.is_flat):  # type: ignore[attr-defined]
        raise errors.edit_refused(node, "src", "only copies of one dimension can change")
    if isinstance(before, node_params.Batch):
        try:
            edit.require_same_operations(before, after)
        except ValueError as error:
            raise errors.edit_refused(node, "operations", str(error)) from None
    if before.kind not in edit.EDITS:
        raise errors.edit_refused(node, "kind", "nodes of this kind cannot change")
    return after


def _at_home(template: Template) -> AbstractContextManager[None]:
    """The device of the graph is current inside, whichever was."""
    driver, home = template.driver, template.root.context
    if not home or contexts.ensure(driver, home):
        return _NOTHING
    return contexts.made_current(driver, home)


def instantiate(template: Template, flags: int) -> GraphExec:
    """A new executable from a template as it is."""
    handle = template.handle
    template.finish()
    value = template.value
    driver = template.driver
    with _at_home(template):
        mark = CompletionMark(driver)
    try:
        with release.relaxed_thread():
            made = ExecHandle.make(
                driver, "cuGraphInstantiate", value, flags,
                keep=(handle, template.root.lease), is_lost=mark.is_lost,
            )  # fmt: skip
    except BaseException:
        mark.close()
        raise
    return GraphExec(template, OwnTarget(made, mark), Shadow(), template.kept())
