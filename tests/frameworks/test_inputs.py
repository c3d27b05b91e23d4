"""Whose memory an address lies in, among the tensors that Python knows."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs.frameworks.pytorch.inputs import _Known  # noqa: E402


def known_of(*tensors: Any) -> _Known:
    known = _Known()
    for tensor in tensors:
        known.add(tensor)
    return known


def test_every_address_inside_is_the_owners_and_none_outside():
    tensor = torch.zeros(3, 5)
    known, start = known_of(tensor), tensor.data_ptr()
    for address in (start, start + 1, start + 59):
        found = known.owner(address)
        assert found is not None
        assert (found.address, found.kind) == (start, ("float32", (3, 5), "cpu"))
        assert found.storage is tensor.untyped_storage() or found.storage.data_ptr() == start
    assert known.owner(start - 1) is None
    assert known.owner(start + 60) is None


def test_thousands_of_dead_tensors_are_passed_over():
    """As many as a recursion could not take: a benchmark had made and dropped ten thousand."""
    lasting = torch.zeros(8)
    dead = [torch.zeros(8) for _ in range(5000)]
    known = known_of(lasting, *dead)
    highest = max(tensor.data_ptr() for tensor in dead)
    del dead
    assert known.owner(highest + 4) is None
    found = known.owner(lasting.data_ptr() + 4)
    assert found is not None
    assert found.address == lasting.data_ptr()


def test_a_new_tensor_at_an_old_address_is_the_owner():
    tensor = torch.zeros(4)
    known, start = known_of(tensor), tensor.data_ptr()
    tensor.set_(torch.zeros(6))  # the storage that was known has gone
    assert known.owner(start) is None or known.owner(start).storage.data_ptr() == start
    again = torch.zeros(6)
    known.add(again)
    assert known.owner(again.data_ptr() + 20).kind[1] == (6,)
