"""Tables and sizes in plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def quantity(value: float, unit: str) -> str:
    """A value with three digits and a decimal prefix: `33.6 MB`."""
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    digits = 0 if value == int(value) or abs(value) >= 99.5 else 1 if abs(value) >= 9.95 else 2
    return f"{value:.{digits}f} {_PREFIXES[power]}{unit}"


def columns(header: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[int] = ()) -> str:
    """A table in plain text, two blanks between columns.

    Args:
        header: names of the columns.
        rows: cells; anything `str` takes.
        right: indices of the columns to align to the right.
    """
    lines = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    align = [str.rjust if i in set(right) else str.ljust for i in range(len(header))]

    def render(line: list[str]) -> str:
        return "  ".join(put(cell, width) for put, cell, width in zip(align, line, widths, strict=True)).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join((render(lines[0]), rule, *map(render, lines[1:])))
