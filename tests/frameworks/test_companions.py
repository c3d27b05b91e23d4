"""Several libraries in one block: what each of them gives to a segment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from breakable_cuda_graphs._driver import bindings
from breakable_cuda_graphs.frameworks import companions
from breakable_cuda_graphs.frameworks.protocols import Captured


def test_what_a_companion_keeps_does_not_take_the_place_of_what_the_framework_keeps(
    bare_device: Any,
) -> None:
    mine, theirs = object(), object()
    unused = dict.fromkeys(("before_break", "abandon", "inputs", "leave"))
    inner = SimpleNamespace(**unused, end=lambda _: Captured(0, None, keep=mine))
    framework = SimpleNamespace(driver=bindings.current())
    session: Any = companions.Accompanied(inner, framework, None, 7)  # type: ignore[arg-type]
    assert session.end(None).keep is mine
    session._companions["numba"] = SimpleNamespace(end=lambda: theirs)
    kept, own = session.end(None).keep
    assert (kept, own) == ([theirs], mine)
