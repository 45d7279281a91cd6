"""Where the checkpoints of a run are."""

from __future__ import annotations

import os
from pathlib import Path


def real_path(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path to which a path leads, links followed; tensorstore refuses `..` and `//` in a path."""
    return Path(os.path.realpath(os.path.expanduser(path)))


def checkpoints_in(directory: Path) -> Path:
    """Returns where the steps are: in a run's directory, or in a directory of checkpoints.

    Raises:
        FileNotFoundError: if there is no such directory.
        ValueError: if it is that of a single step.
    """
    inside = directory / "checkpoints"
    if not directory.is_dir():
        raise FileNotFoundError(f"no directory {directory}. Give that of a run, or its checkpoints.")
    if directory.name.isdigit() and (directory / "manifest").is_dir():
        raise ValueError(
            f"{directory} is one step of a run. Give the directory that holds the steps, {directory.parent}, and, to "
            f"choose this one, --step {directory.name}; to `checkpoint diff`, {directory.parent}@{directory.name}."
        )
    return inside if inside.is_dir() else directory
