"""The deliberate faults of `mutations.py` still fit the source, and name tests that are there.

Running them takes minutes and is done by hand: `python tests/mutations.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mutations import MUTATIONS, PACKAGE, ROOT, Mutation, apply


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_deliberate_fault_fits_the_source(tmp_path: Path, mutation: Mutation) -> None:
    target = tmp_path / PACKAGE / mutation.file
    target.parent.mkdir(parents=True)
    shutil.copy(ROOT / PACKAGE / mutation.file, target)
    apply(mutation, tmp_path)
    changed = target.read_text()
    assert changed != (ROOT / PACKAGE / mutation.file).read_text()
    compile(changed, mutation.file, "exec")
    for path in mutation.tests.split():
        assert (ROOT / path).is_file()


def test_there_are_twenty_of_them_with_names_of_their_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 20
