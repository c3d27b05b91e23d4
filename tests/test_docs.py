"""The pages for users: their code runs, and their links lead somewhere.

The blocks of a page run in order in one namespace, as a reader would run them. What a block prints
has to be what the comments behind its `print` calls say. Without a GPU they run on the simulated
device, with "cpu" in the place of "cuda"; `pytest -m gpu` runs them as they stand.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from docs.pages import Block, blocks_of, drawn, pictures_of

from breakable_cuda_graphs.simulator import simulated_device

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"

#: docs/benchmarks.md is drawn by a program that has tests of its own.
GUIDES = sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "benchmarks.md")
PAGES = [README, ROOT / "DESIGN.md", *GUIDES]
PAGES_WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]

_SAID = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)


def page_names(pages: list[Path]) -> list[str]:
    return [page.stem for page in pages]


# ---------------------------------------------------------------- code


def test_the_pages_have_code() -> None:
    assert README in PAGES_WITH_CODE
    assert sum(len(blocks_of(page)) for page in PAGES_WITH_CODE) >= 10
    for page in PAGES_WITH_CODE:
        assert len(blocks_of(page)) == page.read_text().count("```python")


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=page_names(PAGES_WITH_CODE))
def test_code_runs_on_the_simulated_device(page: Path) -> None:
    pytest.importorskip("torch")
    namespace: dict[str, Any] = {"__name__": "page"}
    with simulated_device() as device:
        for block in blocks_of(page):
            if not block.needs_gpu:
                said = block.run(namespace, "cpu")
                assert said == _SAID.findall(block.code), f"{page.name}:{block.line}"
        assert device.findings == []


@pytest.mark.gpu
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=page_names(PAGES_WITH_CODE))
def test_code_runs_on_the_device(page: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks_of(page):
        said = block.run(namespace, "cuda")
        assert said == _SAID.findall(block.code), f"{page.name}:{block.line}"


def test_a_block_that_says_something_else_would_be_seen() -> None:
    block = Block(README, 1, 'print(1 + 1)  # 3\nprint("and")\n', False)
    assert block.run({}, "cpu") == ["2", "and"]
    assert _SAID.findall(block.code) == ["3"]


# ---------------------------------------------------------------- pictures

PAGES_WITH_PICTURES = [page for page in GUIDES if pictures_of(page)]


@pytest.mark.parametrize("page", PAGES_WITH_PICTURES, ids=page_names(PAGES_WITH_PICTURES))
def test_pictures_are_those_that_the_code_above_them_makes(page: Path) -> None:
    """`python docs/pages.py` draws them again."""
    pytest.importorskip("torch")
    for picture, svg in drawn(page):
        assert picture.file.read_text() == svg, f"{picture.file.name} shows something else"


def test_every_picture_belongs_to_a_page() -> None:
    files = {picture.file for page in PAGES_WITH_PICTURES for picture in pictures_of(page)}
    assert files == set((ROOT / "docs" / "pictures").iterdir())
    assert len(files) >= 5


# ---------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_names(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """`mkdocs build --strict`, in .ci/run, holds that what the navigation names is there."""
    named = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert pages <= named, "add the page to `nav` in mkdocs.yml, and to docs/index.md"


def test_every_page_can_be_reached_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index.read_text()))
    assert linked >= {page.name for page in PAGES if page.parent == index.parent} - {index.name}
