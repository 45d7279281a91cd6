"""Text files: which ones, in which order, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

# Directories that hold other people's packages or compiled files.
_SKIPPED = ("site-packages", "dist-packages", "__pycache__")


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents, in a fixed order.

    Attributes:
        name: what it is, for people.
        documents: UTF-8, without zero bytes, none of them empty.
        skipped: files of a directory that were left out because they are not UTF-8 text.
    """

    name: str
    documents: tuple[bytes, ...]
    skipped: int = 0

    @property
    def bytes(self) -> int:
        """Size of all documents."""
        return sum(map(len, self.documents))


def read_text(paths: Sequence[str | os.PathLike[str]] = ()) -> Text:
    """Reads files and, recursively, directories; the source of the Python standard library if none are given.

    Documents come in the order of `paths`, those of a directory sorted by their path within it, so that the order is
    the same on every machine. Hidden files, installed packages and, within a directory, files that are not UTF-8 text
    are left out.

    Raises:
        ValueError: if a path is missing, cannot be read or is no text, or if there is no text at all.
    """
    if not paths:
        return standard_library()
    documents: list[bytes] = []
    skipped = 0
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"`data` {path} does not exist. Give a text file, or a directory of text files.")
        before = len(documents)
        if path.is_dir():
            texts = [_read(file) for file in _files(path)]
            documents += [text for text in texts if text]
            skipped += sum(text is None for text in texts)
            what = f"directory holds no UTF-8 text ({len(texts)} files looked at, {skipped} of them not text)"
        else:
            text = _read(path)
            if text is None:
                raise ValueError(f"`data` {path} is not UTF-8 text. Convert it, or leave it out.")
            documents += [text] if text else []
            what = "file is empty"
        if len(documents) == before:
            raise ValueError(f"`data` {path}: the {what}. Give files with text in them.")
    name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    return Text(name, tuple(documents), skipped)


def standard_library() -> Text:
    """Returns the source of the Python standard library on this machine: real text of some tens of MB, without a
    download.

    Raises:
        ValueError: if this Python has been installed without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    texts = [_read(file) for file in _files(root, suffix=".py")] if root.is_dir() else []
    documents = tuple(text for text in texts if text)
    if not documents:
        raise ValueError(f"{root} holds no source of the Python standard library. Give text of your own as `data`.")
    return Text("the source of the Python standard library", documents, sum(text is None for text in texts))


def _files(root: Path, suffix: str = "") -> Iterator[Path]:
    """Yields the files below a directory, ordered by their path within it, part by part."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError as error:
        raise ValueError(f"`data` {root} cannot be read: {error.strerror}. Check its permissions.") from error
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _SKIPPED:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path), suffix)
        elif entry.is_file() and entry.name.endswith(suffix):
            yield Path(entry.path)


def _read(path: Path) -> bytes | None:
    """Returns the content of a file; `None` if it is not UTF-8 text. A zero byte, which separates documents, is no
    text."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"`data` {path} cannot be read: {error.strerror}. Check its permissions.") from error
    if b"\0" in content:
        return None
    try:
        content.decode()
    except UnicodeDecodeError:
        return None
    return content
