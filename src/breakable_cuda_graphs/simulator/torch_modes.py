"""TODO simulator.torch_modes.

The hard problem: TODO
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatching

if TYPE_CHECKING:
    from .tensors import TensorRecorder

# ---------------------------------------------------------------- modes


class _Operators(dispatching.TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """Sees every operator below autograd, in backward too."""

    def __init__(self, recorder: TensorRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._recorder.operator(func, args, kwargs or {})


_HOST_READS = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__array__: "__array__",
    torch.Tensor.__repr__: "printing",
    torch.Tensor.__format__: "printing",
}


class _HostReads(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Sees the ways to read a CPU tensor that are no operators."""

    def __init__(self, recorder: TensorRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        what = _HOST_READS.get(func)
        if what is not None and self._recorder.is_recording and self._recorder.is_capturing():
            self._recorder.refuse(f"Tensor {what}")
        return func(*args, **(kwargs or {}))


def leave_dispatch_mode(mode: Any) -> None:
    """Leave a mode that may lie under modes which the user has entered since."""
    above = []
    while (top := dispatching._get_current_dispatch_mode()) is not mode and top is not None:
        above.append(dispatching._pop_mode())
    mode.__exit__(None, None, None)
    for each in reversed(above):
        dispatching._push_mode(each)


def leave_function_mode(mode: Any) -> None:
    above = []
    while (top := torch.overrides._get_current_function_mode()) is not mode and top is not None:
        above.append(torch.overrides._pop_mode())
    mode.__exit__(None, None, None)
    for each in reversed(above):
        torch.overrides._push_mode(each)
