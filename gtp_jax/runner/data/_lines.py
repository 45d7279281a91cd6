"""Reads JSON Lines files: one record per line, with a text in one of its fields."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..._foreign import brief, open_regular, printable

# The number of bytes that are searched for line ends at a time.
_PIECE = 1 << 24
_SHOWN_FIELDS = 12


class JsonLines(Sequence[bytes]):
    """The documents of a file, read one at a time: memory holds only the offsets of the lines.

    Args:
        path: the path of the file.
        text_of: returns the document of a line's record, in UTF-8; raises a ValueError that says what is wrong with
            the record.

    Raises:
        ValueError: if the file cannot be read. Reading a document raises one, which names the line, if the line is not
            a JSON object in UTF-8 or has no document.
    """

    def __init__(self, path: Path, text_of: Callable[[dict[str, Any]], bytes]) -> None:
        self._path, self._text_of = path, text_of
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise ValueError(f"`data` {path} cannot be read: {error.strerror}. Check its permissions.") from error
        except ValueError as error:
            raise ValueError(f"`data` {error}") from error
        starts = _line_starts(self._content)
        lengths = np.diff(starts)
        # lines of at most two bytes are left out if they are blank
        short = [line for line in np.flatnonzero(lengths <= 2).tolist() if not self._line(starts, line).strip()]
        self._lines = np.delete(np.arange(len(lengths)), short)  # numbered from 0
        self._starts = starts

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        line = int(self._lines[number])
        try:
            return self._text_of(_record(self._line(self._starts, line)))
        except ValueError as error:
            raise ValueError(f"`data` {self._path}, line {line + 1}: {error}") from error

    def _line(self, starts: np.ndarray, line: int) -> bytes:
        return self._content[int(starts[line]) : int(starts[line + 1])]


def text_in(field: str) -> Callable[[dict[str, Any]], bytes]:
    """Returns a function that returns the text in a field of a record, in UTF-8.

    Raises:
        ValueError: raised by that function if the record does not have the field, or the field is not text.
    """

    def text_of(record: dict[str, Any]) -> bytes:
        if field not in record:
            names = [printable(str(name)) for name in list(record)[:_SHOWN_FIELDS]]
            more = f" and {len(record) - _SHOWN_FIELDS} more" if len(record) > _SHOWN_FIELDS else ""
            has = f"it has {', '.join(names)}{more}" if names else "it has none"
            raise ValueError(
                f"there is no field {field!r}; {has}. Name the field of the text with --text-field, or write "
                "conversations as `messages`, objects with `role` and `content`."
            )
        return as_document(record[field], field)

    return text_of


def as_document(text: Any, field: str) -> bytes:
    """Returns a record's text in UTF-8.

    Raises:
        ValueError: if it is not text, or has a character that a document must not have.
    """
    if not isinstance(text, str):
        raise ValueError(f"the field {field!r} is {brief(text)}; it must be text. Name another with --text-field.")
    try:
        document = text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has a lone surrogate, U+{ord(text[error.start]):04X}. Correct it.") from error
    if (zero := document.find(b"\0")) >= 0:
        raise ValueError(f"the text has a zero byte at {zero}, which separates documents. Remove it.")
    return document


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte 0x{line[error.start]:02x} is not UTF-8. Convert the file.") from error
    except RecursionError:
        raise ValueError("it has too many levels of lists and objects. Leave it out.") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg} at column {error.colno}). Write one object per line.") from error
    except ValueError as error:  # a number with too many digits
        raise ValueError(f"it is not JSON ({error}). Write one object per line.") from error
    if not isinstance(record, dict):
        raise ValueError(f"it holds {brief(record)}; it must be an object. Write one object per line.")
    return record


def _line_starts(content: Any) -> np.ndarray:
    """Returns the offset of each line, `(lines + 1,)` int64, and of the end of the content.

    The first line begins after the byte order mark, if there is one.
    """
    size = len(content)
    begin = 3 if content[:3] == b"\xef\xbb\xbf" else 0
    found = [np.asarray([begin], np.int64)]
    for start in range(begin, size, _PIECE):
        piece = np.frombuffer(content, np.uint8, min(_PIECE, size - start), start)
        found.append(np.flatnonzero(piece == ord("\n")) + start + 1)
    starts = np.concatenate(found)
    return starts if starts[-1] == size else np.append(starts, size)
