"""The only floor that imports `cuda.bindings`: calls, owners of handles, the release queue, captures.

It knows no framework and no sequence; everything above it knows no binding version.

    bindings.py   which driver answers, checked calls, one shape over binding versions 12.9 and 13.x
    process.py    fork and interpreter exit
    release.py    the queue that finalizers feed
    handles.py    owners: Stream, Event, GraphHandle, ExecHandle
    capturing.py  begin, end and look at a stream capture
    reading.py    what is in a graph: nodes, edges, names, arguments
"""
