"""Named ranges: each segment and break of a replay, by name, in Nsight Systems and `torch.profiler`.

The hard problem: a replay must not ask whether anybody looks. So nothing in its loop does: switching
ranges on puts another plan in the place of the usual one, whose launch and whose breaks open a range
and close it, whatever happens in between; switching them off puts the usual one back.

NVTX: https://nvtx.readthedocs.io and `torch.cuda.nvtx`. `torch.profiler.record_function` is what
torch's profiler shows as a user annotation, on the host and over the kernels that it launched.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..errors import bad_choice, bad_type
from . import errors
from .plan import Plan, Step, units_of
from .segments import EagerSegment, GraphSegment

#: What ranges can be for.
KINDS = ("nvtx", "record_function")

_Open = Callable[[str], Any]
_Close = Callable[[], Any]


def checked(wanted: str | Iterable[str] | None) -> tuple[str, ...]:
    """The kinds of ranges that are asked for, each once; raises for what is none, or does not work."""
    if wanted is not None and not isinstance(wanted, Iterable):
        raise bad_type("ranges", wanted, "a name, names in a list or the like, or None")
    names = () if wanted is None else (wanted,) if isinstance(wanted, str) else tuple(wanted)
    for name in names:
        if name not in KINDS:
            raise bad_choice("ranges", name, KINDS)
        _OPENERS[name]()
    return tuple(dict.fromkeys(names))


def with_ranges(
    segments: Sequence[GraphSegment | EagerSegment], plan: Plan, kinds: Iterable[str]
) -> Plan:
    """The plan with a range around each of its launches and breaks."""
    openers = [_OPENERS[kind]() for kind in kinds]
    steps: list[Step] = []
    labels: dict[int, str] = {}
    for unit in units_of(segments, plan, with_nodes=False):
        executable, call = unit.step
        if call is None:
            labels[int(executable)] = unit.label
        else:
            call = functools.partial(_within, openers, unit.label, call)
        steps.append((executable, call))
    made = plan.with_steps(steps)
    launch = plan.launch

    def launch_in_range(executable: Any, stream: Any) -> Any:
        return _within(openers, labels[int(executable)], launch, executable, stream)

    made.launch, made.usual = launch_in_range, plan
    return made


def _within(
    openers: list[Callable[[str], AbstractContextManager[Any]]], label: str,
    call: Callable[..., Any], *args: Any,
) -> Any:  # fmt: skip
    if len(openers) == 1:
        with openers[0](label):
            return call(*args)
    with openers[0](label), openers[1](label):
        return call(*args)


class _Pair:
    """A range from two calls that open and close it."""

    __slots__ = ("_close", "_label", "_open")

    def __init__(self, open_range: _Open, close_range: _Close, label: str) -> None:
        self._open, self._close, self._label = open_range, close_range, label

    def __enter__(self) -> None:
        self._open(self._label)

    def __exit__(self, *_: Any) -> None:
        self._close()


#: Who speaks NVTX: a module, and its names of the two calls.
_NVTX = (
    ("nvtx", "push_range", "pop_range"),
    ("torch.cuda.nvtx", "range_push", "range_pop"),
    ("cupy.cuda.nvtx", "RangePush", "RangePop"),
)


def _nvtx() -> Callable[[str], AbstractContextManager[Any]]:
    """The first of the libraries that is here and whose ranges work."""
    for module, opening, closing in _NVTX:
        try:
            library = importlib.import_module(module)
            open_range, close_range = getattr(library, opening), getattr(library, closing)
            open_range("breakable_cuda_graphs")  # torch without CUDA raises here
            close_range()
        except (ImportError, AttributeError, RuntimeError):
            continue
        return lambda label: _Pair(open_range, close_range, label)
    raise errors.no_ranges("nvtx", [module for module, *_ in _NVTX])


def _record_function() -> Callable[[str], AbstractContextManager[Any]]:
    try:
        profiler = importlib.import_module("torch.profiler")
    except ImportError:
        raise errors.no_ranges("record_function", ["torch"]) from None
    opener: Callable[[str], AbstractContextManager[Any]] = profiler.record_function
    return opener


_OPENERS = {"nvtx": _nvtx, "record_function": _record_function}
