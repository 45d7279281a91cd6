"""What a supervisor has done, from the record of a run, to which its processes write too."""

from __future__ import annotations

from pathlib import Path

from ..plan import columns
from ..trainer import Event, read_lines

# The parts of a recovery, in order, and what they mean.
PARTS = {
    "detection_s": "from the last sign of life of the process that failed to the verdict: the failure is noticed, all "
    "processes are ended, all devices are probed",
    "start_s": "until all processes of the new fleet are connected and have checked their settings",
    "restore_s": "until they have the state of the snapshot",
    "compile_s": "until the step is compiled",
    "step_s": "until the first step has ended",
}


def read_events(path: Path) -> list[Event]:
    """Returns a supervisor's events, without those of its processes. Lines that a kill has cut off are left out.

    Raises:
        FileNotFoundError: if there are none.
    """
    events = [event for event in read_lines(path) if "process" not in event]
    if not events:
        raise FileNotFoundError(f"no event of a supervisor in {path}: the run has not been started with --elastic.")
    return events


def table(events: list[Event]) -> str:
    """Returns what happened, in lines, and what each recovery took."""
    begin = events[0]["time"] if events else 0.0
    said = [(f"{e['time'] - begin:.1f}", e["event"], e["text"]) for e in events if "text" in e]
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
