"""What a sequence consists of: segments, their memory, the plan of a replay, and how it is shown.

state.py           begin, commit, roll back, reset: the base of `CUDAGraphSequence`
segments.py        `GraphSegment` and `EagerSegment`, and which executable runs one
plan.py            the steps of a replay, and what each of them is
nvtx.py            named ranges: another plan
memory.py          who keeps the memory that replays read: the pool, the sequence, or its user
static_results.py  results of breaks: refused, or settled in fixed places
pytree.py          arrays in nested arguments and results
append.py          a graph that was built by hand becomes a segment
rebinding/         move addresses
addresses.py       whose memory an address is in, in words
source_lines.py    the user's line
summary.py         `sequence.explain()`
show.py            text and picture
html.py            the data of a sequence's page
pages/             pages for a browser: templates, styles and scripts
errors.py          the texts of errors
"""
