"""Random edits of every sort agree with a model that knows nothing of graphs, on the device."""

from __future__ import annotations

from typing import Any

import pytest

from breakable_cuda_graphs import Graph
from chains import Chain

from .helpers import N, dev, sync
from .kernels import add_scale, kernel, launch_scale

pytestmark = pytest.mark.gpu


class Device:
    """The known kernel on the device."""

    block = N

    def __init__(self) -> None:
        kernel()  # compiled now, not in a capture

    def array(self, value: float) -> Any:
        return dev(value)

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def scale(self, graph: Graph, out: Any, source: Any, factor: float, after: Any) -> Any:
        return add_scale(graph, out, source, factor, after)

    def launch(self, stream: Any, out: Any, source: Any, factor: float) -> None:
        launch_scale(out, source, factor)  # on torch's current stream, which is the capture's

    def sync(self) -> None:
        sync()


@pytest.mark.parametrize("in_sequence", [True, False], ids=["in a sequence", "alone"])
@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_of_edits_does_what_the_last_ones_said(seed: int, in_sequence: bool) -> None:
    Chain(Device(), seed, in_sequence=in_sequence).run(40)
