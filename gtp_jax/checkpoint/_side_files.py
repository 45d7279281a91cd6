"""Writes and reads the files that a step stores with its arrays, such as a tokenizer's.

The manifest holds their sizes and checksums.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from typing import Any

from .._foreign import brief
from ._checksums import DamagedCheckpoint, differences
from ._foreign_json import MAX_FILE_BYTES, MAX_FILES, MAX_NAME, MAX_NAME_BYTES, files_below, is_plain_name, read_bytes

# The folder of the files. It is inside the manifest's directory, so it is committed with the manifest.
FOLDER = "files"


def describe(files: Mapping[str, bytes]) -> dict[str, list[Any]]:
    """Returns the size and the checksum of each file, as a manifest records them.

    Raises:
        ValueError: if there are too many files, or if a file is too large or its name is not a plain file name.
        TypeError: if a file's content is not bytes.
    """
    if len(files) > MAX_FILES:
        raise ValueError(f"`files` has {len(files)} files; a step stores at most {MAX_FILES}.")
    for name, content in files.items():
        if not is_plain_name(name):
            raise ValueError(
                f"`files` has the name {brief(name)}; a name must have 1 to {MAX_NAME} printable characters and at "
                f"most {MAX_NAME_BYTES} bytes, no slash or backslash, and no dot at its beginning."
            )
        if not isinstance(content, bytes):
            raise TypeError(f"`files` has {brief(content)} as {name}; it must be bytes.")
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(
                f"`files` has {name} with {len(content)} bytes; a file must have at most {MAX_FILE_BYTES}."
            )
    return {name: [len(content), _checksum(content)] for name, content in files.items()}


def write_files(folder: Any, files: Mapping[str, bytes]) -> None:
    """Writes files to a new folder. Creates no folder if there are no files."""
    if files:
        folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def read_files(path: Any, folder: Any, described: Mapping[str, list[Any]]) -> dict[str, bytes]:
    """Returns the files of a step as they were written.

    Args:
        path: the step's directory.
        folder: the directory of the files.
        described: the sizes and checksums that the manifest records for them.

    Raises:
        DamagedCheckpoint: if a file is missing or has changed.
        OSError: if a file cannot be read.
    """
    contents, found = _read(folder, described)
    if lines := differences(described, found, f"{folder}/"):
        raise DamagedCheckpoint(path, lines)
    return contents


def files_damage(folder: Any, described: Mapping[str, list[Any]]) -> list[str]:
    """Returns one line for each file of a step that is missing, has changed, or is not part of the checkpoint.

    Raises:
        OSError: if a file exists and cannot be read.
    """
    there = sorted(files_below(folder))
    return differences(described, dict.fromkeys(there, []) | _read(folder, described)[1], f"{folder}/")


def _read(folder: Any, described: Mapping[str, list[Any]]) -> tuple[dict[str, bytes], dict[str, list[Any]]]:
    """Returns the files that are there, without the content of those of another size, and what `describe` returns."""
    contents, found = {}, {}
    for name, (size, _) in described.items():
        file = folder / name
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = file.stat()
            if not status.is_directory:
                contents[name] = read_bytes(file, size) if status.length == size else b""
                found[name] = [status.length, _checksum(contents[name])]
    return contents, found


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
