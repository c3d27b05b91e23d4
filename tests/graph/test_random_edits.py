"""Random edits of every sort agree with a model that knows nothing of graphs."""

from __future__ import annotations

from typing import Any

import pytest

from breakable_cuda_graphs import Graph
from breakable_cuda_graphs.frameworks.streams import as_handle
from chains import Chain
from graphs import N, array, launch_scale, scale, scale_kernel


class Simulated:
    """The known kernel on the simulated device."""

    block = N

    def __init__(self, device: Any) -> None:
        self.driver, self.kernel = device.driver, scale_kernel()

    def array(self, value: float) -> Any:
        return array(value)

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def scale(self, graph: Graph, out: Any, source: Any, factor: float, after: Any) -> Any:
        return scale(graph, out, source, factor, after, kernel=self.kernel)

    def launch(self, stream: Any, out: Any, source: Any, factor: float) -> None:
        launch_scale(self.driver, self.kernel, as_handle(stream), out, source, factor)

    def sync(self) -> None:
        """Work has happened when a call returns."""


@pytest.mark.parametrize("in_sequence", [True, False], ids=["in a sequence", "alone"])
@pytest.mark.parametrize("seed", range(8))
def test_any_mixture_of_edits_does_what_the_last_ones_said(
    device: Any, seed: int, in_sequence: bool
) -> None:
    Chain(Simulated(device), seed, in_sequence=in_sequence).run(25)
    assert device.findings == []
