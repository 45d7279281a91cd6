"""The record of a run: an append-only file of events, one JSON object per line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ..._foreign import open_regular
from ._own_file import naming, open_own

Event = dict[str, Any]

# The maximum number of bytes of a supervisor's first line, which names all devices.
_LONGEST = 1 << 20


class EventLog:
    """Appends events to a file. Process 0 of a run and its supervisor write to the same file.

    Args:
        path: the path of the file; `None` in a process that does not write.
        say: prints the text of an event; `None` to print nothing.
        guard: called before each write; raises an error if the file no longer belongs to this run.
        held: whether to hold back all events until `release`, because the run may still be refused.
        **fields: the fields of every event, such as the process that writes it.
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
        """Adds an event. When the call returns, it is in the file, unless it is held back.

        Args:
            event: the name of the event, a word or two.
            text: the text for people; an event without text is not printed.
            values: the other fields of the event, as JSON values.
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
        """Writes the events that were held back; later events are written immediately."""
        lines, self._held = self._held or [], None
        for line in lines:
            self._append(line)

    def _append(self, line: Event) -> None:
        if self._path is not None:
            self._guard()
            append_line(self._path, line)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Adds a record to a JSON Lines file in a single write, so that lines of several processes do not interleave.

    If the process that wrote the last line was killed in the middle of it, that line is ended first.
    """
    data = json.dumps(record).encode() + b"\n"
    descriptor = open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        write_line(descriptor, path, data)
    finally:
        os.close(descriptor)


def write_line(descriptor: int, path: Path, data: bytes) -> None:
    """Writes a line to an open file in a single write.

    Raises:
        OSError: if the system does not take all of it, as when the disk is full; names the path.
    """
    with naming(path):
        written = os.write(descriptor, data)
        while written < len(data):  # a full disk takes a part, and refuses the rest
            written += os.write(descriptor, data[written:])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a JSON Lines file; none if there is no file.

    Skips lines that are not JSON objects, such as those that a kill has cut off.
    """
    try:
        with open_regular(path) as file:
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    records = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def events_in(path: Path, needs: Mapping[str, Collection[str]]) -> list[Event]:
    """Returns the events of a record. Skips lines that are not valid events, such as those that other programs have
    added or changed.

    Args:
        path: the path of the record.
        needs: for each name of an event, the fields that must hold numbers, in addition to the time.
    """
    return [record for record in read_lines(path) if _is_event(record, needs)]


def is_of_supervisor(path: Path) -> bool:
    """Returns whether a file is a record that a supervisor began."""
    try:
        with open_regular(path) as file:
            event = json.loads(file.readline(_LONGEST))
    except (OSError, ValueError, RecursionError):
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
    """Returns whether a value of a record is a number to compute with: not a bool, not NaN, not infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # no NaN, no Inf
