"""Reads a step's JSON files as untrusted input: limits their size, and checks the type of every field before use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from .._foreign import MAX_JSON_BYTES, brief, check_regular, open_regular, printable

# Limits on the files stored with a step's arrays: their number, the bytes of each, and the length of a name in
# characters. Tokenizers have up to about 50 MB.
MAX_FILES, MAX_FILE_BYTES, MAX_NAME = 64, 64 << 20, 100
# The limit of Linux file systems on the length of a name, in bytes.
MAX_NAME_BYTES = 255

_MAX_DIMS = 32


def read_file(path: Any) -> str:
    """Returns the text of a step's JSON file.

    Raises:
        ValueError: if it is not a regular file, or larger than `MAX_JSON_BYTES`.
        OSError: if it cannot be read.
    """
    return read_bytes(path, MAX_JSON_BYTES).decode(errors="replace")


def read_bytes(path: Any, limit: int) -> bytes:
    """Returns the content of a step's file of at most `limit` bytes.

    Raises:
        ValueError: if it is not a regular file, or is larger.
        OSError: if it cannot be read.
    """
    if "://" in str(path):
        size = path.stat().length
        content = path.read_bytes() if size <= limit else b""
    else:
        with open_regular(path) as file:
            content = file.read(limit + 1)
        size = len(content)
    if size > limit:
        raise ValueError(f"has more than {limit} bytes, the largest size that is read")
    return content


def check_manifest(content: Any) -> None:
    """Checks the types of a manifest's fields.

    Raises:
        ValueError: if a field is missing or has the wrong type; names the first one.
    """
    _expect("the manifest", content, "an object", _is_object)
    for name, what, fits in _FIELDS:
        if name in content:
            _expect(f"`{name}`", content[name], what, fits)
        elif name != "files":  # absent if there are none
            raise ValueError(f"has no `{name}`")
    for name, leaf in content["leaves"].items():
        _expect(f"`leaves` {brief(name)}", leaf, "an object with shape, dtype and digest", _is_leaf)


def check_sums(content: Any) -> None:
    """Checks the types of the sizes and sums of files.

    Raises:
        ValueError: if an entry has the wrong type; names the first one.
    """
    _expect("it", content, "an object", _is_object)
    for name, pair in content.items():
        _expect(brief(name), pair, "a size and a sum", lambda pair: _is_counts(pair) and len(pair) == 2)


def is_plain_name(name: Any) -> bool:
    """Returns whether a name is a plain file name: printable, not too long, not hidden, and without slashes and
    backslashes."""
    return (
        _is_text(name)
        and 0 < len(name) <= MAX_NAME
        and name.isprintable()
        and len(name.encode()) <= MAX_NAME_BYTES
        and not name.startswith(".")
        and not set(name) & set("/\\")
    )


def files_below(directory: Any) -> list[str]:
    """Returns the relative paths of all files below a directory; empty if it does not exist."""
    names: list[str] = []
    for path in directory.iterdir() if directory.exists() else ():
        names += [f"{path.name}/{name}" for name in files_below(path)] if path.is_dir() else [path.name]
    return names


def strange_files(directory: Any) -> list[str]:
    """Returns a line for each entry below a local directory, at any depth, that is neither a regular file nor a
    directory. Such entries must not be opened, because that may block forever or lead outside the directory."""
    if "://" in str(directory) or not os.path.isdir(directory):
        return []
    lines = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                lines += strange_files(entry.path)
            elif entry.is_symlink():
                lines.append(f"{printable(entry.path)}: a link, which no checkpoint contains")
            else:
                try:
                    check_regular(entry.path, entry.stat(follow_symlinks=False).st_mode)
                except ValueError as error:
                    lines.append(str(error))
    return lines


def _expect(name: str, value: Any, what: str, fits: Callable[[Any], bool]) -> None:
    if not fits(value):
        raise ValueError(f"{name} is {brief(value)}; it must be {what}")


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_DIMS and all(map(_is_count, value))


def _is_leaf(value: Any) -> bool:
    return (
        _is_object(value)
        and _is_counts(value.get("shape"))
        and _is_dtype(value.get("dtype"))
        and _is_text(value.get("digest"))
    )


def _is_dtype(value: Any) -> bool:
    if not _is_text(value) or value.startswith("key<"):
        return _is_text(value)
    try:
        return str(jnp.dtype(value)) == value
    except (TypeError, ValueError, SyntaxError):  # numpy parses lists of types
        return False


def _is_recipe(value: Any) -> bool:
    return value is None or (_is_object(value) and _is_text(value.get("name")))


def _is_loss(value: Any) -> bool:
    return value is None or type(value) in (int, float)


def _is_texts(value: Any) -> bool:
    return _is_object(value) and all(map(_is_text, value.values()))


def _are_files(value: Any) -> bool:
    return (
        _is_object(value)
        and len(value) <= MAX_FILES
        and all(is_plain_name(name) and _is_file(entry) for name, entry in value.items())
    )


def _is_file(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and _is_count(entry[0])
        and entry[0] <= MAX_FILE_BYTES
        and _is_text(entry[1])
    )


_FIELDS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("format", "a whole number", _is_count),
    ("gtp_jax", "text", _is_text),
    ("jax", "text", _is_text),
    ("orbax-checkpoint", "text", _is_text),
    ("step", "a whole number", _is_count),
    ("leaves", "an object of arrays", _is_object),
    ("static", "an object of texts", _is_texts),
    ("extra", "an object", _is_object),
    ("recipe", "an object with a name", _is_recipe),
    ("save", "text", _is_text),
    ("loss", "a number", _is_loss),
    ("files", "an object of sizes and checksums by file name", _are_files),
)
