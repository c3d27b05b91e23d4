"""Whose memory an address lies in, among the tensors that Python knows."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs.frameworks.owners import KnownMemory  # noqa: E402
from breakable_cuda_graphs.frameworks.protocols import Gone  # noqa: E402
from breakable_cuda_graphs.frameworks.pytorch import inputs  # noqa: E402
from breakable_cuda_graphs.frameworks.pytorch.inputs import (  # noqa: E402
    known_tensors,
    learn_tensor,
)


def known_of(*tensors: Any) -> KnownMemory:
    known = known_tensors()
    for tensor in tensors:
        learn_tensor(known, tensor)
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
    learn_tensor(known, again)
    assert known.owner(again.data_ptr() + 20).kind[1] == (6,)


def test_fake_tensors_are_nobodys_memory():
    """`torch.compile` leaves some behind; asking one for its address warns."""
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(4)
    assert known_of(fake)._entries == {}


GIB = 1 << 30


def block(address: int, size: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": size, "state": state}


#: What torch's allocator says, as `torch.cuda.memory_snapshot` gives it.
SNAPSHOT = [
    {
        "device": 0, "segment_pool_id": (0, 0),
        "blocks": [
            block(GIB, 512), block(GIB + 512, 1024, "inactive"),
            block(GIB + 1536, 512, "active_pending_free"), block(GIB + 2048, 512),
        ],
    },
    {"device": 0, "segment_pool_id": (0, 7), "blocks": [block(2 * GIB, 4096, "inactive")]},
    {"device": 1, "segment_pool_id": (0, 0), "blocks": [block(3 * GIB, 4096, "inactive")]},
]  # fmt: skip


def test_memory_that_torch_has_taken_back_has_gone_and_other_pools_and_devices_are_unknown(
    monkeypatch,
):
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: SNAPSHOT)
    monkeypatch.setattr(inputs, "is_memory", lambda driver, word: True)
    gone = [GIB + 512, GIB + 1535, GIB + 1536]
    unknown = [GIB, GIB + 2048, GIB + 2560, 2 * GIB, 3 * GIB, 4 * GIB]
    words = [*gone, *unknown]
    found, left = inputs.find(None, 0, words, lambda _: False, lambda: set(words))  # type: ignore[arg-type]
    assert sorted(piece.address for piece in found) == gone
    assert all(isinstance(piece.storage, Gone) for piece in found)
    assert f"{gone[0]:#x} on cuda:0" in found[0].storage.words
    assert left == unknown


def test_what_need_not_be_an_address_has_not_gone_and_the_allocator_is_not_asked(monkeypatch):
    """A snapshot takes a quarter of a millisecond; words that are left over lie in many arguments."""
    monkeypatch.setattr(inputs, "is_memory", lambda driver, word: True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: pytest.fail("asked"))
    words = [GIB + 512, 4 * GIB]
    found, left = inputs.find(None, 0, words, lambda _: False, set)  # type: ignore[arg-type]
    assert (found, left) == ([], words)
