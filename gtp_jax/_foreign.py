"""Reads files that others wrote: bounded in time and memory, nothing outside the folder, nothing a terminal obeys."""

from __future__ import annotations

import collections
import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO

# The index of the largest published models has some 10 MB and 100,000 tensors.
MAX_JSON_BYTES = 32 << 20
_MAX_VALUES = 2_000_000
_MAX_DEPTH = 64
_MAX_MESSAGE = 4_000

_BRIEF = reprlib.Repr(maxstring=80, maxother=80, maxlong=40, maxlevel=3)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file to read; never waits, as opening a FIFO would.

    Raises:
        ValueError: if it is something else, a device for instance.
        OSError: if it is a directory, or cannot be opened.
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
        path: of the file, for the message.
        mode: its `st_mode`.

    Raises:
        IsADirectoryError, ValueError: naming what it is.
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
        f"{printable(os.fspath(path))} is {kinds.get(stat.S_IFMT(mode), 'no regular file')}, and a regular file is "
        "expected. Give another, or leave it out."
    )


def read_json(path: str | os.PathLike[str], *, limit: int = MAX_JSON_BYTES) -> Any:
    """Returns the content of a JSON file.

    Args:
        path: of the file.
        limit: bytes that it may have.

    Raises:
        ValueError: if it is no regular file, too large, or not JSON as `parse_json` takes it.
        OSError: if it cannot be read.
    """
    with open_regular(path) as file:
        text = file.read(limit + 1)
    if len(text) > limit:
        raise ValueError(f"it has more than {limit} bytes, which is the most that is read")
    return parse_json(text)


def parse_json(text: bytes, *, most_values: int = _MAX_VALUES) -> Any:
    """Returns the content of JSON text in UTF-8.

    Raises:
        ValueError: if it is not JSON, has an object with one key twice, more than `most_values` values, or more than 64
            levels.
    """
    # a value takes some 100 bytes in memory, and as few as 2 in the text
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
        raise ValueError(f"{brief(name)} is there twice")
    return fields


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file that a foreign file names, which must be a file of the folder.

    Links may lead to other files of the folder, and to the `blobs` of Hugging Face's cache, whose snapshots are
    folders of links to them.

    Args:
        folder: where the naming file is.
        name: the file's name, without directories.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the name is not that of a file in this folder, or the file lies elsewhere.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise ValueError(f"{brief(name)} is not the name of a file in {folder}; names without directories are expected")
    place = folder.resolve()
    try:
        target = (place / name).resolve(strict=True)
    except RuntimeError as error:  # Python 3.12 reports a loop of links so
        raise ValueError(f"{folder / name} is a link that leads to itself. Replace it by the file.") from error
    except OSError as error:
        raise FileNotFoundError(f"{name} is not in {folder} ({error.strerror}). Download it as well.") from error
    blobs = place.parent.parent / "blobs" if place.parent.name == "snapshots" else place
    if not (target.is_relative_to(place) or target.parent == blobs):
        raise ValueError(
            f"{folder / name} is a link to {printable(str(target))}, outside of the folder. Copy the file into it, or "
            "give the folder in which it lies."
        )
    check_regular(folder / name, target.stat().st_mode)
    return target


def printable(text: str, *, lines: bool = False) -> str:
    """Returns text in which escapes stand for what is not printable, so that a terminal shows it and obeys none of it.

    Args:
        text: any.
        lines: whether it may have several lines; otherwise their ends are escaped too.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c in "\n\t") else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def message(error: BaseException) -> str:
    """Returns an error's message for a terminal: printable, and cut if it is long."""
    text = printable(str(error)[: _MAX_MESSAGE + 1], lines=True)
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} ..."


def brief(value: Any) -> str:
    """Returns a foreign value as Python writes it, cut if it is long."""
    return _BRIEF.repr(value)
