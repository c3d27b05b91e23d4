"""The pages: what they hold, that they load nothing, and how they behave in a browser."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from breakable_cuda_graphs import (  # noqa: E402
    CUDAGraphSequence,
    Graph,
    annotate,
    breakable_graph,
    no_graph,
)
from breakable_cuda_graphs.sequence import html  # noqa: E402
from browser import Browser, needs_chromium  # noqa: E402
from helping import capture  # noqa: E402

SCHEMES = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


@no_graph
def attend(t: Any, number: int) -> None:
    t.add_(1)


def layers(count: int, width: int = 1) -> Any:
    """A sequence with so many breaks, each in a scope of its own."""
    x = torch.ones(8)

    def body() -> None:
        for number in range(count):
            with annotate(f"layer {number}"):
                for _ in range(width):
                    x.mul_(0.5)
                attend(x, number)
        x.sub_(1)

    return capture(body, keep_inputs=True)[0]


def data_of(page: str) -> Any:
    """What a page shows."""
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    return json.loads(text)


# ---------------------------------------------------------------- what they hold


def test_a_sequences_page_has_its_parts_their_nodes_and_what_their_addresses_are(
    device: Any,
) -> None:
    seq = layers(2)
    (side,) = data_of(html.page(seq))["sides"]
    assert [(part["kind"], part["name"]) for part in side["parts"]] == [
        ("graph", "segment 0"),
        ("break", "attend"),
        ("graph", "segment 2"),
        ("break", "attend"),
        ("graph", "segment 4"),
    ]
    assert side["parts"][1]["scope"] == "layer 0"
    assert side["parts"][1]["args"][1] == ["1", "0"]
    node = side["parts"][0]["nodes"][0]
    assert node["name"] == "aten::mul_.Tensor"
    assert node["facts"] == [["launch", "1 block of 1"]]
    assert "break argument 0 of attend" in [what for _, _, what in node["args"]]


def test_a_page_is_one_file_that_forbids_itself_to_load_anything(
    device: Any, tmp_path: Path
) -> None:
    seq = layers(1)
    seq.to_html(tmp_path / "sequence.html")
    seq.profile(iterations=1, warmup=0).to_html(tmp_path / "profile.html")
    for name in ("sequence.html", "profile.html"):
        text = (tmp_path / name).read_text()
        assert "default-src 'none'" in text
        assert re.findall(r"""(?:src|href)=["'](?!data:)""", text) == []
        assert "{{" not in text.partition('id="data"')[0]


HOSTILE = "</script><script>document.title='taken'</script>{{data}}<!--<img src=x>"


def hostile_sequence() -> Any:
    def body(t: Any) -> None:
        t.add_(1)

    body.__qualname__ = HOSTILE
    broken = no_graph(body)
    x = torch.ones(2)
    seq = CUDAGraphSequence()
    with breakable_graph(seq, keep_inputs=True), annotate(HOSTILE):
        x.mul_(2)
        broken(x)
    return seq


def test_names_cannot_end_the_data(device: Any, tmp_path: Path) -> None:
    seq = hostile_sequence()
    page = html.page(seq)
    assert page.count("</script>") == 2
    (side,) = data_of(page)["sides"]
    assert side["parts"][1]["name"] == HOSTILE
    path = tmp_path / "profile.html"
    seq.profile(iterations=1, warmup=0).to_html(path)
    report = data_of(path.read_text())
    assert report["rows"][1]["name"] == HOSTILE


class Unwilling:
    def __repr__(self) -> str:
        raise RuntimeError("not now")


def test_an_argument_that_cannot_be_shown_is_named_by_its_type(device: Any) -> None:
    seq = CUDAGraphSequence()
    with breakable_graph(seq):
        no_graph(lambda thing: None)(Unwilling())
    (side,) = data_of(html.page(seq))["sides"]
    assert side["parts"][1]["args"] == [["0", "<Unwilling>"]]


def test_two_sequences_are_compared_part_by_part(device: Any) -> None:
    left, right = layers(2), layers(2, width=2)
    changes = data_of(html.page(left, right))["changes"]
    fields = [{change["field"] for change in found if "address" not in change} for found in changes]
    assert fields == [{"topology"}, set(), {"topology"}, set(), set()]
    same = layers(2)
    for found in data_of(html.page(left, same))["changes"]:
        assert all(change.get("address") for change in found)


def test_a_part_that_only_one_of_two_has_is_a_difference(device: Any) -> None:
    left, right = layers(1), layers(2)
    changes = data_of(html.page(left, right))["changes"]
    assert len(changes) == 5
    assert [found[0]["old"] for found in changes[3:]] == ["nothing", "nothing"]


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    made = Browser()
    try:
        yield made
    finally:
        made.close()


def check_quiet(browser: Browser) -> None:
    """Nothing went wrong, and nothing was asked for but what is in the page."""
    assert browser.problems == []
    assert [url for url in browser.requests if not url.startswith("data:")] == []


#: The least contrast of any text with what is behind it (WCAG 2: 4.5 is readable).
CONTRAST = """
(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const rect = at.tagName === "g" && at.querySelector("rect");
      const colour = parse(rect ? getComputedStyle(rect).fill : getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  let least = 99;
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || ["SCRIPT", "STYLE", "title", "OPTION"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    if (!element.getClientRects().length || style.visibility === "hidden") continue;
    const front = parse(element.tagName === "text" ? style.fill : style.color);
    const pair = [light(front), light(behind(element))].sort((a, b) => b - a);
    least = Math.min(least, (pair[0] + 0.05) / (pair[1] + 0.05));
  }
  return least;
})()
"""


@needs_chromium
@SCHEMES
@pytest.mark.parametrize("breaks", [1, 200])
def test_pages_open_quietly_and_are_readable(
    device: Any, browser: Browser, tmp_path: Path, breaks: int, dark: bool
) -> None:
    seq = layers(breaks)
    seq.to_html(tmp_path / "sequence.html")
    seq.profile(iterations=2, warmup=0).to_html(tmp_path / "profile.html")
    for name in ("sequence.html", "profile.html"):
        browser.open(tmp_path / name, dark=dark)
        check_quiet(browser)
        assert browser.run(CONTRAST) >= 4.5
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "it is too wide"
        picture = tmp_path / "picture.png"
        browser.picture(picture)
        assert picture.stat().st_size > 10_000


@needs_chromium
def test_a_profile_is_used_with_the_keyboard(device: Any, browser: Browser, tmp_path: Path) -> None:
    layers(3).profile(iterations=2, warmup=0).to_html(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    said = "document.getElementById('said').textContent"
    for _ in range(4):  # three buttons, then the timeline
        browser.press("Tab")
    assert browser.run("document.activeElement.id") == "timeline"
    browser.press("n")
    assert "segment 0" in browser.run(said)
    browser.press("n")
    assert "layer 0/attend" in browser.run(said)
    assert browser.run("document.querySelector('tr.chosen').dataset.row") == "1"
    browser.press("p")
    assert "segment 0" in browser.run(said)
    whole = browser.run("view.length")
    browser.press("+", "+", "ArrowRight")
    assert browser.run("view.length") < whole / 2
    assert browser.run("view.start") > 0
    browser.press("0")
    assert browser.run("view.length") == whole
    check_quiet(browser)


@needs_chromium
def test_the_table_of_a_profile_is_sorted(device: Any, browser: Browser, tmp_path: Path) -> None:
    report = layers(3).profile(iterations=2, warmup=0)
    report.to_html(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    browser.run("document.querySelectorAll('#table th button')[5].focus()")
    browser.press("Enter")
    order = (
        "[...document.querySelectorAll('#table tbody tr')].map((line) => Number(line.dataset.row))"
    )
    wanted = sorted(range(len(report.rows)), key=lambda n: -report.rows[n].cpu_us)
    assert browser.run(order) == wanted
    assert browser.run("document.querySelectorAll('#table th')[5].ariaSort") == "descending"
    browser.press("Enter")
    assert browser.run(order) == wanted[::-1]
    browser.run("document.querySelector('#table tbody tr').focus()")
    browser.press("ArrowDown", "Enter")
    assert browser.run("document.querySelector('tr.chosen').dataset.row") == str(wanted[::-1][1])


@needs_chromium
def test_a_sequence_is_used_with_the_keyboard(
    device: Any, browser: Browser, tmp_path: Path
) -> None:
    layers(3, width=3).to_html(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    focus = "document.activeElement.id"
    details = "document.getElementById('details').textContent"
    browser.press("Tab", "Tab")
    assert browser.run(focus) == "parts"
    browser.press("ArrowDown")
    assert "break: eager Python" in browser.run(details)
    assert "layer 0" in browser.run(details)
    browser.press("ArrowDown", "Enter")
    assert browser.run("document.activeElement.dataset.number") == "0"
    browser.press("ArrowDown", "ArrowDown")
    assert browser.run("document.activeElement.dataset.number") == "2"
    assert "aten::mul_.Tensor" in browser.run(details)
    browser.press("End")
    assert browser.run("document.activeElement.dataset.number") == "2"
    browser.press("Home", "ArrowUp")
    assert browser.run("document.activeElement.dataset.number") == "0"
    browser.press("Escape")
    assert browser.run(focus) == "parts"
    browser.press("End")
    assert browser.run("document.querySelector('#parts [aria-selected=true]').dataset.place") == "6"
    check_quiet(browser)


@needs_chromium
def test_parts_are_filtered(device: Any, browser: Browser, tmp_path: Path) -> None:
    layers(12).to_html(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    browser.run("document.getElementById('filter').focus()")
    browser.press(*"layer 7")
    shown = browser.run(
        "[...document.querySelectorAll('#parts li')].map((item) => item.dataset.place)"
    )
    assert shown == ["14", "15"]
    assert "2 of 25" in browser.run("document.getElementById('counted').textContent")


@needs_chromium
def test_of_a_graph_of_thousands_of_nodes_only_what_is_seen_is_drawn(
    device: Any, browser: Browser, tmp_path: Path
) -> None:
    layers(1, width=3000).to_html(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    count = "document.querySelectorAll('.node').length"
    assert 5 < browser.run(count) < 60
    browser.press("Tab", "Tab", "Enter", "End")
    assert browser.run("document.activeElement.dataset.number") == "2999"
    assert browser.run(count) < 60
    inside = (
        "(() => { const box = document.activeElement.getBoundingClientRect();"
        " return box.top >= 0 && box.bottom <= innerHeight; })()"
    )
    assert browser.run(inside), "what is chosen cannot be seen"
    check_quiet(browser)


@needs_chromium
def test_graphs_inside_nodes_are_opened_and_left(
    device: Any, browser: Browser, tmp_path: Path
) -> None:
    memory = torch.zeros(64)
    inner, outer = Graph(), Graph()
    first = inner.memset(memory.data_ptr(), ctypes.c_uint8(1), 64)
    inner.memset(memory.data_ptr(), ctypes.c_uint8(2), 64, after=first)
    outer.child(inner)
    seq = CUDAGraphSequence()
    seq.append(outer)
    seq.to_html(tmp_path / "page.html")
    inner.close()
    browser.open(tmp_path / "page.html")
    browser.press("Tab", "Tab", "Enter", "Enter")
    assert browser.run("document.querySelectorAll('.node').length") == 2
    assert "fills" in browser.run("document.getElementById('details').textContent")
    browser.press("Escape")
    assert browser.run("document.querySelectorAll('.node').length") == 1
    assert browser.run("document.activeElement.dataset.number") == "0"
    check_quiet(browser)


@needs_chromium
def test_names_of_others_are_text(device: Any, browser: Browser, tmp_path: Path) -> None:
    seq = hostile_sequence()
    seq.to_html(tmp_path / "sequence.html")
    seq.profile(iterations=1, warmup=0).to_html(tmp_path / "profile.html")
    for name in ("sequence.html", "profile.html"):
        browser.open(tmp_path / name)
        assert browser.run("document.title") != "taken"
        assert browser.run("document.images.length") == 0
        assert HOSTILE in browser.run("document.body.textContent")
        check_quiet(browser)


@needs_chromium
def test_what_differs_is_marked_and_addresses_only_when_asked(
    device: Any, browser: Browser, tmp_path: Path
) -> None:
    left, right = layers(2), layers(2, width=2)
    left.to_html(tmp_path / "page.html", right)
    browser.open(tmp_path / "page.html")
    marked = "[...document.querySelectorAll('#parts .differs')].map((e) => e.parentElement.dataset.place)"
    assert browser.run(marked) == ["0", "2"]
    assert browser.run("document.querySelectorAll('.side').length") == 2
    assert browser.run("document.querySelectorAll('.node.changed').length") >= 1
    browser.run("document.getElementById('addresses').click()")
    assert set(browser.run(marked)) > {"0", "2"}
    browser.run("document.getElementById('only-changed').click()")
    shown = browser.run("[...document.querySelectorAll('#parts li')].map((e) => e.dataset.place)")
    assert shown == browser.run(marked)
    check_quiet(browser)
