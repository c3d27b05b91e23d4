"""cuBLAS workspaces: when they have to be made, as far as that shows without a device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs.frameworks.pytorch import workspaces  # noqa: E402
from helping import in_thread  # noqa: E402


class Stream:
    cuda_stream = 0x77


class Allocator:
    """Counts what is given out; a product takes a workspace if its thread has none."""

    def __init__(self) -> None:
        self.given = 0
        self.has_workspace = False
        self.routes = 0
        self.products: list[bool] = []

    def product(self) -> None:
        assert self.routes == 1, "a product outside of the workspace's pool"
        self.given += not self.has_workspace
        self.has_workspace = True


@pytest.fixture
def allocator(monkeypatch: Any) -> Allocator:
    made = Allocator()

    def route(change: int) -> Any:
        def call(*_: Any) -> None:
            made.routes += change

        return call

    def products(device: int, grad: bool) -> None:
        made.product()
        made.products.append(grad)

    stubs = {
        "_cuda_beginAllocateCurrentStreamToPool": route(1),
        "_cuda_endAllocateToPool": route(-1),
        "_cuda_memoryStats": lambda device: {"allocation": {"all": {"allocated": made.given}}},
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch._C, name, stub, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch, "mm", lambda left, right, out: made.product())
    monkeypatch.setattr(workspaces, "_products", products)
    monkeypatch.setattr(workspaces, "_look", lambda *_: None)
    monkeypatch.setattr(workspaces, "_factor", lambda device: None)
    monkeypatch.setattr(workspaces, "_thread", workspaces._Thread())
    monkeypatch.setattr(workspaces, "_pools", {})
    return made


def test_they_are_made_for_the_first_block_and_then_only_looked_at(allocator):
    for _ in range(3):
        workspaces.make(0, Stream())
    assert allocator.products == [True]
    assert allocator.routes == 0


def test_cleared_by_somebody_they_are_made_again(allocator):
    workspaces.make(0, Stream())
    allocator.has_workspace = False
    workspaces.make(0, Stream())
    workspaces.make(0, Stream())
    assert allocator.products == [True, True]


def test_autograds_thread_gets_its_own_with_the_first_block_that_may_need_it(allocator):
    with torch.no_grad():
        workspaces.make(0, Stream())
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
