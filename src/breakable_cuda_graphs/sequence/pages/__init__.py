"""Pages for a browser: a profile's timeline, a sequence's graphs. Each is one file that needs no network.

assembling.py   a template, its style, its script and its data as one page
looks.py        a sequence, or two, as the data of a page
*.html *.css *.js   the pages themselves; all that they show, they read from their data
"""

from __future__ import annotations

from .assemble import profile_page, sequence_page

__all__ = ["profile_page", "sequence_page"]
