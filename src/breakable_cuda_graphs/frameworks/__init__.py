"""What a framework must be told when a segment begins and ends: torch, CuPy, Numba, any stream.

protocols.py   what a framework, its pool, its session and its arrays can be asked
errors.py      what is said where a framework cannot capture, and how it is warned
streams.py     what counts as a stream, and whose handle it has
loaded.py      which libraries are loaded, without loading them
arrays.py      device arrays of any library, and whose memory they lie in
owners.py      arrays by the addresses that captured kernels have
cupy.py        CuPy: private memory, its current stream, its arrays
numba.py       Numba: what it must not do inside a segment, and its arrays
find.py        who knows a value as a device array
companions.py  the libraries beside the framework of a block
raw.py         streams of anybody, captured by the driver alone
pytorch        torch, whose allocator and generators have to see a capture as their own
simulated.py   torch's CPU tensors on the simulated device
choose.py      the framework of a stream
"""
