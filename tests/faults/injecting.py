"""One fault in one driver call of a program, and the judgement of what came of it.

The hard problem: "nothing is left" has to mean the same after any fault in any call, those of clean-up
and of finalizers too. So a program is run once to write down its calls, and then once for each call
and each fault; each time the same questions are asked, and then the same program has to go right, on
the same sequence and on a new one.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from breakable_cuda_graphs import CaptureError, CUDAError, CUDAGraphSequence
from breakable_cuda_graphs._driver import bindings, release
from breakable_cuda_graphs.simulator import simulated_device
from faults.mending import mend
from faults.programs import FAILING, PROGRAMS, Program, Stage, plain, replayed
from helping import (
    Boom,
    a_stream,
    assert_nothing_left,
    assert_nothing_open,
    settle,
    watched_driver,
)

# ---------------------------------------------------------------- faults


class Fault(NamedTuple):
    """What happens at the so many-th call of a function: a code is answered, or the wrapper raises.

    has_worked: the driver has done the work all the same.
    """

    visit: int
    name: str
    outputs: int
    code: int = 0
    error: type[Exception] | None = None
    has_worked: bool = False

    def __str__(self) -> str:
        what = f"answers {self.code}" if self.error is None else f"raises {self.error.__name__}"
        return f"call {self.visit} of {self.name} {what}{' having worked' * self.has_worked}"


#: Calls that begin nothing and whose failure has no meaning of its own.
NEVER = {"cuGetErrorString", "cuGetErrorName", "cuDriverGetVersion", "cuInit"}

#: The recorder would run an operator eagerly if it could not learn that a capture is open.
ASKED_BY_USERS = {"cuStreamIsCapturing"}

ANYWHERE = (1, 2, 700, 999)

#: Questions that the driver answers "no" to with these codes: there they are no faults.
ANSWERS = {
    "cuFuncGetParamInfo": (1,),
    "cuKernelGetParamInfo": (1,),
    "cuPointerGetAttribute": (1,),
    "cuFuncGetAttribute": (1,),
    "cuGraphKernelNodeGetAttribute": (1,),
    "cuMemGetAddressRange": (1,),
    "cuStreamIsCapturing": (906,),
}

#: Calls that a capture may answer with codes of its own.
IN_CAPTURES = {
    "cuStreamEndCapture": (901, 904),
    "cuStreamBeginCapture": (900, 906),
    "cuStreamGetCaptureInfo": (901, 906),
    "cuStreamUpdateCaptureDependencies": (901, 908),
    "cuLaunchKernel": (900, 901, 906),
    "cuMemcpyAsync": (900, 901, 906),
    "cuEventRecord": (901, 906),
    "cuStreamWaitEvent": (901, 904, 906),
    "cuGraphLaunch": (900, 906),
    "cuGraphInstantiate": (901,),
    "cuGraphAddChildGraphNode": (901,),
}

#: Failing, these may have done their work: the error is that of some earlier work.
MAY_HAVE_WORKED = {"cuStreamEndCapture", "cuEventRecord", "cuStreamWaitEvent", "cuEventSynchronize"}


def not_found(name: str) -> Exception:
    """What the bindings raise for a function that the driver lacks."""
    return RuntimeError(f'Function "{name}" not found')


def faults_of(visit: int, name: str, outputs: int) -> Iterator[Fault]:
    """Every way in which one call may fail."""
    if name.endswith(("Destroy", "Release")):
        # One that was not made cannot be made up for: the handle is lost, whoever owned it.
        for code in ANYWHERE:
            yield Fault(visit, name, outputs, code, has_worked=True)
        yield Fault(visit, name, outputs, error=MemoryError, has_worked=True)
        return
    for code in (*ANYWHERE, *IN_CAPTURES.get(name, ())):
        if code in ANSWERS.get(name, ()):
            continue
        if not (name == "cuStreamEndCapture" and code in (901, 904)):
            yield Fault(visit, name, outputs, code)
        if name in MAY_HAVE_WORKED:
            yield Fault(visit, name, outputs, code, has_worked=True)
    for error in (RuntimeError, MemoryError):
        yield Fault(visit, name, outputs, error=error)


def inject(device: Any, driver: Any, fault: Fault) -> Callable[[int, str, Callable[[], Any]], Any]:
    """The answers of a driver with that fault."""
    visits = 0

    def answer(place: int, name: str, go: Callable[[], Any]) -> Any:
        nonlocal visits
        if name != fault.name or (name in ASKED_BY_USERS and asked_by_the_recorder()):
            return go()
        visits += 1
        if visits != fault.visit:
            return go()
        driver.has_failed = True
        if fault.has_worked:
            code, *values = go()
            if name == "cuStreamEndCapture" and int(code) == 0:
                device.driver.cuGraphDestroy(values[0])
        if fault.error is RuntimeError:
            raise not_found(name)
        if fault.error is not None:
            raise fault.error(f"in {name}")
        return (bindings.types.CUresult(fault.code), *(None,) * fault.outputs)

    return answer


# ---------------------------------------------------------------- the calls of a program


class Call(NamedTuple):
    visit: int
    name: str
    outputs: int


def calls_of(program: Program) -> list[Call]:
    """The driver calls that a program makes, and those that clean up after it."""
    found: list[Call] = []
    visits: Counter[str] = Counter()

    def note(place: int, name: str, go: Callable[[], Any]) -> Any:
        asked = name in ASKED_BY_USERS and asked_by_the_recorder()
        values = go()
        if name not in NEVER and not asked:
            visits[name] += 1
            found.append(Call(visits[name], name, len(values) - 1))
        return values

    with (
        simulated_device(seed=1, check=False) as device,
        a_stream() as side,
        watched_driver(device) as driver,
    ):
        settle()
        driver.answer = note
        seq = CUDAGraphSequence()
        error = attempt(lambda: program(Stage(device, side), seq))
        seq.reset()
        assert error is None or isinstance(error, Boom), f"{type(error).__name__}: {error}"
        settle()
        driver.answer = None
    return found


def asked_by_the_recorder() -> bool:
    """Whether a call is the simulator's own, which stands for the user's library there."""
    frame, files = sys._getframe(3), []
    while frame is not None and len(files) < 2:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return any("/simulator/tensors" in name for name in files)


def attempt(work: Callable[[], Any]) -> BaseException | None:
    """What a run raised; its frames are cleared, as they are once a user has handled it."""
    try:
        work()
    except BaseException as error:
        for each in (error, error.__cause__, error.__context__):
            if each is not None:
                traceback.clear_frames(each.__traceback__)
                each.__traceback__ = None
        return error
    return None


# ---------------------------------------------------------------- the judgement


def is_clear(error: BaseException | None, fault: Fault) -> bool:
    """Whether an error is the user's own or names what failed (None: it did no harm)."""
    if error is None or isinstance(error, Boom | CaptureError):
        return True
    if isinstance(error, CUDAError):
        return fault.name in str(error)
    if fault.error is MemoryError and isinstance(error, MemoryError):
        return True
    # An operator's own, or that of the bindings.
    said = "CUDA error" in str(error) or f'"{fault.name}"' in str(error)
    return isinstance(error, RuntimeError) and said


@contextlib.contextmanager
def unraisable() -> Iterator[list[str]]:
    """What finalizers have raised: the interpreter only reports it."""
    found: list[str] = []
    before = sys.unraisablehook
    sys.unraisablehook = lambda args: found.append(f"{args.exc_type.__name__}: {args.exc_value}")
    try:
        yield found
    finally:
        sys.unraisablehook = before


def problem_of(name: str, fault: Fault) -> str | None:
    """Run a program with one fault, and then right; in words what was wrong, if anything was."""
    program = PROGRAMS[name]
    with (
        simulated_device(seed=fault.visit, check=False) as device,
        a_stream() as side,
        watched_driver(device) as driver,
        unraisable() as unraised,
    ):
        before = device.leaks()
        settle()
        seq: Any = CUDAGraphSequence()
        try:
            run_with(driver, device, side, program, fault, seq)
            run_again(device, side, name, seq)
            assert_nothing_open(device)
            seq = None
            assert_nothing_left(device, besides=before)
            assert not unraised, f"a finalizer raised {unraised}"
        except AssertionError as wrong:
            text = str(wrong)[:300]
            traceback.clear_frames(wrong.__traceback__)
        else:
            return None
        seq = None
        mend()
    return text


def run_with(driver: Any, device: Any, side: Any, program: Program, fault: Fault, seq: Any) -> None:
    """A program and the clean-up after it with this fault; they raise something clear, or nothing."""
    stage, generator = Stage(device, side), torch.get_rng_state()
    driver.has_failed = False
    driver.answer = inject(device, driver, fault)
    error = attempt(lambda: program(stage, seq))
    if not driver.has_failed:
        error = attempt(seq.reset) or error  # the fault may lie in what cleans up, or in finalizers
        settle()
    driver.answer = None
    assert driver.has_failed, "the program took another course"
    assert is_clear(error, fault), f"unclear: {type(error).__name__}: {error}"
    if fault.name == "cuThreadExchangeStreamCaptureMode":
        release.put_thread_back()  # as the next block would
    assert_nothing_open(device)
    if error is not None and not stage.has_captured:
        assert torch.equal(torch.get_rng_state(), generator), "the generator has moved"


def run_again(device: Any, side: Any, name: str, seq: Any) -> None:
    """The same sequence again, and a fresh one; a program that fails by itself fails as before."""
    seq.reset()
    for each in (seq, CUDAGraphSequence()):
        again = attempt(lambda s=each: PROGRAMS[name](Stage(device, side), s))
        if name in FAILING:
            assert isinstance(again, Boom), f"the next run raised {again!r}"
            again = attempt(lambda s=each: replayed(plain)(Stage(device, side), s))
        assert again is None, f"the next run failed: {type(again).__name__}: {again}"


def chosen(faults: list[Fault], salt: str, share: int) -> list[Fault]:
    """One in so many of these faults; the same ones each time."""
    return [fault for fault in faults if zlib.crc32(f"{salt} {fault}".encode()) % share == 0]
