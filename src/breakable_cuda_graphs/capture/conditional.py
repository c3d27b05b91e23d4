"""Choices and loops that the device makes: capture_if and capture_while.

The hard problem: a body must be captured while the capture around it is open, and nothing of the
outer graph may be touched before the body has come out whole. So each body is captured on a stream
and in a pool of its own, and only then the setter kernel, the conditional node and the body's nodes
go into the outer graph, and the outer stream goes on behind them.

Outside of captures the same calls are plain Python, so code can be written and debugged eagerly.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .._driver import (
    bindings,
    conditionals,
    contexts,
    enums,
    release,
    stream_capture,
    transplant,
    user_objects,
)
from .._driver.bindings import types
from .._driver.handles import GraphHandle
from ..errors import not_callable
from ..frameworks import choose
from ..graph.build import Condition, as_scalar, leaves
from ..graph.capture_notes import Page
from ..graph.errors import recording_lost
from ..graph.part import check_body
from ..graph.recording import Recording, open_recording
from ..sequence.memory import Use
from . import errors, open_blocks
from .open_blocks import OpenBlock

Body = Callable[[], None]


def capture_if(flag: Any, fn: Body, orelse_fn: Body | None = None) -> None:
    """`if flag: fn() else: orelse_fn()`, decided on the device each time a captured graph runs.

    flag: an array of one number in device memory; what it holds when the graph gets there counts.
    fn, orelse_fn: functions without arguments that return None and write into existing tensors. They
        may hold kernels, copies and fills of the device, and further `capture_if` and `capture_while`.

    Inside a `breakable_graph` block, a `Graph.capture` or another library's capture this adds a
    conditional node and no break. Outside, and inside a break, it is the plain `if`, and waits for
    the device.

    Bodies are captured on a stream of their own, which is current for torch and CuPy. To launch with
    a library that has no current stream, build the node by hand (`Graph.if_`), where `.stream` of
    `body.capture()` is that stream, and `append` the graph.

    Raises `CaptureError` for what a body cannot hold: host callbacks, breaks, random numbers of torch,
    work on the stream of the capture around it; `TypeError` for a flag that is no such array.
    """
    _require_callable("fn", fn)
    if orelse_fn is not None:
        _require_callable("orelse_fn", orelse_fn)
    scene = _scene()
    if scene is None:
        chosen = fn if _is_true(flag) else orelse_fn
        if chosen is not None:
            _call(chosen, "capture_if")
        return
    bodies = [fn] if orelse_fn is None else [fn, orelse_fn]
    _add(scene, enums.IF, flag, bodies, "capture_if")


def capture_while(flag: Any, fn: Body) -> None:
    """`while flag: fn()`, decided on the device; see `capture_if`.

    The flag is read before the first round and after each.
    """
    _require_callable("fn", fn)
    scene = _scene()
    if scene is None:
        while _is_true(flag):
            _call(fn, "capture_while")
        return
    _add(scene, enums.WHILE, flag, [fn], "capture_while")


def _require_callable(name: str, given: object) -> None:
    """Of both functions, whichever would run: at a capture neither does."""
    if not callable(given):
        raise not_callable(name, given)


def _call(fn: Body, where: str) -> None:
    if fn() is not None:  # type: ignore[func-returns-value]
        raise errors.body_returns(where)


# ---------------------------------------------------------------- where it is called


class _Scene(NamedTuple):
    """The capture that a call is part of: its stream, and who keeps things for it."""

    driver: bindings.Driver
    stream: Any
    keep: Callable[[object], None]
    page: Page | None
    block: OpenBlock | None


def _scene() -> _Scene | None:
    """The capture that the current stream is in, or None: then the call is plain Python."""
    recording = open_recording()
    if recording is not None:
        return _of_recording(recording)
    block = open_blocks.find() if open_blocks.open_blocks else None
    if block is not None:
        if not block.is_open:
            return None  # in a break
        return _Scene(block.driver, _capturing_stream(block), block.keep, block.page(), block)
    return _of_somebody_else()


def _of_recording(recording: Recording) -> _Scene:
    keep = recording.also_keep.append
    return _Scene(recording.driver, recording.handle, keep, recording.page(), None)


def _capturing_stream(block: OpenBlock) -> Any:
    """The current stream, if it was forked from the block's own, else the block's own."""
    handle = block.framework.current_stream()
    if handle and handle != block.handle and block.holds_stream(handle):
        return types.CUstream(handle)
    return block.stream


def _of_somebody_else() -> _Scene | None:
    torch = sys.modules.get("torch")
    uses_torch = torch is not None and torch.cuda.is_initialized()
    if not bindings.started() and not uses_torch and "cupy" not in sys.modules:
        return None
    driver = bindings.current()
    stream = types.CUstream(choose.framework_for(driver, None).current_stream())
    if stream_capture.status(driver, stream) is not stream_capture.Status.ACTIVE:
        return None

    def keep(thing: object) -> None:
        user_objects.hold(driver, driver.capture_info(stream).graph, thing)

    return _Scene(driver, stream, keep, None, None)


# ---------------------------------------------------------------- into the capture


def _add(scene: _Scene, choice: int, flag: Any, bodies: list[Body], where: str) -> None:
    driver = scene.driver
    scalar, owner = as_scalar(flag, choice)
    conditionals.prepare(driver)
    recordings = [_record(scene, body, where) for body in bodies]
    for recording in recordings:
        check_body(recording.template)
    with release.relaxed_thread():
        _plant(scene, choice, scalar, recordings)
    scene.keep((owner, [recording.keep for recording in recordings]))
    if scene.block is not None:
        for recording in recordings:
            scene.block.take_inputs(
                *recording.inputs, Use(f"read or written in the body of {where}")
            )
    else:  # nobody watches, so what the bodies name is kept
        scene.keep([recording.inputs[0] for recording in recordings])


def _last_work(scene: _Scene) -> list[int] | None:
    """The nodes that the next work of the capture will wait for; None once it is invalidated."""
    info = scene.driver.capture_info(scene.stream)
    return None if info.graph is None else [int(node) for node in info.dependencies]


def _require_same(scene: _Scene, before: list[int] | None, where: str) -> None:
    """What a body has launched into the capture around it would run whatever the flag says."""
    now = _last_work(scene)
    if now is None or now == before:
        return
    error = errors.body_elsewhere(where)
    if scene.block is not None:
        scene.block.poison = error  # the caller may hide it, and the work is there
    raise error


def _record(scene: _Scene, body: Body, where: str) -> Recording:
    """Capture one body on its own."""
    recording = Recording(scene.driver, None, mode="relaxed")
    before = _last_work(scene)
    with _in_body(scene.block, where), recording:
        _call(body, where)
        _require_same(scene, before, where)
    return recording


@contextlib.contextmanager
def _in_body(block: OpenBlock | None, where: str) -> Iterator[None]:
    """Inside, a break of the block is refused: it would end the wrong capture."""
    if block is None:
        yield
        return
    before, block.in_body = block.in_body, where
    try:
        yield
    finally:
        block.in_body = before


def _plant(
    scene: _Scene, choice: int, scalar: conditionals.Scalar, recordings: list[Recording]
) -> None:
    driver, stream = scene.driver, scene.stream
    info = driver.capture_info(stream)
    if info.graph is None:
        raise recording_lost(RuntimeError("the capture around it was invalidated"))
    context, graph = contexts.current(driver), info.graph
    condition = Condition.of_graph(driver, graph, context, choice, len(recordings), scalar)
    made = condition.add_nodes(graph, condition.add_setter(graph, info.dependencies))
    driver.update_capture_dependencies(stream, [made.nodes[-1]])
    known = made.known
    for body, recording in zip(made.bodies, recordings, strict=True):
        ground = transplant.Ground(driver, body, graph, context)
        source = recording.template.handle
        assert isinstance(source, GraphHandle)
        planted = transplant.transplant(ground, source, (), recording.template.known)
        known |= planted.conditionals
        if choice == enums.WHILE:
            condition.add_setter(body, leaves(driver, body))
    if scene.page is not None:
        scene.page.journal.note_conditionals(scene.page.segment, known, made.together)


def _is_true(flag: Any) -> bool:
    """What the flag holds now; waits for the device."""
    if hasattr(flag, "copy_to_host"):  # Numba
        return bool(flag.copy_to_host())
    return bool(flag)
