"""The only room that imports `cuda.bindings`: calls, owners of handles, the release queue, captures.

It knows no framework and no sequence; everything above it knows no binding version.

    bindings.py        which driver answers, checked calls, one shape over bindings 12.9 and 13.x
    enums.py           the driver's numbers
    process.py         fork and interpreter exit
    threads.py         which thread a capture, or a changed state, belongs to
    contexts.py        which context a thread's calls go to
    handles.py         owners of streams, events, graphs and executables
    release.py         the queue that finalizers feed
    unfinished.py      what has begun and not ended, and who ends it
    user_objects.py    Python objects that live as long as a graph of somebody else
    stream_capture.py  begin, end and look at a stream capture
    stream_order.py    the completion mark: the end of the last replay
    kernel_params.py   names and arguments of captured kernels
    survey.py          one look at the graph of an open capture
    node_params.py     what nodes do, as plain values
    set_params.py      add nodes to graphs, and change them in graphs and executables
    conditionals.py    conditional nodes, and the kernels that set them
    transplant.py      put what was captured on its own into another graph
    write_value.py     words in device memory, written in the order of a stream
    demangle.py        names of kernels as people write them
    nvrtc.py           compile a little CUDA C++ at run time
    timing.py          times of the device
    errors.py          the texts of errors
"""
