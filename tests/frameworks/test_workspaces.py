"""cuBLAS workspaces: when they have to be made, as far as that shows without a device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import WorkspaceWarning  # noqa: E402
from breakable_cuda_graphs.frameworks.pytorch import workspaces  # noqa: E402
from helping import in_thread  # noqa: E402

LOOK = workspaces._look


class Stream:
    cuda_stream = 0x77


class Allocator:
    """Where what is allocated goes, and which products there were."""

    def __init__(self) -> None:
        self.routes = 0
        self.products: list[bool] = []


@pytest.fixture
def allocator(monkeypatch: Any) -> Allocator:
    made = Allocator()

    def route(change: int) -> Any:
        def call(*_: Any) -> None:
            made.routes += change

        return call

    def products(device: int, grad: bool) -> None:
        assert made.routes == 1, "a product outside of the workspace's pool"
        made.products.append(grad)

    stubs = {
        "_cuda_beginAllocateCurrentStreamToPool": route(1),
        "_cuda_endAllocateToPool": route(-1),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch._C, name, stub, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(workspaces, "_products", products)
    monkeypatch.setattr(workspaces, "_look", lambda *_: None)
    monkeypatch.setattr(workspaces, "_thread", workspaces._Thread())
    monkeypatch.setattr(workspaces, "_pools", {})
    return made


def test_they_are_made_for_each_block_since_anybody_may_have_cleared_some(allocator):
    for _ in range(3):
        workspaces.make(0, Stream())
    assert allocator.products == [True, True, True]
    assert allocator.routes == 0


def test_a_workspace_in_memory_of_others_is_told_at_the_users_line(allocator, monkeypatch):
    monkeypatch.setattr(workspaces, "_look", LOOK)
    monkeypatch.setattr(workspaces, "_ranges", {})
    monkeypatch.setattr(workspaces, "snapshot", lambda pool: [])
    with pytest.warns(WorkspaceWarning, match="ordinary memory") as caught:
        workspaces.make_first(0, Stream())
    assert caught[0].filename == __file__


def test_autograds_thread_gets_its_own_where_it_may_need_it(allocator):
    with torch.no_grad():
        workspaces.make(0, Stream())
    workspaces.make(0, Stream())
    assert allocator.products == [False, True]


def test_another_thread_needs_its_own(allocator):
    workspaces.make(0, Stream())
    in_thread(lambda: workspaces.make(0, Stream()))
    assert allocator.products == [True, True]


def test_the_route_is_closed_whatever_a_product_does(allocator, monkeypatch):
    def fail(device: int, grad: bool) -> None:
        raise RuntimeError("no cuBLAS")

    monkeypatch.setattr(workspaces, "_products", fail)
    with pytest.raises(RuntimeError, match="no cuBLAS"):
        workspaces.make(0, Stream())
    assert allocator.routes == 0


def test_the_route_is_closed_if_an_interrupt_comes_right_behind_its_beginning(
    allocator, monkeypatch
):
    def begin(*_: Any) -> None:
        allocator.routes += 1
        raise KeyboardInterrupt

    monkeypatch.setattr(torch._C, "_cuda_beginAllocateCurrentStreamToPool", begin)
    with pytest.raises(KeyboardInterrupt):
        workspaces.make(0, Stream())
    assert allocator.routes == 0
