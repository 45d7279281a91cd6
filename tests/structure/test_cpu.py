"""The meter of CPU time tells stages within stages apart, and counts a program when it is compiled."""

import time

import jax
import jax.numpy as jnp

from .cpu import GARBAGE, STAGES, Meter

COMPILES, LOWERS, TRACES = STAGES


def spend(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_stage_within_another_counts_for_the_inner_one():
    meter = Meter()
    began = time.process_time()
    meter.on_start(TRACES, 0.0)
    spend(0.02)
    meter.on_start(COMPILES, 0.0)
    spend(0.05)
    meter.on_garbage("start", {})
    spend(0.01)
    meter.on_garbage("stop", {})
    meter.on_end(COMPILES, 0.0, fun_name="inner")
    meter.on_end(TRACES, 0.0, fun_name="outer")
    passed = time.process_time() - began
    traces, compiles, garbage = (meter.stages[name] for name in ("JAX traces", "XLA compiles", GARBAGE))
    assert 0.02 <= traces <= passed - 0.06 and compiles >= 0.05 and garbage >= 0.01
    assert traces + compiles + garbage <= passed
    assert dict(meter.compiled) == {"inner": 1}, "only what XLA compiles is a program"


def test_events_of_jax_are_those_that_the_meter_knows():
    meter = Meter()
    jax.monitoring.register_scalar_listener(meter.on_start)
    jax.monitoring.register_event_duration_secs_listener(meter.on_end)

    @jax.jit
    def of_this_test(x):
        return jnp.sin(x) + 1

    of_this_test(jnp.ones(3))
    assert meter.compiled["jit(of_this_test)"] == 1
    assert set(meter.stages) >= set(STAGES.values())
    of_this_test(jnp.ones(3))
    assert meter.compiled["jit(of_this_test)"] == 1
