"""Modelled times against sums by hand."""

from __future__ import annotations

import pytest
from messages import naming

from gtp_jax import hlo
from gtp_jax.hlo import Collective, Event, LaunchOrder, Shape

FLOPS, LINK = hlo.fact("h200", "bf16_ceiling").value, hlo.fact("h200", "link_ceiling").value


def matmul(at: int, us: float, times: int = 1) -> Event:
    return Event("matmul", f"dot.{at}", at, at, (), 0, times, "forward", flops=round(us * 1e-6 * FLOPS))


def gather(start: int, end: int, us: float, times: int = 1) -> Event:
    whole = Shape("u8", (round(us * 1e-6 * LINK * 8 / 7),))
    part = Shape("u8", (whole.bytes // 8,))
    groups, moving = (tuple(range(8)),), end > start
    name, kind = f"gather.{start}", "all-gather"
    c = Collective(name, kind, (part,), (whole,), groups, ("gtp",), moving, times, True, "forward", "")
    return Event(kind, name, start, end, (whole,), 0, times, "forward", collective=c)


def times(*events: Event) -> list[tuple[str, float, float, float]]:
    spans = hlo.timeline(LaunchOrder(events), "h200").spans
    return [(s.lane, round(s.start_us, 1), round(s.end_us, 1), round(s.exposed_us, 1)) for s in spans]


def test_gather_longer_than_the_matmul_over_it_is_exposed_by_the_difference():
    assert times(gather(0, 2, 30.0), matmul(1, 20.0), matmul(3, 5.0)) == [
        ("communication", 0.0, 30.0, 10.0),
        ("compute", 0.0, 20.0, 0.0),
        ("compute", 30.0, 35.0, 0.0),
    ]


def test_gather_shorter_than_the_matmul_over_it_is_hidden():
    assert times(gather(0, 2, 10.0), matmul(1, 20.0))[0] == ("communication", 0.0, 10.0, 0.0)


def test_synchronous_gather_is_exposed_whole_and_waits_for_the_link():
    found = times(gather(0, 3, 30.0), gather(1, 1, 10.0), matmul(2, 5.0))
    assert found[1] == ("communication", 30.0, 40.0, 40.0)
    assert found[2] == ("compute", 40.0, 45.0, 0.0)


def test_what_a_loop_repeats_takes_the_whole_time_and_sums_add_up():
    line = hlo.timeline(LaunchOrder((gather(0, 0, 10.0, times=4), matmul(1, 20.0, times=4))), "h200")
    assert (line.communication_us, line.exposed_us, line.compute_us) == pytest.approx((40.0, 40.0, 80.0), rel=1e-4)
    assert line.total_us == pytest.approx(line.compute_us + line.exposed_us)


def test_rates_say_where_they_come_from():
    line = hlo.timeline(LaunchOrder(()), "h100")
    assert line.total_us == 0.0 and "datasheet" in line.flop_rate.source and line.link_rate.unit == "B/s"
    assert hlo.timeline(LaunchOrder(()), "h200").flop_rate == hlo.Fact(
        787e12, "FLOP/s", hlo.CHIPS["h200"]["bf16_ceiling"].source
    )


def test_unknown_chip_and_fact_are_refused():
    with pytest.raises(ValueError, match=naming("'h300' h100 h200")):
        hlo.timeline(LaunchOrder(()), "h300")
    with pytest.raises(ValueError, match=naming("fp4_peak 'h200'")):
        hlo.fact("h200", "fp4_peak")
