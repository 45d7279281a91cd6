"""Degrees of mesh axes: checked, and what they leave over."""

from __future__ import annotations

import math
from collections.abc import Mapping


def fill_degrees(degrees: Mapping[str, int | None], devices: int) -> dict[str, int]:
    """Returns the degrees with the one that is `None` set to what the others leave over, at least 1.

    Args:
        degrees: by axis, `None` for at most one.
        devices: how many there are.

    Raises:
        ValueError: if a degree is not a whole number of at least 1.
    """
    for name, degree in degrees.items():
        if degree is not None and (not isinstance(degree, int) or degree < 1):
            raise ValueError(f"`{name}` is {degree!r}; a degree is a whole number of at least 1.")
    given = math.prod(degree for degree in degrees.values() if degree is not None)
    return {name: max(1, devices // given) if degree is None else degree for name, degree in degrees.items()}


def check_degrees(degrees: Mapping[str, int], devices: int, *, remedy: str = "") -> None:
    """Checks that degrees multiply to the number of devices.

    Args:
        degrees: by axis.
        devices: how many there are.
        remedy: what else may be done, beside choosing other degrees.

    Raises:
        ValueError: if they do not.
    """
    product = math.prod(degrees.values())
    if product != devices:
        words = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        raise ValueError(
            f"{words} = {product}, but there are {devices} devices. Choose degrees whose product is the number of "
            f"devices{remedy}."
        )
