"""One CUDA graph: to look into, to build, to capture into, to edit and to run.

The hard problem: a graph needs its nodes and a node its graph, everywhere. So what is asked is written down
below what answers it: nodes say what they ask of a graph, and each file knows only those above it here.

    errors.py         the errors of graphs, nodes, edits and captures into a graph
    arguments.py      bytes of kernel arguments, and the memory behind what people pass
    kernels.py        function handles of the kernels of every library
    checks.py         what fits into what: sizes, alignment, kinds of memory
    abbreviate.py     names, sizes and launch shapes in few letters
    node.py           what every node has, and what it asks of its graph
    nodes.py          the kinds of nodes that hold no graphs
    build.py          what a new node is to do, and what a conditional node decides by
    snapshot.py       one look at a graph
    state.py          a graph's handles, and all that is remembered of its nodes
    capture_notes.py  what is noted of nodes while they are captured
    clone.py          copies of a graph, which node is which in them
    edit.py           what a node does after an edit
    diff.py           what differs between two graphs
    layout.py         where the boxes of a picture go
    text.py           a graph as text, for people and for other tools
    svg.py            a graph as a picture
    recording.py      a capture that stands on its own
    part.py           what `Graph.capture` yields: a recording that is planted into a graph
    target.py         which executable an edit goes to
    view.py           the looking half of `Graph`
    exec.py           `GraphExec`: an executable, its launches and its edits
    change.py         the changing half of `Graph`
    graph.py          `Graph`, and the kinds of nodes that hold graphs
"""
