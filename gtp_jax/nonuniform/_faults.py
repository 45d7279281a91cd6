"""Plans which devices continue after failures, at which tensor-parallel degree, and on which rows of the batch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Integral
from typing import Any

# Slots, indexed by the rank of gtp and then by the rank of tp.
Grid = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Replica:
    """The devices that hold one copy of the model, and the part of the batch that they train on.

    A slot is the place of a device in the healthy grid dp x gtp x tp, counted row by row, as in `jax.devices()`.

    Attributes:
        number: the index of the replica along dp in the healthy grid.
        slots: the slots of its devices: a row for each rank of gtp, in order of tp. They need not be adjacent.
        core: the slots of those devices that store master weights and optimizer state, in the same order.
        rows: the first row of the batch that it trains on, and the row after the last.
    """

    number: int
    slots: Grid
    core: Grid
    rows: tuple[int, int]

    @property
    def tp(self) -> int:
        """The tensor-parallel degree."""
        return len(self.slots[0])

    @property
    def batch(self) -> int:
        """The number of rows of the batch that the replica trains on."""
        return self.rows[1] - self.rows[0]


@dataclasses.dataclass(frozen=True)
class FaultPlan:
    """How a run continues without some of its devices; see `plan_faults`.

    Attributes:
        dp: the number of replicas of the healthy run.
        gtp: the number of shards of a weight.
        tp: the tensor-parallel degree of a healthy replica.
        failed: the slots whose devices are lost.
        batch: the number of rows of a batch, over all replicas.
        microbatches: the number of microbatches into which each replica's rows are divided.
        core_tp: the tensor-parallel degree at which master weights and optimizer state are stored.
        replicas: the replicas that continue.
    """

    dp: int
    gtp: int
    tp: int
    failed: tuple[int, ...]
    batch: int
    microbatches: int
    core_tp: int
    replicas: tuple[Replica, ...]

    @property
    def slots(self) -> int:
        """The number of devices of the healthy grid."""
        return self.dp * self.gtp * self.tp

    @property
    def active(self) -> tuple[int, ...]:
        """The slots of the devices that compute, ascending."""
        return tuple(sorted(slot for replica in self.replicas for row in replica.slots for slot in row))

    @property
    def idle(self) -> tuple[int, ...]:
        """The slots of the healthy devices that are not used, ascending."""
        return tuple(sorted(set(range(self.slots)) - set(self.active) - set(self.failed)))

    @property
    def uniform(self) -> bool:
        """Whether all replicas have the core's degree and the same number of rows, so that they form one ordinary mesh,
        possibly of fewer devices than the healthy one."""
        return len({replica.batch for replica in self.replicas}) == 1 and all(r.core == r.slots for r in self.replicas)

    @property
    def throughput(self) -> Fraction:
        """The throughput as a fraction of the healthy run's, if all time is spent computing and tp scales perfectly.

        It is limited by the slowest replica, which is the one with the most rows per device.
        """
        return self._share([replica.batch for replica in self.replicas], [replica.tp for replica in self.replicas])

    @property
    def throughput_if_dropped(self) -> Fraction:
        """The throughput if replicas that lost a device were left out and the others took their rows; 0 if none is
        left."""
        hurt = {slot // (self.gtp * self.tp) for slot in self.failed}
        return self._best([self.tp] * (self.dp - len(hurt)))

    @property
    def throughput_if_lowered(self) -> Fraction:
        """The throughput if all replicas that continue ran at the lowest degree among them."""
        return self._best([min(replica.tp for replica in self.replicas)] * len(self.replicas))

    def with_core(self, core_tp: int) -> FaultPlan:
        """Returns the plan with master weights and optimizer state stored at another degree."""
        replicas = []
        for replica in self.replicas:
            chosen = core_ranks(replica.tp, core_tp)
            core = tuple(tuple(row[rank] for rank in chosen) for row in replica.slots)
            replicas.append(dataclasses.replace(replica, core=core))
        return dataclasses.replace(self, core_tp=core_tp, replicas=tuple(replicas))

    def devices_of(self, devices: Sequence[Any]) -> dict[int, Any]:
        """Returns the given devices by slot.

        Args:
            devices: the devices of all slots, of the healthy ones, or of the active ones; in the order of slots.

        Raises:
            ValueError: if the number of devices is none of these three.
        """
        healthy = [slot for slot in range(self.slots) if slot not in self.failed]
        for slots in (list(range(self.slots)), healthy, list(self.active)):
            if len(devices) == len(slots):
                return dict(zip(slots, devices, strict=True))
        raise ValueError(
            f"there are {len(devices)} devices, but the plan is for {self.slots}: {len(self.failed)} "
            f"failed, {len(self.active)} active. Pass the devices of all slots, of the {len(healthy)} healthy "
            f"ones, or of the {len(self.active)} active ones."
        )

    def _best(self, degrees: list[int]) -> Fraction:
        parts = self.batch // (self.gtp * self.microbatches)
        return self._share(apportion(parts, degrees, self.gtp * self.microbatches), degrees) if degrees else Fraction(0)

    def _share(self, batches: Sequence[int], degrees: Sequence[int]) -> Fraction:
        slowest = max(Fraction(rows, tp) for rows, tp in zip(batches, degrees, strict=True))
        return Fraction(self.batch, self.dp * self.tp) / slowest


def plan_faults(
    *,
    dp: int,
    gtp: int = 1,
    tp: int,
    failed: Sequence[int | tuple[int, int, int]] = (),
    batch: int,
    microbatches: int = 1,
    batches: Sequence[int] | None = None,
    even: bool = False,
    min_tp: int = 1,
    core_tp: int | None = None,
) -> FaultPlan:
    """Plans how a run continues when devices have failed.

    A replica that lost devices continues at the highest tensor-parallel degree that its remaining devices allow, with
    the same gtp. Devices that are then left over, those of the highest slots of a row, are idle. The other replicas
    keep their degree. Any healthy device of a replica may take any position in it.

    Master weights and optimizer state are stored on the core, which has `gtp * core_tp` devices of every replica. In a
    replica of a higher degree, these are the devices whose part of a weight overlaps most with the part to be stored,
    so that the least is moved.

    Args:
        dp: the number of replicas of the healthy run.
        gtp: the number of shards of a weight, in every replica.
        tp: the tensor-parallel degree of a healthy replica.
        failed: the devices that are lost, each by its slot, the place in the grid dp x gtp x tp, counted row by row, or
            by its coordinates in that grid, `(dp, gtp, tp)`.
        batch: the number of rows of a batch, over all replicas; must be a multiple of gtp * microbatches.
        microbatches: the number of microbatches into which each replica's rows are divided.
        batches: the number of rows of each replica that continues; by default in proportion to the degrees, so that
            all replicas take as nearly the same time as possible.
        even: whether all replicas that lost a device get the lowest degree among them, as in Megatron-LM.
        min_tp: the lowest degree at which a replica may continue; a replica that cannot is left out, with all its
            devices idle.
        core_tp: the degree at which the core stores weights; by default the lowest of the replicas.

    Raises:
        ValueError: if a number is out of its range, if a slot is not in the grid or is named twice, if no replica is
            left, or if the batch cannot be divided among the replicas.
    """
    sizes = {"dp": dp, "gtp": gtp, "tp": tp, "batch": batch, "microbatches": microbatches, "min_tp": min_tp}
    for name, size in sizes.items():
        if not isinstance(_int(size), int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"`{name}` is {size!r}; it must be a whole number of at least 1.")
    dp, gtp, tp, batch, microbatches, min_tp = map(_int, sizes.values())
    if min_tp > tp:
        raise ValueError(f"`min_tp` is {min_tp}; it must be from 1 to {tp}, the degree of a healthy replica.")
    lost = _checked_slots(failed, dp, gtp, tp)
    degrees = {}
    for number in range(dp):
        hurt = sum(slot // (gtp * tp) == number for slot in lost)
        degrees[number] = (gtp * tp - hurt) // gtp
    if even:
        hurt_degrees = [degree for degree in degrees.values() if min_tp <= degree < tp]
        degrees = {n: degree if degree == tp else min([degree, *hurt_degrees]) for n, degree in degrees.items()}
    degrees = {number: degree for number, degree in degrees.items() if degree >= min_tp}
    if not degrees:
        remedy = "Use a lower `min_tp`, or a mesh" if min_tp > 1 else "Use a mesh"
        raise ValueError(
            f"no replica is left: with {len(lost)} of {dp * gtp * tp} devices failed, none of {dp} replicas has "
            f"gtp {gtp} x tp {min_tp} devices. {remedy} of other degrees on the healthy devices."
        )
    core = min(degrees.values()) if core_tp is None else _int(core_tp)
    if not isinstance(core, int) or isinstance(core, bool) or not 1 <= core <= min(degrees.values()):
        raise ValueError(
            f"`core_tp` is {core_tp!r}; it must be from 1 to {min(degrees.values())}, the lowest degree of a replica."
        )
    rows = _rows(batch, gtp * microbatches, list(degrees.values()), batches)
    ends = list(itertools.accumulate(rows))
    replicas = []
    for (number, degree), count, end in zip(degrees.items(), rows, ends, strict=True):
        slots = _grid(number, gtp, tp, degree, lost)
        replicas.append(Replica(number, slots, slots, (end - count, end)))
    return FaultPlan(dp, gtp, tp, tuple(lost), batch, microbatches, core, tuple(replicas)).with_core(core)


def core_ranks(tp: int, core_tp: int) -> tuple[int, ...]:
    """Returns the tp rank of a replica that acts as each rank of the core.

    If a replica divides a dimension into `tp` parts, and the core divides it into `core_tp` parts, each core rank is
    assigned the tp rank whose part overlaps most with its own. No tp rank is assigned twice: a core part is at least as
    long as a tp part, so it either contains a whole tp part or overlaps one by at least half of its own length. Two
    core parts cannot both overlap the same tp part by that much, because the tp part is shorter than either.
    """

    def overlap(rank: int, core: int) -> Fraction:
        start = max(Fraction(rank, tp), Fraction(core, core_tp))
        return min(Fraction(rank + 1, tp), Fraction(core + 1, core_tp)) - start

    return tuple(max(range(tp), key=lambda rank: (overlap(rank, core), -rank)) for core in range(core_tp))


def apportion(parts: int, degrees: Sequence[int], rows: int = 1) -> list[int]:
    """Returns the number of rows for each replica, chosen so that the slowest replica has as few rows per device as
    possible.

    Args:
        parts: the number of indivisible parts of the batch.
        degrees: the tensor-parallel degree of each replica.
        rows: the number of rows per part.
    """
    counts = [0] * len(degrees)
    for _ in range(parts):
        least = min(range(len(degrees)), key=lambda i: (Fraction(counts[i] + 1, degrees[i]), i))
        counts[least] += 1
    return [count * rows for count in counts]


def _checked_slots(failed: Sequence[int | tuple[int, int, int]], dp: int, gtp: int, tp: int) -> list[int]:
    slots: list[Any] = [_slot_of(one, dp, gtp, tp) if isinstance(one, tuple | list) else _int(one) for one in failed]
    total = dp * gtp * tp
    for slot in slots:
        if not isinstance(slot, int) or isinstance(slot, bool) or not 0 <= slot < total:
            raise ValueError(
                f"`failed` names {slot!r}, which is not a slot: dp {dp} x gtp {gtp} x tp {tp} has the slots 0 to "
                f"{total - 1}."
            )
    twice = [slot for slot in slots if slots.count(slot) > 1]
    if twice:
        raise ValueError(f"`failed` names {twice[0]} twice. Name each slot once.")
    return sorted(slots)


def _slot_of(coordinates: Sequence[Any], dp: int, gtp: int, tp: int) -> int:
    """Returns the slot of a device that is named by its coordinates."""
    sizes = dp, gtp, tp
    at = [_int(c) for c in coordinates]
    whole = [isinstance(c, int) and not isinstance(c, bool) for c in at]
    if len(whole) != 3 or not all(whole) or not all(0 <= c < n for c, n in zip(at, sizes, strict=True)):
        raise ValueError(
            f"`failed` names {tuple(coordinates)!r}, which is not a place in the grid: coordinates are (dp, gtp, tp), "
            f"from (0, 0, 0) to {(dp - 1, gtp - 1, tp - 1)}."
        )
    place, column, rank = at
    return (place * gtp + column) * tp + rank


def _int(number: Any) -> Any:
    """Returns a NumPy integer as a Python integer, and anything else unchanged."""
    return int(number) if isinstance(number, Integral) and not isinstance(number, bool) else number


def _grid(number: int, gtp: int, tp: int, degree: int, lost: Sequence[int]) -> Grid:
    """Returns the slots of a replica: each row has its own lowest healthy slots, and missing ones are taken from those
    left over in other rows."""
    first = number * gtp * tp
    own = [[slot for slot in range(first + g * tp, first + (g + 1) * tp) if slot not in lost] for g in range(gtp)]
    over = [slot for row in own for slot in row[degree:]]
    grid = []
    for row in own:
        taken = row[:degree]
        taken += [over.pop(0) for _ in range(degree - len(taken))]
        grid.append(tuple(taken))
    return tuple(grid)


def _rows(batch: int, unit: int, degrees: list[int], batches: Sequence[int] | None) -> list[int]:
    if batches is None:
        if batch % unit:
            raise ValueError(
                f"`batch` is {batch}, which is not a multiple of gtp * microbatches = {unit}. Use "
                f"{math.ceil(batch / unit) * unit}, for example."
            )
        rows = apportion(batch // unit, degrees, unit)
        if not min(rows):
            raise ValueError(
                f"`batch` is {batch}, which is {batch // unit} parts of gtp * microbatches = {unit} rows, too few for "
                f"{len(degrees)} replicas of degrees {degrees}. Use a larger batch or fewer microbatches, or leave "
                "replicas out with `min_tp`."
            )
        return rows
    rows = [_int(n) for n in batches]
    if len(rows) != len(degrees):
        raise ValueError(
            f"`batches` has length {len(rows)}, but {len(degrees)} replicas continue; give one number for each."
        )
    wrong = [n for n in rows if not isinstance(n, int) or isinstance(n, bool) or n < 1 or n % unit]
    if wrong:
        raise ValueError(
            f"`batches` has {wrong[0]!r}; each must be a positive multiple of gtp * microbatches = {unit}."
        )
    if sum(rows) != batch:
        raise ValueError(f"`batches` are {rows}, {sum(rows)} rows in all, but `batch` is {batch}. Make them add up.")
    return rows
