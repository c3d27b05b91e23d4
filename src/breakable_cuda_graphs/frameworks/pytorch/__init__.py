"""PyTorch: the framework that has to see a capture as its own.

framework.py        streams, modes and the session of a block
books.py            one segment: opened by a CUDAGraph shell, ended by the driver, closed by a dummy
draws.py            random numbers that go on over segments and breaks
pools.py            private pools
capture_streams.py  the streams that captures run on
workspaces.py       cuBLAS workspaces of those streams
snapshots.py        looks into torch's allocator
inputs.py           the tensors that captured kernels read or write, by their addresses
tensors.py          tensors as arguments and results of breaks
moving.py           tensors from bare addresses, for `rebind`
modes.py            grad, inference and autocast modes
stray.py            torch work that goes past the capture
"""

from __future__ import annotations

from .framework import TorchFramework

__all__ = ["TorchFramework"]
