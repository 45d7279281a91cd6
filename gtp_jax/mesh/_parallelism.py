"""Degrees of the mesh axes: what a user gives, and what that leaves over."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from .._flags import check_knobs, knob


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Degrees of the mesh axes; gtp takes what the others leave over if it is `None`, and tp is 1.

    Raises:
        ValueError: if a degree is not a whole number of at least 1.
    """

    dp: int = knob(1, "mesh", "replicas of the sharded weights", metavar="N")
    gtp: int | None = knob(None, "mesh", "shards of a weight (default: what dp and tp leave over)", metavar="N")
    tp: int | None = knob(
        None,
        "mesh",
        "tensor-parallel degree, with sequence parallelism (default: 1; `train` takes 2 on virtual CPU devices, unless "
        "--gtp is given)",
        metavar="N",
    )

    def __post_init__(self) -> None:
        check_knobs(self)

    def degrees(self, devices: int) -> dict[str, int]:
        """Returns the degrees on this many devices, of which some may be left over."""
        return fill_degrees({"dp": self.dp, "gtp": self.gtp, "tp": self.tp or 1}, devices)

    def virtual_devices(self, usual: int) -> int:
        """Returns how many virtual devices the degrees need: `usual`, or the next number that fits, if gtp is open."""
        return math.prod(self.degrees(usual).values())
