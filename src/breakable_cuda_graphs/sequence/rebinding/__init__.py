"""`sequence.rebind`: move addresses in everything that was captured.

rebind.py         find what moves, check it, change it, or take all of it back
moves.py          what people pass: pairs of memory, checked
address_index.py  where addresses stand in the arguments of a segment's nodes
verify.py         tensor maps: a second capture that shows which words move
report.py         what was changed and what was left
"""
