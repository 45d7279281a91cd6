"""The lock of a run's directory."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Self


class Lock:
    """Keeps a second supervisor from the same directory. The system releases it when its owner dies.

    Args:
        path: of the lock's file; its directory is made.

    Raises:
        ValueError: if another process holds it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ValueError(
                f"another supervisor runs in {path.parent.parent}. Wait for it or end it, or choose another --out."
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
