"""The 13.x names over bindings of either major, so that a rule is written once.

The hard problem: 12.9 keeps the forms with edge data under a suffix, and the bare names mean other
tuples there. What each shape looks like by itself is a rule too (`test_shapes.py`).
"""

from __future__ import annotations

from typing import Any

import pytest

SUFFIXES = {
    "cuStreamGetCaptureInfo": "_v3",
    "cuStreamUpdateCaptureDependencies": "_v2",
    "cuGraphGetEdges": "_v2",
    "cuGraphNodeGetDependencies": "_v2",
    "cuGraphNodeGetDependentNodes": "_v2",
    "cuGraphAddDependencies": "_v2",
    "cuGraphRemoveDependencies": "_v2",
    "cuGraphAddNode": "_v2",
}


class In13Shape:
    """A module like `cuda.bindings.driver`, its calls in the shape of 13.x."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.is_simulated = getattr(module, "simulated", False) is True
        self.is_old = hasattr(module, "cuGraphGetEdges_v2")

    def __getattr__(self, name: str) -> Any:
        suffixed = name + SUFFIXES.get(name, "")
        return getattr(self.module, suffixed if hasattr(self.module, suffixed) else name)

    def cuCtxCreate(self, params: Any, flags: int, device: Any) -> Any:
        if self.is_old:
            return self.module.cuCtxCreate(flags, device)
        return self.module.cuCtxCreate(params, flags, device)

    def needs(self, *names: str) -> None:
        """Skip the rule where the bindings or the driver lack a call."""
        for name in names:
            if not hasattr(self.module, name):
                pytest.skip(f"these bindings have no {name}")
