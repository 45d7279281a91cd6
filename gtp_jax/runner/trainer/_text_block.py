"""Displays a text that a model wrote."""

from __future__ import annotations

import textwrap


def block(text: str) -> str:
    """Returns a text as it is displayed: with a bar before each line, and without characters that could control a
    terminal."""
    shown = (c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs(4))
    return textwrap.indent("".join(shown), "  | ", lambda _: True)
