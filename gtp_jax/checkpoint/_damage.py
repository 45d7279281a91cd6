"""What is said when a step's directory is damaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SHOWN = 8


class DamagedCheckpoint(ValueError):
    """Files of a step are missing, or are not as they were written.

    Args:
        path: of the step's directory.
        lines: what is damaged, a line each.
    """

    def __init__(self, path: Any, lines: Sequence[str]) -> None:
        super().__init__(damaged(path, lines))
        self.lines = tuple(lines)


def other_values(names: Sequence[str]) -> list[str]:
    """Returns the lines for arrays that read otherwise than they were saved."""
    return [f"{name}: other values than were saved" for name in names]


def damaged(path: Any, lines: Sequence[str]) -> str:
    """Returns what to tell about a step's directory of which this is damaged."""
    shown = "\n".join(f"  {line}" for line in lines[:_SHOWN])
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return (
        f"the checkpoint {path} is damaged:\n{shown}{more}\nRestore another step; `gtp-jax checkpoint verify "
        f"{path.parent}` says which are whole."
    )
