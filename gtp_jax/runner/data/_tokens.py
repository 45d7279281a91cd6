"""Turns text into token numbers: bytes, or by a Hugging Face tokenizer file."""

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

# Documents handed to the tokenizer's threads at a time.
_CHUNK = 256
# Bytes of them; a longer document is encoded in parts.
_PART_BYTES = 1 << 24

_MAX_FILE_BYTES = 1 << 28

_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
# A model has a row for every id.
_MAX_IDS = 1 << 24


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A way to turn documents into tokens.

    Attributes:
        name: for people.
        vocab_size: number of tokens, the separator included.
        separator: the token that stands after each document.
        encode: `documents -> tokens of each document`, without separators.
        decode: tokens to text; bytes that are no character, and tokens that there are not, become U+FFFD.
        published: a prompt to its tokens as the tokenizer was published: with the special tokens that begin a text,
            and those that are written out in it.
        marked: texts to the tokens of each and their `(begin, end)` in characters, `(tokens, 2)`; special tokens that
            are written out in a text are tokens, and no others are added.
        special: ids of special tokens by their texts.
    """

    name: str
    vocab_size: int
    separator: int
    encode: Callable[[Iterable[bytes]], Iterable[np.ndarray]]
    decode: Callable[[Sequence[int]], str]
    published: Callable[[str], list[int]]
    marked: Callable[[Sequence[str]], list[tuple[np.ndarray, np.ndarray]]]
    special: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def prompt(self, text: str) -> list[int]:
        """Returns the tokens of a text that is continued: as in the middle of a document that a run was trained on. Of
        no text the separator, behind which a document begins."""
        (tokens,) = self.encode([text.encode()])
        return [int(token) for token in tokens] or [self.separator]

    @property
    def dtype(self) -> np.dtype:
        """The smallest integer type that holds every token."""
        return np.min_scalar_type(self.vocab_size - 1)

    def documents(self, texts: Iterable[bytes]) -> Documents:
        """Returns the tokens of documents, the separator as the last of each.

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
    """Returns the bytes of a text, and the character that each is of."""
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

    Its own end-of-text token separates documents, if it is a special token, which no text contains; otherwise one more
    token is added behind its vocabulary, whose size is the largest id and one. Text that reads like a special token is
    split as any other. A large document is encoded in parts that end with a line.

    Raises:
        ModuleNotFoundError: if the `tokenizers` package is not installed.
        ValueError: if the file is missing or is no tokenizer, or if an id is beyond 16,777,215; while encoding, if a
            line is too long to be encoded, a word is the separator, or the tokenizer fails.
    """
    with _of_package():
        import tokenizers
    if not Path(path).is_file():
        raise ValueError(f"`tokenizer` {path} is not a file. Give the tokenizer.json of a Hugging Face model.")
    return _tokenizer(_loaded(tokenizers.Tokenizer.from_buffer, path), path)


def read_tokenizer(content: bytes, where: str, end: int | None = None) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json that has been read: see `load_tokenizer`.

    Args:
        content: of the file.
        where: it was, for messages.
        end: the special token that separates documents if none has the name of an end-of-text token.
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
        what = f"has the id {size - 1}; ids up to {_MAX_IDS - 1} can be" if size else "has no token"
        raise ValueError(f"`tokenizer` {path} {what}. Give the tokenizer.json of a Hugging Face model.")
    special = {token.content: id for id, token in loaded.get_added_tokens_decoder().items() if token.special}
    known = [special[token] for token in _END if token in special] or [one for one in special.values() if one == end]
    separator = known[0] if known else size

    def encode(documents: Iterable[bytes]) -> Iterable[np.ndarray]:
        for batch in _batches(documents, name):
            parts = [part for document in batch for part in document]
            texts = [part.decode() for part in parts]
            with _refused(f"`tokenizer` {name} cannot encode `data`", "Give a tokenizer that knows every text."):
                encodings = iter(loaded.encode_batch_fast(texts, add_special_tokens=False))
            for document in batch:
                ids = np.concatenate([np.asarray(next(encodings).ids, np.int64) for _ in document])
                if (ids == separator).any():
                    raise ValueError(
                        f"`tokenizer` {name} makes the token {separator}, which separates documents, of a word in a "
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
        """Has special tokens that are written out in a text encoded as such."""
        loaded.encode_special_tokens = False
        try:
            yield
        finally:
            loaded.encode_special_tokens = True

    def published(text: str) -> list[int]:
        with as_tokens():
            return loaded.encode(text, add_special_tokens=True).ids

    def marked(texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        with as_tokens(), _refused(f"`tokenizer` {name} cannot encode a text", "Give one that knows every text."):
            encodings = loaded.encode_batch(texts, add_special_tokens=False)
        return [(np.asarray(e.ids, np.int64), np.asarray(e.offsets, np.int64).reshape(-1, 2)) for e in encodings]

    return Tokenizer(name, max(size, separator + 1), separator, encode, decode, published, marked, special)


def same_tokenizer(path: str | os.PathLike[str], other: bytes) -> bool:
    """Returns whether two tokenizer.json files define one tokenizer, so that every text has the same ids.

    What is compared is all that the `tokenizers` package reads of them, but for padding and truncation: vocabulary,
    merges, added tokens, normalizer, pre-tokenizer, post-processor, decoder and options of the model.

    Args:
        path: one file, which `load_tokenizer` reads.
        other: the content of the other; if it is no tokenizer, the answer is no.
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
    """Returns what a tokenizer does with a text, in the form in which the package writes it."""
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
    """Raises a ValueError for whatever the `tokenizers` package raises: bare Exceptions, and panics of Rust."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {error}. {remedy}") from error


def _batches(documents: Iterable[bytes], name: str) -> Iterator[list[list[bytes]]]:
    """Yields documents, each in parts, as many at a time as the tokenizer's threads are given."""
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
    """Splits a document behind lines into parts that a tokenizer can take: it needs 100 times their memory."""
    parts, begin = [], 0
    while len(document) - begin > _PART_BYTES:
        end = document.rfind(b"\n", begin, begin + _PART_BYTES) + 1
        if not end:
            raise ValueError(
                f"`data` has a line of more than {_PART_BYTES} bytes, which `tokenizer` {name} cannot take at once; it "
                f"begins with {document[begin : begin + 40]!r}. Break it into lines, or leave out the tokenizer."
            )
        parts.append(document[begin:end])
        begin = end
    return [*parts, document[begin:]]
