"""The messages that the page of symptoms quotes are messages that the library prints."""

from __future__ import annotations

import ast

import pytest

from .pages import ROOT

# So many neighbouring characters of a quotation are a message's own: what stands in its place holders differs.
RUN = 18
# Quoted symptoms that are JAX's, or names of commands.
OTHERS = ("Array has been deleted", "can't apply forward-mode", "gtp-jax ")


def quotations() -> list[str]:
    """Returns what the table of errors quotes, part by part between dots."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = page.partition("## Errors and warnings")[2].partition("\n## ")[0]
    symptoms = [line.split(" | ")[0] for line in table.splitlines() if "`" in line.split(" | ")[0]]
    quoted = [text for symptom in symptoms for text in symptom.split("`")[1::2] if not text.startswith(OTHERS)]
    return [part.strip() for text in quoted for part in text.split("...") if part.strip()]


def literals() -> str:
    """Returns the literal parts of all strings of the library, without the backticks that Markdown would take."""
    strings: list[str] = []
    for path in sorted(path for root in ("gtp_jax", "benchmarks") for path in (ROOT / root).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value.replace("`", ""))
    return "\n".join(strings)


def is_printed(quotation: str, strings: str) -> bool:
    """Says whether a run of a quotation is in a string; all of it if it is short."""
    starts = range(max(1, len(quotation) - RUN + 1))
    return any(quotation[start : start + RUN] in strings for start in starts)


@pytest.fixture(scope="module")
def strings():
    return literals()


def test_every_message_quoted_is_one_that_the_library_prints(strings):
    assert len(quotations()) > 15
    assert not [quotation for quotation in quotations() if not is_printed(quotation, strings)]
