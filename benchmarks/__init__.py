"""Benchmarks against every peer: `python -m benchmarks`, on a machine with a GPU.

The hard problem: a difference of a tenth of a microsecond is smaller than what a machine drifts
by in a minute. So nothing here is timed alone: every benchmark times all its rivals in turn, in
one process, for many rounds (`harness.py`), and says the spread beside each median.

One file a benchmark, named in `REGISTRY` in the order in which they run; each has
`run(settings, report, progress)`. `rivals.py` builds what we are compared with, `record.py` is
what a benchmark fills in and what becomes JSON, `page.py` draws the page from that JSON.
"""

from __future__ import annotations

REGISTRY: dict[str, str] = {
    "replay": "replay",
    "where": "where",
    "splits": "splits",
    "capture": "capture",
    "growth": "growth",
    "random": "random_numbers",
    "rebind": "rebind",
    "memory": "memory",
    "decoder": "decoder",
    "diffusion": "diffusion",
    "training": "training",
    "ranks": "ranks",
    "peers": "peers",
    "soak": "soak",
}
"""Benchmark name (as `--only` takes it) -> module in this package."""
