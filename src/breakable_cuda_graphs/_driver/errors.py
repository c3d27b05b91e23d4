"""The texts of errors about driver calls, handles and processes.

The hard problem: the driver answers with a number and no word of what was tried, so the call's name, the
code's own name and what to look at next are put beside it.
"""

from __future__ import annotations

from ..errors import CUDAError, ProcessError

# ---------------------------------------------------------------- driver calls


def driver_call_failed(call: str, code: int, name: str, sentence: str) -> CUDAError:
    error = CUDAError(f"{call} failed with {name} ({code}): {sentence}")
    error.call, error.code, error.name = call, code, name
    return error


def driver_call_missing(call: str, cause: BaseException) -> CUDAError:
    error = CUDAError(
        f"{call} cannot be called ({cause}): the driver or cuda-bindings is missing or too old for it; "
        "`python -m breakable_cuda_graphs doctor` shows both versions."
    )
    error.call, error.name = call, "NOT_FOUND"
    return error


def no_driver(variable: str, cause: BaseException) -> CUDAError:
    error = CUDAError(
        f"no CUDA driver answers on this machine: {cause} Install the NVIDIA driver, or choose the "
        f"simulated one: {variable}=1, or `with breakable_cuda_graphs.simulator.simulated_device()`."
    )
    error.call, error.name = "cuInit", "NO_DRIVER"
    return error


def closed(what: str) -> RuntimeError:
    return RuntimeError(f"this {what} is closed")


# ---------------------------------------------------------------- processes


def driver_lost_in_fork() -> ProcessError:
    return ProcessError(
        "CUDA was in use when this process was forked, and the driver cannot be used in the child. "
        "Start the child with the 'spawn' method, or fork before the first use of CUDA."
    )


def used_after_fork(what: str) -> ProcessError:
    return ProcessError(
        f"this {what} belongs to the process that was forked; its CUDA handles mean nothing in the "
        "child. Capture in the child (started with 'spawn'), or replay in the parent."
    )


# ---- conditionals


def no_compiler(cause: BaseException) -> RuntimeError:
    return RuntimeError(
        f"conditional nodes need a small kernel that is compiled at run time, and NVRTC cannot be "
        f"loaded ({cause}): install the CUDA toolkit's nvrtc (pip install nvidia-cuda-nvrtc)"
    )


def does_not_compile(code: int, log: str) -> RuntimeError:
    return RuntimeError(
        f"NVRTC could not compile this library's kernels (code {code}): {log[:500]}"
    )
