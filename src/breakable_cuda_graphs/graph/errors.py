"""The errors of graphs, nodes, edits and captures into a graph, and their texts.

The hard problem: the driver refuses an edit or a node with a number, and by then the value that was wrong
is far away. So what is refused here names the field and the node, says what would fit, and says whether
anything was changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from .._driver.errors import used_after_fork
from ..errors import (
    CaptureError,
    CUDAError,
    ProcessError,
    ReplayError,
    UnjoinedStreamError,
    UpdateError,
)


def stream_of_other_context() -> ReplayError:
    return ReplayError(
        "the stream belongs to another CUDA context (another device) than the sequence was captured in: "
        "replay on a stream of that context"
    )


def block_not_open(what: str = "breakable_graph block") -> CaptureError:
    return CaptureError(f"this {what} is not open: it was left already")


def left_elsewhere(what: str, is_in_parent: bool) -> CaptureError | ProcessError:
    if is_in_parent:
        return used_after_fork(what)
    return CaptureError(
        f"a {what} was left on another thread than it was entered on: it is given up, and ended when the "
        "library is next used on the thread that began it, or on any other once that has ended"
    )


def unjoined(
    segment: int, where: str, kernels: Sequence[str], streams: Sequence[int]
) -> UnjoinedStreamError:
    shown = ", ".join(kernels[:8]) + (", ..." if len(kernels) > 8 else "")
    shown = shown or "no kernel, only a wait"
    ids = f" Unjoined side-stream id(s): {', '.join(map(str, streams))}." if streams else ""
    wait = (
        "Let the capture stream wait for it first (torch.cuda.current_stream().wait_stream(side))."
    )
    if any("nccl" in kernel.lower() for kernel in kernels):
        wait += " A collective begun with async_op=True is joined by its wait(): call that first."
    error = UnjoinedStreamError(
        f"work on a side stream was not joined back to the capturing stream before {where} (segment "
        f"{segment}): {shown}.{ids} {wait}"
    )
    error.kernels, error.streams, error.segment = tuple(kernels), tuple(streams), segment
    return error


# ---------------------------------------------------------------- graphs, nodes and edits


class FieldError(ValueError):
    """A value does not fit a field of a node. `field` is the field's name, as in "args[2]"."""

    field: str | None = None


def _field(field: str, text: str) -> FieldError:
    error = FieldError(text)
    error.field = field
    return error


def named(node: object) -> str:
    label = str(getattr(node, "label", node))
    return label if len(label) <= 120 else f"{label[:60]}...{label[-57:]}"


# ---- graphs and executables that cannot be used so


def graph_is_closed() -> RuntimeError:
    return RuntimeError(
        "this graph is closed, or its sequence was reset: its nodes are gone, and an executable of it "
        "can no longer be edited"
    )


def graph_is_fixed() -> RuntimeError:
    return RuntimeError(
        "nothing can be added to or taken out of this graph: it belongs to a sequence, or is a copy "
        "inside another graph. Edit the executable (segment.exec.update), or build a Graph() of your own."
    )


def graph_is_inside() -> RuntimeError:
    return RuntimeError("this graph is inside a node of another: use the outer graph")


def only_its_sequence_draws() -> RuntimeError:
    return RuntimeError(
        "this segment draws random numbers, and what they begin with is written before each launch: only "
        "its sequence can replay it"
    )


def exec_is_closed() -> RuntimeError:
    return RuntimeError(
        "this executable is closed, or its sequence was reset: it can be neither launched nor edited"
    )


def launch_in_a_capture() -> ReplayError:
    return ReplayError(
        "an executable cannot be launched on a stream that is being captured; the capture is unharmed. "
        "Put the graph in as a node (Graph.child), append it to the sequence, or launch it in a break."
    )


def child_of_itself() -> ValueError:
    return ValueError("a graph cannot be a child of itself or of a graph inside it")


def cannot_be_a_child(node: object) -> ValueError:
    return ValueError(
        f"this graph has a {getattr(node, 'kind', 'node')} node, and the driver cannot copy graphs with "
        "allocations or conditional nodes: capture or build its work in the outer graph itself"
    )


def bodies_unknown(node: object) -> RuntimeError:
    return RuntimeError(
        "what is inside this conditional node is not known: it was made by another library, and only "
        "drivers from 13.2 on can be asked"
    )


def no_second_body(node: object) -> RuntimeError:
    return RuntimeError(
        f"the node {named(node)} has no second body that could run when the flag is zero: make it with "
        "if_(flag, orelse=True)"
    )


def copy_differs() -> RuntimeError:
    return RuntimeError(
        "the driver's copy of a captured graph has other nodes than the original, so they cannot be "
        "edited. Please report this with the driver's version."
    )


def no_such_edge(source: object, target: object) -> ValueError:
    return ValueError(f"{named(target)} does not wait for {named(source)}: there is no such edge")


# ---- edits that are refused


def _update_error(node: object, field: str | None, text: str) -> UpdateError:
    error = UpdateError(text)
    error.node, error.field = node, field
    return error


def edit_refused(node: object, field: str | None, why: str) -> UpdateError:
    where = f"{field} of " if field else ""
    return _update_error(
        node,
        field or None,
        f"{where}the node {named(node)} cannot be changed so: {why}. Nothing was changed.",
    )


def edit_failed(node: object, field: str, cause: CUDAError) -> UpdateError:
    error = _update_error(
        node,
        field,
        f"the driver refused to change {field} of the node {named(node)} ({cause}). Nothing was "
        "changed. What an executable lets change is listed with cuGraphExecNodeSetParams.",
    )
    error.call, error.code, error.name = cause.call, cause.code, cause.name
    return error


_UPDATE_REASONS = {
    "TOPOLOGY_CHANGED": "nodes or edges (its topology) differ",
    "NODE_TYPE_CHANGED": "a node is of another type",
    "FUNCTION_CHANGED": "a kernel's function differs",
    "PARAMETERS_CHANGED": "a parameter that may not change differs",
    "NOT_SUPPORTED": "a node of this kind cannot be updated",
    "UNSUPPORTED_FUNCTION_CHANGE": "a kernel's function changed in a way that is not allowed",
    "ATTRIBUTES_CHANGED": "a launch attribute that may not change differs",
}


def update_refused(
    result: str, node: object, change: object, changes: Sequence[object], code: int = 910,
    cause: BaseException | None = None, about: str | None = None,
) -> UpdateError:  # fmt: skip
    """`change` is the difference that explains it (see `diff.Change`), if one was found; `about`
    is the field otherwise.
    """
    if node is None and change is not None:
        node = getattr(change, "node", None)
    field = str(getattr(change, "field", "")) or about
    why = _UPDATE_REASONS.get(result, "the driver does not say why")
    told = f" ({change})" if change is not None else ""
    where = f" at the node {named(node)}" if node is not None else ""
    text = (
        f"the executable cannot take over this graph{where}: {why}{told}; {result}. Nothing was "
        "changed. Instantiate the new graph, or build it with the same nodes and edges in the same order."
    )
    error = _update_error(node, field, text)
    error.call, error.code, error.name = "cuGraphExecUpdate", code, result
    error.changes = tuple(changes)
    error.__cause__ = cause
    return error


def node_of_another_graph(node: object) -> UpdateError:
    text = (
        f"the node {named(node)} belongs to another graph: give a node of the graph that this "
        "executable or graph was made from"
    )
    return _update_error(node, None, text)


def node_was_removed(node: object) -> UpdateError:
    return _update_error(node, None, f"the node {named(node)} was removed from its graph")


def cannot_be_switched(node: object) -> UpdateError:
    text = f"only kernels, copies and fills can be disabled, not the node {named(node)}"
    return _update_error(node, "enabled", text)


def not_one_node(node: object, labels: Sequence[str]) -> UpdateError:
    what = ", ".join(labels[:5]) or "nothing"
    text = (
        f"capture_update for the node {named(node)} has to capture just one operation, and captured "
        f"{len(labels)}: {what}. Nothing was changed."
    )
    return _update_error(node, None, text)


def from_node_and_more(fields: Sequence[str]) -> TypeError:
    return TypeError(
        f"from_node= takes everything from the other node; {', '.join(fields)} came too"
    )


def not_a_field(kind: str, label: str, name: str, allowed: Sequence[str]) -> FieldError:
    known = ", ".join(allowed) or "nothing"
    return _field(name, f"a {kind} node has no {name}; of {label} can be changed: {known}")


def nothing_to_change(label: str) -> FieldError:
    return _field("", f"nothing was given to change in {label}")


# ---- kernels and their arguments


def not_a_kernel(given: object) -> TypeError:
    return TypeError(
        f"{type(given).__name__} is not a kernel: give a CUfunction or CUkernel, a cuda.core Kernel, a "
        "CuPy RawKernel, or a Numba or Triton kernel that has been compiled"
    )


def kernel_not_compiled_once(count: int) -> TypeError:
    how = "not been compiled yet: call it once, or give it signatures" if not count else (
        f"been compiled for {count} signatures: give one of its .overloads"
    )  # fmt: skip
    return TypeError(f"this Numba kernel has {how}")


def argument_count(kernel: str, given: int, wanted: int) -> FieldError:
    return _field("args", f"the kernel {kernel} takes {wanted} arguments, and {given} were given")


def argument_size(kernel: str, index: int, value: object, given: int, wanted: int) -> FieldError:
    return _field(
        f"args[{index}]",
        f"argument {index} of the kernel {kernel} has a size of {wanted} bytes, and the value given "
        f"({type(value).__name__}) has {given} bytes",
    )


def no_such_argument(kernel: str, index: int, count: int) -> FieldError:
    return _field(
        f"args[{index}]", f"the kernel {kernel} has {count} arguments, and none with index {index}"
    )


def argument_without_size(kernel: str, index: int, value: object) -> TypeError:
    return TypeError(
        f"argument {index} of the kernel {kernel} is a bare Python {type(value).__name__}, whose size "
        "is unknown: give a typed number, such as ctypes.c_int(n) or numpy.float32(x)"
    )


def argument_on_the_host(kernel: str, index: int, value: object) -> TypeError:
    return TypeError(
        f"argument {index} of the kernel {kernel} is an array in host memory "
        f"({type(value).__name__}): kernels take device arrays, or an address as ctypes.c_void_p"
    )


def argument_of_unknown_type(kernel: str, index: int, value: object) -> TypeError:
    return TypeError(
        f"argument {index} of the kernel {kernel} cannot be a {type(value).__name__}: give an array, a "
        "typed number (ctypes, numpy), a ctypes structure, or bytes of the argument's size"
    )


def argument_read_wrongly(index: int, size: int, wanted: int, at: int | None) -> ValueError:
    where = "" if at is None else f" at byte {at}"
    return ValueError(f"argument {index} has {size} bytes; {wanted} cannot be read{where}")


def launch_shape(kernel: str, name: str, dim: Sequence[int], limits: Sequence[int]) -> FieldError:
    return _field(
        name,
        f"the kernel {kernel} cannot be launched with {name} {tuple(dim)}: each of the three has to be "
        f"from 1 to {tuple(limits)}",
    )


def too_many_threads(kernel: str, block: Sequence[int], threads: int, most: int) -> FieldError:
    return _field(
        "block",
        f"the kernel {kernel} cannot be launched with block {tuple(block)}: {threads} threads a block, "
        f"and {most} are the most",
    )


def too_much_shared_memory(kernel: str, given: int, most: int) -> FieldError:
    return _field(
        "shared_bytes",
        f"the kernel {kernel} cannot be launched with {given} bytes of dynamic shared memory; at most "
        f"{most} are set for it",
    )


# ---- copies and fills


def null_address(field: str) -> FieldError:
    return _field(field, f"{field} is the null address")


def too_small(field: str, given: int, wanted: int) -> FieldError:
    return _field(field, f"{field} is an array of {given} bytes, and {wanted} bytes are needed")


def negative_size(field: str, number: int) -> FieldError:
    return _field(field, f"{field} must not be negative, and is {number}")


def nothing_to_copy(field: str) -> FieldError:
    return _field(
        field,
        f"{field} must not be zero: the driver has no empty copies, fills, switches or allocations",
    )


def only_flat_copies() -> FieldError:
    return _field("src", "an executable lets only copies of one dimension change")


def only_flat_fills(field: str) -> FieldError:
    return _field(field, "an executable lets only fills of one dimension change their size")


def memory_kind_changes(field: str, before: str, after: str) -> FieldError:
    return _field(
        field, f"{field} is {before}, and cannot become {after}: the kind of memory has to stay"
    )


def rows_overlap(field: str, given: int, least: int) -> FieldError:
    return _field(
        field, f"{field} is {given}, and what lies between is {least}: rows would overlap"
    )


def no_operations() -> FieldError:
    return _field("operations", "operations are empty: give at least one (what, ptr, value)")


def no_such_operation(field: str, what: object, choices: Sequence[str]) -> FieldError:
    return _field(field, f"{field} is to do {what!r}; there are: {', '.join(choices)}")


def word_size(field: str, size: int) -> FieldError:
    return _field(field, f"{field} has a value of {size} bytes; words of memory have 4 or 8")


def word_alignment(field: str, address: int, size: int) -> FieldError:
    return _field(field, f"{field} is at {address:#x}, which is not a multiple of its {size} bytes")


def operations_change(before: int, after: int) -> FieldError:
    return _field(
        "operations",
        f"the number of operations ({before}, given {after}) and the type and size of each stay; their "
        "addresses and values, and how waits compare, can change",
    )


def fill_element(size: int) -> FieldError:
    return _field("value", f"the element of a fill has 1, 2 or 4 bytes, not {size}")


def fill_value(value: int, size: int) -> FieldError:
    return _field(
        "value",
        f"{value} does not fit an element of {size} bytes (0 to {(1 << 8 * size) - 1}); a typed number, "
        "such as numpy.float32(1), brings its own size",
    )


def fill_size(nbytes: int, size: int) -> FieldError:
    return _field("nbytes", f"{nbytes} bytes are not a whole number of elements of {size} bytes")


def fill_alignment(address: int, size: int) -> FieldError:
    return _field("dst", f"{address:#x} is not a multiple of the element's size, {size} bytes")


# ---- captures into graphs


def stream_is_captured() -> CaptureError:
    return CaptureError(
        "this stream is being captured already, and that capture is unharmed: capture on another one"
    )


def part_is_used_up() -> CaptureError:
    return CaptureError("this capture was entered before: call graph.capture() for each")


def recording_reads_what_is_gone(words: str) -> CaptureError:
    return CaptureError(
        f"the capture into the graph reads or writes memory that is gone already ({words}): the graph could "
        "not keep it. Keep the tensor alive until the capture has ended. The graph is as it was."
    )


def recording_lost(cause: BaseException) -> CaptureError:
    error = CaptureError(
        f"the capture into the graph was lost ({cause}): something in it cannot be captured (a host "
        "read such as .item(), a synchronisation, an allocation by another library). The graph is as "
        "it was."
    )
    error.__cause__ = cause
    return error


def recording_has_host_nodes() -> CaptureError:
    return CaptureError(
        "a host callback was captured, which is not safe to launch from Python: use Graph.host. The "
        "graph is as it was."
    )


def recording_copies_pageable(address: int, nbytes: int, is_source: bool) -> CaptureError:
    does, again = ("reads", "read") if is_source else ("writes", "write")
    return CaptureError(
        f"a copy that {does} {nbytes} bytes of ordinary (pageable) host memory at {address:#x} was "
        f"captured, and each launch would {again} that address again: use pinned memory that outlives "
        "the graph. The graph is as it was."
    )


def recording_draws() -> CaptureError:
    return CaptureError(
        "random numbers of torch were drawn in a capture into a graph, or in the body of a conditional "
        "node: what they begin with has to be written before each launch, which only a segment of a "
        "sequence has. Draw before it, or in the segment around it."
    )


def not_in_a_body(label: str) -> CaptureError:
    return CaptureError(
        f"the body of a conditional node cannot hold a {label} node: only kernels, copies and fills of "
        "the device, child graphs and conditional nodes"
    )


def not_a_flag(given: object, why: str) -> TypeError:
    return TypeError(
        f"the flag of a conditional has to be one number in device memory, and {type(given).__name__} "
        f"{why}"
    )
