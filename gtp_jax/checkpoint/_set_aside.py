"""Takes a step out of a run without deleting it."""

from __future__ import annotations

from typing import Any, Literal

import jax
from etils import epath

# Why a step is taken out: its files are not as they were written; or the run has gone back to an earlier one.
Reason = Literal["damaged", "abandoned"]


def aside(path: Any, reason: Reason) -> epath.Path:
    """Returns the name under which a step's directory is kept out of the run: the first that is free."""
    names = [f"{path.name}.{reason}", *(f"{path.name}.{reason}-{count}" for count in range(2, 100))]
    return next(one for one in (path.parent / name for name in names) if not one.exists())


def set_aside(path: Any, reason: Reason) -> epath.Path:
    """Renames a step's directory, in the first process, so that it is no step any more. Returns the new path."""
    kept = aside(path, reason)
    if jax.process_index() == 0:
        path.rename(kept)
    return kept
