"""The settings of a run, in the file `config.json` of its directory: a JSON object with the version that wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import __version__
from ..._foreign import read_json
from ..flags import VERSION_KEY
from ._own_file import replacing

# The key of the program that started a run of `gtp_jax.Trainer`, which alone can resume it; other runs have none.
PROGRAM = "program"


def write_config(path: Path, settings: Mapping[str, Any]) -> None:
    """Writes the settings of a run."""
    new = draft(path)  # if the process is killed here, the old file remains
    with replacing(new) as file:
        file.write(f"{json.dumps({VERSION_KEY: __version__, **settings}, indent=2)}\n".encode())
    new.replace(path)


def draft(path: Path) -> Path:
    """Returns the path of the new file that `write_config` writes first, and with which it then replaces the old
    one."""
    return path.with_name(f"{path.name}.new")


def is_config(path: Path) -> bool:
    """Returns whether `write_config`, of any version, wrote the file."""
    try:
        read_config(path)
    except (ValueError, OSError):
        return False
    return True


def read_config(path: Path) -> dict[str, Any]:
    """Returns the settings in a file, without the version.

    Raises:
        ValueError: if the file is not one that `write_config` wrote.
    """
    try:
        settings = read_json(path)
        settings.pop(VERSION_KEY)
        return settings
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise not_of_a_run(path, error) from error


def not_of_a_run(path: Path, error: Exception) -> ValueError:
    """Returns the error of a file that holds no settings of a run."""
    return ValueError(
        f"{path} is not the configuration of a run of gtp-jax ({error}). Choose another --out, or move the file."
    )
