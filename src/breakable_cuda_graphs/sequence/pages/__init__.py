"""Pages for a browser: a profile's timeline, a sequence's graphs. Each is one file that needs no network.

    assemble.py  a template, its style, its script and its data as one page

The pages are `*.html`, `*.css` and `*.js` beside it; all that they show, they read from their data.
"""
