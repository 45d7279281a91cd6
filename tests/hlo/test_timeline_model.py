"""Modelled times against sums by hand."""

from __future__ import annotations

import dataclasses

import pytest
from messages import naming

from gtp_jax import hlo
from gtp_jax.hlo import Collective, Event, LaunchOrder, Shape

RATES = {rate: hlo.fact("h200", name).value for rate, name in hlo.RATES.items()}
LINK, LATENCY_US = hlo.fact("h200", "link_ceiling").value, 1e6 * hlo.fact("h200", "link_latency").value


def matmul(at: int, us: float, times: int = 1, rate: str = "bf16 matmuls") -> Event:
    flops = round(us * 1e-6 * RATES[rate])
    return Event("matmul", f"dot.{at}", at, at, (), 0, times, "forward", flops=flops, rate=rate)


def elementwise(at: int, us: float) -> Event:
    rate = "elementwise work"
    moved = round(us * 1e-6 * RATES[rate])
    return Event("elementwise", f"fusion.{at}", at, at, (), 0, 1, "forward", moved=moved, rate=rate)


def gather(start: int, end: int, us: float, times: int = 1) -> Event:
    """A gather of one array that takes this long, latency included."""
    whole = Shape("u8", (round((us - LATENCY_US) * 1e-6 * LINK * 8 / 7),))
    part = Shape("u8", (whole.bytes // 8,))
    groups, moving = (tuple(range(8)),), end > start
    name, kind = f"gather.{start}", "all-gather"
    c = Collective(name, kind, (part,), (whole,), groups, ("gtp",), moving, times, True, "forward", "")
    return Event(kind, name, start, end, (whole,), 0, times, "forward", collective=c)


def times(*events: Event) -> list[tuple[str, float, float, float]]:
    order = LaunchOrder(
        tuple(e for e in events if e.kind != "elementwise"), tuple(e for e in events if e.kind == "elementwise")
    )
    spans = hlo.timeline(order, "h200").spans
    return [(s.lane, round(s.start_us, 1), round(s.end_us, 1), round(s.exposed_us, 1)) for s in spans]


def test_collective_launched_together_with_a_matmul_begins_after_it():
    assert times(gather(0, 2, 30.0), matmul(1, 20.0), matmul(3, 5.0)) == [
        ("communication", 20.0, 50.0, 30.0),
        ("compute", 0.0, 20.0, 0.0),
        ("compute", 50.0, 55.0, 0.0),
    ]


def test_second_matmul_hides_a_collective_or_what_fits_under_it():
    assert times(gather(0, 3, 30.0), matmul(1, 20.0), matmul(2, 40.0))[0] == ("communication", 20.0, 50.0, 0.0)
    assert times(gather(0, 3, 50.0), matmul(1, 20.0), matmul(2, 40.0))[0] == ("communication", 20.0, 70.0, 10.0)


def test_elementwise_work_lets_a_collective_begin_before_the_matmul_unless_it_is_too_short():
    events = (gather(0, 3, 30.0), elementwise(1, 10.0), matmul(2, 20.0))
    assert times(*events) == [
        ("communication", 0.0, 30.0, 0.0),
        ("compute", 0.0, 10.0, 0.0),
        ("compute", 10.0, 30.0, 0.0),
    ]
    assert times(gather(0, 3, 30.0), elementwise(1, 2.0), matmul(2, 20.0))[0] == ("communication", 22.0, 52.0, 30.0)


def test_collective_that_waits_for_another_one_begins_during_a_matmul():
    found = times(gather(0, 5, 30.0), elementwise(1, 10.0), gather(2, 4, 20.0), matmul(3, 60.0))
    assert found[2] == ("communication", 30.0, 50.0, 0.0)


def test_synchronous_gather_is_exposed_whole_and_waits_for_the_link():
    found = times(gather(0, 3, 30.0), gather(1, 1, 25.0), matmul(2, 5.0))
    assert found[1] == ("communication", 30.0, 55.0, 55.0)
    assert found[2] == ("compute", 55.0, 60.0, 0.0)


def test_each_array_of_a_collective_adds_the_latency_of_the_link():
    one = gather(0, 0, 30.0)
    own = one.collective
    assert own is not None
    many = dataclasses.replace(own, operands=4 * (dataclasses.replace(own.operands[0], dims=(0,)),), results=())
    assert times(dataclasses.replace(one, collective=many))[0][2] == round(4 * LATENCY_US, 1)


def test_what_a_loop_repeats_takes_the_whole_time_and_sums_add_up():
    line = hlo.timeline(LaunchOrder((gather(0, 0, 30.0, times=4), matmul(1, 20.0, times=4))), "h200")
    assert (line.communication_us, line.exposed_us, line.compute_us) == pytest.approx((120.0, 120.0, 80.0), rel=1e-4)
    assert line.total_us == pytest.approx(line.compute_us + line.exposed_us)


@pytest.mark.parametrize("chip", hlo.CHIPS)
def test_each_kind_of_work_has_a_rate_of_its_own_with_its_source(chip):
    flops = [Event("attention", rate, 0, 0, (), 0, 1, "forward", flops=10**12, rate=rate) for rate in hlo.RATES]
    line = hlo.timeline(LaunchOrder(tuple(flops)), chip)
    assert set(line.rates) == set(hlo.RATES) and all(rate.source for rate in line.rates.values())
    took = {span.event.rate: span.end_us - span.start_us for span in line.spans}
    assert took == pytest.approx({name: 1e18 / rate.value for name, rate in line.rates.items()})
    assert took["FP8 matmuls"] < took["bf16 matmuls"] < took["attention forward"] < took["attention backward"]
    assert hlo.timeline(LaunchOrder(()), chip).rates == {}


def test_unknown_chip_and_fact_are_refused():
    with pytest.raises(ValueError, match=naming("'h300' h100 h200")):
        hlo.timeline(LaunchOrder(()), "h300")
    with pytest.raises(ValueError, match=naming("fp4_peak 'h200'")):
        hlo.fact("h200", "fp4_peak")
