"""The record of a run: a file of JSON objects, a line each, to which lines are only added."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

Event = dict[str, Any]

# bytes of a supervisor's first line: it names all devices
_LONGEST = 1 << 20


class EventLog:
    """Appends events to a file. A run's process 0 and its supervisor write to the same one.

    Args:
        path: the file; `None` for a process that does not write.
        say: prints a line for people; `None` to print nothing.
        guard: called before anything is written; raises if the file is not this run's any more.
        held: whether to write nothing before `release`, because the run may still be refused.
        **fields: of every event, such as the process that writes it.
    """

    def __init__(
        self,
        path: Path | None,
        say: Callable[[str], None] | None = None,
        guard: Callable[[], None] = lambda: None,
        *,
        held: bool = False,
        **fields: Any,
    ) -> None:
        self._path, self._say, self._guard, self._fields = path, say, guard, fields
        self._held: list[Event] | None = [] if held else None

    def write(self, event: str, text: str = "", **values: Any) -> None:
        """Adds an event, in the file when the call returns unless it is held back.

        Args:
            event: what happened, in a word or two.
            text: for people; an event without one is not said.
            values: what else is known, JSON.
        """
        line = {"time": time.time(), "event": event, **self._fields, **values}
        if text:
            line["text"] = text
            if self._say is not None:
                self._say(text)
        if self._held is not None:
            self._held.append(line)
        else:
            self._append(line)

    def release(self) -> None:
        """Writes the events held back so far; later ones are written at once."""
        lines, self._held = self._held or [], None
        for line in lines:
            self._append(line)

    def _append(self, line: Event) -> None:
        if self._path is not None:
            self._guard()
            append_line(self._path, line)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Adds a record to a file of JSON lines, by one write, so that lines of several processes do not mix.

    A last line that a kill has cut off is ended first.
    """
    data = json.dumps(record).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file of JSON lines, none if there is no file; without lines that a kill has cut off."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def events_in(path: Path, needs: Mapping[str, Collection[str]]) -> list[Event]:
    """Returns the events of a record; lines that others have added, or changed, are left out.

    Args:
        path: of the record.
        needs: the numbers that an event must have, by its name, beside the time.
    """
    return [record for record in read_lines(path) if _is_event(record, needs)]


def is_of_supervisor(path: Path) -> bool:
    """Returns whether a file is a record that a supervisor has begun."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.readline(_LONGEST)
    try:
        event = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(event, dict) and event.get("event") == "start" and {"time", "devices", "degrees"} <= event.keys()


def _is_event(record: Event, needs: Mapping[str, Collection[str]]) -> bool:
    name, seconds = record.get("event"), record.get("seconds", {})
    if not (isinstance(name, str) and isinstance(seconds, dict) and isinstance(record.get("text", ""), str)):
        return False
    known = [record[field] for field in ("step", "fleet_step") if field in record]
    needed = [record.get(field) for field in ("time", *needs.get(name, ()))]
    return all(is_number(value) for value in (*known, *needed, *seconds.values()))


def is_number(value: Any) -> bool:
    """Says whether a value of a record is a number that can be computed with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # no NaN, no Inf
