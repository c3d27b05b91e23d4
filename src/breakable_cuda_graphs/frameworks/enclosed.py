"""Captures that stand on their own: what is put into a graph, or into a body, afterwards.

The hard problem: such a capture may open while another one is open in the same thread (the body of a
conditional node), and getting a framework ready for it does what no capture survives. So the thread
is relaxed around that, and the capture has a stream and a pool of its own. On the simulated device
the recorder that is running already sees the body's operators too, and a second one would record
them twice.
"""

from __future__ import annotations

from typing import Any

from .._driver import release
from .._driver.reading import Survey
from . import companions
from .base import Captured, Found, Framework, Pool, Session


class Enclosed:
    """One capture from `begin` to `end` or `abandon`, and what has to live as long as its graph."""

    def __init__(self, framework: Framework, stream: Any, mode: str) -> None:
        self.framework = framework
        with release.relaxed_thread():
            self.pool: Pool = framework.new_pool(None)
            self.stream_object = self.pool.lease(self) if stream is None else stream
        self._session = _session(framework, self.pool, self.stream_object, mode)
        self._is_entered = False

    def begin(self) -> None:
        """Make the stream current and open the capture; whatever fails, all is as it was."""
        with release.relaxed_thread():
            try:
                self._is_entered = True
                self._session.enter()
                self._session.begin()
            except BaseException:
                self.abandon()
                raise

    def end(self, survey: Survey | None) -> Captured:
        """End the capture; one that drew random numbers comes with a runner."""
        return self._session.end(survey)

    def inputs(self, survey: Survey) -> tuple[list[Found], list[int]]:
        """The memory of others that the captured work names; see `Session.inputs`."""
        return self._session.inputs(survey)

    def abandon(self) -> None:
        """End the capture without wanting its graph."""
        self.leave(failed=True)

    def leave(self, failed: bool) -> None:
        """Restore what `begin` changed; if it `failed`, end what is still open. Can be repeated."""
        try:
            if failed:
                self._session.abandon()
        finally:
            self._leave(failed)

    def _leave(self, failed: bool) -> None:
        try:
            if self._is_entered:
                self._session.leave(failed)
                self._is_entered = False
        finally:
            self.pool.end_lease(self, keep=self._session.uses_workspace)


def _session(framework: Framework, pool: Pool, stream: Any, mode: str) -> Session:
    if framework.driver.simulated and release.open_captures():
        from .raw import RawFramework, RawSession

        if isinstance(framework, RawFramework):
            session = RawSession(framework, stream, mode)
            session.names_streams = framework.name == "raw"  # torch's operators name none
            return session
    return companions.session(framework, pool, stream, mode, ())
