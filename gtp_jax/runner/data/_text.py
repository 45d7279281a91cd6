"""Text files: which ones, in which order, and what is wrong with them."""

from __future__ import annotations

import codecs
import dataclasses
import errno
import os
import stat
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..._foreign import open_regular, printable

_SHOWN = 3

# Directories that hold other people's packages or compiled files.
_SKIPPED = ("site-packages", "dist-packages", "__pycache__")

# Files of records by suffix: what they hold, and where the text of a record is. Read as plain text, they would train a
# model on their encoding.
_LINES = ("a JSON record per line", 'of `json.loads(line)["text"]` for each line')
_RECORDS = {
    ".jsonl": _LINES,
    ".ndjson": _LINES,
    ".json": ("JSON", "that it contains"),
    ".parquet": ("columns of records", 'of each row of `pandas.read_parquet(file)["text"]`'),
    ".bin": ("binary data, such as token ids", "of its token ids, decoded,"),
}
# Those that only data sets have; source code also has the others.
_DATA = (".jsonl", ".ndjson", ".parquet")


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents, in a fixed order.

    Attributes:
        name: what it is, for people.
        documents: UTF-8, without zero bytes, none of them empty.
        skipped: files of a directory that were left out because they are not UTF-8 text.
        unread: what else was left out, which older versions of gtp_jax read as text: for people.
    """

    name: str
    documents: tuple[bytes, ...]
    skipped: int = 0
    unread: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of all documents."""
        return sum(map(len, self.documents))


def read_text(
    paths: Sequence[str | os.PathLike[str]] = (),
    *,
    follow_links: bool = False,
    is_run: Callable[[Path], bool] = lambda _: False,
) -> Text:
    """Reads files and, recursively, directories; the source of the Python standard library if none are given.

    Documents come in the order of `paths`, those of a directory sorted by their path within it, so that the order is
    the same on every machine. Hidden files, installed packages and, within a directory, files that are not UTF-8 text
    are left out, these with a warning; of a file that begins with a byte order mark, the mark. Files of records (JSON,
    JSON lines, Parquet, token ids) are refused, because their encoding would pass for text; in a directory of text they
    are read like any other file, with a warning about JSON lines and Parquet.

    Args:
        paths: of files and directories.
        follow_links: follow links in a directory to files and directories outside of it; otherwise such links are left
            out, with a warning. A path that is a link itself is always followed.
        is_run: whether a directory is one that a run writes to; those within a directory are left out, with a warning.

    Raises:
        ValueError: if a path is missing, is no file or directory, cannot be read or is no text, if it is a file of
            records or a directory of nothing else or of a run, or if there is no text at all.
    """
    if not paths:
        return standard_library()
    documents: list[bytes] = []
    skipped: list[str] = []
    runs: list[str] = []
    links = marks = 0

    def noted(directory: Path) -> bool:
        found = is_run(directory)
        runs.extend([str(directory)] if found else [])
        return found

    for path in map(Path, paths):
        before = len(documents)
        if _is_directory(path):
            if is_run(path):
                raise ValueError(
                    f"`data` {path} is the directory of a run, and what a run writes is no text to train on. Give a "
                    "directory of text alone; one that has directories of runs in it is allowed."
                )
            outside: list[str] = []
            files = list(_files(path, outside=None if follow_links else outside, is_run=noted))
            _check_records(path, files)
            others: list[str] = []
            for file in files:
                text = _read(file)
                if fault := _fault(text):
                    others.append(f"{file} ({fault})")
                else:
                    content = text.removeprefix(codecs.BOM_UTF8)
                    documents += [content] if content else []
                    marks += len(content) < len(text)
            skipped += others
            links += len(outside)
            what = f"directory holds no UTF-8 text ({len(files)} files looked at, {len(others)} of them not text)"
        else:
            if _kind(path) in _RECORDS:
                raise ValueError(f"`data` {path} is a file of records: {_remedy(path)}")
            text = _read(path)
            if fault := _fault(text):
                raise ValueError(f"`data` {path} is not UTF-8 text ({fault}). Convert it, or leave it out.")
            content = text.removeprefix(codecs.BOM_UTF8)
            documents += [content] if content else []
            marks += len(content) < len(text)
            what = "file is empty"
        if len(documents) == before:
            left_out = f"; {links} links lead out of it, and are followed if you ask for it" if links else ""
            raise ValueError(f"`data` {path}: the {what}{left_out}. Give files with text in them.")
    if runs:
        warnings.warn(
            f"{len(runs)} directories of runs in `data` are left out, such as {printable(runs[0])}: what a run writes "
            "is no text to train on.",
            stacklevel=2,
        )
    if links:
        warnings.warn(
            f"{links} links in `data` lead out of their directory and are left out. Follow them with `follow_links` "
            "(`--follow-links`), or give what they lead to as `data`.",
            stacklevel=2,
        )
    if skipped:
        more = f" and {len(skipped) - _SHOWN} more" if len(skipped) > _SHOWN else ""
        warnings.warn(
            f"{len(skipped)} files in `data` are not UTF-8 text and are left out: "
            f"{printable(', '.join(skipped[:_SHOWN]))}{more}. To read them, convert those that are text to UTF-8.",
            stacklevel=2,
        )
    name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    unread = [f"{len(runs)} directories of runs"] if runs else []
    unread += [f"the byte order marks of {marks} files"] if marks else []
    return Text(name, tuple(documents), len(skipped), tuple(unread))


def standard_library() -> Text:
    """Returns the source of the Python standard library on this machine: real text of some tens of MB, without a
    download.

    Raises:
        ValueError: if this Python has been installed without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    texts = [_read(file) for file in _files(root, ".py", directories=False)] if root.is_dir() else []
    faults = [_fault(text) for text in texts]
    documents = tuple(text for text, fault in zip(texts, faults, strict=True) if text and not fault)
    if not documents:
        raise ValueError(f"{root} holds no source of the Python standard library. Give text of your own as `data`.")
    return Text("the source of the Python standard library", documents, sum(map(bool, faults)))


def _check_records(directory: Path, files: Sequence[Path]) -> None:
    """Checks that a directory holds text, and not only files of records.

    Raises:
        ValueError: naming one of the files. If there are other files too, a warning names it: for files that only data
            sets have, and for all files of records if they are most of the bytes.
    """
    records = [file for file in files if _kind(file) in _RECORDS]
    if records and len(records) == len(files):
        raise ValueError(
            f"`data` directory {directory} holds nothing but files of records, such as {records[0].name}: "
            f"{_remedy(records[0])}"
        )
    most = 2 * sum(file.stat().st_size for file in records) > sum(file.stat().st_size for file in files)
    data = records if most else [file for file in records if _kind(file) in _DATA]
    if data:
        warnings.warn(
            f"{len(data)} of the {len(files)} files in `data` directory {directory} are files of records, such as "
            f"{data[0].name}: {_remedy(data[0])} Those in UTF-8 are read as text now, others left out.",
            stacklevel=3,
        )


def _kind(file: Path) -> str:
    """Returns the suffix of a file of records, or of the file that a link leads to; otherwise the file's own."""
    suffixes = [path.suffix.lower() for path in (file, file.resolve())]
    return next((suffix for suffix in suffixes if suffix in _RECORDS), suffixes[0])


def _remedy(file: Path) -> str:
    """Returns what a file of records holds, what is read instead, and how to convert it."""
    holds, text = _RECORDS[_kind(file)]
    return (
        f"a {_kind(file)} file holds {holds}. Only plain text is read, a UTF-8 file per document, and the model would "
        f"learn the encoding. Write the text {text} to a .txt file of its own, and give their directory."
    )


def _is_directory(path: Path) -> bool:
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


def _files(
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


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"`data` {path} cannot be read: {error.strerror}. Check its permissions.") from error
    except ValueError as error:
        raise ValueError(f"`data` {error}") from error
    except MemoryError as error:
        raise ValueError(f"`data` {path} is larger than this machine's memory. Give less of it.") from error


def _fault(content: bytes) -> str:
    """Says why this is not UTF-8 text, if it is not. A zero byte, which separates documents, is no text."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return f"byte 0x{content[error.start]:02x} at {error.start} is not UTF-8"
    zero = content.find(b"\0")
    return f"a zero byte at {zero}" if zero >= 0 else ""
