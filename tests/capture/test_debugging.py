"""Where in the user's code something happens."""

from __future__ import annotations

import _thread
import time
from typing import Any

import pytest

from breakable_cuda_graphs import force_no_graph, no_graph
from breakable_cuda_graphs.sequence import source_lines
from helping import capture


def test_a_thread_with_little_python_below_has_a_place_too() -> None:
    """Autograd's threads call a marked function with nothing below it."""
    places: list[Any] = []

    def work() -> None:
        try:
            places.append(source_lines.line_of(source_lines.user_place()))
        except ValueError as error:
            places.append(error)

    _thread.start_new_thread(work, ())
    while not places:
        time.sleep(0.001)
    line = work.__code__.co_firstlineno + 2
    assert places == [f"{__file__}:{line}"]


def test_the_line_is_the_users_where_a_library_calls_the_break(device: Any) -> None:
    """A module's `__call__`, or a decorator of torch's, stands between the two."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    module, x = torch.nn.Identity(), torch.ones(2)
    module.forward = no_graph(lambda t: None)
    forced = torch.no_grad()(force_no_graph)
    line = test_the_line_is_the_users_where_a_library_calls_the_break.__code__.co_firstlineno + 7
    seq, _ = capture(lambda: (module(x), forced()))
    assert [segment.line for segment in seq.segments[1:]] == [f"{__file__}:{line}"] * 4
    (watched,) = seq.watched
    assert watched.endswith(f"captured at {__file__}:{line}")
