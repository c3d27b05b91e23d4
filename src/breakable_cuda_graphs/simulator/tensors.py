"""CPU torch tensors captured operator by operator on a simulated stream.

The hard problem: on a device captured work does not run at capture, and runs on bare addresses at
replay. The CPU has neither streams nor deferred work, so both have to be made here:

- At capture an operator is run once on *stand-ins* (copies of its inputs) to learn what its outputs
  look like. No real memory is touched, in-place writes take no effect, random generators are put
  back, and the new outputs are filled with poison (NaN; the lowest integer), as unwritten device
  memory would be: code that looks at a result at capture gets a value that stands out.
- The operator becomes one kernel node whose parameters are the data pointers of its inputs and new
  outputs. Its body builds tensors on whatever addresses it is launched with and runs the operator
  again, so edited addresses work as on a device; no Python of the user runs. Random operators draw
  from torch's CPU generator at replay.

The graph's nodes keep the memory of outputs made during the capture (the private pool of a device),
and nothing else: an input that has died by the time of a replay is a finding, and its reader's
outputs are poisoned. Views are not recorded. What has to read the device (`.item()`, `nonzero`,
boolean masks, printing) raises as CUDA does and invalidates the capture.

Streams are handles; the current one is the calling thread's (`current_stream()`, `stream(handle)`).
Operators called on a stream that is not capturing run at once.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatching
from torch.utils import _pytree as pytree

from .._driver.enums import CAPTURE_INVALIDATED
from .driver import SimulatedDriver
from .kernels import SimulatedKernel
from .stream_state import ACTIVE, INVALIDATED
from .tensor_places import (
    ALLOCATES,
    ENTERS,
    METADATA,
    TensorPlace,
    is_view,
    made_in_captures,
    making,
    poison,
    reads_device,
    short,
    stand_in,
    tensors_of,
    title,
    written_arguments,
)
from .torch_modes import HostReadMode, OperatorMode, leave_dispatch_mode, leave_function_mode

# ---------------------------------------------------------------- the current stream


class _Current(threading.local):
    handle = 0

    def __init__(self) -> None:
        self.thread = object()  # which thread this is: numbers are given out again


_current = _Current()


def current_stream() -> int:
    """This thread's current stream for CPU tensors; 0, the default stream, at first."""
    return _current.handle


@contextmanager
def stream(handle: Any) -> Iterator[None]:
    """Make another stream current on this thread."""
    previous, _current.handle = _current.handle, int(handle)
    try:
        yield
    finally:
        _current.handle = previous


# ---------------------------------------------------------------- running without an audience


@contextmanager
def _plain_torch() -> Iterator[None]:
    """No modes, no autograd, no autocast: an operator means what it meant when it was recorded."""
    with (
        dispatching._disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


@contextmanager
def _same_random_state(values: list[Any]) -> Iterator[None]:
    """Put generators back at the end."""
    generators = [torch.default_generator]
    generators += [each for each in values if isinstance(each, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


# ---------------------------------------------------------------- a recorded operator


class RecordedOperator:
    """One operator as a kernel: everything of it but the addresses."""

    def __init__(
        self,
        driver: SimulatedDriver,
        func: Any,
        flat: list[Any],
        spec: Any,
        fresh: list[Any],
        owned: weakref.WeakSet[Any],
    ) -> None:
        self._driver = driver
        self._func = func
        self._spec = spec
        self._title = title(func)
        self._slots = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]
        inputs: list[Any] = [flat[i] for i in self._slots]
        self._rest = [None if isinstance(v, torch.Tensor) else v for v in flat]
        self._inputs = [TensorPlace.of(tensor) for tensor in inputs]
        self._outputs = [TensorPlace.of(tensor) for tensor in fresh]
        self.inputs = [Input(t) for t in inputs if t.untyped_storage() not in owned]
        # What was made during the capture lives as long as a node that uses it.
        self._kept = [t.untyped_storage() for t in inputs if t.untyped_storage() in owned]
        self._kept += [tensor.untyped_storage() for tensor in fresh]
        self.addresses = [int(tensor.data_ptr()) for tensor in (*inputs, *fresh)]

    def kernel(self) -> SimulatedKernel:
        """The kernel; it keeps this object."""
        parameters = [ctypes.c_void_p] * len(self.addresses)
        return SimulatedKernel(self._run, parameters, name=self._title)

    def _run(self, *addresses: int) -> None:
        with _plain_torch():
            inputs = addresses[: len(self._inputs)]
            outputs = [
                place.at(address)
                for place, address in zip(self._outputs, addresses[len(inputs) :], strict=True)
            ]
            dead = next((w for w in self.inputs if w.died_at(inputs)), None)
            if dead is not None:
                self._driver.world.find(f"{self._title} ran on memory that was freed: {dead}")
                for output in outputs:
                    poison(output)
                return
            self._compute(inputs, outputs)

    def _compute(self, inputs: tuple[int, ...], outputs: list[Any]) -> None:
        flat: list[Any] = list(self._rest)
        for slot, place, address in zip(self._slots, self._inputs, inputs, strict=True):
            flat[slot] = place.at(address)
        args, kwargs = pytree.tree_unflatten(flat, self._spec)
        results = tensors_of(self._func(*args, **kwargs))
        if not outputs:
            return
        known = {flat[slot].untyped_storage()._cdata for slot in self._slots}
        new = [t for t in results if t.untyped_storage()._cdata not in known]
        for target, source in zip(outputs, new, strict=True):
            target.copy_(source)


class Input:
    """An input of an operator that somebody else has to keep alive."""

    def __init__(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        self._storage = weakref.ref(storage)
        self.start = int(storage.data_ptr())
        self._end = self.start + int(storage.nbytes())
        self.shape = tuple(tensor.shape)

    @property
    def is_dead(self) -> bool:
        """Whether its memory is gone."""
        return self._storage() is None

    def died_at(self, addresses: tuple[int, ...]) -> bool:
        """Whether the memory is gone and one of these addresses still means it."""
        if not self.is_dead:
            return False
        return any(self.start <= address < self._end for address in addresses)

    def __str__(self) -> str:
        return f"an input of shape {self.shape} at {self.start:#x}"


# ---------------------------------------------------------------- the recorder


class TensorRecorder:
    """Records this thread's operators on CPU tensors into the capture of the current stream."""

    def __init__(self, simulated_driver: SimulatedDriver) -> None:
        self._driver = simulated_driver
        #: while they are on torch's stacks
        self._modes: tuple[OperatorMode, HostReadMode] | None = None
        self._is_held = False
        self._thread: object = None  # whose stacks they are on
        self.is_recording = False
        self._stream = self._previous = 0
        #: what the operators of this recording read and did not make
        self.inputs: list[Input] = []
        #: storages made during recordings of this recorder
        self._owned: weakref.WeakSet[Any] = weakref.WeakSet()

    def hold(self) -> None:
        """Put the modes on torch's stacks for several recordings, until `leave`.

        Autograd saves and restores the stacks around each of its nodes, and a mode is off its stack
        while it handles a call. A recording that ends and begins inside `backward()` can therefore
        not take its modes off; held ones stay where they are and only listen or not.
        """
        self._is_held = True
        self._enter_modes()

    def leave(self) -> None:
        """The end of `hold`; nothing happens if that is over."""
        self.end()
        self._is_held = False
        self._leave_modes()

    def begin(self, stream_handle: Any) -> None:
        """Start recording on this thread, into the capture that is open on this stream."""
        if self.is_recording:
            raise RuntimeError("this recorder is recording already")
        self._stream, self._previous = int(stream_handle), _current.handle
        _current.handle = self._stream
        self._enter_modes()
        self.inputs.clear()
        self.is_recording = True

    def end(self) -> None:
        """Stop recording; nothing happens if it has stopped."""
        if not self.is_recording:
            return
        self.is_recording = False
        is_here = _current.thread is self._thread
        if not self._is_held:
            self._leave_modes()
        if is_here and _current.handle == self._stream:
            _current.handle = self._previous

    def _enter_modes(self) -> None:
        if self._modes is None:
            self._thread = _current.thread
            self._modes = (OperatorMode(self.operator), HostReadMode(self._refuse_read))
            for mode in self._modes:
                mode.__enter__()

    def _leave_modes(self) -> None:
        modes, self._modes = self._modes, None
        if modes is not None and _current.thread is self._thread:
            leave_dispatch_mode(modes[0])
            leave_function_mode(modes[1])

    # ---- one operator

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run, record or refuse one operator, as the current stream's state demands."""
        if not self.is_recording:
            return func(*args, **kwargs)
        status = self._status()
        if status == INVALIDATED:
            raise self._error(CAPTURE_INVALIDATED, title(func))
        if status != ACTIVE:
            return func(*args, **kwargs)
        if reads_device(func, args, kwargs):
            self.refuse(title(func))
        name = short(func)
        if is_view(func) or name in METADATA or torch.Tag.inplace_view in func.tags:
            return self._note_new(func(*args, **kwargs), name)
        if name in ALLOCATES:
            return self._new(func(*args, **kwargs))
        return self._record(func, args, kwargs)

    def _note_new(self, value: Any, name: str) -> Any:
        if name in ENTERS:
            for tensor in tensors_of(value):
                self._owned.add(tensor.untyped_storage())
        return value

    def _new(self, value: Any) -> Any:
        """New memory: the capture's own, and poisoned."""
        for tensor in tensors_of(value):
            self._owned.add(tensor.untyped_storage())
            with making:
                made_in_captures.add(tensor.untyped_storage())
            poison(tensor)
        return value

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        trial = [stand_in(v) if isinstance(v, torch.Tensor) else v for v in flat]
        with _same_random_state(flat):
            trial_args, trial_kwargs = pytree.tree_unflatten(trial, spec)
            outcome = func(*trial_args, **trial_kwargs)
        written = written_arguments(func, args, kwargs)
        stand_ins = {t.untyped_storage()._cdata for t in trial if isinstance(t, torch.Tensor)}
        new = [t for t in tensors_of(outcome) if t.untyped_storage()._cdata not in stand_ins]
        if not new and not written and func._schema.returns:
            return func(*args, **kwargs)  # an undeclared view, or a question about metadata
        self._new(new)
        self._launch(func, flat, spec, new)
        return _returned(func, outcome, written)

    def _launch(self, func: Any, flat: list[Any], spec: Any, new: list[Any]) -> None:
        recorded = RecordedOperator(self._driver, func, flat, spec, new, self._owned)
        self.inputs += recorded.inputs
        kernel = recorded.kernel()
        arguments = (tuple(recorded.addresses), kernel.parameters)
        (code,) = self._driver.cuLaunchKernel(
            kernel.handle, 1, 1, 1, 1, 1, 1, 0, _current.handle, arguments, 0
        )
        if int(code):
            raise self._error(int(code), title(func))

    # ---- the capture

    def _status(self) -> int:
        code, status = self._driver.cuStreamIsCapturing(_current.handle)
        return 0 if int(code) else int(status)

    def refuse(self, what: str) -> None:
        """The host wants a value of the device: that ends the capture, as on a device."""
        (code,) = self._driver.cuStreamSynchronize(_current.handle)
        raise self._error(int(code), what)

    def _refuse_read(self, what: str) -> None:
        """The same for a read that is no operator, where a capture is open and still good."""
        if self.is_recording and self._status() == ACTIVE:
            self.refuse(what)

    def _error(self, code: int, what: str) -> RuntimeError:
        text = self._driver.cuGetErrorString(code)[1].decode()
        return RuntimeError(f"CUDA error: {text} ({what})")


def _returned(func: Any, outcome: Any, written: dict[str, Any]) -> Any:
    """What the operator returns: its new outputs, and its own arguments where it wrote to them."""
    returns = func._schema.returns
    if not returns:
        return None
    values = list(outcome) if len(returns) > 1 else [outcome]
    for place, each in enumerate(returns):
        if each.alias_info is not None and each.alias_info.is_write:
            (alias,) = each.alias_info.before_set
            values[place] = written[alias]
    return values[0] if len(returns) == 1 else type(outcome)(values)
