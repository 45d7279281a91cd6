"""What a supervisor is asked to do while it runs: files in the run's directory."""

from __future__ import annotations

from pathlib import Path

_REJOIN = "rejoin."


def ask_to_rejoin(elastic: Path, device: int) -> None:
    """Asks for a device to be used again.

    Args:
        elastic: the directory of the supervisor's files.
        device: its number.

    Raises:
        ValueError: if the number is negative.
        FileNotFoundError: if no supervisor has run there.
    """
    if device < 0:
        raise ValueError(f"`device` is {device}; devices are counted from 0.")
    if not elastic.is_dir():
        raise FileNotFoundError(f"no {elastic}: no run has been started there with --elastic.")
    (elastic / f"{_REJOIN}{device}").touch()


def take_rejoins(elastic: Path) -> list[int]:
    """Returns the devices that are to be used again, and forgets the requests."""
    found = []
    for path in sorted(elastic.glob(f"{_REJOIN}*")):
        path.unlink(missing_ok=True)
        number = path.name.removeprefix(_REJOIN)
        if number.isdecimal():
            found.append(int(number))
    return found
