"""The simulated driver's calls, a file for each group of them; they stand on the state beside this folder.

context_calls.py   devices, contexts, errors and versions
stream_calls.py    streams and events
capture_calls.py   begin, end and look at a capture
memory_calls.py    allocations and addresses
launch_calls.py    work that is given to a stream
function_calls.py  functions and their parameters
graph_calls.py     build graphs, read them, draw them
param_calls.py     read and set what a node does
exec_calls.py      instantiate, launch, update
user_calls.py      user objects
"""
