"""The log of a run: an append-only file of JSON lines, one for each step and one for each evaluation."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ._events import append_line, is_number, read_lines, write_line
from ._own_file import open_own
from ._tracker import Tracker

Record = dict[str, Any]

# The key of a record that marks that the run continues from an earlier step.
_FROM = "continued_from"


# The key of the loss on held-out data in the record of an evaluation.
HELD_OUT = "held_out"


def loss_key(text: str) -> str:
    """Returns the key of the loss on a text of `eval_data` in the record of an evaluation."""
    return f"loss on {text}"


class Log:
    """Appends records to a file. When a call returns, its record is in the file.

    Args:
        path: the path of the file; `None` in a process that does not log.
        step: the number of updates made so far; 0 for a new run, whose file is emptied.
        guard: called before each write; raises an error if the file no longer belongs to this run.
        trackers: trackers that receive the same numbers, and are closed together with the log.
    """

    def __init__(
        self,
        path: Path | None,
        step: int,
        guard: Callable[[], None] = lambda: None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self._path, self._guard, self._trackers = path, guard, trackers
        self._file: int | None = None
        if path is None:
            return
        guard()
        if step:
            append_line(path, {_FROM: step})
        else:
            os.close(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        self._file = open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, step: int, **values: Any) -> None:
        """Adds a record."""
        self._append({"step": step, **values})
        for tracker in self._trackers:
            tracker.write(step, values)

    def rewind(self, step: int) -> None:
        """Records that the run continues from an earlier step, after which steps will be logged again."""
        self._append({_FROM: step})
        for tracker in self._trackers:
            tracker.rewind(step)

    def close(self) -> None:
        """Closes the file and the trackers."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        for tracker in self._trackers:
            tracker.close()

    def _append(self, record: Record) -> None:
        if self._file is not None and self._path is not None:
            self._guard()
            write_line(self._file, self._path, json.dumps(record).encode() + b"\n")


def read_log(path: Path) -> list[Record]:
    """Returns the records of a log that led to the run's present state; none if there is no file.

    If a run repeated steps after it was resumed or rolled back, returns them once, as they were last made. Skips
    records without a step or with values that are not numbers, and lines that a kill has cut off.
    """
    records: list[Record] = []
    for record in read_lines(path):
        if is_number(step := record.get(_FROM)):
            records = [kept for kept in records if kept["step"] <= step]
        elif isinstance(record.get("step"), int) and all(isinstance(value, int | float) for value in record.values()):
            records.append(record)
    return records
