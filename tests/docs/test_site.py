"""Every page of the site is in its navigation and in llms.txt, its links resolve, and its reference is whole."""

import importlib
import re

import pytest

import gtp_jax
from docs.site.names import NAMES
from docs.site.pages import sections, write
from gtp_jax._old_names import OLD_NAMES

from .pages import links
from .test_pages import anchors

MOST_IN_THE_GUIDE = 12


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "pages"
    write(folder)
    return folder


def test_the_navigation_and_llms_txt_have_every_page_once_and_the_guide_is_short(site):
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.md"))
    assert sorted(page for listed in sections().values() for page in listed) == pages and len(pages) > 50
    assert list(sections()) == ["Home", "User guide", "Reference", "Contributing"]
    assert len(sections()["User guide"]) <= MOST_IN_THE_GUIDE
    lines = [line for line in (site / "llms.txt").read_text().splitlines() if line.startswith("- ")]
    listed = [match[1] for line in lines if (match := re.fullmatch(r"- \[.+?\]\((\S+)\): \S.+", line))]
    assert sorted(f"{page[:-1]}.md" if page.endswith("/") else page for page in listed) == pages


def test_the_links_of_the_site_lead_to_its_pages_and_their_headings(site):
    found = [(page, link) for page in site.rglob("*.md") for link in links(page)]
    inside = [(page, *link.partition("#")) for page, link in found if "://" not in link]
    assert len(inside) > 100
    for page, path, _, anchor in inside:
        target = page.parent / path if path else page
        assert target.resolve().is_file() and target.resolve().is_relative_to(site), f"{page} links to {path}"
        if anchor and target.parent.name == "api":
            assert f"::: {anchor}\n" in target.read_text()
        elif anchor:  # Python-Markdown makes one hyphen of what GitHub makes two of
            assert anchor in anchors(target) and "--" not in anchor, f"{page} links to {path}#{anchor}"


def test_the_reference_has_every_name_of_the_top_level_past_and_present():
    described = {(f"gtp_jax.{package}", name) for package, names in NAMES.items() for name in names}
    for rooms in (gtp_jax.ABOVE, OLD_NAMES):  # pyright: ignore
        assert {(room, name) for room, names in rooms.items() for name in names} <= described
    for package, name in described:
        assert getattr(importlib.import_module(package), name).__doc__, f"{package}.{name} has no docstring"
