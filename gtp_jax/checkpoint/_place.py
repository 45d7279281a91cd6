"""Locates the checkpoints of a run."""

from __future__ import annotations

import os
from pathlib import Path


def real_path(path: str | os.PathLike[str]) -> Path:
    """Returns an absolute path with links resolved, because tensorstore refuses `..` and `//` in a path."""
    return Path(os.path.realpath(os.path.expanduser(path)))


def check_encodes(path: str | os.PathLike[str]) -> None:
    """Checks that a path is UTF-8, because tensorstore reads and writes no other.

    Raises:
        ValueError: if it is not.
    """
    name = os.fspath(path)
    if any("\ud800" <= one <= "\udfff" for one in name):  # how Python holds the bytes of a name that are not UTF-8
        raise ValueError(
            f"the path {name!r} is not UTF-8, and the arrays of a checkpoint can be neither written nor read there. "
            "Rename the directory, or choose another one."
        )


def checkpoints_in(directory: Path) -> Path:
    """Returns the directory that holds the steps, given a run's directory or a directory of checkpoints.

    Raises:
        FileNotFoundError: if there is no such directory.
        ValueError: if it is the directory of a single step.
    """
    inside = directory / "checkpoints"
    if not directory.is_dir():
        raise FileNotFoundError(
            f"no directory {directory}. Give the directory of a run, of its checkpoints or of an import."
        )
    if directory.name.isdigit() and (directory / "manifest").is_dir():
        raise ValueError(
            f"{directory} is one step of a run. Give the directory that holds the steps, {directory.parent}. To choose "
            f"this step, add --step {directory.name}; for `checkpoint diff`, write {directory.parent}@{directory.name}."
        )
    return inside if inside.is_dir() else directory
