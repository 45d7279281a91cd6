"""The log of a run: a JSON object a line, one for each step and one for each evaluation. Lines are only added."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ._events import append_line, is_number, read_lines
from ._tracker import Tracker

Record = dict[str, Any]

# The key of a record that says that the run goes on from an earlier step.
_FROM = "continued_from"


def loss_key(text: str) -> str:
    """Returns the key of the loss on a text of `eval_data`, in the record of an evaluation."""
    return f"loss on {text}"


class Log:
    """Appends records to a file, each of them in the file when the call returns.

    Args:
        path: the file; `None` for a process that does not log.
        step: updates made so far; 0 of a new run, whose file is made empty.
        guard: called before anything is written; raises if the file is not this run's any more.
        trackers: take the same numbers, and are closed with it.
    """

    def __init__(
        self,
        path: Path | None,
        step: int,
        guard: Callable[[], None] = lambda: None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self._file, self._guard, self._trackers = None, guard, trackers
        if path is None:
            return
        guard()
        if step:
            append_line(path, {_FROM: step})
        else:
            path.write_text("")
        self._file = path.open("a", buffering=1)

    def write(self, step: int, **values: Any) -> None:
        """Adds a record."""
        self._append({"step": step, **values})
        for tracker in self._trackers:
            tracker.write(step, values)

    def rewind(self, step: int) -> None:
        """Says that the run goes on from an earlier step, behind which steps will be logged again."""
        self._append({_FROM: step})
        for tracker in self._trackers:
            tracker.rewind(step)

    def close(self) -> None:
        """Closes the file, and trackers."""
        if self._file is not None:
            self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def _append(self, record: Record) -> None:
        if self._file is not None:
            self._guard()
            self._file.write(json.dumps(record) + "\n")


def read_log(path: Path) -> list[Record]:
    """Returns the records of a log that led to the run's state, none if there is no file.

    Steps that a resumed run, or one that was rolled back, has made again are returned once, as they were made last.
    Records without a step, or of anything but numbers, are left out, and so are lines that a kill has cut off.
    """
    records: list[Record] = []
    for record in read_lines(path):
        if is_number(step := record.get(_FROM)):
            records = [kept for kept in records if kept["step"] <= step]
        elif isinstance(record.get("step"), int) and all(isinstance(value, int | float) for value in record.values()):
            records.append(record)
    return records
