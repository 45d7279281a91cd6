"""JSON lines: a record a line, of which one field is a text."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..._foreign import brief, open_regular, printable

# Bytes searched for line ends at a time.
_PIECE = 1 << 24
_SHOWN_FIELDS = 12


class JsonLines(Sequence[bytes]):
    """Documents of a file, read one at a time: memory holds the offsets of lines alone.

    Args:
        path: of the file.
        text_of: a document in UTF-8 from the record of its line; a ValueError says what is wrong with it.

    Raises:
        ValueError: if the file cannot be read; where a document is read, naming its line, if that is no JSON object in
            UTF-8, or has no document.
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
        # of the short ones, those without anything in them are left out
        short = [line for line in np.flatnonzero(lengths <= 2).tolist() if not self._line(starts, line).strip()]
        self._lines = np.delete(np.arange(len(lengths)), short)  # from 0
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
    """Returns a function from a record to the text in a field of it, in UTF-8.

    Raises:
        ValueError: from that function, if there is no such field, or it is no text.
    """

    def text_of(record: dict[str, Any]) -> bytes:
        if field not in record:
            names = [printable(str(name)) for name in list(record)[:_SHOWN_FIELDS]]
            more = f" and {len(record) - _SHOWN_FIELDS} more" if len(record) > _SHOWN_FIELDS else ""
            has = f"it has {', '.join(names)}{more}" if names else "it has none"
            raise ValueError(f"there is no field {field!r}; {has}. Give that of the text as --text-field.")
        return as_document(record[field], field)

    return text_of


def as_document(text: Any, field: str) -> bytes:
    """Returns a record's text in UTF-8.

    Raises:
        ValueError: if it is no text, or has a character that no document may have.
    """
    if not isinstance(text, str):
        raise ValueError(f"the field {field!r} is {brief(text)}, and must be text. Give another as --text-field.")
    try:
        document = text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has half a character, U+{ord(text[error.start]):04X}. Correct it.") from error
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
        raise ValueError(f"it is no JSON ({error.msg} at column {error.colno}). Write an object a line.") from error
    except ValueError as error:  # a number of too many digits
        raise ValueError(f"it is no JSON ({error}). Write an object a line.") from error
    if not isinstance(record, dict):
        raise ValueError(f"it holds {brief(record)}, and must be an object. Write an object a line.")
    return record


def _line_starts(content: Any) -> np.ndarray:
    """Returns where lines begin, `(lines + 1,)` int64, the last one the end of the content; after a byte order mark."""
    size = len(content)
    begin = 3 if content[:3] == b"\xef\xbb\xbf" else 0
    found = [np.asarray([begin], np.int64)]
    for start in range(begin, size, _PIECE):
        piece = np.frombuffer(content, np.uint8, min(_PIECE, size - start), start)
        found.append(np.flatnonzero(piece == ord("\n")) + start + 1)
    starts = np.concatenate(found)
    return starts if starts[-1] == size else np.append(starts, size)
