"""Replaying: what `CUDAGraphSequence` adds to the state of a sequence.

sequence.py  `CUDAGraphSequence`: the replay loop, and the public surface
embed.py     a replay inside another capture
profile.py   where the time of a replay goes
gate.py      the delay and the marks around one unit of a profiled replay
passes.py    the times of some replays, and their means
report.py    `Profile`: figures, a table, files for other tools
errors.py    the texts of errors
"""
