"""Capturing: the block, its breaks, and what may be called inside.

breakable_graph.py  the context manager
block.py            one open block: segments, borders, the end, whatever fails
break_call.py       one call of a break: arguments, body, result
breaks.py           `no_graph`, `force_no_graph`, `is_in_breakable_graph`
open_blocks.py      which block a call belongs to
refusals.py         why a segment is refused, and what to say of the user's own error
conditional.py      `capture_if` and `capture_while`
annotate.py         `annotate`: names for parts of a capture
stacks.py           the Python line of each node
errors.py           the texts of errors
"""
