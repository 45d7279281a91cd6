"""Maps files of token ids into memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..._foreign import open_regular
from ..._words import TOKEN_DTYPES
from ._documents import Documents
from ._files import suffix_of
from ._tokens import Tokenizer

# The header of llm.c's files has 256 32-bit integers. The first two (magic number and version) determine the dtype; the
# third is the number of tokens.
_HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
_HEADER_NUMBERS = 256

# The number of ids that are checked at a time.
_PIECE = 1 << 22
# The number of ids that are decoded to estimate the number of bytes per token.
_SAMPLE = 1 << 16


def read_tokens(path: Path, tokenizer: Tokenizer, dtype: str | None = None) -> Documents:
    """Returns the memory-mapped tokens of a `.npy` or `.bin` file; documents end with the tokenizer's separator.

    Args:
        path: the path of the file.
        tokenizer: the tokenizer that the ids belong to.
        dtype: the dtype of a `.bin` file's ids, which are little endian; by default, the header determines it.

    Raises:
        ValueError: if the file cannot be read, is not such a file, or has an id that the tokenizer does not know.
    """
    try:
        with open_regular(path):
            pass
        tokens = _array(path) if suffix_of(path) == ".npy" else _binary(path, dtype)
    except OSError as error:
        raise ValueError(f"`data` {path} cannot be read: {error.strerror or error}. Check its permissions.") from error
    except ValueError as error:
        raise ValueError(f"`data` {path} holds no token ids: {error}") from error
    ends: list[np.ndarray] = []
    for start in range(0, len(tokens), _PIECE):
        piece = tokens[start : start + _PIECE]
        if len(outside := np.flatnonzero((piece < 0) | (piece >= tokenizer.vocab_size))):
            raise ValueError(
                f"`data` {path} has the id {piece[outside[0]]} at {start + outside[0]}, but the tokenizer "
                f"{tokenizer.name} knows 0 to {tokenizer.vocab_size - 1}. Give --tokenizer the tokenizer.json that "
                "made the file; for a .bin file, check --token-dtype."
            )
        ends.append(np.flatnonzero(piece == tokenizer.separator) + start + 1)
    found = np.concatenate([[0], *ends]).astype(np.int64)
    return Documents(tokens, found if found[-1] == len(tokens) else np.append(found, len(tokens)))


def split_tokens(documents: Documents, held_out: float) -> tuple[Documents, Documents]:
    """Splits off the last documents of a file, which have at most the share `held_out` of its tokens.

    If the last document alone is longer, its end is split off.
    """
    size, offsets = len(documents.tokens), documents.offsets
    cut = wanted = size - int(size * held_out)
    if (later := offsets[offsets >= wanted])[0] < size:
        cut = int(later[0])
    before, after = offsets[offsets < cut], offsets[offsets > cut]
    return (
        Documents(documents.tokens[:cut], np.append(before, cut)),
        Documents(documents.tokens[cut:], np.append(cut, after) - cut),
    )


def bytes_of(tokens: np.ndarray, tokenizer: Tokenizer) -> float:
    """Returns the size in bytes of the text of tokens, estimated from the first ones."""
    first = tokens[:_SAMPLE].tolist()
    return len(tokens) * len(tokenizer.decode(first).encode()) / max(1, len(first))


def _array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # a forged header may raise anything
        raise ValueError(f"it cannot be read ({error}). Write it with numpy.save.") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        what = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "several arrays"
        raise ValueError(f"it has {what}. Save one one-dimensional array of integers.")
    return array


def _binary(path: Path, dtype: str | None) -> np.ndarray:
    size = path.stat().st_size
    head = np.fromfile(path, "<i4", 3) if size >= 4 * _HEADER_NUMBERS else np.zeros(3, "<i4")
    if (kind := _HEADERS.get((int(head[0]), int(head[1])))) is not None:
        begin, count = 4 * _HEADER_NUMBERS, int(head[2])
        if begin + count * np.dtype(kind).itemsize != size:
            raise ValueError(
                f"its header says {count} tokens of {np.dtype(kind)}, but it has {size} bytes. Download it again."
            )
        if dtype is not None and np.dtype(dtype) != np.dtype(kind):
            raise ValueError(f"its header says {np.dtype(kind)}, but --token-dtype says {dtype}. Leave the flag out.")
        return np.memmap(path, kind, "r", begin, (count,)) if count else np.zeros(0, kind)
    if dtype is None:
        raise ValueError(f"its dtype is unknown. Give --token-dtype, one of {', '.join(TOKEN_DTYPES)}.")
    kind = np.dtype(dtype).newbyteorder("<")
    if size % kind.itemsize:
        raise ValueError(f"its {size} bytes are not a multiple of the {kind.itemsize} of {dtype}. Check --token-dtype.")
    return np.memmap(path, kind, "r") if size else np.zeros(0, kind)
