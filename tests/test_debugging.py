"""Where in the user's code something happens."""

from __future__ import annotations

import _thread
import time
from typing import Any

from breakable_cuda_graphs import debugging


def test_a_thread_with_little_python_below_has_a_place_too() -> None:
    """Autograd's threads call a marked function with nothing below it."""
    places: list[Any] = []

    def work() -> None:
        try:
            places.append(debugging.line_of(debugging.user_place()))
        except ValueError as error:
            places.append(error)

    _thread.start_new_thread(work, ())
    while not places:
        time.sleep(0.001)
    line = work.__code__.co_firstlineno + 2
    assert places == [f"{__file__}:{line}"]
