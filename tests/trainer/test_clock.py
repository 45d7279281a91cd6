"""The clock of a process: limits of phases, silence of peers, and suspensions, on a clock that the test moves."""

from __future__ import annotations

import pytest

from gtp_jax.runner.launch import Launch
from gtp_jax.runner.trainer._clock import LIMITS_S, SILENT_AT_FIRST_S, TICK_S, PhaseClock
from gtp_jax.runner.trainer._peer_watch import PeerWatch
from gtp_jax.runner.trainer._peers import several
from gtp_jax.runner.trainer._slow import slow as slow_by_name


class Time:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


def running(time: Time, step_s: float = 1.0, steps: int = 4) -> PhaseClock:
    """A clock of a process that has made some steps, the first of which compiled for a minute."""
    clock = PhaseClock(time)
    clock.expect([1])
    for activity in ("join", "check", "compile", "restore"):
        clock.begin(activity)
    clock.begin("step", 0)
    time.s += 60
    for step in range(1, steps + 1):
        clock.begin("step", step)
        time.s += step_s
    clock.heard(1)
    clock.tick()
    return clock


def pass_s(time: Time, clocks: list[PhaseClock], seconds: float, *, talk: bool = True) -> None:
    for _ in range(int(seconds / TICK_S)):
        time.s += TICK_S
        for clock in clocks:
            assert clock.tick() == 0
            if talk:
                clock.heard(1)


def test_each_phase_has_its_limit_from_the_start_on():
    time = Time()
    clock = PhaseClock(time)
    for activity, limit_s in LIMITS_S.items():
        clock.begin(activity)
        assert clock.limit_s == limit_s
        pass_s(time, [clock], limit_s)
        assert clock.elapsed_s == limit_s
        pass_s(time, [clock], 1)
        assert clock.elapsed_s > clock.limit_s
    assert PeerWatch(Launch(2, 0, "h:1", join_timeout_s=900))._clock.limit_s == LIMITS_S["start"] + 900


def test_limits_are_learned_from_warm_steps_only():
    time = Time()
    clock = running(time, step_s=20.0)
    assert clock.limit_s == 200
    assert running(Time(), step_s=1.0).limit_s == 120
    assert running(Time(), steps=1).limit_s == LIMITS_S["step"]  # the first has compiled
    clock.begin("evaluate", 4)
    assert clock.limit_s == LIMITS_S["evaluate"]
    time.s += 500
    clock.begin("step", 4)
    assert clock.limit_s == 200  # an evaluation is no step
    clock.begin("compile", 4)
    clock.begin("step", 4)
    time.s += 90
    clock.begin("step", 5)  # compiled again
    assert clock.limit_s == 200


def test_silence_is_judged_more_patiently_before_the_first_step():
    time = Time()
    clock = PhaseClock(time)
    clock.expect([1, 2])
    pass_s(time, [clock], SILENT_AT_FIRST_S)  # 1 talks
    assert clock.silent() == [] and clock.silent(1 / 3) == [2]
    pass_s(time, [clock], 1)
    assert clock.silent() == [2]
    clock = running(Time())
    assert clock.silence_s == 20


@pytest.mark.parametrize("apart_s", [0, 3, 15])
def test_processes_that_are_suspended_together_do_not_end_each_other(apart_s):
    time = Time()
    clocks = [running(time), running(time)]
    for clock in clocks:
        clock.tick()
        clock.heard(1)
    pass_s(time, clocks, 5)
    time.s += 25  # nobody runs
    assert clocks[0].tick() > 20
    assert clocks[0].silent() == [] and clocks[0].elapsed_s < clocks[0].limit_s
    for _ in range(apart_s):  # the other one is still suspended
        time.s += TICK_S
        clocks[0].tick()
        assert clocks[0].silent() == []
    assert clocks[1].tick() > 20 + apart_s
    clocks[0].heard(1)
    assert clocks[1].silent() == []


def test_suspended_for_hours_is_forgiven_and_a_peer_that_stays_silent_is_not():
    time = Time()
    clock = running(time)
    time.s += 8 * 3600
    clock.tick()
    assert clock.silent() == [] and clock.elapsed_s < clock.limit_s
    pass_s(time, [clock], 21, talk=False)
    assert clock.silent() == [1]


def test_late_ticks_of_a_loaded_machine_are_not_forgiven():
    time = Time()
    clock = running(time)
    for _ in range(7):
        time.s += 3 * TICK_S
        assert clock.tick() == 0
    assert clock.silent() == [1]


def times(**changes: float) -> dict[str, float]:
    return {"step": 0.1, "input": 0.001, "dispatch": 0.002, "device 0": 0.001, "device 1": 0.0011, **changes}


def slow(times: dict[int, dict[str, float]]) -> list[str]:
    return slow_by_name(times, lambda processes: several("process", processes))


def test_only_the_slow_process_or_device_is_named():
    same = {p: times() for p in range(4)}
    assert slow(same) == []
    assert slow({**same, 2: times(input=0.05)}) == ["process 2: input takes 50.0 ms per step, and 1.0 ms in the others"]
    [line] = slow_by_name({**same, 2: times(input=0.05)}, lambda processes: f"process {processes[0]} on node7")
    assert line.startswith("process 2 on node7: input takes")
    [line] = slow({**same, 1: times(dispatch=0.03)})
    assert line.startswith("process 1: dispatch takes 30.0 ms per step")
    [line] = slow({**same, 3: times(**{"device 1": 0.002})})
    assert line == "process 3: device 1 takes 2.00 ms for matrix products that take 1.00 ms on others"
    assert slow({**same, 2: times(input=0.008)}) == []  # eight times as long, and no matter for a step of 100 ms
    assert slow({**same, 2: times(step=0.5)}) == []  # steps wait for each other
    assert slow({0: times(input=0.05)}) == []  # nobody to compare with
    assert slow({0: times(), 1: {}}) == []
