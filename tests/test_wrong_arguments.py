"""A wrong argument is refused by its name, before anything is changed, and is never taken for another.

One row a mistake that a reader of the reference may make; messages of values that do not fit a node are
in `test_graph.py` and `test_exec.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import (  # noqa: E402
    CUDAGraphSequence,
    Graph,
    breakable_graph,
    capture_if,
    capture_while,
    is_in_breakable_graph,
)
from breakable_cuda_graphs._driver import bindings  # noqa: E402
from breakable_cuda_graphs.frameworks.raw import (  # noqa: E402
    RawFramework,
    RawPool,
)
from breakable_cuda_graphs.graph.arguments import Arg  # noqa: E402
from breakable_cuda_graphs.simulator import simulated_device  # noqa: E402


def captured(**options: Any) -> CUDAGraphSequence:
    sequence, x = CUDAGraphSequence(), torch.ones(4)
    with breakable_graph(sequence, keep_inputs=True, **options):
        x.mul_(2)
    return sequence


def filled() -> Graph:
    graph = Graph()
    graph.memset(torch.zeros(4), ctypes.c_float(1), 16)
    return graph


def nothing() -> None:
    pass


def set_ranges(value: Any) -> None:
    CUDAGraphSequence().ranges = value


def in_a_block(call: Callable[[], object]) -> None:
    with breakable_graph(CUDAGraphSequence()):
        call()


#: what is done wrong, and how the error begins
MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: CUDAGraphSequence(pool="shared").pool(), "pool must be another sequence's pool()"),
    (lambda: CUDAGraphSequence(pool=CUDAGraphSequence()).pool(), "pool must be another sequence's"),
    (lambda: captured(generators=[3]), "generators must be torch.Generator objects, not int"),
    (lambda: captured(capture_error_mode=["global"]), "capture_error_mode must be one of"),
    (lambda: set_ranges(3), "ranges must be a name, names in a list or the like, or None, not int"),
    (
        lambda: captured().to_html("page.html", "other"),
        "other must be a CUDAGraphSequence, not str",
    ),
    (lambda: captured().rebind([((8, 16), (0, 16))]), "cannot rebind: 0x0 is not in device memory"),
    (lambda: capture_if(True, nothing, 3), "`orelse_fn` must be callable, not int"),
    (lambda: capture_while(False, 3), "`fn` must be callable, not int"),
    (lambda: in_a_block(lambda: capture_if(torch.ones(1), 3)), "`fn` must be callable, not int"),
    (lambda: filled().find(3), "pattern must be a shell pattern"),
    (lambda: filled().find("*", "memset"), "kind must be a class of breakable_cuda_graphs.nodes"),
    (lambda: filled().count("memset"), "kind must be a class of breakable_cuda_graphs.nodes"),
    (lambda: filled().diff(captured()), "other must be a Graph, not CUDAGraphSequence"),
    (lambda: filled().child(captured().segments[0]), "graph must be a Graph, not GraphSegment"),
    (
        lambda: filled().instantiate().update_from(captured()),
        "graph must be a Graph, not CUDAGraph",
    ),
    (lambda: filled().memset(torch.zeros(4), 0, 16, after=3), "after must be a node of the graph"),
    (lambda: filled().mem_alloc(0), "nbytes must not be zero"),
    (lambda: filled().mem_alloc(8, device="cuda"), "device must be an int, not str"),
    (lambda: Arg(0, 0, 8, bytes(8)).as_struct(int), "kind must be a ctypes.Structure"),
    (lambda: filled().mem_free("memory"), "memory must be the node that allocates it"),
    (
        lambda: filled().capture(0).__enter__(),
        "the legacy default stream cannot be captured: give a",
    ),
    (lambda: simulated_device(devices=0).__enter__(), "devices has to be at least 1, not 0"),
]


@pytest.mark.parametrize(("mistake", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_a_mistake_is_refused_by_name(device, tmp_path, monkeypatch, mistake, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        mistake()
    assert str(caught.value).startswith(words)
    assert not is_in_breakable_graph()
    captured().replay()  # raises if anything was left behind


def test_a_page_that_cannot_be_made_leaves_the_old_one(device, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("old")
    with pytest.raises(TypeError, match="other must be"):
        captured().to_html(page, 3)
    assert page.read_text() == "old"


def test_an_executable_that_is_closed_is_called_so(device):
    execution = filled().instantiate()
    execution.close()
    with pytest.raises(RuntimeError, match="this executable is closed"):
        execution.launch()


# ---------------------------------------------------------------- pools and generators without torch


def test_a_handle_of_torchs_names_one_pool_on_the_simulated_device(device):
    one, two, other = (CUDAGraphSequence(pool=key) for key in ((0, 7), (0, 7), (0, 8)))
    assert one.pool() is two.pool()
    assert other.pool() is not one.pool()


def test_the_driver_alone_takes_no_pools_and_generators_of_torchs(bare_device):
    raw = RawFramework(bindings.current(), 0)
    with pytest.raises(TypeError, match="pool must be another sequence's pool\\(\\), not tuple"):
        raw.new_pool((0, 7))
    pool = raw.new_pool(None)
    assert isinstance(pool, RawPool)
    assert raw.new_pool(pool) is pool
    with pytest.raises(TypeError, match="generators are torch's"):
        raw.session(pool, pool.stream, "global", (torch.Generator(),))
