"""Files that `data` names: which ones, in which order, and what they hold by their suffix."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from ..._foreign import open_regular

# Directories that hold other people's packages or compiled files.
_SKIPPED = ("site-packages", "dist-packages", "__pycache__")


# Files of records, and of token ids, by suffix. Read as plain text, they would train a model on their encoding.
LINES = (".jsonl", ".ndjson")
TABLES = (".parquet",)
TOKENS = (".npy", ".bin")
SUFFIXES = (*LINES, *TABLES, *TOKENS, ".json")


def suffix_of(file: Path) -> str:
    """Returns the suffix of a file; of a link, that of the file that it leads to if it is one of `SUFFIXES`."""
    suffixes = [path.suffix.lower() for path in (file, file.resolve())]
    return next((suffix for suffix in suffixes if suffix in SUFFIXES), suffixes[0])


def is_directory(path: Path) -> bool:
    """Says whether a path is a directory, and not a file.

    Raises:
        ValueError: if there is nothing, or what cannot be looked at.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError as error:
        raise ValueError(f"`data` {path} does not exist. Give a text file, or a directory of text files.") from error
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
    """Yields the files below a directory, ordered by their path within it, part by part.

    Args:
        root: the directory.
        suffix: of the files' names.
        outside: takes links that lead out of the directory, which are then not followed; with `None` they are.
        directories: follow links to directories too.
        is_run: whether a directory is that of a run, whose files are left out.
    """
    home, seen = root.resolve(), set[tuple[int, int]]()

    def below(directory: Path) -> Iterator[Path]:
        try:
            status = directory.stat()
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            raise ValueError(f"`data` {directory} cannot be read: {error.strerror}. Check its permissions.") from error
        if (status.st_dev, status.st_ino) in seen:  # by another link
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
    """Says whether an entry is a link to nothing, or in a loop of links."""
    return entry.is_symlink() and not os.path.exists(entry.path)


def read_file(path: Path) -> bytes:
    """Returns the content of a file.

    Raises:
        ValueError: naming it, if it cannot be read.
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
