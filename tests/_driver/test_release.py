"""The release queue: finalizers only append; nothing runs in an open capture, in a child, or at exit."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from breakable_cuda_graphs._driver import bindings, process, release
from breakable_cuda_graphs._driver.handles import StreamHandle


@pytest.fixture
def driver(driver):
    release.drain()
    yield driver
    assert release.open_captures() == 0
    assert release.pending() == 0


def test_the_queue_runs_in_order_and_counts(driver):
    log = []
    for number in range(3):
        release.later(process.epoch, lambda number=number: log.append(number))
    assert log == []
    assert release.drain() == 3
    assert log == [0, 1, 2]
    assert release.drain() == 0


def test_nothing_runs_while_a_capture_is_open(driver):
    log = []
    for capture in ("one", "two", "two"):  # noting one twice is no harm
        release.capture_opened(capture)
    release.later(process.epoch, lambda: log.append(1))
    assert release.drain() == 0
    release.capture_closed("two")
    assert release.drain() == 0
    release.capture_closed("one")
    assert log == []
    assert release.drain() == 1


def test_one_that_fails_does_not_keep_the_others(driver, caplog):
    log = []

    def fail() -> None:
        raise ValueError("mine")

    release.later(process.epoch, fail)
    release.later(process.epoch, lambda: log.append(1))
    assert release.drain() == 2
    assert log == [1]
    assert "mine" in caplog.text


def test_what_a_release_queues_is_released_too(driver):
    log = []
    release.later(process.epoch, lambda: release.later(process.epoch, lambda: log.append(1)))
    release.drain()
    assert log == [1]


def test_a_release_that_drains_does_not_wait_for_itself(driver):
    release.later(process.epoch, release.drain)
    assert release.drain() == 1


def test_only_one_thread_drains(driver):
    entered, leave = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert leave.wait(10)

    release.later(process.epoch, slow)
    thread = threading.Thread(target=release.drain)
    thread.start()
    assert entered.wait(10)
    release.later(process.epoch, lambda: None)
    assert release.drain() == 0
    leave.set()
    thread.join(10)
    assert release.pending() == 0


def test_what_a_parent_made_is_never_released(driver):
    log = []
    release.later(process.epoch - 1, lambda: log.append(1))
    assert release.pending() == 0
    release._queue.append((process.epoch - 1, lambda: log.append(2)))
    release.drain()
    assert log == []


def test_at_the_exit_nothing_is_queued_or_released(driver, monkeypatch):
    log = []
    release.later(process.epoch, lambda: log.append(1))
    monkeypatch.setattr(process, "exiting", True)
    release.later(process.epoch, lambda: log.append(2))
    assert release.drain() == 0
    monkeypatch.undo()
    assert release.drain() == 1
    assert log == [1]


def test_releases_run_in_a_relaxed_thread_and_the_mode_comes_back(driver, bare_device):
    """A capture of somebody else, in global mode, survives a release."""
    other = driver.cuStreamCreate(1)
    mine = StreamHandle.create(driver)
    driver.cuStreamBeginCapture(other, bindings.types.CUstreamCaptureMode(0))
    del mine
    release.drain()
    assert driver.capture_info(other).status == 1
    driver.cuGraphDestroy(driver.cuStreamEndCapture(other))
    driver.cuStreamDestroy(other)
    exchange = driver.cuThreadExchangeStreamCaptureMode
    assert int(exchange(bindings.types.CUstreamCaptureMode(0))) == 0


def test_the_mode_comes_back_after_an_error(driver):
    mode = bindings.types.CUstreamCaptureMode
    driver.cuThreadExchangeStreamCaptureMode(mode(1))
    with pytest.raises(ValueError, match="mine"), release.relaxed_thread():
        assert int(driver.cuThreadExchangeStreamCaptureMode(mode(2))) == 2
        raise ValueError("mine")
    assert int(driver.cuThreadExchangeStreamCaptureMode(mode(0))) == 1


PROGRAM = """
import atexit, os, sys
from breakable_cuda_graphs.simulator import SimulatedDriver
from breakable_cuda_graphs._driver import bindings, release, process
from breakable_cuda_graphs._driver.handles import StreamHandle
driver = bindings.Driver(SimulatedDriver(1), simulated=True)
bindings.use(driver)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0))
{body}
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM.format(body=body)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_a_forked_child_that_drains_calls_no_driver():
    done = run("""
import warnings; warnings.simplefilter("ignore")
StreamHandle.create(driver)
child = os.fork()
if child == 0:
    os._exit(0 if release.drain() == 0 and driver.module.findings == [] else 4)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
""")
    assert done.returncode == 0, done.stderr


def test_a_forked_child_touches_nothing_and_the_parent_goes_on():
    done = run("""
import warnings; warnings.simplefilter("ignore")
owner, queued = StreamHandle.create(driver), StreamHandle.create(driver)
del queued
child = os.fork()
if child == 0:
    try:
        owner.value
    except RuntimeError as error:
        assert "forked" in str(error), error
    else:
        os._exit(3)
    owner.close()
    del owner
    os._exit(0 if driver.module.findings == [] else 4)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert release.drain() == 1
owner.close()
assert driver.module.findings == [] and driver.module.leaks() == []
""")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("how", ["global", "cycle", "thread", "queue"])
def test_the_interpreters_end_releases_nothing_and_is_quiet(how):
    hold = {
        "global": "keep = StreamHandle.create(driver)",
        "cycle": "keep = [StreamHandle.create(driver)]; keep.append(keep); del keep",
        "thread": (
            "import threading, time\n"
            "def work(mine=StreamHandle.create(driver)):\n    time.sleep(30)\n"
            "threading.Thread(target=work, daemon=True).start()"
        ),
        "queue": "StreamHandle.create(driver)",
    }[how]
    done = run(
        hold
        + """
destroy = driver.module.cuStreamDestroy
driver.module.cuStreamDestroy = lambda s: (os.write(2, b"destroyed"), destroy(s))[1]
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
