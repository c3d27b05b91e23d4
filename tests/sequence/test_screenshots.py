"""What the guide to profiles shows of a run on a device is made from the report of that run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs import screenshots

from breakable_cuda_graphs.replay.report import Profile
from browser import Browser, needs_chromium


def test_the_guide_shows_the_table_of_the_report_that_is_kept() -> None:
    """`python docs/screenshots.py` writes it again."""
    assert screenshots.table_shown() == screenshots.table()


def test_the_report_is_of_a_device_and_adds_up() -> None:
    report = Profile.from_json(screenshots.REPORT.read_text())
    assert not report.simulated
    total = sum(row.gpu_us + row.gap_us for row in report.rows)
    assert total == pytest.approx(report.replay_us, rel=0.05)


def test_every_screenshot_is_shown_or_the_other_half_of_one() -> None:
    shown = set(re.findall(r"\]\(screenshots/([\w-]+\.png)\)", screenshots.GUIDE.read_text()))
    kept = {path.name for path in screenshots.FOLDER.glob("*.png")}
    assert shown <= kept
    assert kept - shown <= {name.replace("light", "dark") for name in shown}


@needs_chromium
def test_its_page_opens_quietly(tmp_path: Path) -> None:
    Profile.from_json(screenshots.REPORT.read_text()).to_html(tmp_path / "page.html")
    browser = Browser()
    try:
        browser.open(tmp_path / "page.html")
        assert browser.problems == []
        assert "NVIDIA" in browser.run("document.body.textContent")
    finally:
        browser.close()
