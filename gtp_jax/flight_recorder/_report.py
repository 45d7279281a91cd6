"""Says in one sentence who waits for whom, given where each process is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# How many of a device's last stamps a report holds.
RECENT = 8


@dataclasses.dataclass(frozen=True)
class Report:
    """Where a process is.

    Attributes:
        process: the number of the process.
        host: the name of its host.
        beat: the number of reports that the process has made before.
        step: the number of steps that the process has begun.
        running: whether one of these has not ended.
        over: whether that step takes too long.
        recent: the last stamps of the local device that has executed the fewest: for each, its number and its place.
        python: the place of the main thread in its Python code.
        stamps: the file of the stamps of all local devices, on the host; empty if there are none.
        places: a digest of the places of all programs of the process. Where it is the same, ids mean the same.
        closed: whether the process has closed its recorder, so that this is its last report.
        compiles: whether the process traces or compiles the program of its last step.
    """

    process: int
    host: str
    beat: int
    step: int
    running: bool
    over: bool
    recent: tuple[tuple[int, str], ...]
    python: str
    stamps: str = ""
    places: str = ""
    closed: bool = False
    compiles: bool = False

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Report:
        """Returns a report, given what `dataclasses.asdict` made of it."""
        return cls(**{**values, "recent": tuple((int(number), str(place)) for number, place in values["recent"])})

    @property
    def number(self) -> int:
        """The number of stamps that the slowest local device has executed."""
        return self.recent[-1][0] if self.recent else 0

    @property
    def place(self) -> str:
        """The place of the slowest local device."""
        return self.recent[-1][1] if self.recent else ""


def sentence(reports: Sequence[Report], *, silent: Mapping[int, float], missing: Sequence[int] = ()) -> str:
    """Returns a sentence that says which processes hold up the others, and where those wait.

    Args:
        reports: the last report of each process.
        silent: the seconds since the last report of each process that makes none any more.
        missing: the processes that have made no report.
    """
    step = max(report.step for report in reports)
    if missing:
        culprits, said = [], [f"{_processes(missing)} {_has(missing)} made no report"]
    else:
        culprits, said = _culprits(reports, silent, step)
    waiting = [report for report in reports if report not in culprits and report.running]
    groups: dict[str, list[Report]] = {}
    for report in waiting:
        groups.setdefault(_standing(report), []).append(report)
    whom = f" for {'them' if len(culprits) > 1 else 'it'}" if culprits else ""
    named = [f"{_named(own)} {'wait' if len(own) > 1 else 'waits'}{whom} {place}" for place, own in groups.items()]
    return f"step {step} hangs: " + "; ".join([*said, *named])


def _culprits(reports: Sequence[Report], silent: Mapping[int, float], step: int) -> tuple[list[Report], list[str]]:
    """Returns the processes that hold up the others, and a clause about each group of them."""
    if found := [report for report in reports if report.process in silent]:
        return found, [f"{_named([r])} {_silent(r, silent[r.process])}" for r in found]
    if found := [report for report in reports if not report.running]:
        each = [f"{_named([r])} has {'not begun' if r.step < step else 'ended'} step {step}" for r in found]
        return found, [f"{one}: its Python code is in {r.python}" for one, r in zip(each, found, strict=True)]
    if (found := [report for report in reports if report.compiles]) and len(found) < len(reports):
        return found, [f"{_named(found)} {'compile' if len(found) > 1 else 'compiles'} a program that others have"]
    if (others := _on_another_way(reports)) is not None:
        return others
    least, most = (pick(report.number for report in reports) for pick in (min, max))
    if least < most:
        found = [report for report in reports if report.number == least]
        return found, [f"{_named([r])} is behind, {_standing(r)}" for r in found]
    return [], ["no process is behind the others"]


def _silent(report: Report, seconds: float) -> str:
    if report.closed:
        return f"has closed its recorder after step {report.step}"
    return f"has given no sign of life for {seconds:.0f} s and is {_standing(report)}"


def _on_another_way(reports: Sequence[Report]) -> tuple[list[Report], list[str]] | None:
    """Returns the processes whose stamps differ from those of most, and a clause that says so; `None` if there are
    none. Such processes run another program, which may lack a collective of the others. Without a majority, returns no
    process, and a clause about each program."""
    numbers = sorted({number for report in reports for number, _ in report.recent})
    for number in numbers:
        ways: dict[str, list[Report]] = {}
        for report in reports:
            if (place := dict(report.recent).get(number)) is not None:
                ways.setdefault(place, []).append(report)
        if len(ways) < 2:
            continue
        usual = max(ways, key=lambda place: len(ways[place]))
        found = [report for place, own in ways.items() if place != usual for report in own]
        if len(ways[usual]) <= len(found):
            each = [f"`{place}` in {_named(own)}" for place, own in ways.items()]
            return [], [f"processes run different programs: stamp number {number} is {' and '.join(each)}"]
        place = next(place for place in ways if place != usual)
        own = ways[place]
        return found, [
            f"{_named(own)} {'run' if len(own) > 1 else 'runs'} another program: stamp number {number} is `{place}`, "
            f"and that of the others is `{usual}`"
        ]
    return None


def _standing(report: Report) -> str:
    return report.place or f"in its Python code, {report.python}"


def _has(numbers: Sequence[int]) -> str:
    return "have" if len(numbers) > 1 else "has"


def _named(reports: Sequence[Report]) -> str:
    hosts = {report.host for report in reports}
    on = f" on {hosts.pop()}" if len(hosts) == 1 else ""
    return _processes([report.process for report in reports]) + on


def _processes(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"processes {', '.join(most)} and {last}" if most else f"process {last}"
