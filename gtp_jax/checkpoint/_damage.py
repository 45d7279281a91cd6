"""The error for a damaged step, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SHOWN = 8


class DamagedCheckpoint(ValueError):
    """Files of a step are missing, or have changed since they were written.

    Args:
        path: the path of the step's directory.
        lines: one line for each damaged file or array.
    """

    def __init__(self, path: Any, lines: Sequence[str]) -> None:
        super().__init__(damaged(path, lines))
        self.lines = tuple(lines)


def other_values(names: Sequence[str]) -> list[str]:
    """Returns a line for each of the arrays whose values differ from those saved."""
    return [f"{name}: values differ from those saved" for name in names]


def damaged(path: Any, lines: Sequence[str]) -> str:
    """Returns the error message for a damaged step, with the first few of `lines`."""
    shown = "\n".join(f"  {line}" for line in lines[:_SHOWN])
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return (
        f"the checkpoint {path} is damaged:\n{shown}{more}\nRestore another step; `gtp-jax checkpoint verify "
        f"{path.parent}` shows which are intact."
    )
