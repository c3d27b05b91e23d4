"""Several libraries in one block: the framework's session, and beside it those of the others.

The hard problem: which libraries take part shows only as the block goes on: a break may import CuPy,
and from then on segments may allocate with it. So they are looked for again before each segment.
One that is loaded inside a segment comes too late for it: what it has made there is not private.
"""

from __future__ import annotations

import contextlib
from typing import Any

from .._driver.bindings import Driver
from .._driver.survey import Survey
from . import errors, loaded, owners
from .protocols import Birth, Captured, Companion, Follower, Found, Framework, Pool, Session
from .streams import as_handle


def session(
    framework: Framework, pool: Pool, stream: Any, mode: str, generators: tuple[Any, ...]
) -> Accompanied:
    """A session for one block, or one enclosed capture, with all libraries that are loaded."""
    inner = framework.session(pool, stream, mode, generators)
    return Accompanied(inner, framework, pool, stream)


def follower(framework: Framework) -> Follower | None:
    """The library whose current stream has to follow the framework's: CuPy, beside torch."""
    module = loaded.loaded(framework.driver, "cupy")
    if module is None or framework.name == "raw":  # that one's current stream is CuPy's
        return None
    return framework.driver.once(_follower, module)


def _follower(driver: Driver, module: Any) -> Follower:
    from .cupy import CupyFollower

    return CupyFollower(module)


class Accompanied:
    """A framework's session that takes the other libraries along."""

    def __init__(self, inner: Session, framework: Framework, pool: Pool, stream: Any) -> None:
        self.inner = inner
        self._framework, self._pool = framework, pool
        self._driver = framework.driver
        self._stream, self._handle = stream, as_handle(stream)
        self._companions: dict[str, Companion] = {}
        self.before_break = inner.before_break
        # The framework's own, as long as no other library takes part.
        self.abandon, self.inputs, self.leave = inner.abandon, inner.inputs, inner.leave

    @property
    def uses_workspace(self) -> bool:
        return self.inner.uses_workspace

    @property
    def had_company(self) -> bool:
        return self.inner.had_company

    def enter(self) -> None:
        self.inner.enter()
        self._admit()

    def _admit(self) -> None:
        """Take in what has been loaded since."""
        for name in loaded.newly_loaded(self._driver, self._companions):
            companion = self._companion(name, loaded.loaded(self._driver, name))
            self._companions[name] = companion  # first: what fails halfway has to be left too
            self.abandon, self.inputs, self.leave = self._abandon, self._inputs, self._leave
            companion.enter()

    def _companion(self, name: str, module: Any) -> Companion:
        if name == "cupy":
            from .cupy import CupyCompanion

            return CupyCompanion(module, self._framework, self._pool, self._stream, self._handle)
        from .numba import NumbaCompanion

        return NumbaCompanion(module, self._framework, self._handle)

    def begin(self) -> None:
        self._admit()
        self.inner.begin()
        for companion in self._companions.values():
            companion.begin()

    def end(self, survey: Survey | None) -> Captured:
        kept = [companion.end() for companion in self._companions.values()]
        captured = self.inner.end(survey)
        late = loaded.newly_loaded(self._driver, self._companions)
        if late and captured.problem is None:
            captured.problem = errors.library_came_late(late[0])
        if any(kept):
            captured.keep = (kept, captured.keep)
        return captured

    def has_new_company(self) -> bool:
        """Whether a library was loaded that takes part from the next segment on."""
        return bool(loaded.newly_loaded(self._driver, self._companions))

    def _abandon(self) -> None:
        try:
            for companion in self._companions.values():
                companion.end()
        finally:
            self.inner.abandon()

    def birth(self, address: int, storage: Any = None) -> Birth:
        for companion in self._companions.values():
            birth = companion.birth(address)
            if birth is not None:
                return birth
        birth = self.inner.birth(address, storage)
        if birth is Birth.BREAK and storage is not None and not _is_torchs(storage):
            return Birth.OLDER  # torch takes for new what it has not made
        return birth

    def _inputs(self, survey: Survey) -> tuple[list[Found], list[int]]:
        found, unknown = self.inner.inputs(survey)
        if unknown:
            companions = self._companions.values()
            unknown = [
                address
                for address in unknown
                if not any(c.birth(address) is Birth.POOL for c in companions)
            ]
            more, unknown = owners.find(self._framework.driver, unknown)
            found = [*found, *more]
        return found, unknown

    def _leave(self, failed: bool) -> None:
        with contextlib.ExitStack() as stack:  # each of them leaves, whatever becomes of the others
            stack.callback(self.inner.leave, failed)
            for companion in self._companions.values():
                stack.callback(companion.leave, failed)


def _is_torchs(storage: Any) -> bool:
    return type(storage).__module__.partition(".")[0] == "torch"
