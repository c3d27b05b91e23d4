"""PyTorch: the framework that has to see a capture as its own.

modes.py            grad, inference and autocast modes
tensors.py          tensors as arguments and results of breaks, and from bare addresses
allocator.py        looks into torch's allocator
inputs.py           the tensors that captured kernels read or write, by their addresses
workspaces.py       cuBLAS workspaces of capture streams
capture_streams.py  the streams that captures run on
pools.py            private pools
capture.py          one segment: opened by a CUDAGraph shell, ended by the driver, closed by a dummy
draws.py            random numbers that go on over segments and breaks
stray.py            torch work that goes past the capture
framework.py        streams, modes and the session of a block
"""
