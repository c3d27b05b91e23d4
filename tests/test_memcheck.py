"""The script that runs device tests under memcheck: what it runs, and how it reads the summary."""

from __future__ import annotations

import pytest

from gpu import memcheck


@pytest.mark.parametrize(
    ("output", "seen"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("1 passed\n========= ERROR SUMMARY: 3 errors\n", 3),
        ("========= ERROR SUMMARY: 1 error\n========= ERROR SUMMARY: 2 errors\n", 3),
        ("========= Error: Target application terminated before first instrumented call\n", None),
    ],
)
def test_the_summary_is_read(output: str, seen: int | None) -> None:
    assert memcheck.errors_seen(output) == seen


def test_the_tests_that_it_chooses_are_there() -> None:
    for path in memcheck.SELECTION:
        assert (memcheck.ROOT / path).is_file(), path


def test_calls_that_tests_make_to_fail_are_not_counted() -> None:
    line = memcheck.command("/bin/compute-sanitizer", ["tests/gpu"])
    assert line[line.index("--report-api-errors") + 1] == "no"
    assert line[-1] == "tests/gpu"
    assert {"memcheck", "-m", "gpu", "pytest"} <= set(line)


def test_without_the_tool_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memcheck, "sanitizer", lambda: None)
    assert memcheck.main([]) == 2
    assert "compute-sanitizer" in capsys.readouterr().out
