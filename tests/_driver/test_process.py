"""Where this process stands: forks counted, the exit known."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from breakable_cuda_graphs._driver import process


def test_only_what_was_made_here_may_be_released(monkeypatch):
    assert process.can_release(process.epoch)
    assert not process.can_release(process.epoch - 1)
    monkeypatch.setattr(process, "exiting", True)
    assert not process.can_release(process.epoch)


def test_the_driver_is_lost_in_a_child_of_a_process_that_used_it(monkeypatch):
    monkeypatch.setattr(process, "_driver_used_in_epoch", None)
    assert not process.driver_lost_in_fork()
    process.note_driver_use()
    assert not process.driver_lost_in_fork()
    monkeypatch.setattr(process, "epoch", process.epoch + 1)
    assert process.driver_lost_in_fork()
    process.note_driver_use()
    assert not process.driver_lost_in_fork()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_fork_counts_in_the_child_only():
    before = process.epoch
    child = os.fork()
    if child == 0:
        os._exit(0 if process.epoch == before + 1 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert process.epoch == before


def test_the_exit_is_known_to_what_runs_at_it():
    code = (
        "import atexit\n"
        "atexit.register(lambda: print(process.exiting, process.can_release(0)))\n"
        "from breakable_cuda_graphs._driver import process\n"
        "print(process.exiting, process.can_release(0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False", "True", "True", "False"]
