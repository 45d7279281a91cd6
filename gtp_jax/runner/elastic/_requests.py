"""Requests to a running supervisor, stored as files in the run's directory."""

from __future__ import annotations

from pathlib import Path

from ..trainer import REJOIN


def ask_to_rejoin(elastic: Path, device: int) -> None:
    """Asks the supervisor to use a device again.

    Args:
        elastic: the directory of the supervisor's files.
        device: the device number.

    Raises:
        ValueError: if the number is negative.
        FileNotFoundError: if no supervisor has run in this directory.
    """
    if device < 0:
        raise ValueError(f"`device` is {device}; device numbers start at 0.")
    if not elastic.is_dir():
        raise FileNotFoundError(f"{elastic} does not exist: no run was started there with --elastic.")
    (elastic / f"{REJOIN}{device}").touch()


def take_rejoins(elastic: Path) -> list[int]:
    """Returns the devices that users asked to use again, and removes the requests."""
    found = []
    for path in sorted(elastic.glob(f"{REJOIN}*")):
        path.unlink(missing_ok=True)
        number = path.name.removeprefix(REJOIN)
        if number.isdecimal():
            found.append(int(number))
    return found
