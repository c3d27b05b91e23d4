"""PyTorch: the framework that has to see a capture as its own.

framework.py  streams, modes and the session of a block
books.py      one segment: opened by a CUDAGraph shell, ended by the driver, closed by a dummy
pools.py      private pools, capture streams, cuBLAS workspaces
draws.py      random numbers that go on over segments and breaks
tensors.py    tensors as arguments and results of breaks
modes.py      grad, inference and autocast modes
"""

from .framework import TorchFramework

__all__ = ["TorchFramework"]
