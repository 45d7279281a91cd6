"""Plans after failures, and how those of Megatron-LM's nonuniform tensor parallelism map to them.

`megatron/core/distributed/nonuniform_tp.py` (dev branch, e3ef5d1864), line by line, there and here:

- `tp_base`: `tp`, the degree of a healthy replica.
- `tp_spares` = 0, everything is a no-op: `failed=()`, so that `plan.uniform`, and the ordinary step runs.
- `tp_spares` > 0, ranks that a hurt replica gives up: `tp` less `Replica.tp`, for each replica, unless `even`.
- `num_reduced_tp_dp_ranks`, and reduced replicas come first: any replicas, in any place.
- `non_active_ranks_per_dp[(dp, cp, pp)]`, local slots: `failed`, slots of the whole grid; gtp stands in place of cp.
- Counts of inactive slots must agree over cp: rows of gtp fill up from each other, so that two failures in one row cost
  as much as one in each of two (`test_rows_of_gtp_fill_up_from_each_other`).
- `compute_uniform_tp_spares_with_parity`, spares are the most failures of a replica: `even=True`, the lowest degree
  among hurt replicas.
- Replicas with fewer failures idle their highest healthy slots: `even=True`, `plan.idle`.
- {0: [2, 5], 1: [1]} at 8 gives 2 spares, {0: [2, 5], 1: [1, 7]}; equal failures keep their lists:
  `test_spares_are_evened_out_as_upstream`.
- No failures give (0, {}): `test_without_failures_the_plan_is_the_healthy_run`.
- `get_active_ranks_for_dp`, base slots less the inactive ones, perhaps not contiguous: `Replica.slots`.
- Its default without a list, the first base - spares: the highest are idle, `test_active_slots_are_the_lowest_ones`.
- `initialize_nonuniform_tp_process_groups`, where a spare process exits or gets False: `plan.active`; other processes
  are not started, or take part in nothing.
- Healthy replicas are untouched: `test_slots_are_active_idle_or_failed_and_none_is_two_of_them`.
- `ntp_map`, units chunked over the core and the rest dealt round robin: `core_ranks`, contiguous runs at every degree,
  so that no permutation of units is ever stored.
- Both degrees must divide the units: any degree, as runs of a `Split` may differ in length or be empty.
- Split tables of `ntp_map` and an all-to-all within tp: `plan_moves`, permutes over gtp and tp together (test_moves).
- Side gradients behind each main gradient, which loses the order of row-parallel weights: gradients are logical arrays;
  tests/nonuniform/test_nonuniform_step.py names every kind of leaf.
- Extra ranks skip the sum over replicas, and replicated leaves stay local: these come from the core to every device.
- Equal local batches, gradients averaged: rows in proportion to the degree, sums divided once by all tokens.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from messages import naming

from gtp_jax.nonuniform import plan_faults
from gtp_jax.nonuniform._faults import apportion


@st.composite
def faults(draw):
    """Degrees, failed slots and a batch that any such plan can divide."""
    dp, gtp, tp = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 8))
    failed = draw(st.lists(st.integers(0, dp * gtp * tp - 1), unique=True, max_size=2 * gtp))
    microbatches = draw(st.integers(1, 2))
    batch = gtp * microbatches * draw(st.integers(dp * tp, 4 * dp * tp))
    chosen = dict(dp=dp, gtp=gtp, tp=tp, failed=failed, batch=batch, microbatches=microbatches)
    assume(any(gtp * tp - lost >= gtp for lost in _lost(chosen)))
    return chosen | {"even": draw(st.booleans())}


@given(faults())
def test_slots_are_active_idle_or_failed_and_none_is_two_of_them(chosen):
    plan = plan_faults(**chosen)
    slots = [*plan.active, *plan.idle, *plan.failed]
    assert sorted(slots) == list(range(plan.slots))
    for replica in plan.replicas:
        assert len({len(row) for row in replica.slots}) == 1 and len(replica.slots) == plan.gtp
        own = range(replica.number * plan.gtp * plan.tp, (replica.number + 1) * plan.gtp * plan.tp)
        assert all(slot in own for row in replica.slots for slot in row)
        for row, core in zip(replica.slots, replica.core, strict=True):
            assert set(core) <= set(row) and len(set(core)) == plan.core_tp
        if not _lost(chosen)[replica.number]:
            assert [slot for row in replica.slots for slot in row] == list(own), "healthy replicas keep every slot"


@given(faults())
def test_rows_cover_the_batch_in_whole_parts(chosen):
    plan = plan_faults(**chosen)
    ends = [0, *(replica.rows[1] for replica in plan.replicas)]
    assert [replica.rows[0] for replica in plan.replicas] == ends[:-1] and ends[-1] == plan.batch
    assert all(replica.batch % (plan.gtp * plan.microbatches) == 0 for replica in plan.replicas)


@given(faults())
def test_degrees_are_the_highest_that_the_rest_of_a_replica_allows(chosen):
    plan = plan_faults(**chosen | {"even": False})
    degrees = {replica.number: replica.tp for replica in plan.replicas}
    for number, lost in enumerate(_lost(chosen)):
        assert degrees.get(number, 0) == (plan.gtp * plan.tp - lost) // plan.gtp
    assert plan.core_tp == min(degrees.values())


@given(faults())
def test_losing_devices_never_speeds_a_run_up_and_going_on_is_never_slower_than_dropping(chosen):
    plan = plan_faults(**chosen | {"even": False})
    healthy = plan_faults(**chosen | {"failed": ()})
    assert plan.throughput <= healthy.throughput <= 1
    assert plan.throughput >= plan.throughput_if_dropped and plan.throughput >= plan.throughput_if_lowered
    compute_share = Fraction(len(plan.active), plan.slots)
    assert plan.throughput <= compute_share


@given(st.integers(1, 30), st.lists(st.integers(1, 8), min_size=1, max_size=3))
def test_no_other_division_of_the_batch_is_faster(parts, degrees):
    def slowest(counts):
        return max(Fraction(count, tp) for count, tp in zip(counts, degrees, strict=True))

    found = apportion(parts, degrees)
    assert sum(found) == parts
    divisions = itertools.product(range(parts + 1), repeat=len(degrees) - 1)
    best = min(slowest([*some, parts - sum(some)]) for some in divisions if sum(some) <= parts)
    assert slowest(found) == best


def test_without_failures_the_plan_is_the_healthy_run():
    plan = plan_faults(dp=2, gtp=2, tp=4, batch=8)
    assert plan.uniform and plan.core_tp == 4 and plan.idle == () and plan.throughput == 1
    assert [replica.core for replica in plan.replicas] == [replica.slots for replica in plan.replicas]


def test_spares_are_evened_out_as_upstream():
    for failed, inactive in [
        ((2, 5, 8 + 1), {0: [2, 5], 1: [1, 7]}),
        ((0, 8 + 3), {0: [0], 1: [3]}),
    ]:
        plan = plan_faults(dp=3, tp=8, failed=failed, batch=24, even=True)
        found = {n: [slot - 8 * n for slot in range(8 * n, 8 * n + 8) if slot not in plan.active] for n in inactive}
        assert found == inactive
        assert [replica.tp for replica in plan.replicas] == [8 - len(inactive[0])] * 2 + [8]
    uneven = plan_faults(dp=3, tp=8, failed=(2, 5, 9), batch=24)
    assert [replica.tp for replica in uneven.replicas] == [6, 7, 8] and uneven.core_tp == 6


def test_active_slots_are_the_lowest_ones():
    plan = plan_faults(dp=2, tp=8, failed=(15,), batch=15, even=True)
    assert plan.replicas[1].slots == (tuple(range(8, 15)),)
    gaps = plan_faults(dp=1, tp=8, failed=(2, 5), batch=6)
    assert gaps.replicas[0].slots == ((0, 1, 3, 4, 6, 7),)


def test_rows_of_gtp_fill_up_from_each_other():
    plan = plan_faults(dp=1, gtp=2, tp=4, failed=(0, 1), batch=6)  # both in one row
    assert plan.replicas[0].slots == ((2, 3, 7), (4, 5, 6)) and plan.idle == ()
    plan = plan_faults(dp=1, gtp=2, tp=4, failed=(1,), batch=6)
    assert plan.replicas[0].slots == ((0, 2, 3), (4, 5, 6)) and plan.idle == (7,)


def test_coordinates_name_the_devices_that_slots_do():
    sizes = dict(dp=2, gtp=3, tp=4)
    grid = np.arange(24).reshape(2, 3, 4)
    for slot in range(24):
        place = tuple(int(c[0]) for c in np.nonzero(grid == slot))
        assert plan_faults(**sizes, failed=[place], batch=12) == plan_faults(**sizes, failed=[slot], batch=12)
        of_numpy = plan_faults(**sizes, failed=[tuple(np.int64(c) for c in place)], batch=12)
        assert of_numpy == plan_faults(**sizes, failed=[np.int64(slot)], batch=12)
    mixed = plan_faults(**sizes, failed=[(1, 2, 3), 0], batch=12)
    assert mixed.failed == (0, 23)


def test_four_and_three_share_the_batch_in_proportion():
    plan = plan_faults(dp=2, tp=4, failed=(5,), batch=14)
    assert [replica.batch for replica in plan.replicas] == [8, 6]
    found = plan.throughput, plan.throughput_if_dropped, plan.throughput_if_lowered
    assert found == (Fraction(7, 8), Fraction(1, 2), Fraction(3, 4))
    given_rows = plan_faults(dp=2, tp=4, failed=(5,), batch=14, batches=(10, 4))
    assert [replica.rows for replica in given_rows.replicas] == [(0, 10), (10, 14)]


def test_a_replica_below_the_floor_is_left_out():
    plan = plan_faults(dp=2, tp=4, failed=(4, 5, 6), batch=8, min_tp=2)
    assert [replica.number for replica in plan.replicas] == [0] and plan.idle == (7,)
    assert plan.core_tp == 4 and plan.throughput == Fraction(1, 2)


def test_devices_are_those_of_all_slots_the_healthy_or_the_active():
    plan = plan_faults(dp=2, gtp=2, tp=2, failed=(0,), batch=8)
    assert plan.idle == (2, 3)[:1] or len(plan.idle) == 1
    names = [f"d{slot}" for slot in range(8)]
    healthy = [n for slot, n in enumerate(names) if slot != 0]
    active = [n for slot, n in enumerate(names) if slot in plan.active]
    for devices in (names, healthy, active):
        found = plan.devices_of(devices)
        assert all(found[slot] == names[slot] for slot in plan.active)
    with pytest.raises(ValueError, match=naming("3 devices 8 1 failed")):
        plan.devices_of(names[:3])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"failed": (8,)}, "`failed` 8 dp 2 gtp 1 tp 4 0 7"),
        ({"failed": (1, 1)}, "`failed` 1 twice"),
        ({"failed": (7, (1, 0, 3))}, "`failed` 7 twice"),
        ({"failed": ((1, 3),)}, "`failed` (1, 3) (dp, gtp, tp)"),
        ({"failed": ((2, 0, 0),)}, "(2, 0, 0) (0, 0, 0) (1, 0, 3)"),
        ({"failed": ((0, 0, True),)}, "(0, 0, True)"),
        ({"failed": tuple(range(8))}, "no replica 8 of 8 other degrees"),
        ({"min_tp": 5}, "`min_tp` 5 from 1 to 4"),
        ({"failed": (0, 4), "min_tp": 4}, "gtp 1 tp 4 lower `min_tp`"),
        ({"batch": 7, "microbatches": 2}, "`batch` 7 microbatches 2 8"),
        ({"batch": 1}, "too few 2 replicas"),
        ({"batches": (8,)}, "`batches` 1 2 replicas"),
        ({"batches": (8, 8)}, "16 rows `batch` 14"),
        ({"failed": (0,), "core_tp": 4}, "`core_tp` 4 from 1 to 3"),
    ],
)
def test_what_cannot_work_is_refused_by_message(settings, message):
    with pytest.raises(ValueError, match=naming(message)):
        plan_faults(**{"dp": 2, "tp": 4, "batch": 14} | settings)


def _lost(chosen):
    size = chosen["gtp"] * chosen["tp"]
    return [sum(slot // size == n for slot in chosen["failed"]) for n in range(chosen["dp"])]
