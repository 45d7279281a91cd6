"""Every page is short enough, its links resolve, its pictures are used, and it names no machine."""

from __future__ import annotations

import re

import pytest

from .pages import DOCUMENTS, PAGES, README, ROOT, blocks, links, name

MAX_README_BYTES = 6144
MAX_PAGE_BYTES = 12288
GROWING = {"CHANGELOG.md", "docs/experiments.md"}  # with every release and experiment
MAX_WORDS = 32_000
_ELSEWHERE = ("http://", "https://", "mailto:")
# Paths of machines and hosts of registries. In brackets, so that this line does not match itself.
BANNED = re.compile(r"/wor[k]/|/far[m]/|/roo[t]/|py[p]i\.|pythonh[o]sted|registry\.np[m]js|deb\.de[b]ian")


def test_the_readme_is_at_most_6_kib_and_its_index_links_every_page():
    assert len(README.read_bytes()) <= MAX_README_BYTES
    index = ROOT / "docs" / "README.md"
    assert "docs/README.md" in links(README)
    linked = {(index.parent / link).resolve() for link in links(index) if not link.startswith(_ELSEWHERE)}
    assert {page.resolve() for page in PAGES} - {README.resolve(), index.resolve()} <= linked


def test_the_readmes_commands_are_where_ci_looks_for_them():
    text = README.read_text()
    for number in (1, 2):
        assert re.search(rf"^<!-- command {number} -->\n```sh\n(?:.+\n)+```$", text, re.MULTILINE)


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_a_page_is_short_and_names_no_machine_and_its_relative_links_resolve(page):
    assert len(page.read_bytes()) <= MAX_PAGE_BYTES or name(page) in GROWING
    assert not [line for line in page.read_text().splitlines() if BANNED.search(line)]
    for link in links(page):
        if link.startswith(_ELSEWHERE):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{name(page)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{name(page)} links to {link}, and there is no such heading"


def test_the_pages_together_are_short():
    pages = [page for page in PAGES if name(page).startswith("docs/") and name(page) not in GROWING]
    assert len(pages) > 20
    assert sum(len(page.read_text().split()) for page in pages) <= MAX_WORDS


def test_every_picture_is_shown_on_a_page():
    shown = {(page.parent / link).resolve() for page in DOCUMENTS for link in links(page) if link.endswith(".png")}
    assert {picture.resolve() for picture in (ROOT / "docs").glob("*.png")} == shown


def test_a_page_begins_with_its_purpose_and_shows_code():
    for page in PAGES[1:]:
        title, blank, purpose = page.read_text().splitlines()[:3]
        assert title.startswith("# ") and not blank and re.match(r"[A-Z].+", purpose), name(page)
        assert blocks(page, "python") or blocks(page, "sh"), name(page)


def test_each_row_of_figures_has_the_command_that_printed_it():
    page = ROOT / "docs" / "speed.md"
    lines = [line for block in blocks(page, "sh") for line in block.code.splitlines()]
    commands = {letter for line in lines for letter in re.findall(r"# ([A-Z])(?:, twice)?$", line)}
    rows = [line.split("|")[1].strip() for line in page.read_text().splitlines() if line.startswith("| ")]
    letters = {row[0] for row in rows if row != "command"}
    assert letters == commands and len(rows) > 10


def anchors(page) -> set[str]:
    """What links to a page's headings may end with, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
