"""How the devices that are left go on."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import naming

from gtp_jax.runner.elastic._plan import plan_fleet

degrees = st.integers(1, 4)


@given(degrees, degrees, degrees, st.integers(1, 40), st.booleans(), st.data())
def test_every_device_is_lost_used_or_idle_and_the_faster_plan_is_taken(dp, gtp, tp, batch, unequal, data):
    total, healthy = dp * gtp * tp, {"dp": dp, "gtp": gtp, "tp": tp}
    lost = data.draw(st.sets(st.integers(0, total - 1), max_size=total - tp))
    plan = plan_fleet(healthy, lost, batch=batch, unequal=unequal)
    assert sorted([*plan.devices, *plan.idle, *lost]) == list(range(total))
    mesh = plan_fleet(healthy, lost, batch=batch, unequal=False)
    assert plan.throughput >= mesh.throughput > 0
    assert math.prod(mesh.degrees.values()) == len(mesh.devices) and len(mesh.idle) < tp
    # a device stores no more than before if that can be
    assert mesh.degrees["tp"] == tp and mesh.degrees["gtp"] >= min(gtp, len(mesh.devices) // tp)
    if plan.failed:
        assert unequal and plan.throughput > mesh.throughput and plan.failed == tuple(sorted(lost))
    else:
        assert plan == mesh
    if not lost:
        assert plan.degrees == healthy and plan.throughput == 1


@pytest.mark.parametrize(
    ("healthy", "lost", "expected"),
    [
        (dict(dp=1, gtp=8, tp=1), {3}, dict(dp=1, gtp=7, tp=1)),
        (dict(dp=8, gtp=1, tp=1), {3}, dict(dp=7, gtp=1, tp=1)),
        (dict(dp=2, gtp=4, tp=1), {0, 7}, dict(dp=1, gtp=6, tp=1)),
        (dict(dp=4, gtp=2, tp=1), {0, 7}, dict(dp=3, gtp=2, tp=1)),
        (dict(dp=1, gtp=4, tp=2), {5}, dict(dp=1, gtp=3, tp=2)),
    ],
    ids=str,
)
def test_meshes_after_a_failure(healthy, lost, expected):
    assert plan_fleet(healthy, lost, batch=24, unequal=False).degrees == expected


def test_a_replica_goes_on_at_a_lower_tp_where_that_is_faster():
    plan = plan_fleet(dict(dp=2, gtp=1, tp=4), {6}, batch=14)
    assert plan.failed == (6,) and len(plan.devices) == 7 and not plan.idle
    assert plan.degrees == dict(dp=2, gtp=1, tp=4)
    assert plan.throughput == pytest.approx(7 / 8)
    said = plan.describe()
    assert re.search(naming("dp 2 gtp 1 tp 4 lost [6] 88%"), said) and "[0, 1, 2, 3, 4, 5, 7]" in said


def test_too_few_devices_and_devices_that_are_none_are_refused():
    with pytest.raises(ValueError, match=naming("3 of 4 devices tp 4")):
        plan_fleet({"dp": 1, "gtp": 1, "tp": 4}, {2}, batch=4, unequal=False)
    with pytest.raises(ValueError, match=naming("`lost` [4] 0 to 3")):
        plan_fleet({"dp": 1, "gtp": 4, "tp": 1}, {4}, batch=4)
