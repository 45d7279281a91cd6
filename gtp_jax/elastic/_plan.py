"""Which devices a fleet uses, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from ..mesh import DP, GTP, TP


@dataclasses.dataclass(frozen=True)
class FleetPlan:
    """The devices of a fleet and their mesh.

    Attributes:
        devices: numbers of those that train, ascending.
        idle: numbers of those that are sound and have nothing to do.
        degrees: of the mesh.
    """

    devices: tuple[int, ...]
    idle: tuple[int, ...]
    degrees: dict[str, int]

    def describe(self) -> str:
        """Returns the mesh, and who is idle, for people."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.degrees.items())
        return f"{mesh} on devices {list(self.devices)}" + (f", {list(self.idle)} idle" if self.idle else "")


def plan_fleet(degrees: Mapping[str, int], lost: Collection[int]) -> FleetPlan:
    """Plans a mesh of the devices that are left, the same batch on each of its steps.

    tp stays as it is; what is left over of a tp group is idle. gtp is at least what it was, so that a device stores no
    more than before as long as there are as many; dp takes what remains.

    Args:
        degrees: of the healthy mesh.
        lost: numbers of the devices that are lost.

    Raises:
        ValueError: if too few devices are left.
    """
    dp, gtp, tp = degrees[DP], degrees[GTP], degrees[TP]
    total = dp * gtp * tp
    if not set(lost) <= set(range(total)):
        raise ValueError(f"`lost` is {sorted(lost)}; the run has devices 0 to {total - 1}.")
    left = [number for number in range(total) if number not in lost]
    if not lost:
        return FleetPlan(tuple(left), (), dict(degrees))
    groups = len(left) // tp
    if groups == 0:
        raise ValueError(
            f"no plan: {len(left)} of {total} devices are left, and tp {tp} needs {tp}. Repair devices and resume, or "
            "start another run with a lower --tp from the last checkpoint (--from)."
        )
    new_dp = max(d for d in range(1, groups + 1) if groups % d == 0 and (d == 1 or groups // d >= gtp))
    used, idle = left[: groups * tp], left[groups * tp :]
    return FleetPlan(tuple(used), tuple(idle), {DP: new_dp, GTP: groups // new_dp, TP: tp})
