"""The quick start as a program that checks itself: capture once, replay for inputs of either branch.

The hard problem: a demo that only prints looks right when it is wrong. So the expected numbers are
computed without the library and without the device, the result is overwritten before each replay,
and the inputs take both branches of the break whatever the capture took.

With torch and a GPU it runs there; with torch alone, on the simulated device with CPU tensors;
without torch, as driver calls on a stream. It says which of these it did.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from . import CUDAGraphSequence, breakable_graph, no_graph
from ._driver import bindings
from .frameworks.streams import as_handle
from .simulator import simulated_device

__all__ = ["Outcome", "main", "run_neutral", "run_torch"]

#: (input, result, expected result)
Outcome = tuple[float, float, float]

_COUNT = 64


def main(*, simulated: bool = False, neutral: bool = False) -> int:
    """Run the demo that fits this machine, print what it does, return 0 if every result is right."""
    torch = None if neutral else imported_torch()
    simulated = simulated or bindings.is_simulator_wanted()
    if torch is None:
        return _neutral_demo(simulated, "--neutral" if neutral else "torch is not installed")
    if not simulated and torch.cuda.is_available():
        return _report(_torch_steps(torch, "cuda"), run_torch(torch, "cuda"))
    why = "as asked" if simulated else f"torch {torch.__version__} finds no CUDA device"
    with _simulated(why):
        return _report(_torch_steps(torch, "cpu"), run_torch(torch, "cpu"))


def imported_torch() -> Any:
    """torch, or None where it cannot be imported, for whatever reason."""
    try:
        import torch
    except (ImportError, OSError):
        return None
    return torch


# ---------------------------------------------------------------- with torch


def run_torch(torch: Any, device: str) -> Iterator[Outcome]:
    """The README's quick start on tensors of a device."""

    @no_graph
    def dynamic_scale(t: Any) -> None:
        if t.sum().item() > 0:  # read on the host: no graph can hold this
            t.mul_(2)
        else:
            t.mul_(-3)

    static_input = torch.full((_COUNT,), 4.0, device=device)
    sequence = CUDAGraphSequence()
    with breakable_graph(sequence):
        hidden = static_input * 2
        dynamic_scale(hidden)
        result = hidden + 1

    for value in (4.0, -4.0, 0.5, -1.0):
        result.fill_(float("nan"))
        static_input.fill_(value)
        sequence.replay()
        expected = value * 2 * (2 if value > 0 else -3) + 1
        low, high = result.min().item(), result.max().item()
        yield value, low if low != expected else high, expected


def _torch_steps(torch: Any, device: str) -> str:
    where = torch.cuda.get_device_name() if device == "cuda" else "the simulated device"
    return (
        f"torch {torch.__version__} on {where}: graph (hidden = input * 2), "
        "break (hidden *= 2 if its sum is positive, else -3), graph (result = hidden + 1)"
    )


# ---------------------------------------------------------------- with the driver alone


def _neutral_demo(simulated: bool, why: str) -> int:
    if not simulated:
        try:
            bindings.current()
        except RuntimeError as error:
            why, simulated = f"{why}, and no driver answers: {reason(error)}", True
    if not simulated:
        print(f"No torch ({why}): plain driver calls.")
        return _report(_NEUTRAL_STEPS, run_neutral())
    with _simulated(why):
        return _report(_NEUTRAL_STEPS, run_neutral())


_NEUTRAL_STEPS = (
    "driver calls on a stream: graph (copy input to hidden), "
    "break (hidden = 2 * hidden if it is below 100, else hidden - 100), graph (copy to result)"
)


def run_neutral() -> Iterator[Outcome]:
    """The same program on bare device memory: fills and copies on a stream, and a break."""
    driver = bindings.current()
    sequence = CUDAGraphSequence()
    stream = bindings.types.CUstream(as_handle(sequence.stream))  # makes a context current, too
    nbytes = 4 * _COUNT

    @no_graph
    def decide(address: int) -> None:
        value = _read(driver, stream, address)[0]
        driver.cuMemsetD32Async(address, value * 2 if value < 100 else value - 100, _COUNT, stream)

    with _device_memory(driver, 3, nbytes) as (static_input, hidden, result):
        driver.cuMemsetD32Async(static_input, 21, _COUNT, stream)
        with breakable_graph(sequence):
            driver.cuMemcpyDtoDAsync(hidden, static_input, nbytes, stream)
            decide(hidden)
            driver.cuMemcpyDtoDAsync(result, hidden, nbytes, stream)
        for value in (21, 121, 0, 100):
            driver.cuMemsetD32Async(result, 0xFFFFFFFF, _COUNT, stream)
            driver.cuMemsetD32Async(static_input, value, _COUNT, stream)
            sequence.replay(sequence.stream)
            expected = value * 2 if value < 100 else value - 100
            words = _read(driver, stream, result)
            yield value, next((word for word in words if word != expected), expected), expected
        sequence.reset()


def _read(driver: bindings.Driver, stream: Any, address: int) -> list[int]:
    """The 32-bit words of a buffer, once the stream's work is done."""
    driver.cuStreamSynchronize(stream)
    words = (ctypes.c_uint32 * _COUNT)()
    driver.cuMemcpyDtoH(ctypes.addressof(words), address, 4 * _COUNT)
    return list(words)


@contextlib.contextmanager
def _device_memory(driver: bindings.Driver, count: int, nbytes: int) -> Iterator[list[Any]]:
    with contextlib.ExitStack() as stack:
        buffers = []
        for _ in range(count):
            buffers.append(driver.cuMemAlloc(nbytes))
            stack.callback(driver.cuMemFree, buffers[-1])
        yield buffers


# ---------------------------------------------------------------- saying it


def reason(error: BaseException) -> str:
    """What was at the bottom of an error: the words of the driver, or of who looked for it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().rstrip(".")


@contextlib.contextmanager
def _simulated(why: str) -> Iterator[None]:
    print(f"SIMULATED DEVICE ({why}).")
    print("Captures, breaks and replays go through this library; no GPU is used.")
    with simulated_device() as device:
        yield
        for finding in device.findings:
            print(f"the simulated driver was misused: {finding}")
        if device.findings:
            raise SystemExit(1)


def _report(steps: str, outcomes: Iterable[Outcome], say: Callable[[str], None] = print) -> int:
    """Print each outcome; 1 if one is wrong or none came."""
    say(steps)
    say("captured once; replayed:")
    verdicts = []
    for value, result, expected in outcomes:
        verdicts.append(result == expected)
        verdict = "right" if verdicts[-1] else f"WRONG, expected {expected:g}"
        say(f"  input {value:6g}  ->  result {result:6g}   {verdict}")
    if verdicts and all(verdicts):
        say(f"All {len(verdicts)} results are right.")
        return 0
    say("A result is WRONG. `python -m breakable_cuda_graphs doctor` says what is known here.")
    return 1
