"""torch's operators while a function is watched: reads, copies, generators, collectives, streams.

The hard problem: no one place sees all of it. A dispatch mode sees every operator, in `backward`
too, but not what an operator does inside; a function mode sees the outermost call, which names it
as the user wrote it; the driver's waits inside of operators show only as torch's own sync warnings,
and those only on a device. All three report to one watch, which keeps one finding a line.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ..simulator import tensor_places, torch_modes
from .growing import Growth
from .memory import SavedMemory
from .streams import WatchedStreams
from .watching import Watch

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")

#: What reads a tensor on the host without an operator of its own (on the simulated device).
_READS = {*torch_modes.HOST_READS, torch.Tensor.cpu}
_PRINTS = {torch.Tensor.__repr__, torch.Tensor.__format__}

#: Calls that bring numbers of the host to the device they name.
_MAKES = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}

_SYNC_WARNING = "called a synchronizing CUDA operation"


class Operators:
    """The two modes, which can be taken off torch's stacks for a while."""

    def __init__(
        self, watch: Watch, streams: WatchedStreams, growth: Growth, state: SavedMemory | None,
        current: Callable[[], int], device: str,
    ) -> None:  # fmt: skip
        self.watch, self.streams, self.growth = watch, streams, growth
        self.state, self.current, self.device = state, current, device
        self.simulated = device == "cpu"
        self.call = ""  # the outermost torch function that is running
        self._known = _default_generators(device)
        self._modes: tuple[_Dispatch, _Functions] | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, operators are seen."""
        try:
            self.on()
            with self._sync_warnings(), self._optimizers():
                yield
        finally:
            self._leave()

    def on(self) -> None:
        """Put the modes on torch's stacks."""
        if self._modes is None:
            self._modes = (_Dispatch(self), _Functions(self))
            self._modes[0].__enter__()
            self._modes[1].__enter__()

    def off(self) -> bool:
        """Take them off, from under modes that were entered since; whether they were on.

        A mode that handles a call at this moment is off its stack already, and torch puts it back.
        """
        are_on = self._modes is not None and all(self._listed())
        if are_on:
            self._leave()
        return are_on

    def _listed(self) -> tuple[bool, bool]:
        """Which of the two is on its stack."""
        if self._modes is None:
            return False, False
        dispatch, functions = self._modes
        return (
            dispatch in _get_current_dispatch_mode_stack(),
            functions in _get_current_function_mode_stack(),
        )

    def _leave(self) -> None:
        """Both leave their stacks, if they are on them."""
        is_dispatch_on, is_function_on = self._listed()
        modes, self._modes = self._modes, None
        if modes is not None and is_dispatch_on:
            torch_modes.leave_dispatch_mode(modes[0])
        if modes is not None and is_function_on:
            torch_modes.leave_function_mode(modes[1])

    @contextlib.contextmanager
    def _sync_warnings(self) -> Iterator[None]:
        """On a device: torch warns of each wait in its operators, and the warning becomes a finding."""
        if self.simulated:
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode")
            warnings.filterwarnings("always", message=_SYNC_WARNING)
            shown = warnings.showwarning

            def show(message: Any, *rest: Any, **named: Any) -> None:
                if _SYNC_WARNING in str(message):
                    self.watch.note(
                        "host read", self.call or "an operator", "torch waited for the device",
                        unless_known=True,
                    )  # fmt: skip
                else:
                    shown(message, *rest, **named)

            warnings.showwarning = show
            before = torch.cuda.get_sync_debug_mode()
            try:
                torch.cuda.set_sync_debug_mode("warn")
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    @contextlib.contextmanager
    def _optimizers(self) -> Iterator[None]:
        """Steps of optimizers that torch would not capture."""

        def about_to_step(optimizer: Any, *_: Any) -> None:
            if any(group.get("capturable") is False for group in optimizer.param_groups):
                self.watch.note("optimizer", f"{type(optimizer).__name__}.step")

        handle = register_optimizer_step_pre_hook(about_to_step)
        try:
            yield
        finally:
            handle.remove()

    # ---- one operator

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look at one operator, run it, and look at what came out."""
        inputs = tensor_places.tensors_of((args, kwargs))
        here = [tensor for tensor in inputs if self.watch.owns(tensor)]
        title = str(func._schema.name)
        if func.namespace in _COLLECTIVES:
            self.watch.note("collective", title)
        elif here and tensor_places.reads_device(func, args, kwargs):
            self.watch.note("host read", self._named(title), _reason(title))
        elif not self.simulated:
            self._copy(func, title, args, kwargs)
        self._draws(title, args, kwargs)
        written = tensor_places.written_arguments(func, args, kwargs)
        before = self.growth.before(here, tensor_places.tensors_of(written))
        result = func(*args, **kwargs)
        made = [each for each in tensor_places.tensors_of(result) if self.watch.owns(each)]
        if here or made:
            if not tensor_places.is_view(func):
                self.streams.worked(self.current(), self._named(title))
            self.growth.after(self._named(title), before, here, made)
        return result

    def _named(self, title: str) -> str:
        """The call as the user wrote it, and the operator that it came to."""
        if not self.call or self.call.rpartition(".")[2] == title.rpartition("::")[2]:
            return title
        return f"{self.call} ({title})"

    def _copy(self, func: Any, title: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copies between host and device that are not both pinned and non-blocking."""
        if title == "aten::_to_copy":
            source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
            quick = bool(kwargs.get("non_blocking"))
            pinned = target.type == "cpu" or (source.device.type == "cpu" and source.is_pinned())
        elif title == "aten::copy_":
            source, target = args[1], args[0].device
            quick = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            host = args[0] if target.type == "cpu" else source
            pinned = host.device.type == "cpu" and host.is_pinned()
        else:
            return
        kinds = {source.device.type, target.type}
        if kinds != {"cpu", self.device} or (quick and pinned):
            return
        if target.type == "cpu":
            self.watch.note("host read", self._named(title), "a copy to the host")
        else:
            why = "from pinned memory, but blocking" if pinned else "from pageable memory"
            self.watch.note("pageable copy", self._named(title), why)

    def _draws(self, title: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if not isinstance(value, torch.Generator) or value.device.type != self.device:
                continue
            if all(value is not known for known in self._known):
                self.watch.note("generator", self._named(title))
                if all(value is not known for known in self.watch.generators):
                    self.watch.generators.append(value)
                    if self.state is not None:
                        self.state.add_generator(value)

    # ---- one call

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outermost call of torch's that the user's code made."""
        outer, self.call = self.call, _name(func)
        try:
            if func in _READS and args and self.watch.owns(args[0]):
                if self.simulated or func in _PRINTS:
                    self.watch.note("host read", self.call)
            elif func in _MAKES and self._makes_on_device(func, args, kwargs):
                self.watch.note("pageable copy", self.call, "from Python numbers")
            return func(*args, **kwargs)
        finally:
            self.call = outer

    def _makes_on_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call brings numbers of the host to the device.

        On the simulated device that is so where a device is named: else the number is the host's.
        """
        if func is torch.Tensor.new_tensor:
            return bool(args) and self.watch.owns(args[0]) and kwargs.get("device") is None
        if not args or isinstance(args[0], torch.Tensor):
            return False
        device = kwargs.get("device")
        if device is None and not self.simulated:
            device = torch.get_default_device()
        return device is not None and torch.device(device).type == self.device


def _reason(title: str) -> str:
    short = title.rpartition("::")[2]
    if short in ("index", "index_put", "index_put_", "_index_put_impl_", "masked_select"):
        return "how many elements a mask has is not known before"
    if short == "nonzero":
        return "the shape of the result depends on the data"
    return ""


def _name(func: Any) -> str:
    """A torch function as the user wrote it, without its module."""
    name = resolve_name(func) or getattr(func, "__name__", str(func))
    return str(name).removeprefix("torch.nn.functional.").removeprefix("torch.")


def _default_generators(device: str) -> tuple[Any, ...]:
    """The generators that every capture knows."""
    if device == "cpu":
        return (torch.default_generator,)
    return tuple(torch.cuda.default_generators)


class _Dispatch(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """Not the simulator's: frames of this folder are no part of a stack, those of others are."""

    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self._operators = operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._operators.operator(func, args, kwargs or {})


class _Functions(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self._operators = operators

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._operators.function(func, args, kwargs or {})
