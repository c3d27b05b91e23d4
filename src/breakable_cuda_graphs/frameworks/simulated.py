"""Torch's CPU tensors on the simulated device.

The hard problem: on the CPU torch has no streams and records nothing; the simulator's recorder
turns each operator into a node. This adapter is the raw one, with tensors as arrays and the
recorder running while a segment is open.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch

from .._driver.bindings import Driver
from .._driver.survey import Survey
from ..errors import bad_type
from ..simulator import tensor_places, tensors
from . import protocols
from .protocols import Gone
from .pytorch import modes
from .pytorch.tensors import Tensors, is_alias_storage, tensors_in
from .raw import RawFramework, RawPool, RawSession
from .streams import as_handle


class SimulatedTorch(RawFramework):
    """CPU tensors, captured operator by operator."""

    name = "simulated torch"

    def __init__(self, driver: Driver, context: int) -> None:
        super().__init__(driver, context)
        self.arrays = Tensors("cpu")
        self.is_capturing = None
        self._named: weakref.WeakValueDictionary[Any, RawPool] = weakref.WeakValueDictionary()

    def current_stream(self) -> int:
        return tensors.current_stream()

    def stream_current(self, stream: Any) -> AbstractContextManager[Any]:
        return tensors.stream(as_handle(stream))

    def new_pool(self, given: Any) -> RawPool:
        """Torch's handles name pools here too, though there is no memory in them."""
        identity = given.id if isinstance(given, torch.cuda.MemPool) else given
        if type(identity) is not tuple or len(identity) != 2:
            return super().new_pool(given)
        pool = self._named.get(identity)
        if pool is None:
            pool = self._named[identity] = super().new_pool(None)
        return pool

    def session(
        self, pool: protocols.Pool, stream: Any, mode: str, generators: tuple[Any, ...]
    ) -> SimulatedSession:
        for generator in generators:
            if not isinstance(generator, torch.Generator):
                raise bad_type("generators", generator, "torch.Generator objects")
        return SimulatedSession(self, stream, mode)

    def modes(self) -> Any:
        return modes.current()

    def in_modes(self, wanted: Any) -> AbstractContextManager[Any]:
        return modes.entered(wanted)


class SimulatedSession(RawSession):
    """A raw session with the recorder running while a segment is open."""

    names_streams = False

    def __init__(self, framework: SimulatedTorch, stream: Any, mode: str) -> None:
        super().__init__(framework, stream, mode)
        self._recorder = tensors.TensorRecorder(framework.driver.module)
        self._older: set[int] | None = None

    def begin(self) -> None:
        super().begin()
        self._recorder.begin(int(self.stream))

    def end(self, survey: Survey | None) -> protocols.Captured:
        self._recorder.end()
        return super().end(survey)

    def abandon(self) -> None:
        self._recorder.end()
        super().abandon()

    def before_break(self) -> None:
        if self._older is None:
            self._older = _storage_addresses()

    def birth(self, address: int, storage: Any = None) -> protocols.Birth:
        if tensor_places.was_made_in_a_capture(address):
            return protocols.Birth.POOL
        if self._older is None or address in self._older:
            return protocols.Birth.OLDER
        return protocols.Birth.BREAK

    def inputs(self, survey: Survey) -> tuple[list[protocols.Found], list[int]]:
        found, arrays = [], Tensors("cpu")
        for start, end, tensor in _storages():
            if any(start <= address < end for address in survey.addresses()):
                found.append(protocols.Found(start, tensor.untyped_storage(), arrays.kind(tensor)))
        for given in self._recorder.inputs:
            if given.is_dead:
                words = f"{list(given.shape)} on cpu, given back before the segment had ended"
                found.append(protocols.Found(given.start, Gone(words), ("", (), "")))
        return found, []

    def enter(self) -> None:
        super().enter()
        self._recorder.hold()

    def leave(self, failed: bool) -> None:
        self._recorder.leave()
        super().leave(failed)


def _storages() -> list[tuple[int, int, Any]]:
    """(first address, end, tensor) of every CPU tensor with memory that Python knows."""
    found = []
    for thing in tensors_in(None):
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.layout is torch.strided:
            if torch._C._functorch.is_functorch_wrapped_tensor(thing):
                continue
            storage = thing.untyped_storage()
            is_real = thing.device.type == "cpu" and not is_alias_storage(storage)
            if storage.nbytes() and is_real:
                start = storage.data_ptr()
                found.append((start, start + storage.nbytes(), thing))
    return found


def _storage_addresses() -> set[int]:
    return {start for start, _, _ in _storages()}
