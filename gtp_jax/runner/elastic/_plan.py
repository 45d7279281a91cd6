"""Which devices a fleet uses, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from fractions import Fraction

from ...mesh import DP, EP, GTP, TP
from ...nonuniform import plan_faults


@dataclasses.dataclass(frozen=True)
class FleetPlan:
    """The devices of a fleet and their mesh.

    Attributes:
        devices: numbers of those that train, ascending.
        idle: numbers of those that are sound and have nothing to do.
        degrees: of the mesh; of the healthy one if replicas are unequal.
        failed: numbers of those that are lost, if replicas are unequal; empty on a mesh.
        throughput: sequences a second, as a share of the healthy run's, if all time is spent computing.
    """

    devices: tuple[int, ...]
    idle: tuple[int, ...]
    degrees: dict[str, int]
    failed: tuple[int, ...] = ()
    throughput: Fraction = Fraction(1)

    def describe(self) -> str:
        """Returns the mesh, and who is idle, for people."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.degrees.items())
        lower = f", those replicas at a lower tp that had {list(self.failed)}" if self.failed else ""
        idle = f", {list(self.idle)} idle" if self.idle else ""
        share = f"; {float(self.throughput):.0%} of the healthy throughput" if self.throughput != 1 else ""
        return f"{mesh} on devices {list(self.devices)}{lower}{idle}{share}"


def plan_fleet(
    degrees: Mapping[str, int], lost: Collection[int], *, batch: int, microbatches: int = 1, unequal: bool = True
) -> FleetPlan:
    """Plans how the devices that are left train on the same batches: whichever of these computes faster.

    - A mesh: tp stays as it is, and what is left over of a tp group is idle. gtp is at least what it was, so that a
      device stores no more than before as long as there are as many; dp takes what remains. Where the ranks do not
      divide the batch, rows of weight 0 are added.
    - Replicas of unequal tp (`plan_faults`).

    Args:
        degrees: of the healthy mesh.
        lost: numbers of the devices that are lost.
        batch: sequences of a step.
        microbatches: parts of each rank's sequences.
        unequal: whether replicas of unequal tp are possible.

    Raises:
        ValueError: if too few devices are left, or experts are divided over ep.
    """
    if degrees.get(EP, 1) > 1:
        raise ValueError(
            f"no plan: experts are divided over ep {degrees[EP]}, and a run cannot yet divide them anew among fewer "
            "devices. Start another run with another --ep from the last checkpoint (--from)."
        )
    total = degrees[DP] * degrees[GTP] * degrees[TP]
    if not set(lost) <= set(range(total)):
        raise ValueError(f"`lost` is {sorted(lost)}; the run has devices 0 to {total - 1}.")
    if not lost:
        return FleetPlan(tuple(range(total)), (), dict(degrees))
    plans = [_mesh(degrees, lost, batch, microbatches)]
    if unequal and degrees[TP] > 1:
        plans.append(_replicas(degrees, lost, batch, microbatches))
    possible = [plan for plan in plans if plan is not None]
    if not possible:
        left = total - len(set(lost))
        raise ValueError(
            f"no plan: {left} of {total} devices are left, and tp {degrees[TP]} needs {degrees[TP]}. Repair devices "
            "and resume, or start another run with a lower --tp from the last checkpoint (--from)."
        )
    return max(possible, key=lambda plan: plan.throughput)  # the mesh, if both are as fast


def _mesh(degrees: Mapping[str, int], lost: Collection[int], batch: int, microbatches: int) -> FleetPlan | None:
    dp, gtp, tp = degrees[DP], degrees[GTP], degrees[TP]
    left = [number for number in range(dp * gtp * tp) if number not in lost]
    groups = len(left) // tp
    if groups == 0:
        return None
    new_dp = max(d for d in range(1, groups + 1) if groups % d == 0 and (d == 1 or groups // d >= gtp))
    rows = -(-batch // (groups * microbatches)) * microbatches  # of each rank
    used, idle = left[: groups * tp], left[groups * tp :]
    share = Fraction(batch, dp * gtp) / rows
    return FleetPlan(tuple(used), tuple(idle), {DP: new_dp, GTP: groups // new_dp, TP: tp}, throughput=share)


def _replicas(degrees: Mapping[str, int], lost: Collection[int], batch: int, microbatches: int) -> FleetPlan | None:
    try:
        plan = plan_faults(
            dp=degrees[DP],
            gtp=degrees[GTP],
            tp=degrees[TP],
            failed=sorted(lost),
            batch=batch,
            microbatches=microbatches,
        )
    except ValueError:  # no replica is left, or it cannot have a part of the batch
        return None
    return FleetPlan(plan.active, plan.idle, dict(degrees), plan.failed, plan.throughput)
