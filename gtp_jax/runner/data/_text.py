"""Reads texts from files and directories, and reports what is wrong with them."""

from __future__ import annotations

import bisect
import codecs
import dataclasses
import itertools
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..._foreign import printable
from ._chat import holds_conversations
from ._files import LINES, TABLES, TOKENS, files_in, is_directory, read_file, suffix_of
from ._lines import JsonLines, text_in
from ._tables import is_saved, read_parquet, read_saved

_SHOWN = 3

# Files with these suffixes are left out of a directory of text. .bin and .json files are not, as they have many uses.
_RECORDS = (*LINES, *TABLES, ".npy")


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents, in a fixed order.

    Attributes:
        name: a name of the text for messages.
        documents: the documents, in UTF-8 without zero bytes. Documents of records are read one at a time and may be
            empty.
        skipped: the number of files in directories that were left out because they are not UTF-8 text.
        unread: descriptions of what else was left out but was read as text by older versions of gtp_jax.
        token_files: files of token ids, in addition to the documents.
        chat_files: files of conversations, in addition to the documents.
        records: whether some documents are the texts of records; otherwise each is a file.
    """

    name: str
    documents: Sequence[bytes]
    skipped: int = 0
    unread: tuple[str, ...] = ()
    token_files: tuple[Path, ...] = ()
    chat_files: tuple[Path, ...] = ()
    records: bool = False

    @property
    def bytes(self) -> int:
        """The total size of all documents, in bytes."""
        return sum(map(len, self.documents))


def read_text(
    paths: Sequence[str | os.PathLike[str]] = (),
    *,
    text_field: str = "text",
    follow_links: bool = False,
    is_run: Callable[[Path], bool] = lambda _: False,
) -> Text:
    """Reads files and, recursively, directories; the source of the Python standard library if none are given.

    A plain text file is one document. A file of records (JSON Lines, Parquet) holds many documents, each in a field of
    a record; so does a directory that the `datasets` package has saved. Files of token ids, and JSON Lines files whose
    first record has `messages` and no text, are listed in the result but not read here.

    If files of records and token ids have most of the bytes of a directory, only these are read; its other files are
    left out, with a warning. Otherwise it is a directory of text, and its files of records are left out, with a
    warning.

    Documents are in the order of `paths`, and within a directory in the order of their paths, so that the order is the
    same on every machine. Hidden files and installed packages are left out. Files that are not UTF-8 text are left out
    of a directory of text, with a warning. A byte order mark at the beginning of a file is removed.

    Args:
        paths: the paths of files and directories.
        text_field: the name of the field that holds the text of a record.
        follow_links: whether to follow links in a directory to files and directories outside of it; otherwise such
            links are left out, with a warning. A path that is itself a link is always followed.
        is_run: returns whether a directory is one that a run writes to; those within a directory are left out, with a
            warning.

    Raises:
        ValueError: if a path is missing, is not a file or directory, cannot be read, is not text, is JSON other than
            JSON Lines, or is the directory of a run, or if there is no text at all. Reading the documents of records
            raises one if a record has no text.
        ModuleNotFoundError: if a package that reads a file is not installed.
    """
    if not paths:
        return standard_library()
    reader = _Reader(text_field, follow_links, is_run)
    for path in map(Path, paths):
        if is_directory(path):
            reader.add_directory(path)
        else:
            reader.add_file(path)
    reader.warn()
    name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    return reader.text(name)


class _Reader:
    """Collects documents file by file, and records what is left out."""

    def __init__(self, text_field: str, follow_links: bool, is_run: Callable[[Path], bool]) -> None:
        self._field, self._follow_links, self._is_run = text_field, follow_links, is_run
        self._plain: list[bytes] = []  # plain text files since the last file of records
        self._parts: list[Sequence[bytes]] = [self._plain]
        self._token_files: list[Path] = []
        self._chat_files: list[Path] = []
        self._skipped: list[str] = []
        self._runs: list[str] = []
        self._records: list[str] = []  # left out
        self._others: list[str] = []  # left out of directories of records
        self._links = self._marks = 0

    def text(self, name: str) -> Text:
        documents = tuple(self._plain) if len(self._parts) == 1 else _Chained([part for part in self._parts if part])
        unread = [f"{len(self._runs)} directories of runs"] if self._runs else []
        unread += [f"{len(self._records)} files of records"] if self._records else []
        unread += [f"the byte order marks of {self._marks} files"] if self._marks else []
        records = len(self._parts) > 1
        files = tuple(self._token_files), tuple(self._chat_files)
        return Text(name, documents, len(self._skipped), tuple(unread), *files, records)

    def add_file(self, path: Path) -> None:
        kind = suffix_of(path)
        if kind in (*LINES, *TABLES, *TOKENS):
            self._add_records(path)
            return
        if kind == ".json":
            raise ValueError(
                f"`data` {path} is JSON, which is read only as JSON Lines. Write one record per line to a .jsonl file, "
                "or the text that it contains to a .txt file."
            )
        if fault := self._add_text(path):
            raise ValueError(f"`data` {path} is not UTF-8 text ({fault}). Convert it, or leave it out.")

    def add_directory(self, path: Path) -> None:
        if self._is_run(path):
            raise ValueError(
                f"`data` {path} is the directory of a run, and what a run writes is not text to train on. Give a "
                "directory of text; it may contain directories of runs."
            )
        if is_saved(path):
            self._add_part(path, read_saved(path, self._field))
            return
        outside: list[str] = []
        files = list(files_in(path, outside=None if self._follow_links else outside, is_run=self._noted))
        self._links += len(outside)
        records = [file for file in files if suffix_of(file) in (*LINES, *TABLES, *TOKENS)]
        if _are_most(records, files):
            self._others += [str(file) for file in files if file not in set(records)]
            for file in records:
                self._add_records(file)
            return
        json = [file for file in files if suffix_of(file) == ".json"]
        if len(json) == len(files) > 0:
            self.add_file(json[0])
        if _are_most(json, files):
            warnings.warn(
                f"{len(json)} of the {len(files)} files in `data` directory {path} are JSON, such as {json[0].name}, "
                "and have most of its bytes. They are read as text, so the model learns their encoding. Write the text "
                "that they contain to .txt files, or one record per line to a .jsonl file.",
                stacklevel=4,
            )
        self._records += [str(file) for file in files if suffix_of(file) in _RECORDS]
        before, skipped = sum(map(len, self._parts)), len(self._skipped)
        for file in files:
            if suffix_of(file) not in _RECORDS and (fault := self._add_text(file, required=False)):
                self._skipped.append(f"{file} ({fault})")
        if sum(map(len, self._parts)) == before:
            left_out = f"; {self._links} links lead out of it: follow them with --follow-links" if outside else ""
            raise ValueError(
                f"`data` {path}: the directory holds no UTF-8 text ({len(files)} files read, "
                f"{len(self._skipped) - skipped} of them not text){left_out}. Give files with text in them."
            )

    def _add_text(self, path: Path, *, required: bool = True) -> str:
        """Adds a file as a document. If it is not text, returns why instead."""
        text = read_file(path)
        if fault := _fault(text):
            return fault
        content = text.removeprefix(codecs.BOM_UTF8)
        if not content and required:
            raise ValueError(f"`data` {path}: the file is empty. Give files with text in them.")
        self._plain += [content] if content else []
        self._marks += len(content) < len(text)
        return ""

    def _add_records(self, path: Path) -> None:
        if suffix_of(path) in TOKENS:
            self._token_files.append(path)
        elif suffix_of(path) in TABLES:
            self._add_part(path, read_parquet(path, self._field))
        elif holds_conversations(path, self._field):
            self._chat_files.append(path)
        else:
            self._add_part(path, JsonLines(path, text_in(self._field)))

    def _add_part(self, path: Path, documents: Sequence[bytes]) -> None:
        if not len(documents):
            raise ValueError(f"`data` {path}: there is no record. Give files with records in them.")
        self._plain = []
        self._parts += [documents, self._plain]

    def _noted(self, directory: Path) -> bool:
        found = self._is_run(directory)
        self._runs.extend([str(directory)] if found else [])
        return found

    def warn(self) -> None:
        """Warns about everything that was left out."""
        if self._runs:
            _warn(
                f"{len(self._runs)} directories of runs in `data` are left out, such as {printable(self._runs[0])}: "
                "what a run writes is not text to train on."
            )
        if self._links:
            _warn(
                f"{self._links} links in `data` lead out of their directory and are left out. Follow them with "
                "`follow_links` (`--follow-links`), or give their targets as `data`."
            )
        if self._skipped:
            _warn(
                f"{len(self._skipped)} files in `data` are not UTF-8 text and are left out: {_some(self._skipped)}. To "
                "read those that are text, convert them to UTF-8."
            )
        if self._records:
            _warn(
                f"{len(self._records)} files of records in directories of text are left out: {_some(self._records)}. "
                "To read them, give them as `data` of their own."
            )
        if self._others:
            _warn(
                f"{len(self._others)} other files in directories of records are left out: {_some(self._others)}. To "
                "read them, give them as `data` of their own."
            )


class _Chained(Sequence[bytes]):
    """Several sequences of documents, chained."""

    def __init__(self, parts: Sequence[Sequence[bytes]]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        part = bisect.bisect_right(self._ends, number)
        return self._parts[part][number - self._ends[part] + len(self._parts[part])]

    def __iter__(self) -> Iterator[bytes]:
        return itertools.chain.from_iterable(self._parts)


def standard_library() -> Text:
    """Returns the source of the Python standard library: some tens of MB of real text, without a download.

    Raises:
        ValueError: if this Python has been installed without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    texts = [read_file(file) for file in files_in(root, ".py", directories=False)] if root.is_dir() else []
    faults = [_fault(text) for text in texts]
    documents = tuple(text for text, fault in zip(texts, faults, strict=True) if text and not fault)
    if not documents:
        raise ValueError(f"{root} holds no source of the Python standard library. Give text of your own as `data`.")
    return Text("the source of the Python standard library", documents, sum(map(bool, faults)))


def _are_most(some: Sequence[Path], files: Sequence[Path]) -> bool:
    """Returns whether `some` have more than half of the bytes of `files`, or are all of them."""
    sizes = [sum(file.stat().st_size for file in of) for of in (some, files)]
    return bool(some) and (len(some) == len(files) or 2 * sizes[0] > sizes[1])


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{printable(', '.join(names[:_SHOWN]))}{more}"


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def _fault(content: bytes) -> str:
    """Returns why this is not UTF-8 text; empty if it is. Text has no zero bytes, because they separate documents."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return f"byte 0x{content[error.start]:02x} at {error.start} is not UTF-8"
    zero = content.find(b"\0")
    return f"a zero byte at {zero}" if zero >= 0 else ""
