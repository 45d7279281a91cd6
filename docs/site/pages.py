"""The pages of the site: those of the repository, with links that hold on the site, and those made from code."""

from __future__ import annotations

import ast
import os
import re
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

import gtp_jax

from .names import NAMES, page_of, page_of_all

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def sources() -> dict[str, Path]:
    """Returns the files of the repository that are on the site, by their paths there."""
    found = {path.name: path for path in sorted((ROOT / "docs").iterdir()) if path.suffix in {".md", ".png"}}
    found["all-pages.md"] = found.pop("README.md")
    found["index.md"] = ROOT / "README.md"
    found["changelog.md"] = ROOT / "CHANGELOG.md"
    found["contributing.md"] = ROOT / "CONTRIBUTING.md"
    found["kernels.md"] = ROOT / "ffi" / "README.md"
    found["formats.md"] = ROOT / "gtp_jax" / "formats" / "README.md"
    return found | {f"examples/{path.stem}.md": path for path in sorted((ROOT / "examples").glob("*.py"))}


def sections() -> dict[str, list[str]]:
    """Returns the pages that the navigation lists, in its order, by its sections."""

    def listed(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for one in (entry.values() if isinstance(entry, dict) else entry) for page in listed(one)]

    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return {title: listed(pages) for entry in navigation for title, pages in entry.items()}


def write(folder: Path) -> None:
    """Writes all pages, pictures and `llms.txt` into a new folder."""
    files = sources()
    sites = {path.resolve(): site for site, path in files.items()}
    pages = {"api/gtp_jax.md": page_of_all(gtp_jax.ABOVE)}  # pyright: ignore
    for package in NAMES:
        purpose = _purpose((ROOT / "gtp_jax" / package.replace(".", "/") / "__init__.py").read_text())
        pages[f"api/{package}.md"] = page_of(package, purpose)
    for site, path in files.items():
        if path.suffix == ".md":
            pages[site] = _with_links(path, site, sites)
        elif path.suffix == ".py":
            text = path.read_text()
            pages[site] = f"# {path.name}\n\n{_purpose(text)}\n\n```python\n{text}```\n"
    shutil.rmtree(folder, ignore_errors=True)
    for site, text in [*pages.items(), ("llms.txt", _llms(pages))]:
        (folder / site).parent.mkdir(parents=True, exist_ok=True)
        (folder / site).write_text(text)
    for site, path in files.items():
        if path.suffix == ".png":
            shutil.copy(path, folder / site)


def _purpose(module: str) -> str:
    """Returns the first paragraph of the docstring of a module's text, in one line."""
    return " ".join((ast.get_docstring(ast.parse(module)) or "").split("\n\n")[0].split())


def _with_links(path: Path, site: str, sites: dict[Path, str]) -> str:
    """Returns a page whose links lead to pages of the site. What links to other files of the repository names them."""

    def moved(link: re.Match[str]) -> str:
        target = (path.parent / link["path"]).resolve()
        if target not in sites:
            text, file = link["text"][1:-1], str(target.relative_to(ROOT))
            return text if file in text else f"{text} (`{file}`)"
        return f"{link['text']}({os.path.relpath(sites[target], PurePosixPath(site).parent)}{link['anchor'] or ''})"

    return _LINK.sub(moved, path.read_text())


def _llms(pages: dict[str, str]) -> str:
    """Returns `llms.txt`: the link, title and purpose of each page, by sections.

    Links lead to Markdown, which the site has next to its pages, except where only the built page has the text.
    """
    parts = [f"# gtp_jax\n\n> {gtp_jax.__doc__}"]
    for section, listed in sections().items():
        lines = []
        for site in listed:
            title, purpose = pages[site].split("\n\n")[:2]
            purpose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(purpose.split()))
            link = f"{site.removesuffix('.md')}/" if site.startswith("api/") else site
            lines.append(f"- [{title.removeprefix('# ')}]({link}): {purpose}")
        parts.append("\n".join([f"## {section}\n", *lines]))
    return "\n\n".join(parts) + "\n"
