"""Which thread's streams a block watches; what it warns about is in `tests/gpu`."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.overrides import _get_current_function_mode  # noqa: E402

from breakable_cuda_graphs.frameworks.pytorch import stray  # noqa: E402
from helping import in_raw_thread, in_thread, in_thread_of_number  # noqa: E402


@pytest.fixture
def set_stream(monkeypatch: Any) -> None:
    monkeypatch.setattr(stray, "_set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "set_stream", stray._set_stream)
    monkeypatch.delitem(__import__("sys").modules, "torch._dynamo", raising=False)


def test_a_thread_of_the_number_of_one_that_ended_in_a_block_is_not_watched(
    set_stream: None,
) -> None:
    watch = stray.StrayWatch(lambda: False)
    number = in_raw_thread(watch.start)
    modes: list[Any] = []

    def work() -> None:
        torch.cuda.set_stream(None)
        modes.append(_get_current_function_mode())

    in_thread_of_number(number, work)
    watch.stop()
    assert modes == [None]
    assert torch.cuda.set_stream is stray._set_stream
    assert stray._watches == []


def test_a_finalizer_may_stop_one_in_the_middle_of_another_start(set_stream: None) -> None:
    def work() -> None:
        watch = stray.StrayWatch(lambda: False)
        watch.start()
        with stray._lock:
            watch.stop()

    in_thread(work, timeout=5)
    assert stray._watches == []
