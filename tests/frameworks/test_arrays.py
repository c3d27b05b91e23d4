"""Who knows a value as a device array; objects that are none are not disturbed."""

from __future__ import annotations

import types as python_types
from typing import Any
from unittest.mock import MagicMock

import pytest

from breakable_cuda_graphs.frameworks.arrays import ForeignArrays, interface_of, piece_of

INTERFACE = {"shape": (4, 2), "typestr": "<f4", "data": (0x1000, False), "version": 3}


class Foreign:
    """An array that only `__cuda_array_interface__` tells of."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return INTERFACE


class Grumpy:
    """Raises whatever it is asked for, as proxies without a target do."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Freed:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise ValueError("the memory is gone")


@pytest.mark.parametrize(
    "make", [Grumpy, Freed, lambda: Foreign, MagicMock, int, list, lambda: print]
)
def test_what_is_no_device_array_is_none(make: Any) -> None:
    assert interface_of(make()) is None


@pytest.mark.parametrize(
    "value", [Foreign(), python_types.SimpleNamespace(__cuda_array_interface__=INTERFACE)]
)
def test_an_array_of_an_unknown_library_is_described_and_kept(value: Any) -> None:
    arrays = ForeignArrays()
    assert arrays.owns(value)
    assert not arrays.can_alias(value)
    assert arrays.keeper(value) is value
    assert arrays.storage(value) == (0x1000, 0, None)
    assert arrays.kind(value) == ("<f4", (4, 2), "cuda")
    assert arrays.place(value) == (0x1000, None)
    assert piece_of(value) is None


def test_tensors_of_torch_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(3)
    assert interface_of(tensor) is None
    found = piece_of(tensor[1:])
    assert found is not None
    assert (found.address, found.nbytes) == (tensor.data_ptr(), 12)
