"""Computes how a run spent its time, from the record of its events."""

from __future__ import annotations

from collections.abc import Sequence

from ._events import Event

_BEGINS = ("start", "resume")
# The numbers that events must have in addition to the time to be counted.
NEEDS = {name: ("step",) for name in ("ready", "save", "snapshot", "rollback")}


def seconds_by_cause(events: Sequence[Event]) -> dict[str, float]:
    """Returns the seconds of a run by cause, over all its attempts.

    `step` is the time of steps that count; `lost`, the time of steps that were repeated after a kill or a rollback;
    `down`, the time from the last event of an attempt to the next attempt, by the clocks of the hosts of process
    0. The other causes are activities.

    Args:
        events: the events of the record, in order; only those that the trainer wrote are used.
    """
    causes = {"step": 0.0, "lost": 0.0, "down": 0.0}
    total: dict[str, float] = {}  # seconds of the attempt by cause, at its last event
    saved: dict[int, float] = {}  # for each saved step, the seconds of steps that count up to it, over all attempts
    counted = 0.0  # seconds of steps that count in previous attempts
    last: Event | None = None

    def lose(step: int, spent: float) -> float:
        """Returns the seconds of steps after a saved one, which are lost."""
        kept = max((s for at, s in saved.items() if at <= step), default=0.0)
        for at in [at for at in saved if at > step]:
            del saved[at]
        return max(0.0, spent - kept)

    lost_here = 0.0
    for event in (e for e in events if "process" in e):
        if event["event"] in _BEGINS:
            if last is not None:
                causes["down"] += max(0.0, event["time"] - last["time"])
            for name, seconds in total.items():
                causes[name] = causes.get(name, 0.0) + seconds * (name != "step")
            counted += total.get("step", 0.0) - lost_here
            causes["lost"] += lost_here
            total, lost_here = {}, 0.0
        if event["event"] == "ready":  # the attempt continues from a saved step; later steps are lost
            gone = lose(event["step"], counted)
            counted, causes["lost"] = counted - gone, causes["lost"] + gone
        total = event.get("seconds", total)
        spent = counted + total.get("step", 0.0) - lost_here
        if event["event"] in ("save", "snapshot"):
            saved[event["step"]] = spent
        elif event["event"] == "rollback":
            lost_here += lose(event["step"], spent)
        last = event
    for name, seconds in total.items():
        causes[name] = causes.get(name, 0.0) + seconds * (name != "step")
    causes["step"] = counted + total.get("step", 0.0) - lost_here
    causes["lost"] += lost_here
    return {name: seconds for name, seconds in causes.items() if seconds > 0 or name == "step"}


def goodput(causes: dict[str, float]) -> float:
    """Returns the share of the time that was spent on steps that count, from seconds by cause."""
    return causes.get("step", 0.0) / max(1e-9, sum(causes.values()))
