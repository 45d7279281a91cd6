"""Reads files from untrusted sources.

Time and memory are bounded, no file outside the folder is read, and no control characters reach a terminal.
"""

from __future__ import annotations

import collections
import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO

# The index of the largest published models has about 10 MB and 100,000 tensors.
MAX_JSON_BYTES = 32 << 20
_MAX_VALUES = 2_000_000
_MAX_DEPTH = 64
_MAX_MESSAGE = 4_000

_BRIEF = reprlib.Repr(maxstring=80, maxother=80, maxlong=40, maxlevel=3)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading. Never blocks, as opening a FIFO could.

    Raises:
        ValueError: if the path is not a regular file, for example a device.
        OSError: if the path is a directory, or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: str | os.PathLike[str], mode: int) -> None:
    """Refuses what is not a regular file.

    Args:
        path: the path of the file, for the message.
        mode: the `st_mode` of the file.

    Raises:
        IsADirectoryError: if it is a directory.
        ValueError: if it is neither a regular file nor a directory; the message names what it is.
    """
    if stat.S_ISREG(mode):
        return
    kinds = {
        stat.S_IFIFO: "a FIFO",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
        stat.S_IFDIR: "a directory",
    }
    kind = IsADirectoryError if stat.S_ISDIR(mode) else ValueError
    raise kind(
        f"{printable(os.fspath(path))} is {kinds.get(stat.S_IFMT(mode), 'no regular file')}, but a regular file is "
        "expected. Give another file, or leave it out."
    )


def read_json(path: str | os.PathLike[str], *, limit: int = MAX_JSON_BYTES) -> Any:
    """Returns the content of a JSON file.

    Args:
        path: the path of the file.
        limit: the largest allowed size of the file in bytes.

    Raises:
        ValueError: if the file is not regular, is too large, or is not JSON that `parse_json` accepts.
        OSError: if the file cannot be read.
    """
    with open_regular(path) as file:
        text = file.read(limit + 1)
    if len(text) > limit:
        raise ValueError(f"it has more than {limit} bytes, which is the most that is read")
    return parse_json(text)


def parse_json(text: bytes, *, most_values: int = _MAX_VALUES) -> Any:
    """Returns the content of JSON text in UTF-8.

    Raises:
        ValueError: if the text is not JSON, has the same key twice in an object, or has more than `most_values` values
            or 64 levels.
    """
    # a value takes about 100 bytes in memory, but as few as 2 in the text
    if sum(map(text.count, (b",", b"[", b"{"))) > most_values:
        raise ValueError(f"it holds more than {most_values} values, which is the most that is read")
    try:
        content = json.loads(text.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise _too_deep() from None
    level, depth = [content], 0
    while level := [child for value in level for child in _children(value)]:
        depth += 1
        if depth > _MAX_DEPTH:
            raise _too_deep()
    return content


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _too_deep() -> ValueError:
    return ValueError(f"it has more than {_MAX_DEPTH} levels of lists and objects, which is the most that is read")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        ((name, _),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {brief(name)} occurs twice in an object")
    return fields


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file that a foreign file names, which must be in the same folder.

    Links may lead to other files in the folder, and to the `blobs` of Hugging Face's cache, whose snapshots are folders
    of links to them.

    Args:
        folder: the folder of the file that contains the name.
        name: the name of the file, without directories.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the name is not that of a file in this folder, if it is a link that leads elsewhere, or if it is
            not a regular file.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise ValueError(f"{brief(name)} is not a file name in {folder}; a name without directories is expected")
    place = folder.resolve()
    try:
        target = (place / name).resolve(strict=True)
    except RuntimeError as error:  # Python 3.12 reports a loop of links this way
        raise ValueError(f"{folder / name} is a link that leads to itself. Replace it with the file.") from error
    except OSError as error:
        raise FileNotFoundError(f"{name} is not in {folder} ({error.strerror}). Download it as well.") from error
    blobs = place.parent.parent / "blobs" if place.parent.name == "snapshots" else place
    if not (target.is_relative_to(place) or target.parent == blobs):
        raise ValueError(
            f"{folder / name} is a link to {printable(str(target))}, outside the folder. Copy the file into it, or "
            "give the folder that contains the file."
        )
    check_regular(folder / name, target.stat().st_mode)
    return target


def printable(text: str, *, lines: bool = False) -> str:
    """Returns text with escapes for unprintable characters, so that a terminal shows them and does not obey them.

    Args:
        text: any text.
        lines: whether to keep newlines and tabs; otherwise these are escaped too.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c in "\n\t") else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def message(error: BaseException) -> str:
    """Returns an error's message for a terminal: printable, and truncated if it is long."""
    text = printable(str(error)[: _MAX_MESSAGE + 1], lines=True)
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} ..."


def brief(value: Any) -> str:
    """Returns the `repr` of a foreign value, truncated if it is long."""
    return _BRIEF.repr(value)
