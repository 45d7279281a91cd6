"""The mesh of the devices that are left."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtp_jax.elastic._plan import plan_fleet

degrees = st.integers(1, 4)


@given(degrees, degrees, degrees, st.data())
def test_lost_devices_are_left_out_and_as_many_as_possible_train(dp, gtp, tp, data):
    total = dp * gtp * tp
    lost = data.draw(st.sets(st.integers(0, total - 1), max_size=total - tp))
    plan = plan_fleet({"dp": dp, "gtp": gtp, "tp": tp}, lost)
    assert sorted([*plan.devices, *plan.idle, *lost]) == list(range(total))
    assert math.prod(plan.degrees.values()) == len(plan.devices)
    assert plan.degrees["tp"] == tp and len(plan.idle) < tp
    # a device stores no more than before if that can be
    assert plan.degrees["gtp"] >= min(gtp, len(plan.devices) // tp)
    if not lost:
        assert plan.degrees == {"dp": dp, "gtp": gtp, "tp": tp}


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
    assert plan_fleet(healthy, lost).degrees == expected


def test_too_few_devices_and_devices_that_are_none_are_refused():
    with pytest.raises(ValueError, match="no plan: 3 of 4 devices are left, and tp 4 needs 4"):
        plan_fleet({"dp": 1, "gtp": 1, "tp": 4}, {2})
    with pytest.raises(ValueError, match=r"`lost` is \[4\]; the run has devices 0 to 3"):
        plan_fleet({"dp": 1, "gtp": 4, "tp": 1}, {4})
