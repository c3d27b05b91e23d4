"""Deliberate faults, put into a copy of the library one at a time: the CPU tests have to catch each.

    python tests/mutations.py                  # all of them, a few minutes
    python tests/mutations.py "no join" ...    # those whose names begin so

The hard problem: a test that cannot fail looks like one that does not. So each fault here is one that a
hurried change could make (a release that is dropped, a join that is skipped, an order that is wrong, a
state that is not restored, a flag that is not tested), and is named with the tests that have to see it.
`test_mutations.py` holds that each still applies to the source; README.md here has the last full run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src", "breakable_cuda_graphs")


class Mutation(NamedTuple):
    """One fault: a piece of one file, what takes its place, and the tests that catch it."""

    name: str
    file: str
    before: str
    after: str
    tests: str


MUTATIONS = (
    # ---- releases
    Mutation(
        "a finalizer drops its handle", "_driver/handles.py",
        "            queue(self._queued)\n", "            pass\n",
        "tests/_driver/test_handles.py",
    ),
    Mutation(
        "a handle is destroyed twice", "_driver/handles.py",
        "call(slot.pop())", "call(slot[0]); call(slot.pop())",
        "tests/_driver/test_handles.py",
    ),
    Mutation(
        "releases run in an open capture", "_driver/release.py",
        " = _open.add\n", " = set().add\n",
        "tests/_driver/test_release.py",
    ),
    Mutation(
        "releases run in an unrelaxed thread", "_driver/release.py",
        "CUstreamCaptureMode(RELAXED)", "CUstreamCaptureMode(0)",
        "tests/_driver/test_release.py",
    ),
    Mutation(
        "the thread's capture mode is not restored", "_driver/release.py",
        "        if self._previous is not None:\n", "        if False:\n",
        "tests/_driver/test_release.py",
    ),
    Mutation(
        "a release that is interrupted is lost", "_driver/release.py",
        "            epoch, release = _queue[0]\n", "            epoch, release = _queue.popleft()\n",
        "tests/faults/test_finalizers.py tests/_driver/test_release.py",
    ),
    Mutation(
        "remains do not wait for the last replay", "sequence/state.py",
        "            self._mark.wait()\n", "            pass\n",
        "tests/replay/test_sequence.py",
    ),
    # ---- joins and orders
    Mutation(
        "no join at the beginning of a block", "capture/block.py",
        "                join(self.driver, self.stream, self._ambient)\n", "",
        "tests/frameworks/test_streams.py tests/capture/test_block.py",
    ),
    Mutation(
        "no join at the end of a block", "capture/block.py",
        "            join(self.driver, self._ambient, self.stream)\n", "",
        "tests/frameworks/test_streams.py tests/capture/test_block.py",
    ),
    Mutation(
        "a replay on another stream is not ordered", "replay/sequence.py",
        "        mark.order_after(handle, stream)\n        try:\n", "        try:\n",
        "tests/replay/test_sequence.py tests/frameworks/test_streams.py",
    ),
    Mutation(
        "a replay that a break ends leaves no mark", "replay/sequence.py",
        "            with contextlib.suppress(CUDAError):  # the break's own error is the one to see\n"
        "                mark.record(handle, stream)\n",
        "",
        "tests/replay/test_sequence.py tests/frameworks/test_streams.py",
    ),
    Mutation(
        "joined segments are not in order", "sequence/plan.py",
        "            after = nodes[-1:]\n", "            after = nodes[:0]\n",
        "tests/replay/test_sequence.py tests/sequence/test_segments.py",
    ),
    Mutation(
        "a break runs before its segment", "sequence/plan.py",
        "        if self.steps and self.steps[-1][1] is None:\n"
        "            executable = self.steps.pop()[0]\n",
        "        if self.steps and self.steps[-1][1] is None:\n"
        "            self.steps.insert(len(self.steps) - 1, (None, call))\n            return\n",
        "tests/replay/test_sequence.py tests/capture/test_breaks.py",
    ),
    # ---- what is not put back
    Mutation(
        "the current stream is not restored", "frameworks/raw.py",
        "        self._changes.undo()\n", "        pass\n",
        "tests/capture/test_block.py tests/capture/test_failures.py",
    ),
    Mutation(
        "a block of a thread that has ended is left open", "_driver/unfinished.py",
        "not each.home.is_here() and not each.adopt()", "not each.home.is_here()",
        "tests/faults/test_abandoned.py",
    ),
    Mutation(
        "an interrupted end is not taken up", "capture/block.py",
        "            self.put_back()\n            raise\n", "            raise\n",
        "tests/faults/test_abandoned.py",
    ),
    Mutation(
        "the generator is not restored after a failure", "frameworks/pytorch/draws.py",
        "            self.generator.set_state(self._before)\n", "            pass\n",
        "tests/frameworks/test_draws.py",
    ),
    Mutation(
        "the allocator's books are left open", "frameworks/pytorch/capture.py",
        "        finally:\n            self._closed()\n", "        finally:\n            pass\n",
        "tests/frameworks/test_pytorch_capture.py",
    ),
    Mutation(
        "what a failed block watched is not forgotten", "capture/block.py",
        "            self.sequence._memory.back_to(self._memory_mark)\n", "",
        "tests/sequence/test_memory.py tests/capture/test_failures.py",
    ),
    Mutation(
        "a failed rebind is not taken back", "sequence/rebinding/rebind.py",
        "                edit.undo()\n", "                pass\n",
        "tests/sequence/rebinding/test_rebind.py",
    ),
    Mutation(
        "edits are lost when segments are joined anew", "sequence/plan.py",
        "        segment._reapply(seat)  # what was edited in the executable that runs it until now\n", "",
        "tests/sequence/test_segments.py",
    ),
    # ---- flags and refusals
    Mutation(
        "memory that dies in a break goes unnoticed", "replay/sequence.py",
        "                    if memory.stale is not None:\n", "                    if False:\n",
        "tests/sequence/test_memory.py tests/replay/test_sequence.py",
    ),
    Mutation(
        "memory that died goes unnoticed", "replay/sequence.py",
        " or self._memory.stale is not None:\n            self._refuse", ":\n            self._refuse",
        "tests/sequence/test_memory.py",
    ),
    Mutation(
        "a swallowed error does not poison the block", "capture/block.py",
        "        if self.poison is not None:\n", "        if False:\n",
        "tests/capture/test_failures.py",
    ),
    Mutation(
        "a half-made sequence can be replayed", "sequence/state.py",
        "        if self._has_failed:\n            raise errors.replay_after_failure()\n", "",
        "tests/capture/test_failures.py",
    ),
    Mutation(
        "a break may replay its own sequence", "replay/sequence.py",
        "        if self._turn._is_owned():", "        if False:",
        "tests/replay/test_sequence.py tests/capture/test_breaks.py",
    ),
    Mutation(
        "a static result of another shape is copied", "sequence/static_results.py",
        "        if not is_plain or known.kind(leaf) != place.kind:\n", "        if False:\n",
        "tests/sequence/test_static_results.py",
    ),
    Mutation(
        "a break runs under the modes of the caller", "replay/sequence.py",
        "            and (not plan.has_breaks or plan.modes == plan.framework.modes())\n", "",
        "tests/capture/test_breaks.py tests/replay/test_sequence.py tests/frameworks/test_modes.py",
    ),
    Mutation(
        "a stream that does not answer counts as idle", "_driver/stream_capture.py",
        '    raise driver.error("cuStreamIsCapturing", code)\n', "    return Status.NONE\n",
        "tests/_driver/test_stream_capture.py",
    ),
)  # fmt: skip


def apply(mutation: Mutation, tree: Path) -> None:
    """Put a fault into a copy of the source; raises where it does not fit exactly once."""
    path = tree / PACKAGE / mutation.file
    text = path.read_text()
    if text.count(mutation.before) != 1:
        raise ValueError(
            f"{mutation.name}: the piece is {text.count(mutation.before)} times in {mutation.file}"
        )
    path.write_text(text.replace(mutation.before, mutation.after))


def is_caught(mutation: Mutation) -> tuple[bool, str]:
    """Whether the tests fail on the mutated copy, and the first test that did."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
        apply(mutation, tree)
        # Without a cache of bytecode: a mutated file may be as old and as long as the real one.
        env = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, "--no-header", "--timeout=120", *mutation.tests.split()],
            cwd=ROOT, env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 1 and failed:
        return True, failed[0].partition(" - ")[0].partition("::")[2]
    return False, "no test failed" if not done.returncode else done.stdout[-300:] + done.stderr[
        -300:
    ]


def main(wanted: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not wanted or m.name.startswith(tuple(wanted))]
    survived, began = [], time.monotonic()
    for mutation in chosen:
        caught, by = is_caught(mutation)
        print(f"{'caught  ' if caught else 'SURVIVED'}  {mutation.name}: {by}", flush=True)
        if not caught:
            survived.append(mutation.name)
    minutes = (time.monotonic() - began) / 60
    print(f"{len(chosen)} faults, {len(chosen) - len(survived)} caught, {minutes:.1f} minutes")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
