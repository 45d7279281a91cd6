"""Checks the degrees of mesh axes, and fills in the one that is left out."""

from __future__ import annotations

import math
from collections.abc import Mapping


def fill_degrees(degrees: Mapping[str, int | None], devices: int) -> dict[str, int]:
    """Returns the degrees, with `None` replaced by the number of devices divided by the other degrees, at least 1.

    Args:
        degrees: the degree of each axis, `None` for at most one of them.
        devices: the number of devices.

    Raises:
        ValueError: if a degree is not a whole number of at least 1.
    """
    for name, degree in degrees.items():
        if degree is not None and (not isinstance(degree, int) or degree < 1):
            raise ValueError(f"`{name}` is {degree!r}; a degree is a whole number of at least 1.")
    given = math.prod(degree for degree in degrees.values() if degree is not None)
    return {name: max(1, devices // given) if degree is None else degree for name, degree in degrees.items()}


def check_degrees(degrees: Mapping[str, int], devices: int, *, remedy: str = "") -> None:
    """Checks that the product of the degrees is the number of devices.

    Args:
        degrees: the degree of each axis.
        devices: the number of devices.
        remedy: an alternative to choosing other degrees, appended to the error message.

    Raises:
        ValueError: if the product differs from the number of devices.
    """
    product = math.prod(degrees.values())
    if product != devices:
        words = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        raise ValueError(
            f"{words} = {product}, but there are {devices} devices. Choose degrees whose product is the number of "
            f"devices{remedy}."
        )
