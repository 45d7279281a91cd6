"""Where the time of a run went, from its record."""

from __future__ import annotations

from collections.abc import Sequence

from ._events import Event

_BEGINS = ("start", "resume")
# The numbers that events must have, beside the time, to be counted.
NEEDS = {name: ("step",) for name in ("ready", "save", "snapshot", "rollback")}


def seconds_by_cause(events: Sequence[Event]) -> dict[str, float]:
    """Returns the seconds of a run by cause, over all its attempts.

    `step` are those of steps that count; `lost` those of steps that were made again, after a kill or a rollback;
    `down` those between the last event of an attempt and the next attempt; the others are named after activities.

    Args:
        events: of the record, in order; those that another than the trainer wrote are left out.
    """
    causes = {"step": 0.0, "lost": 0.0, "down": 0.0}
    total: dict[str, float] = {}  # of the attempt, at its last event
    saved: dict[int, float] = {}  # seconds of steps that count, over all attempts, up to a step that was saved
    counted = 0.0  # seconds of steps that count, of the attempts before
    last: Event | None = None

    def lose(step: int, spent: float) -> float:
        """Returns the seconds of steps behind one that was saved, which are lost."""
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
        if event["event"] == "ready":  # it goes on from a step that was saved; what was made behind it is lost
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
    """Returns the share of the time in which steps were made that count; of seconds by cause."""
    return causes.get("step", 0.0) / max(1e-9, sum(causes.values()))
