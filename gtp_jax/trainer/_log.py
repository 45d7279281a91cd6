"""The log of a run: a JSON object a line, one for each step and one for each evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Log:
    """Appends records to a file, each of them on disk when the call returns.

    Args:
        path: the file; `None` for a process that does not log.
        step: updates made so far; records up to there stay, and the rest will be logged again.
        guard: called before anything is written; raises if the file is not this run's any more.
    """

    def __init__(self, path: Path | None, step: int, guard: Callable[[], None] = lambda: None) -> None:
        self._file, self._guard = None, guard
        if path is None:
            return
        kept = [record for record in read_log(path) if record["step"] <= step] if step else []
        path.write_text("".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a", buffering=1)

    def write(self, step: int, **values: Any) -> None:
        """Adds a record."""
        if self._file is not None:
            self._guard()
            self._file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def read_log(path: Path) -> list[Record]:
    """Returns the records of a log, none if there is no file. A last line that was cut off by a kill is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
