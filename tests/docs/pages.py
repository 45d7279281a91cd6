"""The documentation's Markdown: its fenced blocks, inline code and links."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
_FOLDERS = ("benchmarks", "docs", "examples", "ffi", "gtp_jax", "tests")
# Pages for users, each of which docs/README.md links to; the others are for contributors, or the changelog.
PAGES = (README, *sorted(page for folder in _FOLDERS for page in (ROOT / folder).rglob("*.md")))
DOCUMENTS = (*PAGES, *sorted({*ROOT.glob("*.md")} - {README}))

# `<!-- not run: REASON -->` in the line above a block leaves it out of the test.
_FENCE = re.compile(r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<kind>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: its file.
        line: of its first line of code, from 1.
        kind: language behind the fence.
        code: its text.
        reason: why it is not run; empty if it is.
    """

    page: Path
    line: int
    kind: str
    code: str
    reason: str

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"{name(self.page)}:{self.line}"


def blocks(page: Path, kind: str) -> list[Block]:
    """The fenced blocks of a language, in order."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start("code")) + 1, kind, found["code"], found["reason"] or "")
        for found in _FENCE.finditer(text)
        if found["kind"] == kind
    ]


def inline_code(page: Path) -> list[str]:
    """Text between single backticks, outside fenced blocks."""
    return _INLINE.findall(_FENCE.sub("", page.read_text()))


def links(page: Path) -> list[str]:
    """Targets of links and pictures, outside fenced blocks."""
    return _LINK.findall(_FENCE.sub("", page.read_text()))


def name(page: Path) -> str:
    """The path within the repository."""
    return str(page.relative_to(ROOT))
