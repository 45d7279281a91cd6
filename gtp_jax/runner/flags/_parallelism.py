"""Degrees of the mesh axes and what they do, as a user gives them."""

from __future__ import annotations

import dataclasses
import math

from ...mesh import EP, Roles, default_roles, fill_degrees
from ._knobs import check_knobs, knob


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Degrees of the mesh axes; gtp takes what the others leave over if it is `None`, and tp is 1.

    Raises:
        ValueError: if a degree is not a whole number of at least 1.
    """

    dp: int = knob(1, "mesh", "groups of ranks that gather weights among themselves", metavar="N")
    gtp: int | None = knob(None, "mesh", "shards of a weight (default: what the others leave over)", metavar="N")
    ep: int = knob(1, "mesh", "ranks that divide the experts of each layer and exchange tokens", metavar="N")
    tp: int | None = knob(
        None,
        "mesh",
        "tensor-parallel degree, with sequence parallelism (default: 1; `train` takes 2 on virtual CPU devices, unless "
        "--gtp is given)",
        metavar="N",
    )

    shard_optimizer: bool = knob(
        True, "mesh", "divide master weights and optimizer state over dp too (ZeRO)", kind=bool
    )

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def roles(self) -> Roles:
        """The roles of the axes."""
        roles = default_roles(() if self.ep == 1 else (EP,))
        return roles if self.shard_optimizer else dataclasses.replace(roles, optimizer=())

    def degrees(self, devices: int) -> dict[str, int]:
        """Returns the degrees on this many devices, of which some may be left over."""
        ep = {} if self.ep == 1 else {EP: self.ep}
        return fill_degrees({"dp": self.dp, "gtp": self.gtp, **ep, "tp": self.tp or 1}, devices)

    def virtual_devices(self, usual: int) -> int:
        """Returns how many virtual devices the degrees need: `usual`, or the next number that fits, if gtp is open."""
        return math.prod(self.degrees(usual).values())
