"""What a supervisor has done: a file of JSON objects, a line each, to which lines are only added."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..plan import columns
from ..trainer import read_log

Event = dict[str, Any]

# The parts of a recovery, in order, and what they mean.
PARTS = {
    "detection_s": "from the last sign of life of the process that failed to the verdict: the failure is noticed, all "
    "processes are ended, all devices are probed",
    "start_s": "until all processes of the new fleet are connected and have checked their settings",
    "restore_s": "until they have the state of the snapshot",
    "compile_s": "until the step is compiled",
    "step_s": "until the first step has ended",
}


class EventLog:
    """Appends events to a file and says them.

    Args:
        path: the file.
        say: prints a line for people.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say

    def write(self, event: str, text: str = "", **values: Any) -> None:
        """Adds an event, on disk when the call returns.

        Args:
            event: what happened, in a word or two.
            text: for people; an event without one is not said.
            values: what else is known, JSON.
        """
        line = {"time": time.time(), "event": event, **values}
        if text:
            line["text"] = text
            self._say(f"gtp-jax elastic: {text}")
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_events(path: Path) -> list[Event]:
    """Returns the events of a file. A last line that was cut off by a kill is left out.

    Raises:
        FileNotFoundError: if there is none.
    """
    if not path.exists():
        raise FileNotFoundError(f"no {path}: the run has not been started with --elastic.")
    return read_log(path)


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
