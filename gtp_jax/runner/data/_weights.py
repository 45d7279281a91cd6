"""Paths with the weights of a mixture: `PATH:WEIGHT`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence


def weighted(paths: Sequence[str]) -> list[tuple[str, float | None]]:
    """Returns paths and their weights; `None` for all if none has one.

    What follows the last colon is a weight if it is a number, and nothing is there by the whole name.

    Raises:
        ValueError: if a weight is not positive, if some paths have one and others none, or if a path with one is there
            twice.
    """
    found = [_weighted(path) for path in paths]
    without = [path for path, weight in found if weight is None]
    if without and len(without) < len(found):
        raise ValueError(
            f"`data` gives weights to some, and none to {without[0]}. Give all one, as {without[0]}:0.5, or none."
        )
    names = [path for path, weight in found if weight is not None]
    if twice := [path for path in names if names.count(path) > 1]:
        raise ValueError(f"`data` {twice[0]} is there twice, with weights. Add them up.")
    return found


def _weighted(path: str) -> tuple[str, float | None]:
    name, colon, text = path.rpartition(":")
    try:
        weight = float(text)
    except ValueError:
        return path, None
    if not colon or os.path.lexists(path):
        return path, None
    if not (math.isfinite(weight) and weight > 0):
        raise ValueError(
            f"`data` {path} has the weight {text}; it must be a number above 0. Give another, or leave the path out."
        )
    return name, weight
