"""Plans which devices a fleet uses, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from fractions import Fraction

from ...mesh import CP, DP, EP, GTP, TP
from ...nonuniform import plan_faults


@dataclasses.dataclass(frozen=True)
class FleetPlan:
    """The devices of a fleet and their mesh.

    Attributes:
        devices: the numbers of the devices that train, in ascending order.
        idle: the numbers of the healthy devices that have nothing to do.
        degrees: the degrees of the mesh by axis; those of the healthy mesh if replicas are unequal.
        failed: the numbers of the lost devices if replicas are unequal; empty on a mesh.
        throughput: sequences per second, as a fraction of the healthy run's, assuming that all time is spent computing.
    """

    devices: tuple[int, ...]
    idle: tuple[int, ...]
    degrees: dict[str, int]
    failed: tuple[int, ...] = ()
    throughput: Fraction = Fraction(1)

    def describe(self) -> str:
        """Returns a description of the mesh and the idle devices."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.degrees.items())
        lower = f", with lower tp in the replicas that lost {list(self.failed)}" if self.failed else ""
        idle = f", {list(self.idle)} idle" if self.idle else ""
        share = f"; {float(self.throughput):.0%} of the healthy throughput" if self.throughput != 1 else ""
        return f"{mesh} on devices {list(self.devices)}{lower}{idle}{share}"


def plan_fleet(
    degrees: Mapping[str, int], lost: Collection[int], *, batch: int, microbatches: int = 1, unequal: bool = True
) -> FleetPlan:
    """Plans how the remaining devices train on the same batches. Chooses the faster of two options:

    - A mesh: tp is unchanged, and devices that do not fill a tp group are idle. gtp does not shrink as long as enough
      devices are left, so that no device stores more than before; dp takes what remains. If the number of ranks does
      not divide the batch, rows of weight 0 are added.
    - Replicas of unequal tp (`plan_faults`).

    Args:
        degrees: the degrees of the healthy mesh, by axis.
        lost: the numbers of the lost devices.
        batch: the number of sequences per step.
        microbatches: the number of microbatches into which each rank splits its sequences.
        unequal: whether replicas of unequal tp are allowed.

    Raises:
        ValueError: if too few devices are left, tokens are divided over cp, or experts are sharded over ep.
    """
    if degrees.get(EP, 1) > 1:
        raise ValueError(
            f"no plan: experts are sharded over ep {degrees[EP]}, and resharding them over fewer devices is not "
            "supported yet. Start a new run with a different --ep from the last checkpoint (--from)."
        )
    if degrees.get(CP, 1) > 1:
        raise ValueError(
            f"no plan: sequences are divided over cp {degrees[CP]}, and dividing them over fewer devices is not "
            "supported yet. Start a new run with a different --cp from the last checkpoint (--from)."
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
            f"no plan: {left} of {total} devices are left, but tp {degrees[TP]} needs {degrees[TP]}. Repair devices "
            "and resume, or start a new run with a lower --tp from the last checkpoint (--from)."
        )
    return max(possible, key=lambda plan: plan.throughput)  # the mesh if both are equally fast


def _mesh(degrees: Mapping[str, int], lost: Collection[int], batch: int, microbatches: int) -> FleetPlan | None:
    dp, gtp, tp = degrees[DP], degrees[GTP], degrees[TP]
    left = [number for number in range(dp * gtp * tp) if number not in lost]
    groups = len(left) // tp
    if groups == 0:
        return None
    new_dp = max(d for d in range(1, groups + 1) if groups % d == 0 and (d == 1 or groups // d >= gtp))
    rows = -(-batch // (groups * microbatches)) * microbatches  # per rank
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
    except ValueError:  # no replica is left, or the batch cannot be divided among the replicas
        return None
    return FleetPlan(plan.active, plan.idle, dict(degrees), plan.failed, plan.throughput)
