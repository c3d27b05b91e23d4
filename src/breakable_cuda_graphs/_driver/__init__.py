"""The only floor that imports `cuda.bindings`: calls, owners of handles, the release queue, captures.

It knows no framework and no sequence; everything above it knows no binding version.

    bindings.py       which driver answers, checked calls, one shape over bindings 12.9 and 13.x
    process.py        fork and interpreter exit
    threads.py        which thread a capture, or a changed state, belongs to
    contexts.py       which context a thread's calls go to
    handles.py        owners of streams, events, graphs and executables
    release.py        the queue that finalizers feed
    userobjects.py    Python objects that live as long as a graph of somebody else
    capturing.py      begin, end and look at a stream capture
    ordering.py       the completion mark: the end of the last replay
    works.py          what nodes do, as plain values
    reading.py        what is in a graph: nodes, edges, names, arguments
    editing.py        add nodes to graphs, and change them in graphs and executables
    conditionals.py   conditional nodes, and the kernels that set them
    transplanting.py  put what was captured on its own into another graph
    wordwriting.py    words in device memory, written in the order of a stream
    nvrtc.py          compile a little CUDA C++ at run time
    timing.py         times of the device
"""

from __future__ import annotations
