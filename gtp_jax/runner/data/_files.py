"""Finds and reads the files that `data` names: which ones, in which order, and what they hold by their suffix."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from ..._foreign import open_regular

# Directories that hold other people's packages or compiled files.
_SKIPPED = ("site-packages", "dist-packages", "__pycache__")


# The suffixes of files of records and of token ids. Read as plain text, they would train a model on their encoding.
LINES = (".jsonl", ".ndjson")
TABLES = (".parquet",)
TOKENS = (".npy", ".bin")
SUFFIXES = (*LINES, *TABLES, *TOKENS, ".json")


def suffix_of(file: Path) -> str:
    """Returns the suffix of a file, in lower case.

    If the file is a link, returns whichever of the suffixes of the link and of its target is one of `SUFFIXES`.
    """
    suffixes = [path.suffix.lower() for path in (file, file.resolve())]
    return next((suffix for suffix in suffixes if suffix in SUFFIXES), suffixes[0])


def is_directory(path: Path) -> bool:
    """Returns whether a path is a directory, and not a file.

    Raises:
        ValueError: if the path does not exist or cannot be read.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError as error:
        raise ValueError(f"`data` {path} does not exist. Give a file, or a directory of files.") from error
    except (OSError, ValueError) as error:  # a ValueError for a zero byte
        reason = "it is a link that leads to itself" if getattr(error, "errno", 0) == errno.ELOOP else str(error)
        raise ValueError(f"`data` {path} cannot be read: {reason}. Give another path.") from error


def files_in(
    root: Path,
    suffix: str = "",
    *,
    outside: list[str] | None = None,
    directories: bool = True,
    is_run: Callable[[Path], bool] = lambda _: False,
) -> Iterator[Path]:
    """Yields the files below a directory, ordered by their path within it, component by component.

    Args:
        root: the directory.
        suffix: the suffix that the files' names must have.
        outside: receives the links that lead out of the directory, which are not followed. If `None`, they are.
        directories: whether to follow links to directories; they are followed only if `outside` is `None`.
        is_run: returns whether a directory belongs to a run; its files are left out.
    """
    home, seen = root.resolve(), set[tuple[int, int]]()

    def below(directory: Path) -> Iterator[Path]:
        try:
            status = directory.stat()
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            raise ValueError(f"`data` {directory} cannot be read: {error.strerror}. Check its permissions.") from error
        if (status.st_dev, status.st_ino) in seen:  # already visited through another link
            return
        seen.add((status.st_dev, status.st_ino))
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _SKIPPED or _is_broken(entry):
                continue
            path, link = Path(entry.path), entry.is_symlink()
            if link and outside is not None and not path.resolve().is_relative_to(home):
                outside.append(entry.path)
            elif entry.is_dir(follow_symlinks=False) or (link and outside is None and directories and entry.is_dir()):
                if not is_run(path):
                    yield from below(path)
            elif entry.is_file() and entry.name.endswith(suffix):
                yield path

    return below(root)


def _is_broken(entry: os.DirEntry[str]) -> bool:
    """Returns whether an entry is a link to nothing, or in a loop of links."""
    return entry.is_symlink() and not os.path.exists(entry.path)


def read_file(path: Path) -> bytes:
    """Returns the content of a file.

    Raises:
        ValueError: if the file cannot be read; the message names it.
    """
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"`data` {path} cannot be read: {error.strerror}. Check its permissions.") from error
    except ValueError as error:
        raise ValueError(f"`data` {error}") from error
    except MemoryError as error:
        raise ValueError(f"`data` {path} is larger than this machine's memory. Give less of it.") from error
