"""Formats tables and quantities as plain text."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from .._foreign import printable

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_SMALL = ("", "m", "µ", "n")


def quantity(value: float, unit: str) -> str:
    """Returns a value with three digits and a decimal prefix, such as `33.6 MB` or `1.20 ms`."""
    power = 0
    while 0 < abs(value) < 0.9995 and power > 1 - len(_SMALL):
        value, power = value * 1000, power - 1
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    digits = 0 if abs(value - round(value)) < 1e-9 or abs(value) >= 99.5 else 1 if abs(value) >= 9.95 else 2
    return f"{value:.{digits}f} {_PREFIXES[power] if power >= 0 else _SMALL[-power]}{unit}"


def alike(words: Iterable[str]) -> str:
    """Returns words with repeated ones counted, such as `2 x [4096,768] [512]`."""
    counts = collections.Counter(words)
    return " ".join(word if count == 1 else f"{count} x {word}" for word, count in counts.items())


def columns(header: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[int] = ()) -> str:
    """Returns a table in plain text, with two spaces between columns.

    Args:
        header: the names of the columns.
        rows: the cells of each row, which are converted by `str`. Characters that are not printable are escaped.
        right: the indices of the columns that are aligned to the right.
    """
    lines = [[printable(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    align = [str.rjust if i in set(right) else str.ljust for i in range(len(header))]

    def render(line: list[str]) -> str:
        return "  ".join(put(cell, width) for put, cell, width in zip(align, line, widths, strict=True)).rstrip()

    rule = "  ".join("-" * width for width in widths).rstrip()
    return "\n".join((render(lines[0]), rule, *map(render, lines[1:])))
