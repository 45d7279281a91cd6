"""Removes a step from a run without deleting it."""

from __future__ import annotations

from typing import Any, Literal

import jax
from etils import epath

# Why a step is removed: its files have changed since they were written, or the run has gone back to an earlier step.
Reason = Literal["damaged", "abandoned"]


def aside(path: Any, reason: Reason) -> epath.Path:
    """Returns the first unused path to which a step's directory can be renamed to remove it from the run."""
    names = [f"{path.name}.{reason}", *(f"{path.name}.{reason}-{count}" for count in range(2, 100))]
    return next(one for one in (path.parent / name for name in names) if not one.exists())


def set_aside(path: Any, reason: Reason) -> epath.Path:
    """Renames a step's directory, in the first process only, so that it is no longer a step. Returns the new path."""
    kept = aside(path, reason)
    if jax.process_index() == 0:
        path.rename(kept)
    return kept
