"""Turns text into token ids: bytes, or the ids of a Hugging Face tokenizer file."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..._foreign import open_regular
from ...ops import check_ids
from ._documents import Documents

# Names that published tokenizers give to the end of a document.
_END = ("<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "</s>", "<eos>", "[SEP]")

# The number of documents handed to the tokenizer's threads at a time.
_CHUNK = 256
# The number of bytes handed to them at a time; a longer document is encoded in parts.
_PART_BYTES = 1 << 24

_MAX_FILE_BYTES = 1 << 28

_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
# Ids are limited because a model has a row for every id.
_MAX_IDS = 1 << 24


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Turns documents into tokens.

    Attributes:
        name: a name for messages.
        vocab_size: the number of tokens, including the separator.
        separator: the token that follows each document.
        encode: returns the tokens of each document, without separators.
        decode: returns the text of tokens; bytes that are not a character, and unknown tokens, become U+FFFD.
        published: returns the tokens of a prompt as the published tokenizer would: it adds the special tokens that
            begin a text, and recognizes those that are written out in it.
        marked: returns, for each text, its tokens and their `(begin, end)` in characters, `(tokens, 2)`. Special tokens
            that are written out in a text are recognized; no others are added.
        special: the ids of special tokens by their texts.
        added: the texts of other tokens that were added to the vocabulary. They are recognized in every text.
    """

    name: str
    vocab_size: int
    separator: int
    encode: Callable[[Iterable[bytes]], Iterable[np.ndarray]]
    decode: Callable[[Sequence[int]], str]
    published: Callable[[str], list[int]]
    marked: Callable[[Sequence[str]], list[tuple[np.ndarray, np.ndarray]]]
    special: Mapping[str, int] = dataclasses.field(default_factory=dict)
    added: tuple[str, ...] = ()

    def prompt(self, text: str) -> list[int]:
        """Returns the tokens of a prompt, encoded like text in the middle of a training document.

        Returns the separator for an empty text, because a document begins after it.
        """
        (tokens,) = self.encode([text.encode()])
        return [int(token) for token in tokens] or [self.separator]

    @property
    def dtype(self) -> np.dtype:
        """The smallest integer type that holds every token."""
        return np.min_scalar_type(self.vocab_size - 1)

    def documents(self, texts: Iterable[bytes]) -> Documents:
        """Returns the tokens of documents, each with the separator as its last token.

        Raises:
            ValueError: if a token is outside the vocabulary.
        """
        return Documents.of((np.append(self._checked(one), self._end) for one in self.encode(texts)), self.dtype)

    @property
    def _end(self) -> np.ndarray:
        return np.asarray([self.separator], self.dtype)

    def _checked(self, tokens: np.ndarray) -> np.ndarray:
        check_ids(tokens, self.vocab_size, name=f"tokens of a document by {self.name}")
        return tokens.astype(self.dtype)


def _bytes_marked(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of a text, and the `(begin, end)` of the character that each belongs to."""
    content = np.frombuffer(text.encode(), np.uint8)
    character = np.cumsum(content & 0xC0 != 0x80) - 1
    return content, np.stack([character, character + 1], axis=1)


# Every byte is a token; byte 0 occurs in no text and separates documents.
BYTES = Tokenizer(
    "bytes",
    256,
    0,
    encode=lambda documents: (np.frombuffer(text, np.uint8) for text in documents),
    decode=lambda tokens: b"".join(
        bytes([token]) if token < 256 else _NO_CHARACTER.encode() for token in tokens
    ).decode(errors="replace"),
    published=lambda text: list(text.encode()),
    marked=lambda texts: [_bytes_marked(text) for text in texts],
)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Reads a Hugging Face `tokenizer.json`.

    If the tokenizer has an end-of-text token that is special, this token separates documents; otherwise a separator is
    added after the vocabulary, at the largest id plus one. Text that reads like a special token is split like any other
    text. A large document is encoded in parts that end at the end of a line.

    Raises:
        ModuleNotFoundError: if the `tokenizers` package is not installed.
        ValueError: if the file is missing or is not a tokenizer, or if an id is above 16,777,215. Encoding raises one
            if a line is too long to be encoded, a word is encoded as the separator, or the tokenizer fails.
    """
    with _of_package():
        import tokenizers
    if not Path(path).is_file():
        raise ValueError(f"`tokenizer` {path} is not a file. Give the tokenizer.json of a Hugging Face model.")
    return _tokenizer(_loaded(tokenizers.Tokenizer.from_buffer, path), path)


def read_tokenizer(content: bytes, where: str, end: int | None = None) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json that has been read: see `load_tokenizer`.

    Args:
        content: the content of the file.
        where: the place of the file, for messages.
        end: the id of the special token that separates documents if none has the name of an end-of-text token.
    """
    with _of_package():
        import tokenizers
    with _refused(f"the tokenizer.json of {where} cannot be read", "Give another with --tokenizer."):
        loaded = tokenizers.Tokenizer.from_buffer(content)
    return _tokenizer(loaded, Path(where) / "tokenizer.json", end)


@contextlib.contextmanager
def _of_package() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'a `tokenizer` file needs the `tokenizers` package: `pip install "gtp_jax[tokenizers]"`. '
            "Without a tokenizer, every byte is a token."
        ) from error


def _tokenizer(loaded: Any, path: str | os.PathLike[str], end: int | None = None) -> Tokenizer:
    name = Path(path).name
    loaded.no_truncation()
    loaded.no_padding()
    loaded.encode_special_tokens = True  # as ordinary text, so that no document holds a separator
    ids = loaded.get_vocab(with_added_tokens=True).values()
    size = 1 + max(ids, default=-1)  # ids may have gaps
    if not 0 < size <= _MAX_IDS:
        what = f"has the id {size - 1}; ids must be at most {_MAX_IDS - 1}" if size else "has no token"
        raise ValueError(f"`tokenizer` {path} {what}. Give the tokenizer.json of a Hugging Face model.")
    named = loaded.get_added_tokens_decoder()
    special = {token.content: id for id, token in named.items() if token.special}
    added = tuple(token.content for token in named.values() if not token.special)
    known = [special[token] for token in _END if token in special] or [one for one in special.values() if one == end]
    separator = known[0] if known else size

    def encode(documents: Iterable[bytes]) -> Iterable[np.ndarray]:
        for batch in _batches(documents, name):
            parts = [part for document in batch for part in document]
            texts = [part.decode() for part in parts]
            with _refused(f"`tokenizer` {name} cannot encode `data`", "Give a tokenizer that can encode any text."):
                encodings = iter(loaded.encode_batch_fast(texts, add_special_tokens=False))
            for document in batch:
                ids = np.concatenate([np.asarray(next(encodings).ids, np.int64) for _ in document])
                if (ids == separator).any():
                    raise ValueError(
                        f"`tokenizer` {name} encodes a word as the token {separator}, which separates documents, in a "
                        f"document that begins with {document[0][:40]!r}. Leave the document out, or give a tokenizer "
                        "whose end-of-text token is special."
                    )
                yield ids

    def decode(tokens: Sequence[int]) -> str:
        runs = itertools.groupby(tokens, key=lambda token: loaded.id_to_token(token) is not None)
        return "".join(
            loaded.decode(list(run), skip_special_tokens=False) if known else _NO_CHARACTER * len(list(run))
            for known, run in runs
        )

    @contextlib.contextmanager
    def as_tokens() -> Iterator[None]:
        """Makes the tokenizer recognize special tokens that are written out in a text."""
        loaded.encode_special_tokens = False
        try:
            yield
        finally:
            loaded.encode_special_tokens = True

    def published(text: str) -> list[int]:
        with as_tokens():
            return loaded.encode(text, add_special_tokens=True).ids

    def marked(texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        with as_tokens(), _refused(f"`tokenizer` {name} cannot encode a text", "Give one that can encode any text."):
            encodings = loaded.encode_batch(texts, add_special_tokens=False)
        return [(np.asarray(e.ids, np.int64), np.asarray(e.offsets, np.int64).reshape(-1, 2)) for e in encodings]

    return Tokenizer(name, max(size, separator + 1), separator, encode, decode, published, marked, special, added)


def same_tokenizer(path: str | os.PathLike[str], other: bytes) -> bool:
    """Returns whether two tokenizer.json files define the same tokenizer, so that every text has the same ids.

    Compares everything that the `tokenizers` package reads from them except padding and truncation: vocabulary,
    merges, added tokens, normalizer, pre-tokenizer, post-processor, decoder and options of the model.

    Args:
        path: the path of one file, which `load_tokenizer` can read.
        other: the content of the other file. If it is not a tokenizer, returns False.
    """
    with _of_package():
        import tokenizers
    from_buffer = tokenizers.Tokenizer.from_buffer
    mine = _definition(_loaded(from_buffer, path))
    try:
        with _refused("it", ""):
            return mine == _definition(from_buffer(other))
    except ValueError:
        return False


def _definition(tokenizer: Any) -> Any:
    """Returns everything that determines what a tokenizer does with a text, as the package writes it to JSON."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return json.loads(tokenizer.to_str())


def _loaded(from_buffer: Callable[[bytes], Any], path: str | os.PathLike[str]) -> Any:
    what = f"`tokenizer` {path} cannot be read as a Hugging Face tokenizer.json"
    with _refused(what, "A SentencePiece model must be converted first."):
        with open_regular(path) as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
        return from_buffer(content)


@contextlib.contextmanager
def _refused(what: str, remedy: str) -> Iterator[None]:
    """Raises a ValueError for anything that the `tokenizers` package raises: bare Exceptions, and Rust panics."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {error}. {remedy}") from error


def _batches(documents: Iterable[bytes], name: str) -> Iterator[list[list[bytes]]]:
    """Yields batches of documents for the tokenizer's threads, each document as a list of its parts."""
    batch: list[list[bytes]] = []
    nbytes = 0
    for document in documents:
        batch.append(_parts(document, name))
        nbytes += len(document)
        if len(batch) == _CHUNK or nbytes >= _PART_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _parts(document: bytes, name: str) -> list[bytes]:
    """Splits a document at line ends into parts of a limited size: the tokenizer needs 100 times their memory."""
    parts, begin = [], 0
    while len(document) - begin > _PART_BYTES:
        end = document.rfind(b"\n", begin, begin + _PART_BYTES) + 1
        if not end:
            raise ValueError(
                f"`data` has a line of more than {_PART_BYTES} bytes, too long for `tokenizer` {name}; it begins with "
                f"{document[begin : begin + 40]!r}. Break it into lines, or leave out the tokenizer."
            )
        parts.append(document[begin:end])
        begin = end
    return [*parts, document[begin:]]
