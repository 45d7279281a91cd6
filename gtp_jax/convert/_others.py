"""Reads the files of a Hugging Face model that gtp_jax keeps unchanged, such as those of the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .._foreign import inside, open_regular, parse_json
from ..checkpoint import MAX_FILE_BYTES
from ..models import ORIGIN_FILES

# The largest published tokenizers have about 1,500,000 values.
_MAX_VALUES = 4_000_000


def read_others(directory: Path) -> dict[str, bytes]:
    """Returns the contents of the `ORIGIN_FILES` in a directory, by name.

    Raises:
        ValueError, OSError: if one is not a regular file of the directory, is too large, or is not a JSON object
            although its name ends with .json.
    """
    there = (name for name in ORIGIN_FILES if (directory / name).exists() or (directory / name).is_symlink())
    return {name: _read(directory, name) for name in there}


def parse_other(content: bytes) -> Any:
    """Returns the parsed content of a file that should be JSON.

    Raises:
        ValueError: if the content is not JSON, or has too many values.
    """
    return parse_json(content, most_values=_MAX_VALUES)


def _read(directory: Path, name: str) -> bytes:
    with open_regular(inside(directory, name)) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(
            f"{directory / name} has more than {MAX_FILE_BYTES} bytes, the maximum that a checkpoint keeps. Move it "
            "out of the directory, and copy it to the exported model."
        )
    if name.endswith(".json"):
        try:
            if not isinstance(parse_other(content), dict):
                raise ValueError("it holds something else")
        except ValueError as error:
            raise ValueError(
                f"{directory / name} is not a JSON object ({error}). Download it again, or move it out of the "
                "directory."
            ) from error
    return content
