"""Reads and shows a supervisor's events from the event log of a run, which the training processes also write to."""

from __future__ import annotations

from pathlib import Path

from ..._foreign import printable
from ...hlo import columns
from ..trainer import Event, events_in, is_number

# The parts of a recovery, in order, and what they mean.
PARTS = {
    "detection_s": "from the failed process's last sign of life to the verdict: the failure is noticed, all processes "
    "are ended, all devices are probed",
    "start_s": "until all processes of the new fleet are connected and have checked their settings",
    "restore_s": "until they have restored the snapshot",
    "compile_s": "until the step is compiled",
    "step_s": "until the first step has ended",
}


# The numeric fields that these events must have to be shown.
_NEEDS = {
    "recovered": ("step", "steps_lost", "total_s", *PARTS),
    "failure": ("last_sign",),
    "lost": ("device",),
    "snapshot": ("step",),
}


def read_events(path: Path) -> list[Event]:
    """Returns a supervisor's events, without those of its processes. Skips lines that a kill truncated and lines that
    are not valid events.

    Raises:
        FileNotFoundError: if there are no such events.
    """
    events = [event for event in events_in(path, _NEEDS) if "process" not in event and _devices_are_known(event)]
    if not events:
        raise FileNotFoundError(f"no supervisor events in {path}: the run was not started with --elastic.")
    return events


def _devices_are_known(event: Event) -> bool:
    if event["event"] not in ("start", "fleet"):
        return True
    devices, numbered = event.get("devices"), event["event"] == "fleet"
    return isinstance(devices, list) and all(is_number(d) if numbered else isinstance(d, str) for d in devices)


def table(events: list[Event]) -> str:
    """Returns a table with one line per event, followed by a table of the times of each recovery."""
    begin = events[0]["time"] if events else 0.0
    said = [(f"{e['time'] - begin:.1f}", printable(e["event"]), printable(e["text"])) for e in events if "text" in e]
    recoveries = [e for e in events if e["event"] == "recovered"]
    parts = [
        (str(e["step"]), str(e["steps_lost"]), *(f"{e[part]:.1f}" for part in PARTS), f"{e['total_s']:.1f}")
        for e in recoveries
    ]
    header = ("step", "lost", *(part.removesuffix("_s") for part in PARTS), "seconds")
    return "\n\n".join(
        (columns(("s", "event", ""), said, right=(0,)),)
        + ((columns(header, parts, right=range(len(header))),) if parts else ())
    )
