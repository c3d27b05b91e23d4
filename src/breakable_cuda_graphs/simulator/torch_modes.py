"""The two torch modes through which the simulated device sees operators and host reads.

The hard problem: a mode has to be left in the middle of a stack that the user has gone on with. So what lies
above it is taken off, and put back when the mode is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatching


class OperatorMode(dispatching.TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """Sees every operator below autograd, in backward too."""

    def __init__(self, operator: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._operator = operator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._operator(func, args, kwargs or {})


#: Reads of a CPU tensor that are no operators, and what they are called.
HOST_READS = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__array__: "__array__",
    torch.Tensor.__repr__: "printing",
    torch.Tensor.__format__: "printing",
}


class HostReadMode(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Sees the ways to read a CPU tensor that are no operators."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__()
        self._refuse = refuse  # told what is read; does nothing outside of a capture

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        what = HOST_READS.get(func)
        if what is not None:
            self._refuse(f"Tensor {what}")
        return func(*args, **(kwargs or {}))


def leave_dispatch_mode(mode: Any) -> None:
    """Leave a mode that may lie under modes which the user has entered since."""
    stack = dispatching
    _leave(mode, stack._get_current_dispatch_mode, stack._pop_mode, stack._push_mode)


def leave_function_mode(mode: Any) -> None:
    """The same for the other kind, which has a stack of its own."""
    stack = torch.overrides
    _leave(mode, stack._get_current_function_mode, stack._pop_mode, stack._push_mode)


def _leave(
    mode: Any, current: Callable[[], Any], pop: Callable[[], Any], push: Callable[[Any], Any]
) -> None:
    above = []
    while (top := current()) is not mode and top is not None:
        above.append(pop())
    mode.__exit__(None, None, None)
    for each in reversed(above):
        push(each)
