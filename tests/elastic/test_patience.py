"""When a process under a supervisor counts as hung, on a clock that the test moves."""

from __future__ import annotations

import selectors
import socket
import subprocess
from collections.abc import Iterator

import pytest

from gtp_jax.runner.elastic._devices import Device
from gtp_jax.runner.elastic._failure import Failure
from gtp_jax.runner.elastic._fleet import Fleet, Member
from gtp_jax.runner.trainer import Line


class Two:
    """A fleet of two processes, whose words are the test's."""

    def __init__(self) -> None:
        self.s = 0.0
        self.fleet = Fleet([], {}, lambda: self.s)
        self._lines: list[Line] = []
        for number in (0, 1):
            ours, theirs = socket.socketpair()
            child = subprocess.Popen(["sleep", "600"])
            member = Member(Device(number, "a device", {}), child, Line(ours), number)
            self.fleet.members.append(member)
            self.fleet._selector.register(member.line, selectors.EVENT_READ, member)
            self._lines.append(Line(theirs))

    def say(self, process: int, activity: str, step: int = 0, *, busy_s: float = 0.0, longest_s: float | None = None):
        beat = {"kind": "beat", "activity": activity, "step": step, "busy_s": busy_s, "longest_s": longest_s}
        self._lines[process].send({**beat, "stepping_s": 0.0})
        self.fleet.poll(0.0)

    def fail(self, process: int, cause: str) -> None:
        self._lines[process].send({"kind": "failed", "cause": cause, "reason": f"{cause} here", "code": 2})
        self.fleet.poll(0.0)

    def pass_s(self, seconds: float, *beating: tuple[int, str, int]) -> Failure | None:
        """Passes time, in which some say the same again and again, and returns the failure at its end."""
        for _ in range(round(2 * seconds)):
            self.s += 0.5
            self.fleet.poll(0.0)
            for beat in beating:
                self.say(*beat)
        return self.fleet.failure()

    def end(self) -> None:
        for line, member in zip(self._lines, self.fleet.members, strict=True):
            member.child.kill()
            member.child.wait()
            line.close()
        self.fleet.kill()


@pytest.fixture
def two() -> Iterator[Two]:
    processes = Two()
    yield processes
    processes.end()


@pytest.mark.parametrize(("start_s", "first_silent_s", "stalled_s", "silent_s"), [(5, 60, 30, 8), (60, 360, 180, 48)])
def test_every_limit_grows_with_what_the_start_took(two, start_s, first_silent_s, stalled_s, silent_s):
    assert two.pass_s(start_s) is None
    for process in (0, 1):
        two.say(process, "compile")
    assert two.pass_s(first_silent_s - 1, (0, "compile", 0)) is None
    failure = two.pass_s(2, (0, "compile", 0))
    assert (failure.kind, failure.device) == ("silent", 1)
    for step in (0, 1):
        for process in (0, 1):
            two.say(process, "step", step)
    two.say(0, "step", 1, busy_s=stalled_s - 1, longest_s=1.0)
    assert two.fleet.failure() is None
    two.say(0, "step", 1, busy_s=stalled_s + 1, longest_s=1.0)
    assert two.fleet.failure().kind == "stalled"
    assert two.pass_s(silent_s - 1, (0, "step", 1)) is None
    failure = two.pass_s(2, (0, "step", 1))
    assert failure.reason == f"process 1 (a device) was silent for {silent_s + 1:.1f} s"


@pytest.mark.parametrize(("first_s", "limit_s"), [(None, 900), (5, 180), (60, 600)])
def test_a_process_may_start_ten_times_as_slowly_as_the_first(two, first_s, limit_s):
    beating = [(0, "start", 0)] if first_s else []
    assert two.pass_s(first_s or 0) is None
    if first_s:
        two.say(0, "start")
    assert two.pass_s(limit_s - (first_s or 0) - 1, *beating) is None
    failure = two.pass_s(2, *beating)
    assert (failure.kind, failure.device, failure.activity) == ("silent", 1 if first_s else 0, None)


def test_a_refusal_ends_the_run_unless_it_follows_a_failure(two):
    for process in (0, 1):
        two.say(process, "snapshot", 3)
    two.fail(1, "error")
    two.pass_s(0.1)
    two.s += 0.1
    two.fail(0, "refused")  # such as a ValueError that a collective raises without its peer
    failure = two.pass_s(1.0)
    assert two.fleet.ended() is None and (failure.kind, failure.device) == ("error", 1)


def test_a_refusal_before_its_peers_complain_ends_the_run(two):
    two.fail(0, "refused")
    two.s += 0.1
    two.fail(1, "unconnected")
    two.pass_s(1.0)
    assert two.fleet.ended().reason == "refused here"
