"""The files of a Hugging Face model that gtp_jax keeps without reading what they say: the tokenizer's, for example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .._foreign import inside, open_regular, parse_json
from ..checkpoint import MAX_FILE_BYTES
from ..models import ORIGIN_FILES

# The largest published tokenizers have some 1,500,000.
_MAX_VALUES = 4_000_000


def read_others(directory: Path) -> dict[str, bytes]:
    """Returns the contents of those of `ORIGIN_FILES` that are in a directory, by name.

    Raises:
        ValueError, OSError: if one is no regular file of the directory, too large, or not JSON as its name says.
    """
    there = (name for name in ORIGIN_FILES if (directory / name).exists() or (directory / name).is_symlink())
    return {name: _read(directory, name) for name in there}


def parse_other(content: bytes) -> Any:
    """Returns what is in one of these files that is JSON.

    Raises:
        ValueError: if it is not JSON, or has too many values.
    """
    return parse_json(content, most_values=_MAX_VALUES)


def _read(directory: Path, name: str) -> bytes:
    with open_regular(inside(directory, name)) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(
            f"{directory / name} has more than {MAX_FILE_BYTES} bytes, which is the most that a checkpoint keeps. Move "
            "it out of the directory, and copy it to what is exported."
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
