"""Options for the degrees of the mesh axes and what the axes shard."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from ._knobs import check_knobs, knob

if TYPE_CHECKING:
    from ...mesh import Roles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The degrees of the mesh axes. By default, `gtp` takes all devices that the other axes leave, and `tp` is 1.

    Raises:
        ValueError: if a degree is not a whole number of at least 1.
    """

    dp: int = knob(1, "mesh", "number of replicas; each gathers weights within itself", metavar="N")
    gtp: int | None = knob(None, "mesh", "number of shards per weight (default: all remaining devices)", metavar="N")
    cp: int = knob(1, "mesh", "number of ranks that divide the tokens of each sequence", metavar="N")
    ep: int = knob(1, "mesh", "number of ranks that divide the experts of each layer and exchange tokens", metavar="N")
    tp: int | None = knob(
        None,
        "mesh",
        "tensor-parallel degree, with sequence parallelism (default: 1; `train` takes 2 on virtual CPU devices, unless "
        "--gtp is given)",
        metavar="N",
    )

    shard_optimizer: bool = knob(
        True, "mesh", "also shard master weights and optimizer state over dp (ZeRO)", kind=bool
    )

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def roles(self) -> Roles:
        """The roles of the axes."""
        from ...mesh import default_roles, rare_degrees

        roles = default_roles(("dp", "gtp", "tp", *rare_degrees(cp=self.cp, ep=self.ep)))
        return roles if self.shard_optimizer else dataclasses.replace(roles, optimizer=())

    def degrees(self, devices: int) -> dict[str, int]:
        """Returns the degrees for this number of devices, some of which may be unused."""
        from ...mesh import fill_degrees, rare_degrees

        return fill_degrees(
            {"dp": self.dp, "gtp": self.gtp, **rare_degrees(cp=self.cp, ep=self.ep), "tp": self.tp or 1}, devices
        )

    @property
    def of_batch(self) -> dict[str, int] | None:
        """The degrees of the axes that divide the batch; `None` if they depend on the number of devices."""
        if self.gtp is None:
            return None
        return {"dp": self.dp, "gtp": self.gtp, **({"ep": self.ep} if self.ep > 1 else {})}

    def virtual_devices(self, usual: int) -> int:
        """Returns the number of virtual devices that the degrees need.

        If gtp is not given, this is `usual` or the next number that fits.
        """
        return math.prod(self.degrees(usual).values())
