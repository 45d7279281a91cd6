"""Parses paths with the weights of a mixture: `PATH:WEIGHT`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence


def weighted(paths: Sequence[str]) -> list[tuple[str, float | None]]:
    """Returns paths and their weights; all weights are `None` if no path has one.

    What follows the last colon is a weight if it is a number and no file has the whole name.

    Raises:
        ValueError: if a weight is not positive, if only some paths have one, or if a path with a weight occurs twice.
    """
    found = [_weighted(path) for path in paths]
    without = [path for path, weight in found if weight is None]
    if without and len(without) < len(found):
        raise ValueError(
            f"`data` gives weights to some paths, but none to {without[0]}. Give all a weight, such as "
            f"{without[0]}:0.5, or none."
        )
    names = [path for path, weight in found if weight is not None]
    if twice := [path for path in names if names.count(path) > 1]:
        raise ValueError(f"`data` {twice[0]} is given twice, with weights. Give it once, with the sum of its weights.")
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
