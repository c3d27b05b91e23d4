"""What is in a graph: kinds, names, the bytes of kernel arguments in both forms; what dangles."""

from __future__ import annotations

import ctypes
import struct

import pytest

from breakable_cuda_graphs._driver import enums, kernel_params
from breakable_cuda_graphs._driver.bindings import types
from breakable_cuda_graphs._driver.kernel_params import KernelReader
from breakable_cuda_graphs._driver.survey import Survey, copy_pointers
from breakable_cuda_graphs.simulator import SimulatedKernel


class Three(ctypes.Structure):
    _fields_ = [("a", ctypes.c_uint64), ("b", ctypes.c_uint32), ("c", ctypes.c_uint64)]


PARAMETERS = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_double, Three, ctypes.c_uint8)
VALUES = (0x7000_0000_1234, -5, 2.5, Three(11, 12, 13), 200)


@pytest.fixture
def graph(driver):
    made = driver.cuGraphCreate(0)
    yield made
    driver.cuGraphDestroy(made)


def add_kernel(driver, graph, kernel, values, after=(), by_kernel_handle=False):
    params = types.CUDA_KERNEL_NODE_PARAMS()
    if by_kernel_handle:
        params.kern = kernel.kernel_handle
    else:
        params.func = kernel.handle
    params.gridDimX = params.gridDimY = params.gridDimZ = 1
    params.blockDimX = params.blockDimY = params.blockDimZ = 1
    if kernel.parameters:
        kinds = [None if issubclass(p, ctypes.Structure) else p for p in kernel.parameters]
        params.kernelParams = (tuple(values), tuple(kinds))
    return driver.cuGraphAddKernelNode(graph, list(after) or None, len(after), params)


def nothing(*_):
    pass


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("by_kernel_handle", [False, True])
def test_arguments_are_read_byte_by_byte_in_both_forms(driver, graph, packed, by_kernel_handle):
    kernel = SimulatedKernel(nothing, PARAMETERS, name="_Z5thing", packed=packed)
    node = add_kernel(driver, graph, kernel, VALUES, by_kernel_handle=by_kernel_handle)
    reader = KernelReader(driver)
    params = reader.params(node)
    assert bool(int(params.extra or 0)) == packed
    assert bool(int(params.kernelParams or 0)) != packed
    arguments = reader.arguments(params)
    assert arguments[0] == struct.pack("<Q", 0x7000_0000_1234)
    assert arguments[1] == struct.pack("<i", -5)
    assert arguments[2] == struct.pack("<d", 2.5)
    assert arguments[3] == bytes(VALUES[3])
    assert arguments[4] == bytes([200])
    assert reader.name(node) == "_Z5thing"
    words = reader.words_of(node)
    assert words[0] == 0x7000_0000_1234
    assert [words[2], words[4]] == [11, 13]  # beside them the double, and b with its padding
    assert len(words) == 5


def test_a_kernel_without_parameters_has_no_arguments(driver, graph):
    node = add_kernel(driver, graph, SimulatedKernel(nothing), ())
    reader = KernelReader(driver)
    assert reader.arguments(reader.params(node)) == []
    assert reader.words_of(node) == []


def test_a_layout_is_read_once_a_function(driver, graph):
    kernel = SimulatedKernel(nothing, (ctypes.c_int,))
    one, two = (add_kernel(driver, graph, kernel, (n,)) for n in (1, 2))
    reader = KernelReader(driver)
    layout = reader.layout(reader.params(one))
    assert layout.parameters == ((0, 4),)
    assert reader.layout(reader.params(two)) is layout


def test_nodes_are_described_by_kernel_name_or_kind(driver, graph):
    kernel = add_kernel(driver, graph, SimulatedKernel(nothing, name="k"), ())
    empty = driver.cuGraphAddEmptyNode(graph, None, 0)
    reader = KernelReader(driver)
    assert reader.describe(kernel) == "k"
    assert reader.describe(empty) == "empty"
    assert kernel_params.node_type(driver, kernel) == enums.KERNEL
    assert kernel_params.node_type(driver, empty) == enums.EMPTY


def test_a_kind_that_the_bindings_do_not_know_is_minus_one(driver, graph, monkeypatch):
    node = driver.cuGraphAddEmptyNode(graph, None, 0)

    def unknown(_):
        raise ValueError("99 is not a valid CUgraphNodeType")

    monkeypatch.setattr(driver.module, "cuGraphNodeGetType", unknown, raising=False)
    assert kernel_params.node_type(driver, node) == -1
    assert kernel_params.KernelReader(driver).describe(node) == "node of kind -1"


def memset_params(address):
    params = types.CUDA_MEMSET_NODE_PARAMS()
    params.dst = types.CUdeviceptr(int(address))
    params.value, params.elementSize, params.width, params.height = 1, 4, 1, 1
    return params


def test_a_survey_finds_kinds_and_addresses_in_children_too(driver, graph):
    context = driver.cuCtxGetCurrent()
    address = int(driver.cuMemAlloc(64))
    child = driver.cuGraphCreate(0)
    add_kernel(driver, child, SimulatedKernel(nothing, (ctypes.c_void_p,)), (address + 8,))
    driver.cuGraphAddMemsetNode(graph, None, 0, memset_params(address), context)
    driver.cuGraphAddChildGraphNode(graph, None, 0, child)
    survey = Survey(KernelReader(driver), graph, [])
    assert survey.kinds == {enums.MEMSET, enums.CHILD, enums.KERNEL}
    assert survey.addresses() >= {address, address + 8}
    assert survey.kernel_words == [[address + 8]]
    driver.cuGraphDestroy(child)
    driver.cuMemFree(address)


class Large(ctypes.Structure):
    _fields_ = [("few", ctypes.c_uint64 * 9)]


@pytest.mark.parametrize("packed", [False, True])
def test_in_a_large_argument_no_word_is_surely_an_address(driver, graph, packed):
    kernel = SimulatedKernel(nothing, (ctypes.c_void_p, Large, Three), packed=packed)
    large = Large((ctypes.c_uint64 * 9)(*range(100, 109)))
    add_kernel(driver, graph, kernel, (0x7000_0000_1234, large, Three(11, 12, 13)))
    survey = Survey(KernelReader(driver), graph, [])
    assert {0x7000_0000_1234, 104, 11, 13} <= survey.addresses()
    assert survey.sure_addresses() & {0x7000_0000_1234, 104, 11, 13} == {0x7000_0000_1234, 11, 13}


def test_a_copy_names_both_its_addresses():
    params = types.CUDA_MEMCPY3D()
    params.srcDevice, params.dstDevice = types.CUdeviceptr(16), types.CUdeviceptr(32)
    assert copy_pointers(params) == {16, 32}
    params.srcDevice, params.srcHost = types.CUdeviceptr(0), 48
    assert copy_pointers(params) == {32, 48}


def test_what_dangles_are_leaves_that_the_frontier_misses(driver, graph):
    kernels = [SimulatedKernel(nothing, name=f"k{n}") for n in range(4)]
    first = add_kernel(driver, graph, kernels[0], ())
    left = add_kernel(driver, graph, kernels[1], (), [first])
    right = add_kernel(driver, graph, kernels[2], (), [first])
    reader = KernelReader(driver)
    survey = Survey(reader, graph, [left])
    assert survey.names(survey.dangling) == ["k2"]
    assert Survey(reader, graph, [left, right]).dangling == []
    last = add_kernel(driver, graph, kernels[3], (), [left, right])
    assert Survey(reader, graph, [last]).dangling == []
    assert [int(node) for node in Survey(reader, graph, []).dangling] == [int(last)]


def test_an_empty_graph_has_nothing(driver, graph):
    survey = Survey(KernelReader(driver), graph, [])
    assert (survey.kinds, survey.dangling, survey.addresses()) == (set(), [], set())
