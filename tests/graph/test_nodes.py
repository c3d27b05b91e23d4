"""Nodes are typed values: copies, told by which node they are, with arguments that have no types."""

from __future__ import annotations

import copy
import ctypes
import pickle
import struct
from typing import Any

import numpy
import pytest

from breakable_cuda_graphs import Graph
from breakable_cuda_graphs._driver.demangle import demangled
from breakable_cuda_graphs.graph.graph import ChildNode
from breakable_cuda_graphs.graph.nodes import (
    BatchMemOpNode,
    EmptyNode,
    EventRecordNode,
    EventWaitNode,
    HostNode,
    KernelNode,
    MemAllocNode,
    MemcpyNode,
    MemFreeNode,
    MemsetNode,
)
from breakable_cuda_graphs.simulator import SimulatedKernel
from graphs import N, array, f32, scale, scale_kernel


def test_a_kernel_node_tells_how_it_was_launched(device: Any) -> None:
    graph, out, source = Graph(), array(), array(1)
    node = scale(graph, out, source, 2.0)
    (found,) = graph.nodes
    assert found == node
    assert isinstance(found, KernelNode)
    assert (found.name, found.grid, found.block, found.shared_bytes) == (
        "scale", (1, 1, 1), (N, 1, 1), 0,
    )  # fmt: skip
    assert [(a.index, a.offset, a.size) for a in found.args] == [
        (0, 0, 8), (1, 8, 8), (2, 16, 4), (3, 20, 4),
    ]  # fmt: skip
    assert found.args[0].as_pointer() == out.ctypes.data
    assert found.args[1].data == struct.pack("<Q", source.ctypes.data)
    assert found.args[2].as_float32() == 2.0
    assert found.args[3].as_int32() == N


def test_a_node_is_its_own_copy_and_cannot_be_pickled(device: Any) -> None:
    node = scale(Graph(), array(), array(), 2.0)
    assert copy.copy(node) is node
    assert copy.deepcopy([node])[0] is node
    with pytest.raises(TypeError, match="a KernelNode cannot be pickled"):
        pickle.dumps(node)


def test_an_argument_is_read_only_as_what_fits(device: Any) -> None:
    node = scale(Graph(), array(), array(), 2.0)
    with pytest.raises(ValueError, match="4 bytes"):
        node.args[2].as_pointer()
    with pytest.raises(ValueError, match="8 bytes"):
        node.args[0].as_int32()
    assert node.args[0].as_uint32(at=4) == node.args[0].as_pointer() >> 32
    with pytest.raises(ValueError, match="at byte 6"):
        node.args[0].as_uint32(at=6)


class Pair(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_void_p), ("count", ctypes.c_int), ("half", ctypes.c_int16))


def test_a_structure_is_read_back_whole_and_in_parts(device: Any) -> None:
    kernel = SimulatedKernel(lambda pair: None, (Pair,), name="takes_pair")
    node = Graph().kernel(kernel, 1, 1, (Pair(0x1234_5678_9ABC, -7, 3),))
    (arg,) = node.args
    assert arg.size == ctypes.sizeof(Pair)
    whole = arg.as_struct(Pair)
    assert (whole.pointer, whole.count, whole.half) == (0x1234_5678_9ABC, -7, 3)
    assert arg.as_pointer(at=0) == 0x1234_5678_9ABC
    assert arg.as_int32(at=8) == -7
    assert arg.as_int16(at=12) == 3


@pytest.mark.parametrize("packed", [False, True], ids=["table", "packed"])
def test_both_forms_of_arguments_read_alike(device: Any, packed: bool) -> None:
    out, source = array(), array(3)
    graph = Graph()
    node = scale(graph, out, source, 2.0, kernel=scale_kernel(packed=packed))
    assert [a.data for a in node.args] == [
        struct.pack("<Q", out.ctypes.data), struct.pack("<Q", source.ctypes.data),
        struct.pack("<f", 2.0), struct.pack("<i", N),
    ]  # fmt: skip
    with graph.instantiate() as execution:
        execution.update(node, args={2: f32(5)})
        execution.launch()
        assert (out == 15).all()


def test_a_node_keeps_what_it_showed(device: Any) -> None:
    graph, out, source = Graph(), array(), array(1)
    node = scale(graph, out, source, 2.0)
    before = node.args
    graph.update(node, args={2: f32(7)})
    assert before[2].as_float32() == 2.0
    assert node.args[2].as_float32() == 2.0
    assert graph.nodes[0].args[2].as_float32() == 7.0
    graph.close()
    assert node.args[2].as_float32() == 2.0


def test_nodes_compare_by_what_they_are(device: Any) -> None:
    graph = Graph()
    node = scale(graph, array(), array(), 2.0)
    changed = graph.update(node, grid=2)
    assert changed == node
    assert changed.grid == (2, 1, 1)
    assert len({node, changed, *graph.nodes}) == 1
    other = Graph()
    assert scale(other, array(), array(), 2.0) != node


def test_a_removed_node_is_another_than_its_successor_at_the_same_address(device: Any) -> None:
    graph = Graph()
    node = graph.join()
    graph.remove(node)
    again = graph.join()
    assert node != again
    with pytest.raises(RuntimeError, match="removed"):
        graph.join(node)


def test_every_kind_is_read_back_as_it_was_built(device: Any) -> None:
    graph, x, y = Graph(), array(1), array()
    event = device.driver.cuEventCreate(0)[1]
    kernel = scale(graph, y, x, 2.0)
    copied = graph.memcpy(y, x, 16, after=kernel)
    fill = graph.memset(y, f32(3), 8, after=copied)
    inner = Graph()
    inner.memset(y, 0, 4)
    nodes = [
        kernel, copied, fill, graph.join(kernel, copied), graph.event_record(event), graph.child(inner),
        graph.event_wait(event), graph.host(lambda: None),
        graph.batch_mem_op([("write", y, numpy.uint32(3))]),
    ]  # fmt: skip
    assert [type(node) for node in nodes] == [
        KernelNode, MemcpyNode, MemsetNode, EmptyNode, EventRecordNode, ChildNode, EventWaitNode,
        HostNode, BatchMemOpNode,
    ]  # fmt: skip
    assert {type(node) for node in graph.nodes} == {type(node) for node in nodes}
    assert (copied.src, copied.dst, copied.nbytes) == (x.ctypes.data, y.ctypes.data, 16)
    assert (fill.dst, fill.element_size, fill.nbytes) == (y.ctypes.data, 4, 8)
    assert fill.value == int(numpy.float32(3).view(numpy.uint32))
    assert nodes[4].event == nodes[6].event == int(event)
    assert [n.kind for n in nodes[5].graph.nodes] == ["memset"]
    device.driver.cuEventDestroy(event)


def test_words_of_memory_are_written_and_waited_for(device: Any) -> None:
    graph, word, wide = Graph(), numpy.zeros(2, "u4"), numpy.zeros(1, "u8")
    node = graph.batch_mem_op([
        ("write", word, numpy.uint32(7)),
        ("write", wide, ctypes.c_uint64(1 << 40)),
        ("wait_geq", word, numpy.uint32(5)),
        ("wait_and", word, numpy.uint32(4)),
        ("wait_nor", word, numpy.uint32(0)),
    ])  # fmt: skip
    read = [(each.name, each.nbytes, each.value) for each in node.operations]
    assert read == [
        ("write", 4, 7), ("write", 8, 1 << 40), ("wait_geq", 4, 5), ("wait_and", 4, 4),
        ("wait_nor", 4, 0),
    ]  # fmt: skip
    assert [each.address for each in node.operations[:2]] == [word.ctypes.data, wide.ctypes.data]
    with graph.instantiate() as execution:
        execution.launch()
        assert (word[0], wide[0]) == (7, 1 << 40)
    again = Graph()
    assert again.batch_mem_op(node.operations).operations == node.operations


def test_launch_attributes_are_given_and_read_back(device: Any) -> None:
    node = scale(
        Graph(),
        array(),
        array(),
        1,
        cluster=(2, 1, 1),
        grid=(4, 1, 1),
        cooperative=True,
        priority=-3,
    )
    assert (node.attrs.cluster, node.attrs.cooperative, node.attrs.priority) == (
        (2, 1, 1), True, -3,
    )  # fmt: skip
    graph = Graph()
    with pytest.raises(TypeError, match="priority"):
        scale(graph, array(), array(), 1, priority="high")
    assert len(graph) == 0


def test_allocations_tell_their_address(device: Any) -> None:
    graph = Graph()
    memory = graph.mem_alloc(256)
    fill = graph.memset(memory.address, 7, 256, after=memory)
    free = graph.mem_free(memory, after=fill)
    assert [type(n) for n in graph.nodes] == [MemAllocNode, MemsetNode, MemFreeNode]
    assert memory.nbytes >= 256
    assert memory.address == free.address == fill.dst
    with graph.instantiate() as execution:
        execution.launch()


def test_patterns_of_match_read_nodes(device: Any) -> None:
    graph, x, y = Graph(), array(1), array()
    graph.memcpy(y, x, 16)
    (node,) = graph.nodes
    match node:
        case MemcpyNode(src=src, dst=dst, nbytes=nbytes):
            assert (src, dst, nbytes) == (x.ctypes.data, y.ctypes.data, 16)
        case _:
            raise AssertionError(node)


def test_names_are_demangled_where_they_are_mangled() -> None:
    assert demangled("_Z5scalePfPKffi") == "scale(float*, float const*, float, int)"
    assert demangled("scale") == "scale"
    assert demangled("_Znonsense") == "_Znonsense"


def test_a_mangled_kernel_has_both_names(device: Any) -> None:
    graph = Graph()
    node = scale(graph, array(), array(), 1, kernel=scale_kernel(name="_Z5scalePfPKffi"))
    assert node.name == "scale(float*, float const*, float, int)"
    assert node.mangled_name == "_Z5scalePfPKffi"
    assert graph.find("scale(*") == graph.find("_Z5scale*") == (node,)


def test_launch_attributes_are_shown(device: Any) -> None:
    graph = Graph()
    plain = scale(graph, array(), array(), 1)
    assert (plain.attrs.cluster, plain.attrs.cooperative, plain.attrs.priority) == (
        (1, 1, 1), False, 0,
    )  # fmt: skip
    clustered = scale(
        graph, array(), array(), 1, cluster=(4, 1, 1), grid=(4, 1, 1), cooperative=True
    )
    assert clustered.attrs.cluster == (4, 1, 1)
    assert clustered.attrs.cooperative
